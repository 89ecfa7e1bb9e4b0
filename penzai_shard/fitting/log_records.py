"""What a training loop says of itself: losses, rates, memory."""

import collections
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import RuleTypeError
from penzai_shard.planning import bytes_text
from penzai_shard.training.train_state import TrainState, peek
from penzai_shard.tree_paths import path_text

# How many steps a figure of speed is the mean of, at least.
FEWEST_STEPS = 10

# What the metrics of an evaluation begin with.
EVALUATION = "evaluation"

LossOf = str | Callable[[Any], Any] | None


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """How much memory a run takes.

    Attributes:
        bytes: How many bytes.
        of: Of what: ``"device"``, in use on the fullest device of this process; or, where the
            devices do not say, ``"process"``, the most that this process has held so far.
        limit: How many bytes the device has, if it says so.
    """

    bytes: int
    of: str
    limit: int | None = None

    @classmethod
    def now(cls) -> "MemoryUse | None":
        """What is in use; None where nothing says so.

        >>> MemoryUse.now().of
        'process'
        """
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        used = [one for one in stats if "bytes_in_use" in one]
        if used:
            fullest = max(used, key=lambda one: one["bytes_in_use"])
            return cls(fullest["bytes_in_use"], "device", fullest.get("bytes_limit"))
        try:
            import resource  # not on Windows
        except ImportError:
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return cls(peak if sys.platform == "darwin" else peak * 1024, "process")

    def __str__(self) -> str:
        if self.of == "process":
            return f"{bytes_text(self.bytes)} process"
        limit = "" if self.limit is None else f" of {bytes_text(self.limit)}"
        return f"{bytes_text(self.bytes)}{limit} per device"


