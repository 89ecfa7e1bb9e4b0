"""How often Python looks for garbage while a search runs."""

import contextlib
import gc
from collections.abc import Iterator

# New objects after which the youngest are looked at; of these looks every sixth is at older ones
# too, and every third of those at all. So at most some 360,000 objects are garbage unnoticed.
_THRESHOLDS = (20_000, 5, 2)


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """While it is entered, Python looks for garbage after 20,000 new objects instead of 700.

    Tracing a step makes more than a hundred thousand objects, of which nearly all are in use until
    it is done, and then none. To look at them again and again takes a sixth of a search's time.
    What was set to be rarer stays so, and a collector that is switched off stays off.

    >>> with seldom_collected():
    ...     gc.get_threshold()[0] >= 20_000
    True
    """
    former = gc.get_threshold()
    # A threshold of 0 means never.
    if 0 < former[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*former)
