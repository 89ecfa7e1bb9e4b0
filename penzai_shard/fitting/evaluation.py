"""Evaluation between the steps of a training loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from penzai_shard.errors import RuleTypeError, TrainingStoppedError
from penzai_shard.fitting.background_feed import BackgroundFeed
from penzai_shard.fitting.batch_sources import BatchSource, Place, Position, placed_batches
from penzai_shard.fitting.log_records import on_host


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What to evaluate, and when.

    Attributes:
        every: After how many steps, and after the last one.
        step: ``step(state, **batch)`` gives what is averaged, and leaves the state as it is.
        batches: The batches, read from the first one each time.
        place: Places a batch.
        ahead: How many batches to place ahead.
    """

    every: int
    step: Callable[..., Any]
    batches: BatchSource
    place: Place
    ahead: int

    @classmethod
    def of(
        cls, every: Any, step: Any, batches: Any, place: Place, ahead: int
    ) -> "Evaluation | None":
        """The evaluation that was asked for, or None.

        Raises:
            RuleTypeError: Only a part of it was given, or batches that can be read only once.
        """
        given = {"evaluate_every": every, "eval_step": step, "eval_batches": batches}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == 3:
            return None
        if missing:
            raise RuleTypeError(
                "evaluation needs evaluate_every, eval_step and eval_batches; missing: "
                f"{', '.join(missing)}. Write for instance evaluate_every=100, eval_step="
                "build_eval_step_fn(loss_fn), eval_batches=[batch]."
            )
        if not callable(step):
            raise RuleTypeError(
                f"eval_step must be a function, as build_eval_step_fn gives it, not {step!r:.80}."
            )
        source = BatchSource(batches, "eval_batches")
        if not source.can_be_read_again:
            raise RuleTypeError(
                f"eval_batches is a {type(batches).__name__}, which can be read only once, and "
                "every evaluation reads all of it. Give a list, a dataset, or a function that "
                "makes it."
            )
        return cls(every, step, source, place, ahead)

    def run(self, state: Any) -> Any:
        """The mean over all batches, each counting the same, of what the step returns."""
        iterator = self.batches.iterator(Position())
        items = placed_batches(
            iterator,
            self.place,
            Position(),
            None,
            lambda batch: None,
            argument="eval_batches",
            keep_position=False,
        )
        count, total, before = 0, None, None
        with BackgroundFeed(items, self.ahead, "eval_batches") as feed:
            while (item := feed.next()) is not None:
                aux = _with_loss(self.step(state, **item.inputs))
                count += 1
                # Read one step late, so that the devices always have one to do.
                if before is not None:
                    total = _added(total, before)
                before = aux
        if before is None:
            raise TrainingStoppedError(
                "eval_batches has no batch. Give a list, a dataset, or a function that makes it "
                "anew for every evaluation."
            )
        total = _added(total, before)
        return jax.tree.map(lambda leaf: _mean(leaf, count), total)


def _with_loss(returned: Any) -> Any:
    """What an evaluation step returned; a loss with a dictionary of outputs as one dictionary."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        loss, aux = returned
        return {"loss": loss} | aux
    return returned


def _added(total: Any, aux: Any) -> Any:
    aux = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), on_host(aux))
    return aux if total is None else jax.tree.map(np.add, total, aux)


def _mean(total: np.ndarray, count: int) -> Any:
    mean = total / count
    return float(mean) if mean.ndim == 0 else mean
