"""Taking one node of a tree apart and putting it together again, for every kind of pytree.

Edits go through models node by node. How the nodes of a type are built is worked out once per
type; Penzai's classes, lists and dictionaries are then read directly, and every other registered
pytree through JAX. Mutable variables are leaves: what they hold is theirs.
"""

import collections
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
from penzai.core.struct import Struct, is_pytree_dataclass_type, is_pytree_node_field
from penzai.core.variables import AbstractVariable

from penzai_shard.library_apis.jax_api import children_of_node, keyed_children_of_node
from penzai_shard.readers import is_shared_object
from penzai_shard.tree_paths import key_text

Keys = Sequence[Any]
"""The keys from the root to a node. Text is made of them only where it is needed."""

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _nothing(node: Any) -> tuple[()]:
    return ()


@dataclasses.dataclass(frozen=True, slots=True)
class NodeKind:
    """How the nodes of a type are taken apart and put together.

    Attributes:
        parts: Gives the keys and subtrees directly below a node, in order.
        rebuilt: Makes a node like another of a list of subtrees.
        is_leaf: Whether such nodes have no subtrees, and are no nodes to look for.
        is_struct: Whether it is one of Penzai's classes.
        is_layer: Whether it is a node that can be called.
        fields: For Penzai's classes, the fields that hold subtrees.
        read: For Penzai's classes with such fields, gives their values, and something more.
    """

    parts: Callable[[Any], Iterable[tuple[Any, Any]]]
    rebuilt: Callable[[Any, list[Any]], Any]
    is_leaf: bool = False
    is_struct: bool = False
    is_layer: bool = False
    fields: tuple[str, ...] = ()
    read: Callable[[Any], tuple[Any, ...]] = _nothing


def _parts_of_other(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return zip(node._fields, node, strict=True)
    found: Any = keyed_children_of_node(node)
    return [(key_text(key), child) for key, child in found[0]]


def _other_rebuilt(node: Any, children: list[Any]) -> Any:
    structure: Any = jax.tree_util.tree_structure(node, is_leaf=lambda part: part is not node)
    return structure.unflatten(children)


_LEAF = NodeKind(_nothing, lambda node, children: node, is_leaf=True)
_OTHER = NodeKind(_parts_of_other, _other_rebuilt)
_BUILTINS: dict[type, NodeKind] = {
    list: NodeKind(enumerate, lambda node, children: children),
    tuple: NodeKind(enumerate, lambda node, children: tuple(children)),
    dict: NodeKind(dict.items, lambda node, children: dict(zip(node, children, strict=True))),
    collections.defaultdict: _OTHER,
}


@functools.lru_cache(maxsize=4096)
def kind_of_type(node_type: Hashable) -> NodeKind | None:
    """The kind of a type as far as the type alone tells; None if an object must be asked."""
    assert isinstance(node_type, type)
    if node_type in _BUILTINS:
        return _BUILTINS[node_type]
    if issubclass(node_type, AbstractVariable | jax.Array | str | int | float | None):
        return _LEAF
    if (
        issubclass(node_type, Struct)
        and is_pytree_dataclass_type(node_type)
        and node_type.__dictoffset__
    ):
        return _kind_of_struct(node_type)
    return None


def _kind_of_struct(node_type: type) -> NodeKind:
    """The kind of one of Penzai's classes, whose nodes are read and made without JAX."""
    fields: Any = dataclasses.fields(node_type)
    every = [field.name for field in fields]
    subtrees = tuple(field.name for field in fields if is_pytree_node_field(field))
    # With a name twice, because for a single one it would give the value itself.
    read: Any = operator.attrgetter(*subtrees, subtrees[0]) if subtrees else _nothing

    def rebuilt(node: Any, children: list[Any]) -> Any:
        # Nothing is checked or run, and nothing but fields is carried over: other attributes,
        # such as what a compiled layer remembers of its body, belong to the old object alone.
        made: Any = object.__new__(node_type)
        old, attributes = node.__dict__, made.__dict__
        if len(old) == len(every):
            attributes.update(old)
        else:
            attributes.update((name, getattr(node, name)) for name in every)
        for name, child in zip(subtrees, children):  # noqa: B905
            attributes[name] = child
        return made

    return NodeKind(
        lambda node: zip(subtrees, read(node), strict=False),
        rebuilt,
        is_struct=True,
        is_layer=any("__call__" in base.__dict__ for base in node_type.__mro__),
        fields=subtrees,
        read=read,
    )


_kinds_of_others: dict[type, NodeKind] = {}


def kind_of(node: Any) -> NodeKind:
    """How a node is built; worked out once per type.

    >>> kind_of([1]).is_leaf, kind_of(3).is_leaf
    (False, True)
    """
    node_type = type(node)
    key: Any = node_type
    kind = kind_of_type(key) or _kinds_of_others.get(node_type)
    if kind is None:
        if children_of_node(node) is None:
            # Not remembered: the type may be registered as a pytree later.
            return _LEAF
        # A module whose calls change variables in it can be run in no other way.
        kind = dataclasses.replace(_OTHER, is_layer=callable(node) and not is_shared_object(node))
        _kinds_of_others[node_type] = kind
    return kind


def is_layer(value: Any) -> bool:
    """Whether a value is a layer: one that can be called, and that JAX can take apart.

    Modules of Flax NNX are none: they change while they run.

    >>> from penzai import pz
    >>> is_layer(pz.nn.Identity()), is_layer(pz.nn.Identity), is_layer([])
    (True, False, False)
    """
    if isinstance(value, type) or not callable(value) or is_shared_object(value):
        return False
    return children_of_node(value) is not None


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """The keys and subtrees directly below a node, in order; none for a leaf.

    >>> children_of({"b": 1, "a": [2]})
    [('b', 1), ('a', [2])]
    """
    return list(kind_of(node).parts(node))


def nodes_of(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every node that is not a leaf, with its keys, in the order of the tree; made as it is asked.

    >>> [keys for keys, _ in nodes_of({"b": [1, (2,)]})]
    [(), ('b',), ('b', 1)]
    """
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while waiting:
        keys, node = waiting.pop()
        if kind_of(node).is_leaf:
            continue
        yield keys, node
        waiting.extend(reversed([((*keys, key), child) for key, child in children_of(node)]))


def first_cycle(tree: Any) -> tuple[Keys, Keys, Any] | None:
    """Where a tree contains itself: a node's keys, the same node's keys below it, and the node.

    >>> ring = []
    >>> ring.append({"a": ring})
    >>> first_cycle(ring)[:2]
    ((), (0, 'a'))
    """
    above: list[int] = []
    for keys, node in nodes_of(tree):
        del above[len(keys) :]
        if id(node) in above:
            return keys[: above.index(id(node))], keys, node
        above.append(id(node))
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
    names, is_known = _names_of_type(key)
    if is_known:
        return names
    if names == ("named_group",) and isinstance(getattr(node, "name", None), str):
        return "named_group", node.name
    return () if kind_of(node).is_leaf else names


@functools.lru_cache(maxsize=4096)
def _names_of_type(node_type: Hashable) -> tuple[tuple[str, ...], bool]:
    """What nodes of a type are called, and whether that is known without asking the node."""
    assert isinstance(node_type, type)
    kind = kind_of_type(node_type)
    if node_type in _BUILTINS or (kind is not None and kind.is_leaf):
        return (), True
    names = (snake_case(node_type.__name__),)
    return names, kind is not None and names != ("named_group",)
