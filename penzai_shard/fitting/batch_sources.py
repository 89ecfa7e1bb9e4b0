"""Where a loop's batches come from, and how a run that goes on finds its place in them."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError, TrainingStoppedError
from penzai_shard.fitting.iterator_states import keeps_state, state_of_text, state_text
from penzai_shard.named_leaves import leaves_of
from penzai_shard.processes import failing_together

Place = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Position:
    """How far a run has come in its batches.

    Attributes:
        used: How many batches its steps have used.
        iterator_state: Where the iterator stood then, as text, if it can say so.
    """

    used: int = 0
    iterator_state: str | None = None


@dataclasses.dataclass(frozen=True)
class PlacedBatch:
    """One batch, ready for a step.

    Attributes:
        inputs: The inputs of the loss function by name.
        tokens: How many tokens or examples it has; see ``token_count``.
        position: How far the run will have come once a step has used it.
    """

    inputs: dict[str, Any]
    tokens: int | None
    position: Position


@dataclasses.dataclass(frozen=True)
class BatchSource:
    """What ``fit`` was given as batches.

    Attributes:
        batches: An iterable, an iterator, or a function without arguments that gives one.
        argument: The name of the argument that it was given as.
    """

    batches: Any
    argument: str = "batches"

    def __post_init__(self) -> None:
        given, name = self.batches, self.argument
        if isinstance(given, Mapping) or hasattr(given, "shape") or hasattr(given, "named_shape"):
            what = "one batch" if isinstance(given, Mapping) else "an array"
            raise RuleTypeError(
                f"{name} must be an iterable of batches, and is {what}. For the same batch in "
                f"every step: {name}=itertools.repeat(batch), a batch being a dictionary such as "
                "{'tokens': tokens}."
            )
        if isinstance(given, str | bytes) or not (isinstance(given, Iterable) or callable(given)):
            raise RuleTypeError(
                f"{name} must be an iterable of batches, such as a list, a generator or a "
                f"dataset of grain, or a function that gives one; not {_described(given)}."
            )

    @property
    def can_be_read_again(self) -> bool:
        """Whether it starts from the first batch each time."""
        return not isinstance(self.batches, Iterator)

    def iterator(self, position: Position) -> Iterator[Any]:
        """An iterator over the batches after a position, which is that of a checkpoint or 0.

        Args:
            position: Where to start.

        Raises:
            RuleTypeError: The function gave something else than an iterable.
            TrainingStoppedError: The position cannot be found.
        """
        given = self.batches
        if not isinstance(given, Iterable):
            given = given()
            if not isinstance(given, Iterable):
                raise RuleTypeError(
                    f"{self.argument} is a function, and gave {_described(given)} instead of an "
                    "iterable of batches."
                )
        self._refuse_used(given, position)
        iterator = iter(given)
        if position.iterator_state is not None:
            if not keeps_state(iterator):
                raise TrainingStoppedError(
                    "the checkpoint holds where an iterator stood that has get_state() and "
                    f"set_state(), and {self.argument} is {_described(given)}, which has not. "
                    "Give the same dataset as before."
                )
            iterator.set_state(state_of_text(position.iterator_state))  # type: ignore[attr-defined]
        elif position.used:
            return self._skipped(iterator, position.used)
        return iterator

    def _refuse_used(self, given: Any, position: Position) -> None:
        """Refuses a generator that is used up, or that would be skipped from an unknown place."""
        if not inspect.isgenerator(given):
            return
        stage = inspect.getgeneratorstate(given)
        again = f"Make it anew, or give the function that makes it: {self.argument}=" + (
            getattr(given, "__name__", "").strip("<>").replace("genexpr", "make_batches")
            or "make_batches"
        )
        if stage == inspect.GEN_CLOSED:
            raise TrainingStoppedError(
                f"{self.argument} is a generator that is used up: it gives nothing more. {again}."
            )
        if stage != inspect.GEN_CREATED and position.used:
            raise TrainingStoppedError(
                f"{self.argument} is a generator that was used already, so nobody knows which of "
                f"its batches come after the {position.used} that the checkpoint has used. {again}."
            )

    def _skipped(self, iterator: Iterator[Any], count: int) -> Iterator[Any]:
        """The batches after some; these are drawn when the first of the others is asked for."""
        for skipped in range(count):
            if next(iterator, iterator) is iterator:
                raise TrainingStoppedError(
                    f"the checkpoint has used {count} batches, and {self.argument} ended after "
                    f"{skipped}. Give the same batches as before."
                )
        yield from iterator


def placed_batches(
    iterator: Iterator[Any],
    place: Place,
    start: Position,
    most: int | None,
    count_tokens: Callable[[Any], int | None],
    *,
    argument: str = "batches",
    keep_position: bool = True,
) -> Iterator[PlacedBatch]:
    """The batches of an iterator, each placed, with the position after it.

    Args:
        iterator: Batches on the host, or anywhere.
        place: Places a batch.
        start: The position of the iterator.
        most: How many batches are needed; no more are drawn. None draws all.
        count_tokens: How many tokens a placed batch has.
        argument: What the batches were given as, for messages.
        keep_position: Whether the iterator's state is of interest.
    """
    has_state = keep_position and keeps_state(iterator)
    used = start.used
    while most is None or used - start.used < most:
        # Of several processes all fail at the same batch, so that none waits for another's. What
        # places a batch sees to that itself.
        with failing_together(f"drawing batch {used} of {argument}"):
            batch = next(iterator, iterator)
            if batch is iterator:
                if most is None or jax.process_count() == 1:
                    return
                raise TrainingStoppedError(
                    f"{argument} ended after {used - start.used} of {most} batches."
                )
            _refuse_other_forms(batch, used, argument)
            state = state_text(iterator) if has_state else None
        inputs = place(batch)
        if not isinstance(inputs, Mapping):
            raise RuleTypeError(
                f"shard_batch must return the batch, and returned {_described(inputs)}. Write for "
                "instance shard_batch=functools.partial(layout.shard_batch, mesh=mesh)."
            )
        used += 1
        yield PlacedBatch(dict(inputs), count_tokens(inputs), Position(used, state))


def token_count(axes: tuple[Any, ...], batch: Any) -> int | None:
    """How many tokens a batch has: the largest product of the lengths of some logical axes.

    Args:
        axes: The logical axes.
        batch: A tree of named arrays.

    Returns:
        The number; None if no array has all of these logical axes.

    >>> from penzai import pz
    >>> token_count(("batch", "seq"), {"tokens": pz.nx.ones({"batch": 8, "seq": 16})})
    128
    """
    counts = []
    for leaf in leaves_of(batch):
        sizes = dict(zip(leaf.names or (), leaf.shape, strict=False))
        if axes and all(axis in sizes for axis in axes):
            counts.append(math.prod(sizes[axis] for axis in axes))
    return max(counts, default=None)


def is_placed_nowhere(inputs: Mapping[str, Any]) -> bool:
    """Whether no array of a batch is committed to devices."""
    return not any(
        isinstance(leaf, jax.Array) and leaf.committed for leaf in jax.tree.leaves(dict(inputs))
    )


def _refuse_other_forms(batch: Any, number: int, argument: str) -> None:
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        return
    fix = f"Write for instance ({{'tokens': batch}} for batch in {argument})"
    if isinstance(batch, tuple | list) and len(batch) == 2:
        fix = f"Write for instance ({{'x': x, 'y': y}} for x, y in {argument})"
    if isinstance(batch, Mapping):
        others = sorted({type(name).__name__ for name in batch if not isinstance(name, str)})
        fix = f"Its keys are of type {', '.join(others)}; use the names of the inputs"
    raise RuleTypeError(
        "a batch must be a dictionary of the loss function's inputs by name, and batch "
        f"{number} of {argument} is {_described(batch)}. {fix}; with grain, "
        "dataset.map(lambda batch: {'tokens': batch})."
    )


def _described(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
