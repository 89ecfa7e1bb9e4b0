"""Items made ahead of their use by a thread of their own.

The method is a bounded buffer: the thread makes an item as soon as there is room for it, so that
making it overlaps whatever is done with those before it.
"""

import collections
import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import jax

from penzai_shard.errors import ShardingWarning

Item = TypeVar("Item")

# How often whoever waits for an item looks whether it should go on waiting.
_SECONDS_BETWEEN_LOOKS = 0.05
# How long the end of a feed waits for an item that is being made.
SECONDS_TO_END = 30.0


class BackgroundFeed(Generic[Item]):
    """Items of an iterator, in its order, at most so many of them made ahead.

    To be used in a ``with`` statement, at whose end the thread ends too.

    Attributes:
        seconds_waited: How long ``next`` has waited for items so far.

    >>> with BackgroundFeed(iter("abc"), ahead=2) as feed:
    ...     feed.next(), feed.next(), feed.next(), feed.next()
    ('a', 'b', 'c', None)
    """

    def __init__(
        self, items: Iterator[Item], ahead: int, name: str = "batches", *, in_step: bool = False
    ) -> None:
        """Takes an iterator.

        Args:
            items: The items. With a thread they are made there; it is closed at the end if it
                is a generator.
            ahead: How many items may be ready and not used; 0 makes each when it is asked for,
                without a thread.
            name: What the items are, for the thread's name and for messages.
            in_step: Whether other processes make as many items: a feed that is left without an
                error then makes all that it has room for, so that each of them has made as many
                as the others when they have used as many.
        """
        self.seconds_waited = 0.0
        self._items = items
        self._ahead = ahead
        self._name = name
        self._in_step = in_step
        self._ready: collections.deque[Item] = collections.deque()
        self._changed = threading.Condition()
        self._has_ended = self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "BackgroundFeed[Item]":
        if self._ahead:
            # Settings of JAX that hold within a with statement hold for one thread alone.
            config: Any = jax.config
            settings = config.jax_enable_x64, config.jax_default_device
            self._thread = threading.Thread(
                target=self._make, args=settings, name=f"penzai-shard-{self._name}", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        thread, self._thread = self._thread, None
        with self._changed:
            if thread is not None and self._in_step and error is None:
                self._changed.wait_for(
                    lambda: self._has_ended or len(self._ready) >= self._ahead, SECONDS_TO_END
                )
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(SECONDS_TO_END)
            if thread.is_alive():
                warnings.warn(
                    f"the iterator of {self._name} has been making one item for over "
                    f"{SECONDS_TO_END:.0f} s, and nobody waits for it any longer; its thread ends "
                    "when the item is made.",
                    ShardingWarning,
                    stacklevel=3,
                )
                return
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def next(self, should_stop: Callable[[], bool] = lambda: False) -> Item | None:
        """The next item, or None if there is none, or if waiting for it should stop.

        Args:
            should_stop: Asked now and then while there is nothing to return.

        Raises:
            BaseException: What the iterator raised, with its own traceback, once all items
                before it were returned.
        """
        start = time.perf_counter()
        try:
            if not self._ahead:
                return next(self._items, None)
            with self._changed:
                while not self._ready:
                    if self._error is not None:
                        raise self._error
                    if self._has_ended or should_stop():
                        return None
                    self._changed.wait(_SECONDS_BETWEEN_LOOKS)
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        finally:
            self.seconds_waited += time.perf_counter() - start

    def _make(self, uses_64_bits: bool, device: jax.Device | None) -> None:
        with contextlib.ExitStack() as settings:
            settings.enter_context(jax.enable_x64(uses_64_bits))
            settings.enter_context(jax.default_device(device))
            try:
                while self._has_room():
                    item = next(self._items, None)
                    if item is None:
                        break
                    self._put(item)
                    del item  # Not kept alive while the next one is made.
            except BaseException as error:
                # Raised by ``next``, where somebody sees it.
                self._error = error
            finally:
                with self._changed:
                    self._has_ended = True
                    self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits until one more item may be made; False if none is wanted any more."""
        with self._changed:
            while len(self._ready) >= self._ahead and not self._is_closed:
                self._changed.wait()
            return not self._is_closed

    def _put(self, item: Item) -> None:
        with self._changed:
            if not self._is_closed:
                self._ready.append(item)
                self._changed.notify_all()