@dataclasses.dataclass(frozen=True)
class LogRecord:
    """What ``fit`` gives to its callback.

    Attributes:
        step: The number of steps done, as in the train state after this step.
        loss: The loss of this step; None if ``fit`` was told that there is none.
        aux: The auxiliary output of this step, its arrays on the host as NumPy arrays. Arrays of
            which other processes hold parts stay as they are.
        seconds_per_step: Mean time of a step over those since the record before, and at least
            over the last ten, without saving and evaluation. That of the first step, which
            compiles, only in a record of that step alone.
        tokens_per_second: Tokens per second over the same time, of all processes together; None
            if the batches do not say how many tokens they have.
        seconds_waiting: Mean time per step that the loop has waited for a batch. Where it is near
            ``seconds_per_step``, the batches are what takes the time.
        memory: Memory in use; see its ``of``.
        learning_rate: What the optimizer's state says that it is, as with
            ``optax.inject_hyperparams``; else None.
        evaluation: Means of what the evaluation step returned, if this step was followed by an
            evaluation.
    """

    step: int
    loss: float | None
    aux: Any
    seconds_per_step: float
    tokens_per_second: float | None
    seconds_waiting: float
    memory: MemoryUse | None
    learning_rate: float | None
    evaluation: Any = None

    def __str__(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """The figures for people, the most important first.

        >>> LogRecord(3, 0.25, None, 0.5, 256.0, 0.0, None, 1e-3).parts()
        ['loss 0.2500', '256 tokens/s', '500.0 ms/step', 'lr 0.001']
        """
        parts = [] if self.loss is None else [f"loss {self.loss:.4f}"]
        if self.evaluation is not None:
            parts += [f"evaluation {_figures(self.evaluation)}"]
        if self.tokens_per_second is not None:
            parts += [f"{self.tokens_per_second:,.0f} tokens/s"]
        seconds = self.seconds_per_step
        parts += [f"{seconds:.1f} s/step" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms/step"]
        if self.memory is not None:
            parts += [str(self.memory)]
        if self.learning_rate is not None:
            parts += [f"lr {self.learning_rate:.3g}"]
        return parts


class Pace:
    """How fast the steps are, from when each was found done.

    The first step compiles: it counts only if nothing else does. Results are read late, so that
    single times differ more than the steps do; no figure is of fewer than the last ten.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._steps: collections.deque[tuple[float, int | None]] = collections.deque()
        self._new = 0
        self._first: tuple[float, int | None] | None = None

    def step_done(self, tokens: int | None) -> None:
        """Notes that one more step was found done."""
        now = self._clock()
        if self._first is None:
            self._first = now - self._since, tokens
            self._since = now
            return
        self._steps.append((now - self._since, tokens))
        self._since = now
        self._new += 1

    def go_on(self) -> None:
        """Leaves out the time since the last step was found done."""
        self._since = self._clock()

    def taken(self) -> tuple[float, float | None]:
        """Seconds per step and tokens per second since the last call, and of ten steps at least."""
        while len(self._steps) > max(self._new, FEWEST_STEPS):
            self._steps.popleft()
        self._new = 0
        steps = [*self._steps] or [self._first or (0.0, None)]
        seconds = sum(step_seconds for step_seconds, _ in steps)
        counts = [count for _, count in steps if count is not None]
        is_known = len(counts) == len(steps) and seconds > 0.0
        return seconds / len(steps), sum(counts) / seconds if is_known else None


def loss_in(aux: Any, loss: LossOf) -> Any:
    """The loss in the auxiliary output of a step, where it is; None if there is none.

    Args:
        aux: The auxiliary output.
        loss: Its key, or a function of the output, or None.

    Raises:
        RuleTypeError: It is not there, or is not a single number.
    """
    if loss is None:
        return None
    if callable(loss):
        value = loss(aux)
    elif isinstance(aux, dict) and loss in aux:
        value = aux[loss]
    elif is_array_like(aux) and loss == "loss":
        value = aux
    else:
        has = f"has {', '.join(map(str, aux))}" if isinstance(aux, dict) else f"is {aux!r:.80}"
        raise RuleTypeError(
            f"fit cannot find the loss: the auxiliary output of the step has no {loss!r}; it "
            f"{has}. Return it from the loss function, "
            "`return loss, state, {'loss': loss}`; or let the step add it, "
            "build_train_step_fn(..., step_metrics='loss'); or name another, loss='cross_entropy'; "
            "or say that there is none, loss=None."
        )
    value = getattr(value, "data_array", value)
    if not is_array_like(value) or np.size(cast(Any, value)) != 1:
        raise RuleTypeError(
            f"the loss of a step must be one number, and is {value!r:.80}. Average it in the loss "
            "function."
        )
    return value


def learning_rate_of(state: TrainState) -> Any:
    """The learning rate that an optimizer's state holds, an array; None if it holds none."""
    import optax

    found = optax.tree_utils.tree_get_all_with_path(peek(state, "opt_state"), "learning_rate")
    rates = [value for _, value in found if is_array_like(value) and np.size(value) == 1]
    return rates[0] if rates else None


def metrics_of_step(loss: Any, evaluation: Any) -> dict[str, float]:
    """The numbers by which checkpoints are compared: the loss, and those of an evaluation.

    Args:
        loss: The loss of a step, or None.
        evaluation: What its evaluation gave, or None.

    >>> metrics_of_step(np.float32(0.5), {"loss": 0.25, "of": {"tokens": 3.0}})
    {'loss': 0.5, 'evaluation/loss': 0.25, 'evaluation/of/tokens': 3.0}
    """
    metrics = {} if loss is None else {"loss": float(np.asarray(loss).reshape(()))}
    for path, leaf in jax.tree_util.tree_leaves_with_path({EVALUATION: evaluation}):
        if np.size(leaf) == 1:
            metrics[path_text(path)] = float(np.asarray(leaf).reshape(()))
    return metrics


def on_host(tree: Any) -> Any:
    """A tree with its arrays on the host, but for those of which other processes hold parts."""

    def fetched(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        is_here = leaf.is_fully_addressable or leaf.is_fully_replicated
        return np.asarray(leaf) if is_here else leaf

    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    return jax.tree.map(fetched, tree)


def _figures(tree: Any) -> str:
    if isinstance(tree, dict):
        return ", ".join(f"{name} {_figures(value)}" for name, value in tree.items())
    return f"{tree:.4f}" if isinstance(tree, float) else f"{tree!r:.40}"
