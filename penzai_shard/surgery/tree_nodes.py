"""Taking one node of a tree apart and putting it together again, for every kind of pytree.

Edits go through models node by node. How the nodes of a type are built is worked out once per
type; Penzai's classes, lists and dictionaries are then read directly, and every other registered
pytree through JAX. Mutable variables are leaves: what they hold is theirs.
"""

import dataclasses
import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from penzai.core.struct import (
    Struct,
    is_pytree_dataclass_type,
    is_pytree_node_field,
    pytree_dataclass,
)
from penzai.core.variables import AbstractVariable

from penzai_shard.tree_paths import key_text

LEAF = "leaf"
STRUCT = "struct"
LIST = "list"
TUPLE = "tuple"
DICT = "dict"
OTHER = "other"

_BUILTIN_SHAPES: dict[type, str] = {list: LIST, tuple: TUPLE, dict: DICT}

PUT_IN_MARK = "_put_in_by_recipe"
"""Attribute of a layer of somebody else's that a recipe put in.

It holds the name of the field with the layer's former self (``sublayers`` where that is one in a
list of layers), or None if the layer is to be removed as a whole. It is no field, so ``==`` does
not know it. Penzai's classes have it on a subclass made for it, which every rebuilding of the tree
keeps (training, placing, ``jax.tree.map``); objects of other classes have it themselves, and lose
it then.
"""

Keys = Sequence[Any]
"""The keys from the root to a node. Text is made of them only where it is needed."""

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclasses.dataclass(frozen=True, slots=True)
class NodeKind:
    """How the nodes of a type are built.

    Attributes:
        shape: One of the constants of this module.
        fields: For Penzai's classes, the fields that hold subtrees.
        kept: For Penzai's classes, all fields.
        is_layer: Whether it is a node that can be called.
    """

    shape: str
    fields: tuple[str, ...]
    kept: tuple[str, ...]
    is_layer: bool


@functools.lru_cache(maxsize=4096)
def _kind_of_type(node_type: Hashable) -> NodeKind | None:
    """The kind of a type as far as the type alone tells; None if an object must be asked."""
    assert isinstance(node_type, type)
    builtin = _BUILTIN_SHAPES.get(node_type)
    if builtin is not None:
        return NodeKind(builtin, (), (), False)
    if issubclass(node_type, AbstractVariable | jax.Array | str | int | float | None):
        return NodeKind(LEAF, (), (), False)
    is_layer = any("__call__" in base.__dict__ for base in node_type.__mro__)
    if (
        issubclass(node_type, Struct)
        and is_pytree_dataclass_type(node_type)
        and node_type.__dictoffset__
    ):
        fields = dataclasses.fields(node_type)  # type: ignore[arg-type]
        subtrees = tuple(field.name for field in fields if is_pytree_node_field(field))
        return NodeKind(STRUCT, subtrees, tuple(field.name for field in fields), is_layer)
    return None


_kinds_of_others: dict[type, NodeKind] = {}


def kind_of(node: Any) -> NodeKind:
    """How a node is built; worked out once per type.

    >>> kind_of([1]).shape, kind_of(3).shape, kind_of({"a": 1}).shape
    ('list', 'leaf', 'dict')
    """
    node_type = type(node)
    key: Any = node_type
    kind = _kind_of_type(key) or _kinds_of_others.get(node_type)
    if kind is None:
        if jax.tree_util.default_registry.flatten_one_level(node) is None:
            # Not kept: the type may be registered as a pytree later.
            return NodeKind(LEAF, (), (), False)
        kind = NodeKind(OTHER, (), (), callable(node))
        _kinds_of_others[node_type] = kind
    return kind


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """The keys and subtrees directly below a node, in order; none for a leaf.

    >>> children_of({"b": 1, "a": [2]})
    [('b', 1), ('a', [2])]
    """
    kind = kind_of(node)
    match kind.shape:
        case "struct":
            return [(name, getattr(node, name)) for name in kind.fields]
        case "list" | "tuple":
            return list(enumerate(node))
        case "dict":
            return list(node.items())
        case "other":
            if isinstance(node, tuple) and hasattr(node, "_fields"):
                return list(zip(node._fields, node, strict=True))
            found = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
            return [] if found is None else [(key_text(key), child) for key, child in found[0]]
    return []


def with_children(node: Any, children: Sequence[Any]) -> Any:
    """A node like another with other subtrees, given in the order of ``children_of``.

    >>> with_children((1, 2), [3, 4])
    (3, 4)
    """
    kind = kind_of(node)
    match kind.shape:
        case "struct":
            return with_fields(node, dict(zip(kind.fields, children, strict=True)))
        case "list":
            return list(children)
        case "tuple":
            return tuple(children)
        case "dict":
            return dict(zip(node, children, strict=True))
    structure: Any = jax.tree_util.tree_structure(node, is_leaf=lambda part: part is not node)
    return _with_mark_of(node, structure.unflatten(children))


