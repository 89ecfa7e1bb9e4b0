"""Taking off a model what this library put in."""

import operator
from collections.abc import Iterable
from typing import Any

from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import RolledLayerStack
from penzai_shard.surgery.inserted_layers import (
    body_field,
    is_inserted_sequence,
    library_role,
)
from penzai_shard.surgery.references import display_name
from penzai_shard.surgery.rewriting import SEQUENCE_FIELD
from penzai_shard.surgery.tree_nodes import (
    LEAF,
    STRUCT,
    children_of,
    kind_of,
    mark_of,
    with_children,
    with_fields,
)


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
        # By id, of nodes that changed alone. The node is kept alive beside its result, so that
        # its id stays its own.
        self._known: dict[int, tuple[Any, Any]] = {}
        # For each type its shape, its fields, and whether nodes of it may be taken off.
        self._rows: dict[type, tuple[str, tuple[str, ...], bool]] = {}

    def strip(self, node: Any) -> Any:
        """What a node was before; ``REMOVED`` if it was not there."""
        shape, fields, is_suspect = self._rows.get(type(node)) or self._row(node)
        if shape is LEAF:
            return node
        known = self._known.get(id(node))
        if known is not None:
            return known[1]
        if is_suspect or mark_of(node)[0]:
            stripped = self._strip_suspect(node)
        elif shape is STRUCT:
            stripped = self._strip_struct(node, fields)
        else:
            stripped = self._strip_other(node)
        if stripped is not node:
            self._known[id(node)] = (node, stripped)
        return stripped

    def _row(self, node: Any) -> tuple[str, tuple[str, ...], bool]:
        kind = kind_of(node)
        is_suspect = library_role(type(node)) is not None or (
            self._layers is not None and isinstance(node, self._layers)
        )
        row = self._rows[type(node)] = (kind.shape, kind.fields, is_suspect)
        return row

    def _strip_suspect(self, node: Any) -> Any:
        is_off, field = body_field(node, self._layers)
        if is_off:
            return REMOVED if field is None else self.strip(getattr(node, field))
        role = library_role(type(node))
        if role == "rolled" and (
            self._layers is None or issubclass(RolledLayerStack, self._layers)
        ):
            node = node.to_layer_stack()
        stripped = self._strip_struct(node, kind_of(node).fields)
        if is_inserted_sequence(node) and len(stripped.sublayers) < 2:
            return stripped.sublayers[0] if stripped.sublayers else REMOVED
        return stripped

    def _strip_struct(self, node: Any, fields: tuple[str, ...]) -> Any:
        changes = {}
        for name in fields:
            child = getattr(node, name)
            if name == SEQUENCE_FIELD and type(child) in (list, tuple):
                new = self._strip_sequence(child)
            else:
                new = _in_place(self.strip(child))
            if new is not child:
                changes[name] = new
        return with_fields(node, changes) if changes else node

    def _strip_other(self, node: Any) -> Any:
        children = [child for _, child in children_of(node)]
        stripped = [_in_place(self.strip(child)) for child in children]
        same = all(map(operator.is_, stripped, children))
        return node if same else with_children(node, stripped)

    def _strip_sequence(self, layers: Any) -> Any:
        known = self._known.get(id(layers))
        if known is not None:
            return known[1]
        left = [new for new in map(self.strip, layers) if new is not REMOVED]
        if len(left) == len(layers) and all(map(operator.is_, left, layers)):
            return layers
        result = left if type(layers) is list else tuple(left)
        self._known[id(layers)] = (layers, result)
        return result


def _in_place(stripped: Any) -> Any:
    """Where no list can be shortened, a layer that does nothing stands for one removed."""
    return pz.nn.Identity() if stripped is REMOVED else stripped


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


def strip(model: Any, layers: Any = None) -> Any:
    """Takes off what this library put into a model, and gives the original back.

    Wrapper layers leave their body, constraint layers vanish from the lists they are in, a layer
    that a recipe had to put into a sequence of its own comes back to its place, and a rolled layer
    stack becomes Penzai's. Parts that nothing was put into are the same objects, and so are all
    parameters, with whatever values they have now. A model without anything to take off comes
    back as it is.

    Layers of this library are known by their types, whoever put them in. Layers of somebody
    else's come off if a recipe inserted them, or put them around a layer that they hold in a
    field. Of Penzai's classes that is known for good, also after training, placing or
    ``jax.tree.map``; of other classes (Equinox modules, say) until the tree is rebuilt: name
    their types then. What ``replace`` put in stays, apart from ``RolledLayerStack``.

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
    return _in_place(Stripper(read_layer_types(layers)).strip(model))
