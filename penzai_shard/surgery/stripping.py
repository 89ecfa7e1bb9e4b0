"""Taking off a model what this library put in."""

from collections.abc import Iterable
from typing import Any, TypeVar

from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers.rolled_layer_stack import RolledLayerStack
from penzai_shard.surgery.inserted_layers import body_field, library_role
from penzai_shard.surgery.references import display_name
from penzai_shard.surgery.rewriting import SEQUENCE_FIELD
from penzai_shard.surgery.tree_nodes import LEAF, children_of, kind_of, with_children

Model = TypeVar("Model")


class _Removed:
    """What is left of a layer that is taken off as a whole."""

    def __repr__(self) -> str:
        return "REMOVED"


REMOVED = _Removed()


class Stripper:
    """Takes layers off one model; what is shared stays shared.

    Args:
        layers: The types to take off; None for everything that this library put in.
    """

    def __init__(self, layers: tuple[type, ...] | None) -> None:
        self._layers = layers
        # The node is kept alive beside its result, so that its id stays its own.
        self._known: dict[int, tuple[Any, Any]] = {}

    def strip(self, node: Any) -> Any:
        """What a node was before; ``REMOVED`` if it was not there."""
        if kind_of(node).shape == LEAF:
            return node
        known = self._known.get(id(node))
        if known is None:
            known = self._known[id(node)] = (node, self._strip(node))
        return known[1]

    def _strip(self, node: Any) -> Any:
        is_off, field = body_field(node, self._layers)
        if is_off:
            return REMOVED if field is None else self.strip(getattr(node, field))
        role = library_role(type(node))
        if role == "rolled" and (
            self._layers is None or issubclass(RolledLayerStack, self._layers)
        ):
            node = node.to_layer_stack()
        children = children_of(node)
        stripped = [
            self._strip_sequence(child)
            if key == SEQUENCE_FIELD and isinstance(child, list | tuple)
            else self.strip(child)
            for key, child in children
        ]
        if role == "sequence":
            left = stripped[0]
            if len(left) < 2:
                return left[0] if left else REMOVED
        if all(new is child for new, (_, child) in zip(stripped, children, strict=True)):
            return node
        # Where no list is to be shortened, a layer that does nothing takes the place.
        return with_children(
            node, [pz.nn.Identity() if new is REMOVED else new for new in stripped]
        )

    def _strip_sequence(self, layers: Any) -> Any:
        known = self._known.get(id(layers))
        if known is None:
            left = [new for new in map(self.strip, layers) if new is not REMOVED]
            same = len(left) == len(layers) and all(
                new is layer for new, layer in zip(left, layers, strict=True)
            )
            result = layers if same else left if type(layers) is list else type(layers)(left)
            known = self._known[id(layers)] = (layers, result)
        return known[1]


def read_layer_types(layers: Any) -> tuple[type, ...] | None:
    """The types of ``strip``'s argument, in whatever form they were given."""
    if layers is None:
        return None
    given = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else (
        layers,
    )  # fmt: skip
    wrong = [layer for layer in given if not isinstance(layer, type)]
    if wrong:
        raise RuleTypeError(
            f"strip takes layer types, not {wrong[0]!r}. "
            f"Write {display_name(type(wrong[0]))}, or leave layers out to take off everything."
        )
    return given


def strip(model: Model, layers: Any = None) -> Any:
    """Takes off what this library put into a model, and gives the original back.

    Wrapper layers leave their body, constraint layers vanish from the lists they are in, a layer
    that a recipe had to put into a sequence of its own comes back to its place, and a rolled layer
    stack becomes Penzai's. Parts that nothing was put into are the same objects, and so are all
    parameters, with whatever values they have now. A model without anything to take off comes
    back as it is.

    Layers of this library are known by their types, whoever put them in. Layers of somebody
    else's come off if a recipe inserted them, or put them around a layer that they hold in a
    field; that is known as long as the model is made of the objects that the recipe gave, and
    lost when it is rebuilt by ``jax.tree.map`` or loaded. Name their types then. What ``replace``
    put in stays, apart from ``RolledLayerStack``.

    Args:
        model: The model; it stays as it is.
        layers: A layer type, or several, to take off no others. Of types of somebody else's,
            those with a field ``body`` leave it, and all others vanish.

    Returns:
        The model without them.

    Raises:
        RuleTypeError: ``layers`` holds something that is no type.

    >>> from penzai_shard.layers import Checkpointed, Jitted
    >>> layer = pz.nn.Identity()
    >>> strip(Jitted(Checkpointed(layer))) is layer
    True
    >>> strip(Jitted(Checkpointed(layer)), layers=Jitted)
    Checkpointed(body=Identity(), policy=None)
    """
    stripped = Stripper(read_layer_types(layers)).strip(model)
    return pz.nn.Identity() if stripped is REMOVED else stripped
