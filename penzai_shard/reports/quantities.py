"""Writes values as people read them.

Text is free of control characters, so that no path can steer a terminal.
"""

from typing import Any


def bytes_text(value: float) -> str:
    """Bytes in binary units.

    >>> bytes_text(15_500_000_000)
    '14.4 GiB'
    """
    if abs(value) < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:,.1f} TiB"


def seconds_text(value: float) -> str:
    """Seconds in the unit that fits.

    >>> seconds_text(0.0123), seconds_text(4000)
    ('12.3 ms', '4,000 s')
    """
    if abs(value) >= 100:
        return f"{value:,.0f} s"
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def plain_text(value: object) -> str:
    r"""Any value as one line that cannot steer a terminal.

    >>> plain_text("a\x1b[2J\n"), plain_text(("batch", None))
    ('a\\x1b[2J\\n', '(batch, None)')
    """
    # The text of a tuple of names would put each into quotes.
    text = f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)
    # Escapes of ANSI, line breaks, and marks that reverse the direction of what follows.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# By the kind of a column; values of other kinds are written by ``plain_text``.
FORMATS: dict[str, Any] = {
    "path": lambda path: plain_text(path) or "(root)",
    "bytes": bytes_text,
    "count": "{:,}".format,
    "seconds": seconds_text,
    "percent": "{:.0%}".format,
    "ok": lambda ok: "yes" if ok else "no",
}
