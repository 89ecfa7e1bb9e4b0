"""Rewrites a tree in one pass, and shares everything that no change touches.

Every node is looked at once. Subtrees without a change are the same objects in the result, and
places that share a node share one afterwards, if they were changed in the same way. What a reader
opens, such as a variable or a named array, is a leaf: it can be replaced, and is not entered.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from penzai import pz
from penzai.core.struct import Struct, is_pytree_dataclass_type, is_pytree_node_field

from penzai_shard.errors import Problem
from penzai_shard.paths import path_text
from penzai_shard.readers.reader import reader_of

# The keys from the root to a node. Text is made of them only where it is needed.
Keys: TypeAlias = Sequence[Any]

# The field whose list or tuple of layers runs in order, in Penzai and what follows it.
_SEQUENCE_FIELD = "sublayers"


# How nodes are built


@dataclasses.dataclass(frozen=True, slots=True)
class NodeKind:
    """How the nodes of a type are taken apart and put together.

    Attributes:
        parts: Gives the keys and subtrees directly below a node, in order.
        rebuild: Makes a node like another, with other subtrees.
        is_leaf: Whether such nodes have no subtrees.
        is_layer: Whether such nodes can be called.
        is_opaque: Whether nodes may make their subtrees when they are asked for them.
    """

    parts: Callable[[Any], Iterable[tuple[Any, Any]]]
    rebuild: Callable[[Any, list[Any]], Any]
    is_leaf: bool = False
    is_layer: bool = False
    is_opaque: bool = False


def flatten_once(node: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The parts of a node as JAX takes it apart, by their keys as text, and what joins them."""
    keyed, definition = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path_text(path), part) for path, part in keyed], definition


_LEAF = NodeKind(lambda node: (), lambda node, parts: node, is_leaf=True)
_OTHER = NodeKind(
    lambda node: flatten_once(node)[0],
    lambda node, parts: flatten_once(node)[1].unflatten(parts),
    is_opaque=True,
)
_kinds: dict[type, NodeKind] = {
    list: NodeKind(enumerate, lambda node, parts: parts),
    tuple: NodeKind(enumerate, lambda node, parts: tuple(parts)),
    # JAX would sort the keys.
    dict: NodeKind(dict.items, lambda node, parts: dict(zip(node, parts, strict=True))),
    **dict.fromkeys((type(None), str, int, float, bool, complex), _LEAF),
}


def kind_of(node: Any) -> NodeKind:
    """How a node is built; found out once for each type.

    >>> kind_of(pz.nn.Identity()).is_layer, kind_of(3).is_leaf
    (True, True)
    """
    node_type = type(node)
    kind = _kinds.get(node_type)
    if kind is None:
        is_struct = issubclass(node_type, Struct) and is_pytree_dataclass_type(node_type)
        if isinstance(node, type) or reader_of(node_type) or jax.tree_util.all_leaves([node]):
            # Not kept: the type may be registered as a pytree, or get a reader, later.
            return _LEAF
        kind = _kind_of_struct(node_type) if is_struct and node_type.__dictoffset__ else _OTHER
        kind = _kinds[node_type] = dataclasses.replace(kind, is_layer=callable(node))
    return kind


def _kind_of_struct(node_type: type) -> NodeKind:
    """The kind of one of Penzai's classes, whose nodes are read and made without JAX."""
    fields: Any = dataclasses.fields(node_type)
    names = tuple(field.name for field in fields if is_pytree_node_field(field))
    settings = [field.name for field in fields if not is_pytree_node_field(field)]
    get: Any = operator.attrgetter(*names) if names else lambda node: ()
    # A getter of a single name gives the value itself.
    read = (lambda node: (get(node),)) if len(names) == 1 else get
    assign = object.__setattr__

    def rebuild(node: Any, parts: list[Any]) -> Any:
        # Fields and nothing else: what a compiled layer remembers is the old object's.
        made: Any = object.__new__(node_type)
        for name in settings:
            assign(made, name, getattr(node, name))
        for name, part in zip(names, parts, strict=True):
            assign(made, name, part)
        return made

    return NodeKind(lambda node: zip(names, read(node)), rebuild, is_leaf=not names)  # noqa: B905


def is_layer(value: Any) -> bool:
    """Whether a value is a layer: JAX can take it apart, and it can be called."""
    return kind_of(value).is_layer


def keys_text(keys: Keys) -> str:
    """Keys as a path."""
    return "/".join(map(str, keys))


# Rewriting


@dataclasses.dataclass(frozen=True, slots=True)
class Finder:
    """One place, as a walk down a tree asks for it.

    Attributes:
        matches: Whether a node with these keys, in this state, is there; asked where the type does
            not tell.
        step: The state of a child, of the state of its parent, the parent, the child's keys and
            the child. A state of None says that nothing from there on is at the place; None
            instead of a function, that there are no states.
        start: The state of the root.
        by_type: Whether nodes of a type are at the place, and None where the type does not tell.
        layers_only: Whether nothing but layers is at the place.
    """

    matches: Callable[[Any, Keys, Any], bool] = lambda node, keys, state: False
    step: Callable[[Any, Any, Keys, Any], Any] | None = None
    start: Callable[[Any], Any] = lambda node: True
    by_type: Callable[[type], bool | None] = lambda kind: None
    layers_only: bool = False

    def decide(self, node: Any) -> bool | None:
        """What the type of a node says."""
        return self.by_type(type(node)) if is_layer(node) or not self.layers_only else False

    def has(self, node: Any, keys: Keys, state: Any) -> bool:
        """Whether a node is at the place."""
        if state is None:
            return False
        decided = self.decide(node)
        return self.matches(node, keys, state) if decided is None else decided


