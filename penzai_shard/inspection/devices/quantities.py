"""Bytes and rates as people write them."""

import math
import numbers
import re
from typing import Any

from penzai_shard.errors import RuleTypeError

_POWERS = "KMGT"
_QUANTITY = re.compile(
    r"(?P<number>\d+(\.\d+)?([eE]\+?\d+)?)\s*(?P<power>[KMGT])?(?P<binary>i)?B?(/s)?"
)


def read_bytes(text: str, what: str) -> int:
    """Reads a number of bytes.

    Args:
        text: For instance ``80GB``, ``15.75GiB`` or ``8e10``.
        what: What it is, for messages.

    Raises:
        RuleTypeError: The text is something else, or 0.

    >>> read_bytes("80GB", "--limit"), read_bytes("1.5 KiB", "--limit")
    (80000000000, 1536)
    """
    match = _QUANTITY.fullmatch(text.strip())
    size = 0
    if match is not None and (match["power"] or not match["binary"]):
        base = 1024 if match["binary"] else 1000
        exponent = _POWERS.index(match["power"]) + 1 if match["power"] else 0
        size = int(float(match["number"]) * base**exponent)
    if not size:
        raise RuleTypeError(f"{what} {text!r} is not a size. Write for instance 80GB or 15.75GiB.")
    return size


def read_bandwidths(text: str) -> dict[str, float]:
    """Reads what a device can send in a second over each mesh axis.

    Args:
        text: For instance ``data=25GB,model=450GB``.

    Raises:
        RuleTypeError: The text is something else.

    >>> read_bandwidths("data=25GB,model=4.5e11")
    {'data': 25000000000.0, 'model': 450000000000.0}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not name or not equals or name in found:
            raise RuleTypeError(
                f"cannot read --bandwidth {text!r}. Write for each mesh axis once what a device "
                "can send over it in a second: data=25GB,model=450GB."
            )
        found[name] = float(read_bytes(size, f"--bandwidth {name}="))
    return found


def is_positive(given: Any) -> bool:
    """Whether something is a positive number, and not infinite.

    >>> is_positive(2.5), is_positive(0), is_positive(True), is_positive(math.inf)
    (True, False, False, False)
    """
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    return is_number and 0 < given < math.inf
