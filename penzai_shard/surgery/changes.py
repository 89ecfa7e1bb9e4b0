"""What the edits make of one node, and what they refuse to make of it."""

import operator
import reprlib
from collections.abc import Callable
from typing import Any, Literal

import jax
from penzai import pz

from penzai_shard.surgery.inserted_layers import Inserted, Original, library_role
from penzai_shard.surgery.references import display_name
from penzai_shard.surgery.refusals import EditRefused
from penzai_shard.surgery.rewriting import replaced
from penzai_shard.surgery.stripping import strip
from penzai_shard.surgery.tree_nodes import Keys, is_layer, kind_of

EditKind = Literal["wrap", "insert_before", "insert_after", "replace"]


def inserted(layer: Any, keys: Keys) -> Any:
    """A layer to insert; in an ``Inserted`` if its type alone does not say that it comes off."""
    _check_layer(layer, keys)
    is_known = library_role(type(layer)) in ("passer", "inserted")
    return layer if is_known else Inserted(layer)


def _check_layer(layer: Any, keys: Keys) -> None:
    if is_layer(layer):
        return
    if isinstance(layer, type):
        reason = f"the class {layer.__name__} and not a layer. Return {layer.__name__}(...)."
    elif callable(layer):
        reason = (
            f"{_kind_text(layer)}, which is not a pytree: its parameters would be lost. Make it a "
            "layer, such as a pz.nn.Layer with @pz.pytree_dataclass."
        )
    else:
        shown = f"{reprlib.repr(layer)} of type {type(layer).__name__}"
        returned = "None" if layer is None else shown
        reason = f"{returned} where a layer belongs. Return the layer from it."
    raise EditRefused(keys, f"the function returned {reason}")


def _kind_text(value: Any) -> str:
    if hasattr(value, "__qualname__"):
        return f"the function {display_name(value)}"
    return f"a value of type {type(value).__name__}"


def _check_place(node: Any, keys: Keys) -> None:
    if not callable(node) or isinstance(node, type):
        shown = f"the class {node.__name__}" if isinstance(node, type) else type(node).__name__
        raise EditRefused(
            keys,
            f"{shown} is not a layer, so that nothing can be put around it, before "
            "it or after it. Use replace, or name a layer.",
        )


def _insert_before(make: Callable[[Any, Keys], Any], node: Any, keys: Keys) -> tuple[Any, ...]:
    return _insert_after(make, node, keys)[::-1]


def _insert_after(make: Callable[[Any, Keys], Any], node: Any, keys: Keys) -> tuple[Any, ...]:
    _check_place(node, keys)
    return node, make(node, keys)


def _replace(make: Callable[[Any, Keys], Any], node: Any, keys: Keys) -> tuple[Any, ...]:
    made = make(node, keys)
    if kind_of(node).is_layer and (isinstance(made, type) or not callable(made)):
        _check_layer(made, keys)
    return (made,)


def _wrap(make: Callable[[Any, Keys], Any], node: Any, keys: Keys) -> tuple[Any, ...]:
    """A layer put around a node.

    This library's wrappers go around it as they are. Everything else goes into an ``Inserted``,
    the node in it into an ``Original``. A function may also edit the layer with recipes of its own:
    what it gives then need not hold the very object that it was given.
    """
    _check_place(node, keys)
    made = inside = make(node, keys)
    while inside is not node and library_role(type(inside)) == "wrapper":
        inside = inside.body
    if inside is node:
        return (made,)
    _check_layer(made, keys)
    if isinstance(made, pz.nn.Sequential) and made.sublayers is node:
        name = type(made).__name__
        raise EditRefused(keys, f"{name} takes a list of layers. Write {name}([layer]).")
    try:
        marked = replaced(made, node, Original(node))
        if marked is not made:
            return (Inserted(marked, holds_original=True),)
        is_edited = _is_same(strip(made), strip(node))
    except EditRefused as error:
        raise error.below(keys) from None
    if not is_edited:
        raise EditRefused(
            keys,
            f"the function returned {display_name(type(made))}, which does not hold the "
            f"{display_name(type(node))} that it was given. Put that into it, or use replace.",
        )
    return (made,)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees are built alike of the same objects."""
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(one)
    other_leaves, other_structure = jax.tree_util.tree_flatten(other)
    return structure == other_structure and all(map(operator.is_, leaves, other_leaves))


CHANGES: dict[EditKind, Callable[..., tuple[Any, ...]]] = {
    "wrap": _wrap,
    "insert_before": _insert_before,
    "insert_after": _insert_after,
    "replace": _replace,
}