class Match(NamedTuple):
    """One place that was changed.

    Attributes:
        keys: Where, in the tree before the change.
        before: What stood there.
        after: What stands there now, in order.
    """

    keys: tuple[Any, ...]
    before: Any
    after: tuple[Any, ...]

    @property
    def path(self) -> str:
        """Where, as text; empty for the root."""
        return keys_text(self.keys)


class Refused(Exception):
    """Why a node cannot be changed."""

    def __init__(self, keys: Keys, what: str, fix: str) -> None:
        super().__init__(what)
        self.keys = tuple(keys)
        self.problem = Problem(keys_text(keys), what, fix)


class Rewriter:
    """Changes all nodes of a tree that are at a place.

    Args:
        finder: The place.
        change: Gives what shall stand in place of a node: one thing, several that run in order, or
            nothing. It gets the node and its keys. If it raises ``Refused``, the node stays.
        join: Makes one thing of several, where there is no list of layers to put them in.
        order: Whether matches inside of matches count: not at all, the inner ones first, or the
            outer ones first, where the walk goes on in what the change gave.
        by_node: Whether ``change`` depends on the node and not on its keys.

    Attributes:
        matches: The places that were changed.
        refused: Why some were not.
    """

    def __init__(
        self,
        finder: Finder,
        change: Callable[[Any, Keys], tuple[Any, ...]],
        join: Callable[[tuple[Any, ...]], Any] = tuple,
        order: Literal["outermost", "inner first", "outer first"] = "outermost",
        by_node: bool = True,
    ) -> None:
        self._finder, self._change, self._join = finder, change, join
        self._order, self._by_node = order, by_node
        self.matches: list[Match] = []
        self.refused: list[Refused] = []
        self._removed = pz.nn.Identity()
        # What is known of a type: the answer of ``by_type``, its kind, whether nodes are skipped.
        self._rows: dict[type, tuple[bool | None, NodeKind, bool]] = {}
        self._keys: list[Any] = []
        # What was made, by the ids of what it was made of. The tree keeps its nodes alive; others
        # are held, as a new object may have the id of one that is gone.
        self._changed: dict[int, tuple[Any, ...]] = {}
        self._joined: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._held: list[Any] = []

    def run(self, tree: Any) -> Any:
        """The changed tree; the tree itself if nothing changed."""
        try:
            kind, state = kind_of(tree), self._finder.start(tree)
            if self._finder.has(tree, self._keys, state):
                return self._one(self._items(tree, state, kind))
            return self._below(tree, state, kind)
        except Refused as refused:  # By the finder.
            self.refused.append(refused)
            return tree

    def _row(self, node: Any) -> tuple[bool | None, NodeKind, bool]:
        kind, decided = kind_of(node), self._finder.decide(node)
        row = self._rows[type(node)] = (decided, kind, decided is False and kind.is_leaf)
        return row

    def _below(self, node: Any, state: Any, kind: NodeKind, is_sequence: bool = False) -> Any:
        """A node with its subtrees changed; in a sequence several may take the place of one."""
        rows, keys, step, matches = self._rows, self._keys, self._finder.step, self._finder.matches
        parts = kind.parts(node)
        if kind.is_opaque:
            self._held.append(parts)
        new: list[Any] = []
        is_changed = False
        child_state = state
        for key, child in parts:
            decided, child_kind, is_skipped = rows.get(type(child)) or self._row(child)
            if is_skipped:
                new.append(child)
                continue
            keys.append(key)
            if step is not None:
                child_state = step(state, node, keys, child)
            if child_state is None:
                new.append(child)
            elif decided or (decided is None and matches(child, keys, child_state)):
                items = self._items(child, child_state, child_kind)
                is_changed = is_changed or len(items) != 1 or items[0] is not child
                new += items if is_sequence else (self._one(items),)
            elif child_kind.is_leaf:
                new.append(child)
            else:
                runs_in_order = key == _SEQUENCE_FIELD and type(child) in (list, tuple)
                made = self._below(child, child_state, child_kind, runs_in_order)
                is_changed = is_changed or made is not child
                new.append(made)
            keys.pop()
        if not is_changed:
            return node
        # A node that stands in several places stays one node if its parts became the same.
        made = self._made.get(id(node))
        if made is None or [id(part) for _, part in kind.parts(made)] != [*map(id, new)]:
            made = self._made[id(node)] = kind.rebuild(node, new)
        return made

    def _one(self, items: tuple[Any, ...]) -> Any:
        """What takes the place of a node where one thing is wanted."""
        if len(items) == 1:
            return items[0]
        if not items:
            return self._removed
        if id(items) not in self._joined:
            self._held.append(items)
            self._joined[id(items)] = self._join(items)
        return self._joined[id(items)]

    def _items(self, node: Any, state: Any, kind: NodeKind) -> tuple[Any, ...]:
        """What takes the place of a node that is at the place."""
        inner = self._below(node, state, kind) if self._order == "inner first" else node
        items = self._changed.get(id(inner))
        if items is None:
            try:
                items = self._change(inner, self._keys)
            except Refused as refused:
                self.refused.append(refused)
                items = (inner,)
            self._held.append((inner, items))
            if self._order == "outer first":
                items = tuple(self._below(item, state, kind_of(item)) for item in items)
            if self._by_node:
                self._changed[id(inner)] = items
        self.matches.append(Match(tuple(self._keys), node, items))
        return items


def replace_object(tree: Any, old: Any, new: Any) -> Any:
    """A tree with one object in place of another; the tree itself if it does not hold that.

    >>> layer = pz.nn.Identity()
    >>> replace_object({"a": [layer, pz.nn.Identity()]}, layer, 3)
    {'a': [3, Identity()]}
    """
    finder = Finder(lambda node, keys, state: node is old)
    return Rewriter(finder, lambda node, keys: (new,)).run(tree)
