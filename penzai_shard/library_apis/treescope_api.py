"""What this library takes from the inside of treescope, and what it changes of it.

Taken: the base of a part of a tree, for one with a style of its own and a text on hovering.

Changed: views of arrays that are on devices of several processes. Treescope reads the numbers that
it shows through three functions. Of an array whose parts are on other processes they raise an
error, or, of one of a thousand elements and more, compile a program in which all processes have to
take part, so that one that prints alone waits for good. Penzai's named arrays call the same
functions, so that nothing could be registered for them beside.
"""

import dataclasses
import functools
import html
from typing import Any

import jax
import numpy as np
from treescope._internal.parts import basic_parts, part_interface
from treescope.external import jax_support

from penzai_shard.library_apis.jax_api import Tracer


def show_own_parts() -> None:
    """Has treescope show of such arrays what this process has, and cross out the rest.

    Of all other arrays nothing changes. It may be called again.
    """
    adapter = jax_support.JAXArrayAdapter
    text_of, summary_of = jax_support.faster_array_repr, jax_support.summarize_array_data
    data_of = adapter.get_array_data_with_truncation
    if hasattr(text_of, "__wrapped__"):
        return

    @functools.wraps(text_of)
    def faster_array_repr(array: Any) -> str:
        return repr(array) if _is_elsewhere(array) else text_of(_on_one_device(array))

    @functools.wraps(summary_of)
    def summarize_array_data(array: Any) -> str:
        return summary_of(_on_one_device(array))

    @functools.wraps(data_of)
    def get_array_data_with_truncation(
        self: Any, array: Any, mask: Any, edge_items_per_axis: tuple[int | None, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        if _is_elsewhere(array):
            return shown_parts(array, mask, edge_items_per_axis)
        return data_of(self, _on_one_device(array), mask, edge_items_per_axis)

    jax_support.faster_array_repr = faster_array_repr
    jax_support.summarize_array_data = summarize_array_data
    adapter.get_array_data_with_truncation = get_array_data_with_truncation


def _is_on_others(array: Any) -> bool:
    return not (isinstance(array, Tracer) or array.is_deleted() or array.is_fully_addressable)


def _is_elsewhere(array: Any) -> bool:
    """Whether this process has parts of an array, or nothing of it."""
    return _is_on_others(array) and not array.is_fully_replicated


def _on_one_device(array: Any) -> Any:
    """Of what every process has, one copy, for which no other process is needed."""
    is_copied = _is_on_others(array) and array.is_fully_replicated and array.addressable_shards
    return array.addressable_data(0) if is_copied else array


def shown_parts(
    array: jax.Array, mask: Any, edge_items_per_axis: tuple[int | None, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """What this process has of an array, cut for display; no other process takes part.

    Args:
        array: The array.
        mask: Which elements are to be shown; None for all. It can be broadcast to the array.
        edge_items_per_axis: How many elements to keep at both ends of each dimension, with one in
            between that stands for the others; None keeps all.

    Returns:
        The elements, and which of them are shown: those that are here.

    >>> import jax.numpy as jnp
    >>> shown_parts(jnp.arange(6), None, (1,))
    (array([0, 0, 5], dtype=int32), array([ True, False,  True]))
    """
    # Of each dimension the places that are shown; -1 stands for those left out.
    places = [
        np.arange(length)
        if edge is None
        else np.concatenate([np.arange(edge), [-1], np.arange(length - edge, length)])
        for length, edge in zip(array.shape, edge_items_per_axis, strict=True)
    ]
    shape = [len(each) for each in places]
    shown = np.zeros(shape, np.dtype(array.dtype))
    is_here = np.zeros(shape, bool)
    for shard in array.addressable_shards:
        bounds = [part.indices(n) for part, n in zip(shard.index, array.shape, strict=True)]
        at = [
            np.flatnonzero((each >= start) & (each < stop))
            for each, (start, stop, _) in zip(places, bounds, strict=True)
        ]
        within = [
            each[here] - start for each, here, (start, _, _) in zip(places, at, bounds, strict=True)
        ]
        shown[np.ix_(*at)] = np.asarray(shard.data[np.ix_(*within)])
        is_here[np.ix_(*at)] = True
    if mask is not None:
        wanted = np.broadcast_to(np.asarray(mask), array.shape)
        is_here &= wanted[np.ix_(*places)]
    return shown, is_here


@dataclasses.dataclass(frozen=True)
class StyledPart(basic_parts.DeferringToChild):
    """A part of a tree with classes that a style sheet names, and a text on hovering.

    Attributes:
        child: The part.
        classes: Names of classes, with spaces between them.
        rules: The style sheet, which comes into a page once.
        title: What is shown on hovering; empty for nothing.
    """

    child: part_interface.RenderableTreePart
    classes: str
    rules: str
    title: str = ""

    def html_setup_parts(self, context: Any) -> Any:
        """The style sheet, and what the part needs."""
        return {part_interface.CSSStyleRule(self.rules)} | self.child.html_setup_parts(context)

    def render_to_html(
        self, stream: Any, *, at_beginning_of_line: bool = False, render_context: Any
    ) -> None:
        """Writes the part in an element of its own."""
        title = f' title="{html.escape(self.title)}"' if self.title else ""
        stream.write(f'<span class="{html.escape(self.classes)}"{title}>')
        self.child.render_to_html(
            stream, at_beginning_of_line=at_beginning_of_line, render_context=render_context
        )
        stream.write("</span>")
