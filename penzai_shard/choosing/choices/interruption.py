"""Ctrl-C, noticed even where Python loses it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def remembered_interruption() -> Iterator[Callable[[], None]]:
    """While it is entered, Ctrl-C raises ``KeyboardInterrupt``, and is remembered.

    An exception that is raised while Python collects garbage or calls back from other libraries is
    printed and dropped; calling what is given raises it again. A handler of the program's own is
    left alone, and so is what threads other than the main one do, which get no signals.
    """
    is_asked_for = False

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked_for
        is_asked_for = True
        signal.default_int_handler(number, frame)

    def check() -> None:
        if is_asked_for:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
