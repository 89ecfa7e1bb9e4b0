"""Which layers of a model are not the model's own, and what the model was without them.

All that a recipe puts in is visible in the tree, as layers of this library: they are known by
their types, in every process and after every rebuilding of the tree. A layer of somebody else's
is in an ``Inserted``; if it was put around a layer of the model, that one is in an ``Original``
in it.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from penzai import pz

from penzai_shard.layers import RolledLayerStack, WrapperLayer
from penzai_shard.surgery.tree_nodes import children_of

Role = Literal["wrapper", "passer", "rolled", "sequence", "inserted", "original"]

_LAYERS_PACKAGE = "penzai_shard.layers."


class _PassingWrapper(WrapperLayer):
    """A wrapper that does nothing but to pass everything on."""

    def __call__(self, *args: Any, **side_inputs: Any) -> Any:
        """Runs the layer.

        Args:
            *args: The layer's inputs.
            **side_inputs: The layer's side inputs.

        Returns:
            The layer's output.
        """
        return self.body(*args, **side_inputs)


@pz.pytree_dataclass
class Inserted(_PassingWrapper):
    """Holds a layer that a recipe put into a model, so that ``strip`` can take it off again.

    It runs the layer, and attributes of the layer are read through it. Nothing else changes.
    Layers of this library that need no such sign, such as ``Jitted`` and ``ConstrainSharding``,
    go in without it.

    Attributes:
        body: The layer.
        holds_original: Whether the layer was put around a layer of the model, which then is
            somewhere in it, in an ``Original``.

    >>> Inserted(pz.nn.ConstantRescale(by=2.0))(3.0)
    6.0
    """

    body: Any
    holds_original: bool = dataclasses.field(default=False, metadata={"pytree_node": False})


@pz.pytree_dataclass
class Original(_PassingWrapper):
    """Holds a layer of the model inside of an ``Inserted`` layer that was put around it.

    It runs the layer, and attributes of the layer are read through it. What happens to the layer
    inside, and to the layers around, is free: ``strip`` leaves what is in this.

    Attributes:
        body: The layer.

    >>> Original(pz.nn.ConstantRescale(by=2.0))(3.0)
    6.0
    """

    body: Any


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class InsertedSequence(pz.nn.Sequential):
    """A layer and what a recipe put before or after it where no list could take it.

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


# Further types are added when they are asked for.
_roles: dict[type, Role | None] = {
    Inserted: "inserted",
    Original: "original",
    InsertedSequence: "sequence",
    RolledLayerStack: "rolled",
}


def library_role(node_type: type) -> Role | None:
    """What a layer type of this library does to a model; None for all other types.

    A class that somebody else derived from one of this library's is somebody else's.

    Args:
        node_type: A type.

    Returns:
        ``"wrapper"`` for one that runs its ``body``, ``"passer"`` for one that passes its input
        on, ``"rolled"`` for the rolled layer stack, and what the name says for ``Inserted``,
        ``Original`` and ``InsertedSequence``.

    >>> from penzai_shard.layers import ConstrainSharding, Jitted
    >>> library_role(Jitted), library_role(ConstrainSharding), library_role(pz.nn.Linear)
    ('wrapper', 'passer', None)
    """
    if node_type not in _roles:
        role: Role = "wrapper" if issubclass(node_type, WrapperLayer) else "passer"
        is_ours = node_type.__module__.startswith(_LAYERS_PACKAGE)
        _roles[node_type] = role if is_ours and issubclass(node_type, pz.nn.Layer) else None
    return _roles[node_type]


def vanishes(node: Any) -> bool:
    """Whether nothing is left of a node when all that was put into a model is taken off.

    >>> vanishes(Inserted(pz.nn.Identity())), vanishes(pz.nn.Identity())
    (True, False)
    """
    match library_role(type(node)):
        case "passer":
            return True
        case "wrapper" | "original":
            return vanishes(node.body)
        case "inserted":
            return not node.holds_original
        case "sequence":
            return all(map(vanishes, node.sublayers))
    return False


def original_in(node: Any) -> Original | None:
    """The ``Original`` in a node that was put around it; None if it has none.

    Pairs of ``Inserted`` and ``Original`` are nested like brackets: what was put around a
    node later is skipped.

    >>> layer = Inserted(Inserted(Original(Original(pz.nn.Identity())), holds_original=True))
    >>> original_in(layer.body)
    Original(body=Identity())
    """
    role = library_role(type(node))
    if role == "original":
        return node
    if role == "inserted":
        own = original_in(node.body) if node.holds_original else None
        return None if own is None else original_in(own.body)
    found = (original_in(child) for _, child in children_of(node))
    return next((original for original in found if original is not None), None)


def surrounded(node: Any) -> Any:
    """The one layer of a model that a node was put around; None if it was not put around one.

    >>> from penzai_shard.layers import Jitted
    >>> surrounded(Jitted(pz.nn.Identity())), surrounded(pz.nn.Identity())
    (Identity(), None)
    """
    match library_role(type(node)):
        case "wrapper" | "original":
            return node.body
        case "inserted" if node.holds_original:
            original = original_in(node.body)
            return None if original is None else original.body
        case "sequence":
            left = [layer for layer in node.sublayers if not vanishes(layer)]
            return left[0] if len(left) == 1 else None
    return None
