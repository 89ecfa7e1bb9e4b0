"""Which layers of a model are this library's, and what the model was before they came.

Layers of this library are known by their type, so that they come off whoever put them in, and
also from a model that was rebuilt, trained or loaded. Layers of somebody else's that a recipe put
in carry a mark instead: Penzai's as their class, which lasts, others as long as the object.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable
from typing import Any, Literal

from penzai import pz

from penzai_shard.layers import RolledLayerStack, WrapperLayer
from penzai_shard.surgery.tree_nodes import kind_of, mark_of

Role = Literal["wrapper", "passer", "sequence", "rolled"]

_LAYERS_MODULE = "penzai_shard.layers"


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class InsertedSequence(pz.nn.Sequential):
    """A layer and what a recipe put before or after it where there was no list to put it in.

    It runs like ``pz.nn.Sequential``. ``strip`` puts the layer back in its place.

    Attributes:
        sublayers: The layers to call in order.

    >>> InsertedSequence([pz.nn.ConstantRescale(by=2.0), pz.nn.Identity()])(3.0)
    6.0
    """


def inserted_sequence(layers: Iterable[Any]) -> InsertedSequence:
    """An ``InsertedSequence`` of some layers, made quickly.

    >>> inserted_sequence((pz.nn.Identity(),))
    InsertedSequence(sublayers=[Identity()])
    """
    made = object.__new__(InsertedSequence)
    made.__dict__["sublayers"] = list(layers)
    return made


def library_role(node_type: type) -> Role | None:
    """What a layer type of this library does to a model; None for all other types.

    Args:
        node_type: A type.

    Returns:
        ``"wrapper"`` for one that runs its ``body``, ``"passer"`` for one that passes its input
        on, ``"rolled"`` for the rolled layer stack, ``"sequence"`` for ``InsertedSequence``.

    >>> from penzai_shard.layers import ConstrainSharding, Jitted
    >>> library_role(Jitted), library_role(ConstrainSharding), library_role(pz.nn.Linear)
    ('wrapper', 'passer', None)
    """
    key: Hashable = node_type
    return _library_role(key)


@functools.lru_cache(maxsize=4096)
def _library_role(node_type: Hashable) -> Role | None:
    assert isinstance(node_type, type)
    if issubclass(node_type, InsertedSequence):
        return "sequence"
    if issubclass(node_type, RolledLayerStack):
        return "rolled"
    for base in node_type.__mro__:
        if base is WrapperLayer:
            return "wrapper"
        if base.__module__.startswith(_LAYERS_MODULE) and issubclass(base, pz.nn.Layer):
            return (
                "wrapper"
                if any(field.name == "body" for field in dataclasses.fields(base))
                else "passer"
            )
    return None


def body_field(node: Any, layers: tuple[type, ...] | None) -> tuple[bool, str | None]:
    """Whether a node is to be taken off, and the field with what is then left of it.

    Args:
        node: A node of a model.
        layers: The types to be taken off; None for everything that this library put in.

    Returns:
        A truth value, and the field's name, or None if nothing is left.
    """
    role = library_role(type(node))
    is_put_in, field = mark_of(node)
    if is_put_in and field == "sublayers":
        return False, None
    if layers is not None:
        if not isinstance(node, layers) or role in ("sequence", "rolled"):
            return False, None
        if not is_put_in:
            field = "body" if "body" in kind_of(node).kept or hasattr(node, "body") else None
        return True, field
    if role in ("wrapper", "passer"):
        return True, "body" if role == "wrapper" else None
    return is_put_in, field


def is_inserted_sequence(node: Any) -> bool:
    """Whether a node is a list of layers around one original layer, and comes off with the rest.

    >>> is_inserted_sequence(InsertedSequence([])), is_inserted_sequence(pz.nn.Sequential([]))
    (True, False)
    """
    return library_role(type(node)) == "sequence" or mark_of(node) == (True, "sublayers")
