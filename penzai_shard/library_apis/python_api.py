"""What this library uses of Python that it does not promise to keep."""

import atexit

# Whose own callback is registered here, so that those registered later are called before it.
import concurrent.futures.thread  # noqa: F401
import ctypes
import signal
import threading
from collections.abc import Callable


def before_threads_end(act: Callable[[], None]) -> None:
    """Has a function called when the program ends, while threads can still be given work.

    Functions registered with ``atexit`` are called later, when executors take no work any more,
    and Orbax needs some to write a checkpoint. Since Python 3.12 none can be given a new thread.

    Args:
        act: The function; it should not raise.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(act)


def delay_aborts() -> None:
    """Has ``abort()`` wait for some seconds before it ends the program.

    A library that gives up in one of its own threads ends the program at once, and threads of
    Python cannot say why. As the handler of the signal, ``sleep`` of the C library is called with
    the signal's number, and so waits for six seconds; then the program is aborted after all.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
