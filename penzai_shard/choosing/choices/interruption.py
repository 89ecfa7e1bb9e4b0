"""Ctrl-C, noticed even where Python loses it."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interruption:
    """While it is entered, Ctrl-C raises ``KeyboardInterrupt``, and is remembered.

    An exception that is raised while Python collects garbage or calls back from other libraries is
    printed and dropped; ``check`` raises it again. A handler of the program's own is left alone,
    and so is what threads other than the main one do, which get no signals.
    """

    def __init__(self) -> None:
        self._is_asked_for = False
        self._former: Any = None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._former = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)

    def check(self) -> None:
        """Raises ``KeyboardInterrupt`` if there was Ctrl-C."""
        if self._is_asked_for:
            raise KeyboardInterrupt

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._is_asked_for = True
        signal.default_int_handler(number, frame)
