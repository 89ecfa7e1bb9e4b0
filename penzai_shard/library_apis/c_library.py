"""What this library uses of the C library: giving memory back to the operating system."""

import ctypes


def give_back_free_memory() -> None:
    """Gives memory that was freed back to the operating system, where the C library can.

    glibc keeps what is freed for the next use, in an arena for each of some threads. Once pieces of
    tens of megabytes were freed, it takes pieces of that size from there too (its threshold for
    ``mmap`` adapts), so that each thread of a storage library comes to hold several that nobody
    uses.

    >>> give_back_free_memory()
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return  # Not glibc.
    trim(0)
