"""Taking one node of a tree apart and putting it together again, for every kind of pytree.

Edits go through models node by node. How the nodes of a type are built is worked out once per
type; Penzai's classes, lists and dictionaries are then read directly, and every other registered
pytree through JAX. Mutable variables are leaves: what they hold is theirs.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from penzai.core.struct import Struct, is_pytree_dataclass_type, is_pytree_node_field
from penzai.core.variables import AbstractVariable

from penzai_shard.tree_paths import key_text

LEAF = "leaf"
STRUCT = "struct"
LIST = "list"
TUPLE = "tuple"
DICT = "dict"
OTHER = "other"

_BUILTIN_SHAPES: dict[type, str] = {
    list: LIST,
    tuple: TUPLE,
    dict: DICT,
    collections.defaultdict: OTHER,
}

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
def kind_of_type(node_type: Hashable) -> NodeKind | None:
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
    kind = kind_of_type(key) or _kinds_of_others.get(node_type)
    if kind is None:
        if jax.tree_util.default_registry.flatten_one_level(node) is None:
            # Not kept: the type may be registered as a pytree later.
            return NodeKind(LEAF, (), (), False)
        kind = NodeKind(OTHER, (), (), callable(node))
        _kinds_of_others[node_type] = kind
    return kind


def is_layer(value: Any) -> bool:
    """Whether a value is a layer: one that can be called, and that JAX can take apart.

    >>> from penzai import pz
    >>> is_layer(pz.nn.Identity()), is_layer(pz.nn.Identity), is_layer([])
    (True, False, False)
    """
    if isinstance(value, type) or not callable(value):
        return False
    return jax.tree_util.default_registry.flatten_one_level(value) is not None


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
    return structure.unflatten(children)


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


def nodes_of(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every node that is not a leaf, with its keys, in the order of the tree; made as it is asked.

    >>> [keys for keys, _ in nodes_of({"b": [1, (2,)]})]
    [(), ('b',), ('b', 1)]
    """
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while waiting:
        keys, node = waiting.pop()
        if kind_of(node).shape == LEAF:
            continue
        yield keys, node
        waiting.extend(reversed([((*keys, key), child) for key, child in children_of(node)]))


def first_cycle(tree: Any) -> tuple[Keys, Keys] | None:
    """Where a tree contains itself: the keys of a node and, below it, those of the same node.

    >>> ring = []
    >>> ring.append({"a": ring})
    >>> first_cycle(ring)
    ((), (0, 'a'))
    """
    above: dict[int, tuple[Any, ...]] = {}
    # A node twice: to enter it, and, with None, to leave it.
    waiting: list[tuple[tuple[Any, ...] | None, Any]] = [((), tree)]
    while waiting:
        keys, node = waiting.pop()
        if keys is None:
            del above[id(node)]
        elif id(node) in above:
            return above[id(node)], keys
        elif kind_of(node).shape != LEAF:
            above[id(node)] = keys
            waiting.append((None, node))
            waiting.extend(((*keys, key), child) for key, child in reversed(children_of(node)))
    return None


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
    key: Any = type(node)
    names = _names_of_type(key)
    if names == ("named_group",) and isinstance(getattr(node, "name", None), str):
        return "named_group", node.name
    return names if names and kind_of(node).shape in (STRUCT, OTHER) else ()


@functools.lru_cache(maxsize=4096)
def _names_of_type(node_type: Hashable) -> tuple[str, ...]:
    """What nodes of a type are called, if they are nodes at all."""
    assert isinstance(node_type, type)
    return () if node_type in _BUILTIN_SHAPES else (snake_case(node_type.__name__),)
