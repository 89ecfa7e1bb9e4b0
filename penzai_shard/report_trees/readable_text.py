"""Numbers in units that people read, and text that is safe to show."""

from typing import Literal

Unit = Literal["bytes", "count"]


def bytes_text(count: float) -> str:
    """A number of bytes for people, in powers of 1024.

    >>> bytes_text(512), bytes_text(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{round(count)} B" if unit == "B" else f"{size:.1f} {unit}"


def share_text(part: float, whole: float) -> str:
    """A share in percent; ``"-"`` of nothing.

    >>> share_text(1, 3), share_text(1, 1000), share_text(999, 1000), share_text(0, 0)
    ('33%', '<1%', '>99%', '-')
    """
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.5 or 99.5 < percent < 100:
        return "<1%" if percent < 1 else ">99%"
    return f"{percent:.0f}%"


def quantity_text(value: float, unit: Unit) -> str:
    """A number in its unit for people.

    >>> quantity_text(-2048, "bytes"), quantity_text(1200, "count"), quantity_text(1.5, "count")
    ('-2.0 KiB', '1,200', '1.5')
    """
    if unit == "count":
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return "-" * (value < 0) + bytes_text(abs(value))


def count_text(count: int, what: str) -> str:
    """A number of things for people.

    >>> count_text(1, "array"), count_text(1200, "array")
    ('1 array', '1,200 arrays')
    """
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def printable(text: str) -> str:
    r"""Text with control characters written out, so that it cannot steer a terminal.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
