"""Says how a run goes: the losses, metrics and rates of its steps."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from penzai_shard.arrays.kinds import is_key_type
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import Problem, RuleTypeError

LossIn = str | Callable[[Any], Any] | None
"""Where the loss is in what a step reports: a key, a function of it, or nowhere."""


@dataclasses.dataclass(frozen=True)
class LogRecord:
    """What ``fit`` gives to ``on_log``.

    Attributes:
        step: The number of steps done, as in the train state after this step.
        loss: The loss of this step; None if ``fit`` was told that there is none.
        metrics: What this step reported, its arrays as those of NumPy. Arrays of which other
            processes hold parts stay as they are.
        seconds_per_step: Mean time of a step since the record before, without saving and
            evaluation. The first step, which compiles, counts only in a record of it alone.
        tokens_per_second: Tokens of all processes over the same time; None if the batches do not
            say how many they have.
        seconds_waiting: Mean time per step that the loop has waited for its batch.
        evaluation: The means of an evaluation of the state after this step, or None.
    """

    step: int
    loss: float | None
    metrics: Any
    seconds_per_step: float
    tokens_per_second: float | None
    seconds_waiting: float
    evaluation: Any = None

    def __str__(self) -> str:
        evaluation = read_numbers({"evaluation": self.evaluation})
        numbers = {**read_numbers({"loss": self.loss}), **evaluation}
        parts = [f"{name} {value:.4f}" for name, value in numbers.items()]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return ", ".join([*parts, f"{self.seconds_per_step * 1e3:,.1f} ms/step"])


class Pace:
    """How fast the steps are, from when each was found done."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._steps: list[tuple[float, int | None]] = []
        self._is_first = True

    def end_step(self, tokens: int | None) -> None:
        """Notes that one more step was found done."""
        before, self._since = self._since, time.perf_counter()
        self._steps.append((self._since - before, tokens))

    def skip(self) -> None:
        """Leaves out the time since the last step was found done."""
        self._since = time.perf_counter()

    def take(self) -> tuple[float, float | None]:
        """Seconds per step and tokens per second since the last call."""
        # The first step compiles.
        steps = self._steps[1:] if self._is_first and len(self._steps) > 1 else self._steps
        self._steps, self._is_first = [], False
        seconds = sum(own for own, _ in steps)
        tokens = sum(own or 0 for _, own in steps)
        return seconds / len(steps), tokens / seconds if tokens and seconds else None


def find_loss(reported: Any, loss: LossIn) -> Any:
    """The loss in what a step reports, an array that need not be there yet; None if it has none.

    Raises:
        RuleTypeError: It is not there, or is not a single number.
    """
    found = reported
    if loss is None or callable(loss):
        found = loss and loss(reported)
    elif isinstance(reported, dict):
        found = reported.get(loss)
    leaves = jax.tree.leaves(found)
    if loss is not None and [np.size(leaf) for leaf in leaves] != [1]:
        has = ", ".join(map(str, reported)) if isinstance(reported, dict) else reported
        what = f"the step reports no single number {loss!r}, but {has}"
        fix = "Write build_train_step_fn(..., step_metrics=['loss']), or loss=None for none."
        raise RuleTypeError("fit finds no loss:", [Problem("loss", what, fix)])
    return leaves[0] if leaves else None


def read_number(array: Any) -> float:
    """The number in an array, once it is there."""
    return float(np.asarray(array).reshape(()))


def read_numbers(tree: Any) -> dict[str, float]:
    """Every single number of a tree by path.

    >>> read_numbers({"norm": np.ones(1), "evaluation": {"loss": 0.25}, "out": np.ones(8)})
    {'evaluation/loss': 0.25, 'norm': 1.0}
    """
    numbers = [x for x in leaves_of(tree) if np.size(x.value) == 1 and not is_key_type(x.dtype)]
    return {leaf.path: read_number(leaf.value) for leaf in numbers}


def copy_to_host(tree: Any) -> Any:
    """A tree with the arrays of NumPy, but for those of which other processes hold parts."""

    def read(leaf: Any) -> Any:
        is_read = isinstance(leaf, jax.Array) and not is_key_type(leaf.dtype)
        is_here = is_read and (leaf.is_fully_addressable or leaf.is_fully_replicated)
        return np.asarray(leaf) if is_here else leaf

    return jax.tree.map(read, tree)
