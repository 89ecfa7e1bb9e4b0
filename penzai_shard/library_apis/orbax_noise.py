"""What Orbax writes to logs and to standard error of a failure that is raised anyway."""

import contextlib
import gc
import inspect
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

_LOGGERS = ("absl", "asyncio")
_NOT_BEGUN = "coroutine '_read_array_index_and_device_put' was never awaited"
_QUIET_SECONDS, _MOST_SECONDS = 0.05, 1.0


class _Here(threading.local):
    """Whether this thread is in a block without noise, and whether anything has failed there."""

    is_held = False
    has_failed = False


_here = _Here()


@contextlib.contextmanager
def without_noise(before: Collection[threading.Thread] | None = None) -> Iterator[None]:
    """Keeps Orbax from logging, hundreds of lines long, what is raised as one error anyway.

    Its threads and event loops report the same failure one after the other. What is logged is
    passed on once all went well, and what other threads log at once. Within another such block of
    the same thread it does nothing, so that a row of failures is cleared away once.

    Args:
        before: The threads that ran before Orbax began, if it began before this.
    """
    if _here.is_held:
        try:
            yield
        except BaseException:
            _here.has_failed = True
            # Reads that had not begun warn whenever they are collected, which may be soon.
            warnings.filterwarnings("ignore", _NOT_BEGUN, RuntimeWarning)
            raise
        return
    held: list[logging.LogRecord] = []
    others = {*(threading.enumerate() if before is None else before)} - {threading.current_thread()}

    def hold(record: logging.LogRecord) -> bool:
        # Called by the thread that logs. Numbers of threads are used again, so they do not count.
        if threading.current_thread() in others:
            return True
        held.append(record)
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(hold)
    _here.is_held, _here.has_failed = True, False
    try:
        with _abandoned_reads() as count:
            try:
                yield
            except BaseException:
                _here.has_failed = True
                raise
            finally:
                if _here.has_failed:
                    # Tasks of a failed read or write, of which only the first error was raised,
                    # report theirs to asyncio's log when they are collected: now, not later.
                    _collect()
                    _wait_until_quiet(count)
                    _collect()
                    held.clear()
    finally:
        _here.is_held = False
        for logger in loggers:
            logger.removeFilter(hold)
        for record in held:
            logging.getLogger(record.name).handle(record)


def _collect() -> None:
    with warnings.catch_warnings():
        # Reads that had not begun are of no more interest than those that failed.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        gc.collect()


def _wait_until_quiet(count: Callable[[], int]) -> None:
    """Waits until a number has not changed for a moment, for a second at most."""
    deadline = time.monotonic() + _MOST_SECONDS
    seen = -1
    while seen != count() and time.monotonic() < deadline:
        seen = count()
        time.sleep(_QUIET_SECONDS)


class _Abandoned:
    """Counts what Python would report of tasks that nobody waits for any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self.count = 0

    def begin(self) -> None:
        with self._lock:
            if not self._blocks:
                self._report, sys.unraisablehook = sys.unraisablehook, self._hook
            self._blocks += 1

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                sys.unraisablehook = self._report

    def _hook(self, unraisable: Any) -> None:
        # Where reads go on after one failed, their results come to an event loop that is closed.
        is_late = "Event loop is closed" in str(unraisable.exc_value)
        if is_late or inspect.iscoroutine(unraisable.object):
            self.count += 1
        else:
            self._report(unraisable)


_abandoned = _Abandoned()


@contextlib.contextmanager
def _abandoned_reads() -> Iterator[Callable[[], int]]:
    """Keeps Python from reporting tasks that end after the failure of another; counts them."""
    _abandoned.begin()
    try:
        yield lambda: _abandoned.count
    finally:
        _abandoned.end()
