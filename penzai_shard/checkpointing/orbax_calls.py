"""Calling Orbax: imported when it is first needed, and quiet where its failure is reported."""

import contextlib
import functools
import gc
import logging
import threading
import types
from collections.abc import Iterator

from penzai_shard.errors import require_extra

_LOGGERS = ("absl", "asyncio")


@functools.cache
def orbax() -> types.ModuleType:
    """The interface of Orbax that this library uses."""
    return require_extra("orbax.checkpoint.experimental.v1", "checkpoint")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to what one can read.

    >>> first_line(ValueError("wrong\\nand more"))
    'wrong'
    """
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:300]


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Keeps Orbax from logging, hundreds of lines long, what is raised as one error anyway.

    Its threads and event loops report the same failure one after the other. What is logged is
    passed on once all went well, and what other threads log at once.
    """
    held: list[logging.LogRecord] = []
    others = {*threading.enumerate()} - {threading.current_thread()}

    def hold(record: logging.LogRecord) -> bool:
        # Called by the thread that logs. Numbers of threads are used again, so they do not count.
        if threading.current_thread() in others:
            return True
        held.append(record)
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(hold)
    try:
        yield
    except BaseException:
        held.clear()
        # Event loops report what nobody awaited when they are collected.
        gc.collect()
        held.clear()
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(hold)
        for record in held:
            logging.getLogger(record.name).handle(record)