def with_fields(node: Any, changes: Mapping[str, Any]) -> Any:
    """A node of one of Penzai's classes with some fields changed; nothing is checked or run.

    Only fields are carried over: other attributes of an object, such as what a compiled layer
    remembers of its body, belong to the old object alone.
    """
    made = object.__new__(type(node))
    attributes = made.__dict__
    old = node.__dict__
    kept = kind_of(node).kept
    if len(old) == len(kept):
        attributes.update(old)
        attributes.update(changes)
        return made
    for name in kept:
        attributes[name] = changes[name] if name in changes else getattr(node, name)
    return made


def mark_of(node: Any) -> tuple[bool, str | None]:
    """Whether a recipe put this node in, and the field that holds its former self, if any."""
    attributes = vars(type(node))
    if PUT_IN_MARK not in attributes:
        own = getattr(node, "__dict__", None)
        attributes = own if isinstance(own, dict) else {}
    return (True, attributes[PUT_IN_MARK]) if PUT_IN_MARK in attributes else (False, None)


def with_mark(node: Any, field: str | None) -> Any:
    """A shallow copy of a layer that is marked as put in by a recipe.

    Args:
        node: The layer. The object itself stays unmarked.
        field: The field that holds what the layer was put around, or None.

    Returns:
        The copy; the object itself if it is of a kind that cannot carry the mark.
    """
    shape = kind_of(node).shape
    if shape not in (STRUCT, OTHER) or not isinstance(getattr(node, "__dict__", None), dict):
        return node
    if shape == STRUCT:
        return _copied(node, _marked_type(_unmarked_type(node), field))
    made = object.__new__(type(node))
    made.__dict__.update(node.__dict__)
    made.__dict__[PUT_IN_MARK] = field
    return made


def _copied(node: Any, node_type: type) -> Any:
    """A node of one of Penzai's classes as one of another class with the same fields."""
    made: Any = object.__new__(node_type)
    made.__dict__.update((name, getattr(node, name)) for name in kind_of(node).kept)
    return made


def _unmarked_type(node: Any) -> type:
    node_type = type(node)
    return node_type.__base__ if PUT_IN_MARK in vars(node_type) else node_type  # type: ignore[return-value]


@functools.cache
def _marked_type(node_type: Any, field: str | None) -> type:
    """A subclass that carries a mark, and is its base class to users in all else."""

    def equal(self: Any, other: Any) -> Any:
        if not isinstance(other, node_type) or _unmarked_type(other) is not node_type:
            return NotImplemented
        return _copied(self, node_type) == _copied(other, node_type)

    def reduce(self: Any) -> Any:
        return with_mark, (_copied(self, node_type), field)

    names = ("__module__", "__qualname__", "__doc__", "__hash__")
    body = {name: getattr(node_type, name) for name in names}
    body |= {PUT_IN_MARK: field, "__eq__": equal, "__reduce__": reduce, "__annotations__": {}}
    made = type(node_type)(node_type.__name__, (node_type,), body)
    inherits = bool(dataclasses.fields(node_type))
    return pytree_dataclass(made, init=False, eq=False, has_implicitly_inherited_fields=inherits)


def _with_mark_of(node: Any, made: Any) -> Any:
    is_put_in, field = mark_of(node)
    if is_put_in:
        made.__dict__[PUT_IN_MARK] = field
    return made


def keys_text(keys: Keys) -> str:
    """Keys as a readable path; empty for the root.

    >>> keys_text(["body", "sublayers", 0])
    'body/sublayers/0'
    """
    return "/".join(map(str, keys))


@functools.lru_cache(maxsize=4096)
def snake_case(name: str) -> str:
    """A class name as it may stand in a path pattern.

    >>> snake_case("TransformerBlock"), snake_case("RMSLayerNorm"), snake_case("Linear")
    ('transformer_block', 'rms_layer_norm', 'linear')
    """
    return _WORD_START.sub("_", name).lower()


def names_of(node: Any) -> tuple[str, ...]:
    """What a node is called in path patterns beside its key: its type, and its group's name.

    >>> from penzai import pz
    >>> names_of(pz.nn.NamedGroup("gate", []))
    ('named_group', 'gate')
    """
    if kind_of(node).shape not in (STRUCT, OTHER):
        return ()
    name = snake_case(type(node).__name__)
    if name == "named_group" and isinstance(getattr(node, "name", None), str):
        return name, node.name
    return (name,)
