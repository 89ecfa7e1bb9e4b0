"""One edit carried out on a tree: a recursive rewrite that shares all that it does not touch.

Every node is looked at once. Subtrees without a match are the same objects in the result, and
places that share a node still share one afterwards, as long as they were edited alike.
"""

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any

from penzai import pz

from penzai_shard.surgery.places import Finder, find_object
from penzai_shard.surgery.refusals import EditRefused
from penzai_shard.surgery.tree_nodes import (
    Keys,
    NodeKind,
    first_cycle,
    keys_text,
    kind_of,
    nodes_of,
)

Change = Callable[[Any, Keys], tuple[Any, ...]]

SEQUENCE_FIELD = "sublayers"
"""The field whose list or tuple of layers is run in order, in Penzai and what follows it."""

_SEQUENCES = frozenset({list, tuple})

# What a walk knows of a type: whether its nodes match (None if the node must be asked), how they
# are taken apart and put together, and whether they are skipped.
_Row = tuple[bool | None, NodeKind, bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """One place that an edit changed.

    Attributes:
        path: Where, in the model before this edit.
        before: What stood in it.
        after: What stands in it now, in order.
    """

    path: tuple[Any, ...]
    before: Any
    after: tuple[Any, ...]

    @property
    def path_text(self) -> str:
        """The path as readable text; empty for the root."""
        return keys_text(self.path)


@dataclasses.dataclass(eq=False, repr=False)
class Rewriter:
    """Carries out one edit on one tree.

    Attributes:
        finder: Where.
        change: Gives what shall stand in the place of a node: one thing, several to run in order,
            or nothing.
        joined: Makes one thing of several, where there is no list of layers to put them in.
        same_everywhere: Whether ``change`` depends on the node alone, and not on its path.
        enters: Whether to look for matches in a match, the inner ones being changed first.
        record: Whether to record the matches, and not only their number.
        removed: What stands for a node that was removed where no list can be shortened.
        count: The number of matches.
        matches: The matches, if they are recorded.
    """

    finder: Finder
    change: Change
    joined: Callable[[tuple[Any, ...]], Any] = tuple
    same_everywhere: bool = True
    enters: Callable[[Any], bool] = lambda node: False
    record: bool = False
    removed: Any = dataclasses.field(init=False, default_factory=pz.nn.Identity)
    count: int = dataclasses.field(init=False, default=0)
    matches: list[Match] = dataclasses.field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._rows: dict[type, _Row] = {}
        # The keys from the root to the node at hand. One list, and not a path per node, because
        # most nodes never need theirs.
        self._keys: list[Any] = []
        # What was made of nodes that matched, of several things joined, and of other parts in the
        # place of a node's, by ids. Little is remembered of each, because every object that
        # outlives its function is one more for the garbage collector to visit.
        self._changed: dict[int, tuple[Any, ...]] = {}
        self._joined: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        # Nodes that the tree itself does not keep alive: their ids must not be used again.
        self._held: list[Any] = []
        self._refused: list[EditRefused] = []

    def run(self, tree: Any) -> Any:
        """The edited tree; the tree itself if nothing changed.

        Raises:
            EditRefused: The tree contains itself, or is too deep, or has a dictionary that JAX
                cannot take; a predicate raised it, or ``change`` did at some nodes.
        """
        row = self._row(tree)
        state = self.finder.start(tree)
        try:
            if row[0] or (row[0] is None and self.finder.matches(tree, self._keys, state)):
                edited = self._one(self._items(tree, state, row[1]))
            else:
                edited = self._below(tree, state, row[1])
        except RecursionError:
            raise _too_deep(tree) from None
        if self._refused:
            raise self._refused[0].with_others(self._refused[1:])
        return edited

    def _row(self, node: Any) -> _Row:
        kind = kind_of(node)
        decided = self.finder.by_type(type(node), kind.is_layer)
        is_empty = kind.is_leaf or (kind.is_struct and not kind.fields)
        row = self._rows[type(node)] = (decided, kind, decided is False and is_empty)
        return row

    def _below(self, node: Any, state: Any, kind: NodeKind, is_sequence: bool = False) -> Any:
        """A node with its subtrees edited.

        Args:
            node: The node.
            state: The finder's state of it.
            kind: How it is built.
            is_sequence: Whether it is a list of layers that are run in order, so that several may
                take the place of one.
        """
        # Most nodes have fields or are lists or tuples, and are read without a call of ours.
        if kind.fields:
            parts: Iterable[tuple[Any, Any]] = zip(kind.fields, kind.read(node))  # noqa: B905
        else:
            parts = enumerate(node) if type(node) in _SEQUENCES else self._parts(node, kind)
        rows, keys, step, matches = self._rows, self._keys, self.finder.step, self.finder.matches
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
                if len(items) != 1 or items[0] is not child:
                    is_changed = True
                if is_sequence:
                    new += items
                else:
                    new.append(self._one(items))
            else:
                is_list = kind.is_struct and key == SEQUENCE_FIELD
                made = self._below(child, child_state, child_kind, is_list)
                if made is not child:
                    is_changed = True
                new.append(made)
            keys.pop()
        if not is_changed:
            return node
        known = self._made.get(id(node))
        if known is not None and [id(c) for _, c in kind.parts(known)] == list(map(id, new)):
            return known
        made = self._made[id(node)] = kind.rebuilt(node, new)
        return made

    def _parts(self, node: Any, kind: NodeKind) -> Iterable[tuple[Any, Any]]:
        if isinstance(node, dict):
            _check_keys(node, self._keys)
        parts = kind.parts(node)
        # Nodes of other libraries may make their children when they are asked for them.
        self._held.append(parts)
        return parts

    def _one(self, items: tuple[Any, ...]) -> Any:
        """What takes the place of a node where one thing is wanted."""
        if len(items) > 1:
            joined = self._joined.get(id(items))
            if joined is None:
                joined = self._joined[id(items)] = self.joined(items)
            return joined
        return items[0] if items else self.removed

    def _items(self, node: Any, state: Any, kind: NodeKind) -> tuple[Any, ...]:
        """What takes the place of a node that matches."""
        inner = self._below(node, state, kind) if self.enters(node) else node
        items = self._changed.get(id(inner)) if self.same_everywhere else None
        if items is None:
            try:
                items = self.change(inner, self._keys)
            except EditRefused as error:
                self._refused.append(error)
                items = (inner,)
            if self.same_everywhere:
                self._changed[id(inner)] = items
            self._held.append(items)
        if inner is not node:
            self._held.append(inner)
        self.count += 1
        if self.record:
            self.matches.append(Match(tuple(self._keys), node, items))
        return items


def replaced(tree: Any, old: Any, new: Any) -> Any:
    """A tree with one object in the place of another; the tree itself if it does not hold that.

    >>> layer = pz.nn.Identity()
    >>> replaced({"a": [layer, pz.nn.Identity()]}, layer, 3)
    {'a': [3, Identity()]}
    """
    return Rewriter(find_object(old), lambda node, keys: (new,)).run(tree)


def _check_keys(node: dict[Any, Any], keys: Keys) -> None:
    if isinstance(node, collections.OrderedDict):
        return
    try:
        sorted(node)
    except TypeError:
        kinds = list({type(key): key for key in node}.values())
        raise EditRefused(
            keys,
            f"JAX cannot sort the keys of this dictionary, such as "
            f"{' and '.join(map(repr, kinds[:2]))}, and takes no tree that has it. "
            "Use keys of one type.",
        ) from None


def _too_deep(tree: Any) -> EditRefused:
    cycle = first_cycle(tree)
    if cycle is not None:
        above, below, node = cycle
        return EditRefused(
            below,
            f"this is the same {type(node).__name__} as at "
            f"{keys_text(above) or 'the root'}: the model contains itself, and no JAX function "
            "takes such a tree. Take it out of itself.",
        )
    deepest = max((keys for keys, _ in nodes_of(tree)), key=len, default=())
    return EditRefused(
        (),
        f"the model is nested {len(deepest)} levels deep, and Python's limit of recursion is "
        f"{sys.getrecursionlimit()}. Raise it: sys.setrecursionlimit({20 * len(deepest) + 1000}).",
    )
