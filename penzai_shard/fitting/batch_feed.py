"""Draws and places batches ahead of their use, in a thread, and knows the place of each.

Over several processes all draw and place the same number of batches, and a failure in one of them
is one in all.
"""

import contextlib
import inspect
import itertools
import json
import math
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import Problem, RuleTypeError, TrainingStoppedError, warn_caller
from penzai_shard.processes.agreement import any_process, together

_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_TO_END = 10.0
_END = object()
# Processes agree by the names of threads: each feed has its own.
_numbers = itertools.count()


class Position(NamedTuple):
    """How far a run has come in its batches.

    Attributes:
        used: How many batches its steps have used.
        iterator: Where the iterator stood then, as JSON, if it can say so.
    """

    used: int = 0
    iterator: str | None = None


class Batch(NamedTuple):
    """A batch on the devices.

    Attributes:
        inputs: The inputs of the loss function by name.
        tokens: How many tokens it has, if its arrays say so.
        position: Where the run is once a step has used it.
    """

    inputs: dict[str, Any]
    tokens: int | None
    position: Position


class BatchFeed:
    """Items of an iterator in their order, of which a thread makes some ahead; a context manager.

    >>> with BatchFeed(iter("ab"), ahead=2) as feed:
    ...     feed.next(), feed.next(), feed.next()
    ('a', 'b', None)
    """

    def __init__(self, items: Iterator[Any], ahead: int) -> None:
        self._items, self._ahead, self._used = items, ahead, 0
        self._room = threading.Semaphore(ahead)
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Once the feed is closed: how many items are made all the same.
        self._most: int | None = None
        name = f"penzai_shard batches {next(_numbers)}"
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        # Contexts of JAX hold in one thread: those that decide what arrays become are taken along.
        config: Any = jax.config
        self._contexts = config.jax_enable_x64, config.jax_default_device, jax.sharding.get_mesh()

    def __enter__(self) -> "BatchFeed":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # Other processes wait for what this one has not made yet of what they make.
        self._most = self._used + self._ahead if jax.process_count() > 1 else 0
        self._room.release()
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive():
            warn_caller(["the iterator of batches still makes one that nobody waits for"])

    def next(self, should_stop: Callable[[], bool] = lambda: False) -> Any:
        """The next item, or None if there is none, or if waiting for it should stop.

        Raises:
            BaseException: What the iterator raised, after all items before it.
        """
        while not should_stop():
            with contextlib.suppress(queue.Empty):
                item = self._ready.get(timeout=_SECONDS_BETWEEN_LOOKS)
                self._used += 1
                self._room.release()
                if isinstance(item, BaseException):
                    raise item
                return item
        return None

    def _make(self) -> None:
        x64, device, mesh = self._contexts
        with jax.enable_x64(x64), jax.default_device(device), jax.set_mesh(mesh):
            for made in itertools.count():
                self._room.acquire()
                if self._most is not None and made >= self._most:
                    return
                try:
                    item = next(self._items, None)
                except BaseException as error:
                    item = error  # Raised by ``next``, where somebody sees it.
                self._ready.put(item)
                if item is None or isinstance(item, BaseException):
                    return
                del item  # Not kept alive while the next one is made.


# What is fed


def can_begin_anew(batches: Any) -> bool:
    """Whether batches that were used are found again, as it is known which ones come first."""
    has_state = hasattr(batches, "get_state") and hasattr(batches, "set_state")
    if has_state or not isinstance(batches, Iterator):
        return True
    return inspect.isgenerator(batches) and inspect.getgeneratorstate(batches) == "GEN_CREATED"


def make_batches(
    called: str, batches: Any, position: Position, *, place: Any, tokens_axes: Any, most: Any = None
) -> Iterator[Batch]:
    """Draws batches from a position on, and places them.

    Args:
        called: The argument that the batches were given as.
        batches: An iterable, or a function without arguments that gives one.
        position: That of a checkpoint, or the beginning.
        place: Places a batch.
        most: How many batches are wanted; no more are drawn. None draws all.
        tokens_axes: The logical axes of which the lengths count tokens.

    Raises:
        RuleTypeError: It gives no batches, or ``place`` returns none.
        TrainingStoppedError: The position cannot be found.
        Exception: What the iterator raises.
    """
    iterator = None
    for number in itertools.count() if most is None else range(most):
        with together(f"drawing from {called}"):
            if iterator is None:
                iterator = _open(called, batches, position)
            batch = next(iterator, _END)
            # Where they end in one process, they end in all.
            if any_process(batch is _END, f"whether {called} ends"):
                return
            state = _write_state(called, iterator) if hasattr(iterator, "get_state") else None
            inputs = place(batch)
            if not isinstance(inputs, Mapping) or not all(isinstance(key, str) for key in inputs):
                what = f"a batch is a dictionary of inputs by name, not a {type(inputs).__name__}"
                fix = f"Write ({{'x': x, 'y': y}} for x, y in {called})."
                raise RuleTypeError("fit:", [Problem(called, what, fix)])
        after = Position(position.used + number + 1, state)
        yield Batch(dict(inputs), _count_tokens(inputs, tokens_axes), after)


def _open(called: str, batches: Any, position: Position) -> Iterator[Any]:
    """An iterator that stands at a position."""
    given = batches if isinstance(batches, Iterable) or not callable(batches) else batches()
    if not isinstance(given, Iterable) or isinstance(given, Mapping | str | bytes | jax.Array):
        what = f"batches come from an iterable of dictionaries, not from a {type(given).__name__}"
        fix = "For one batch in every step write itertools.repeat(batch)."
        raise RuleTypeError("fit:", [Problem(called, what, fix)])
    iterator = iter(given)
    if position.iterator is not None and hasattr(iterator, "set_state"):
        record = json.loads(position.iterator)
        state = record["bytes"].encode("latin-1") if "bytes" in record else record["json"]
        iterator.set_state(state)
        return iterator
    if position.iterator is not None:
        what = f"the checkpoint has the state of an iterator, and a {type(iterator).__name__} has "
        problem = Problem(called, what + "no set_state()", "Give batches of the same kind.")
        raise TrainingStoppedError("a run cannot go on:", [problem])
    # Draws and drops as many.
    next(itertools.islice(iterator, position.used, position.used), None)
    return iterator


def _count_tokens(inputs: Any, axes: Sequence[Hashable]) -> int | None:
    """The largest product of the lengths of these logical axes in an array that has all."""
    sizes = [dict(zip(x.names or (), x.shape, strict=False)) for x in leaves_of(inputs)]
    counts = [math.prod(own[axis] for axis in axes) for own in sizes if {*axes} <= own.keys()]
    return max(counts, default=None) if axes else None


def _write_state(called: str, iterator: Any) -> str:
    """Where an iterator stands, as those of grain say it, as JSON."""
    state = iterator.get_state()
    record = {"bytes": state.decode("latin-1")} if isinstance(state, bytes) else {"json": state}
    # What JSON does not hold comes back as something else.
    text = json.dumps(record, default=repr)
    if json.loads(text) != record:
        what = f"the state of a {type(iterator).__name__} is not what JSON holds, nor bytes"
        fix = "Give (batch for batch in batches): to go on, those that were used are drawn again."
        raise RuleTypeError("fit cannot save:", [Problem(called, what, fix)])
    return text
