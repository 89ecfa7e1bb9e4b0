"""What this library uses of Python that it does not promise to keep."""

import atexit

# Whose own callback is registered here, so that those registered later are called before it.
import concurrent.futures.thread  # noqa: F401
import threading
from collections.abc import Callable


def before_threads_end(act: Callable[[], None]) -> None:
    """Has a function called when the program ends, while threads can still be given work.

    Functions registered with ``atexit`` are called later, when executors take no work any more,
    and Orbax needs some to write a checkpoint.

    Args:
        act: The function; it should not raise.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(act)
