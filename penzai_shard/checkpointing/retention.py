"""Which checkpoints of a run are kept: decided from their steps and metrics alone."""

import dataclasses
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from penzai_shard.errors import RuleTypeError
from penzai_shard.rule_kinds import did_you_mean

Metrics = Mapping[str, float]

_BEST = 'Write for instance best=("loss", "min"), or best=("accuracy", "max", 3) to keep three.'


@dataclasses.dataclass(frozen=True)
class Best:
    """What makes a checkpoint better than others.

    Attributes:
        metric: The name of the metric.
        direction: Whether the least or the greatest value is the best.
        count: How many of the best to keep.
    """

    metric: str
    direction: Literal["min", "max"]
    count: int = 1

    @classmethod
    def of(cls, given: Any) -> "Best | None":
        """What was given as ``best``: a name, ``"min"`` or ``"max"``, and how many.

        Raises:
            RuleTypeError: It is anything else.

        >>> Best.of(("loss", "min"))
        Best(metric='loss', direction='min', count=1)
        """
        if given is None:
            return None
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) not in (2, 3):
            raise RuleTypeError(f"best={given!r:.80} is not a metric, 'min' or 'max'. {_BEST}")
        metric, direction, *count = given
        if not isinstance(metric, str) or direction not in ("min", "max"):
            raise RuleTypeError(f"best={given!r:.80} is not a metric, 'min' or 'max'. {_BEST}")
        number = _positive("how many of the best to keep, best[2],", count[0]) if count else 1
        return cls(metric, direction, number)

    def in_order(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """The steps, the best first, and of equals the newer one.

        Those without the metric, or of which it is infinite or not a number, are left out.

        >>> seen = {1: {"loss": 2.0}, 2: {"loss": 1.0}, 3: {"loss": 1.0}, 4: {"loss": math.nan}}
        >>> Best("loss", "min").in_order(seen)
        [3, 2, 1]
        """
        values = {step: each[self.metric] for step, each in metrics.items() if self.metric in each}
        sign = 1 if self.direction == "min" else -1
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * values[step], -step))

    def refuse_other_names(self, metrics: Metrics) -> None:
        """Refuses metrics among which the one that decides is missing.

        Raises:
            RuleTypeError: It is.
        """
        if self.metric not in metrics:
            raise RuleTypeError(
                f"best={self.metric!r} decides which checkpoints are kept, and the metrics given "
                f"are {', '.join(map(repr, metrics)) or 'none'}."
                f"{did_you_mean(self.metric, metrics)} Save without metrics where there are none "
                "yet: metrics=None."
            )


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: those that any of three conditions keeps.

    Attributes:
        keep_last: How many of the newest; None keeps all.
        keep_every: Those whose step is a multiple of this, for ever.
        best: Those with the best values of a metric.
    """

    keep_last: int | None = 2
    keep_every: int | None = None
    best: Best | None = None

    @classmethod
    def of(cls, keep_last: Any, keep_every: Any, best: Any) -> "Retention":
        """What was given.

        Raises:
            RuleTypeError: Some of it cannot be read.
        """
        return cls(
            None if keep_last is None else _positive("keep_last", keep_last),
            None if keep_every is None else _positive("keep_every", keep_every),
            Best.of(best),
        )

    def kept(self, steps: Collection[int], metrics: Mapping[int, Metrics]) -> set[int]:
        """The steps that are kept of those that there are; always the newest.

        Args:
            steps: The steps of whole checkpoints.
            metrics: The metrics of those that have any, by step.

        >>> sorted(Retention(2, 100).kept([50, 100, 150, 200, 250, 300], {}))
        [100, 200, 250, 300]
        """
        if self.keep_last is None:
            return set(steps)
        kept = set(sorted(steps)[-self.keep_last :])
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.best is not None:
            present = {step: each for step, each in metrics.items() if step in set(steps)}
            kept |= set(self.best.in_order(present)[: self.best.count])
        return kept


def metrics_of(given: Any) -> dict[str, float]:
    """The metrics that were given with a checkpoint, as numbers of Python.

    Raises:
        RuleTypeError: They are not numbers by name.

    >>> metrics_of({"loss": 1})
    {'loss': 1.0}
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RuleTypeError(
            f"metrics must be numbers by name, such as {{'loss': 0.5}}, not a "
            f"{type(given).__name__}."
        )
    found = {}
    for name, value in given.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise RuleTypeError(f"metrics[{name!r}] must be a number, not {value!r:.80}.") from None
    return found


def metrics_to_json(metrics: Metrics) -> dict[str, float | str]:
    """Metrics as JSON has them, which has no numbers that are infinite or not a number.

    >>> metrics_to_json({"loss": 0.5, "gap": math.inf})
    {'loss': 0.5, 'gap': 'inf'}
    """
    return {name: n if math.isfinite(n) else str(n) for name, n in metrics.items()}


def _positive(what: str, given: Any) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = 0
    if number < 1 or isinstance(given, bool):
        raise RuleTypeError(f"{what} must be a number of 1 or more, not {given!r:.80}.")
    return number
