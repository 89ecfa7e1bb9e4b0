"""HTML that cannot be broken by what it shows: all text is escaped unless it is HTML already."""

import html
import re

from penzai_shard.text_tables import printable


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


# A browser would break a line after the hyphen in them: arrows, and the numbers of equal blocks.
_UNBROKEN = re.compile(r"-&gt;|\{[\d,-]+\}")
_NOT_WRAPPED = r'<span class="n">\g<0></span>'
# These have no end tag.
_VOID = frozenset({"br", "link", "meta", "wbr"})


def element(tag: str, *children: str | None, **attributes: str | bool | None) -> Markup:
    """An element with what is in it.

    Args:
        tag: Its name.
        *children: ``Markup``, or text, which is escaped; None is left out.
        **attributes: Its attributes, their values escaped; a ``_`` at the end of a name is
            dropped, and one within it becomes ``-``. False or None leaves an attribute out, True
            is one without a value.

    >>> element("p", "a < b ", element("b", "c"), class_="x", title='"')
    '<p class="x" title="&quot;">a &lt; b <b>c</b></p>'
    """
    written = [tag]
    for name, value in attributes.items():
        name = name.removesuffix("_").replace("_", "-")
        if value is True:
            written.append(name)
        elif value is not None and value is not False:
            written.append(f'{name}="{escaped(value)}"')
    start = f"<{' '.join(written)}>"
    if tag in _VOID:
        return Markup(start)
    return Markup(f"{start}{joined(children)}</{tag}>")


def joined(children: "tuple[str | None, ...]") -> Markup:
    """Pieces one after the other; text among them is escaped, and arrows are not broken."""
    return Markup("".join(_of_text(child) for child in children if child is not None))


def _of_text(text: str) -> str:
    return text if isinstance(text, Markup) else _UNBROKEN.sub(_NOT_WRAPPED, escaped(text))


def escaped(text: str) -> Markup:
    r"""Text as HTML, control characters written out; what is HTML already as it is.

    >>> escaped("a\x1b<b>"), escaped(Markup("<br>"))
    ('a\\x1b&lt;b&gt;', '<br>')
    """
    return text if isinstance(text, Markup) else Markup(html.escape(printable(text)))


def path_markup(path: str) -> Markup:
    """A path that is broken after slashes, and nowhere else if there is room.

    >>> path_markup("a/b<c")
    'a/<wbr>b&lt;c'
    """
    return Markup(_UNBROKEN.sub(_NOT_WRAPPED, escaped(path).replace("/", "/<wbr>")))
