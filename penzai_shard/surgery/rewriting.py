"""One edit carried out on a tree: a recursive rewrite that shares all that it does not touch.

Every node is looked at once. Subtrees without a match are the same objects in the result, and
places that share a node still share one afterwards, as long as they were edited alike.
"""

import collections
import dataclasses
import operator
import sys
from collections.abc import Callable
from typing import Any

from penzai import pz

from penzai_shard.surgery.places import Finder, find_object
from penzai_shard.surgery.refusals import EditRefused
from penzai_shard.surgery.tree_nodes import (
    LEAF,
    LIST,
    STRUCT,
    TUPLE,
    Keys,
    children_of,
    first_cycle,
    keys_text,
    kind_of,
    nodes_of,
    with_children,
    with_fields,
)

Change = Callable[[Any, Keys], tuple[Any, ...]]

SEQUENCE_FIELD = "sublayers"
"""The field whose list or tuple of layers is run in order, in Penzai and what follows it."""

# What a walk knows of a type: whether its nodes match (None if the node must be asked), the
# shape of its nodes, and the fields of Penzai's classes.
_Row = tuple[bool | None, str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """One place that an edit changed.

    Attributes:
        path: Where, in the model before this edit.
        before: What was there.
        after: What stands there now, in order.
    """

    path: tuple[Any, ...]
    before: Any
    after: tuple[Any, ...]

    @property
    def path_text(self) -> str:
        """The path as readable text; empty for the root."""
        return keys_text(self.path)


class Rewriter:
    """Carries out one edit on one tree.

    Args:
        finder: Where.
        change: Gives what shall stand in the place of a node: one thing, several to run in order,
            or nothing.
        joined: Makes one thing of several, where there is no list of layers to put them in.
        same_everywhere: Whether ``change`` depends on the node alone, and not on its path.
        enters: Whether to look for matches in a match, the inner ones being changed first.
        record: Whether to keep the matches, and not only their number.

    Attributes:
        removed: What stands for a node that was removed where no list can be shortened.
        count: The number of matches.
        matches: The matches, if they are kept.
    """

    def __init__(
        self,
        finder: Finder,
        change: Change,
        joined: Callable[[tuple[Any, ...]], Any] = tuple,
        same_everywhere: bool = True,
        enters: Callable[[Any], bool] = lambda node: False,
        record: bool = False,
    ) -> None:
        self._decide = finder.by_type
        self._matches = finder.matches
        self._step = finder.step
        self._start = finder.start
        self._change = change
        self._join = joined
        self._same_everywhere = same_everywhere
        self._enters = enters
        self._rows: dict[type, _Row] = {}
        # The keys from the root to the node at hand. One list, and not a path per node, because
        # most nodes never need theirs.
        self._keys: list[Any] = []
        # What was made of the nodes that changed, by their ids. Little is kept of each, because
        # every object that outlives its function is one more for the garbage collector to visit.
        self._changed: dict[int, tuple[Any, ...]] = {}
        self._joined: dict[int, Any] = {}
        self._rebuilt: dict[int, Any] = {}
        # Nodes that the tree itself does not keep alive: their ids must not be used again.
        self._kept_alive: list[Any] = []
        self._record = record
        self._refused: list[EditRefused] = []
        self.removed = pz.nn.Identity()
        self.count = 0
        self.matches: list[Match] = []

    def run(self, tree: Any) -> Any:
        """The edited tree; the tree itself if nothing changed.

        Raises:
            EditRefused: The tree contains itself, or is too deep, or has a dictionary that JAX
                cannot take; a predicate raised it, or ``change`` did at some nodes.
        """
        try:
            edited = self._visit(tree, self._start(tree), self._row(tree))
        except RecursionError:
            raise _too_deep(tree) from None
        if self._refused:
            raise self._refused[0].with_others(self._refused[1:])
        return edited

    def _row(self, node: Any) -> _Row:
        kind = kind_of(node)
        decided = self._decide(type(node), kind.is_layer)
        shape = LEAF if kind.shape is STRUCT and not kind.fields else kind.shape
        row = self._rows[type(node)] = (decided, shape, kind.fields)
        return row

    def _visit(self, node: Any, state: Any, row: _Row) -> Any:
        """What takes the place of a node where one thing is wanted."""
        decided = row[0]
        if decided is False or not (decided or self._matches(node, self._keys, state)):
            return self._visit_children(node, state, row)
        items = self._items(node, state)
        if len(items) == 1:
            return items[0]
        if not items:
            return self.removed
        joined = self._joined.get(id(items))
        if joined is None:
            joined = self._joined[id(items)] = self._join(items)
        return joined

    def _visit_children(self, node: Any, state: Any, row: _Row) -> Any:
        _, shape, fields = row
        if shape is STRUCT:
            return self._visit_struct(node, state, fields)
        if shape is LIST or shape is TUPLE:
            return self._visit_list(node, state, splice=False)
        if shape is LEAF:
            return node
        return self._visit_other(node, state)

    def _visit_struct(self, node: Any, state: Any, fields: tuple[str, ...]) -> Any:
        changes: dict[str, Any] | None = None
        rows, keys, step = self._rows, self._keys, self._step
        child_state = state
        for name in fields:
            child = getattr(node, name)
            row = rows.get(type(child)) or self._row(child)
            decided, shape, child_fields = row
            if decided is False and shape is LEAF:
                continue
            keys.append(name)
            if step is not None:
                child_state = step(state, node, keys, child)
            if child_state is None:
                made = child
            elif decided is not False and (decided or self._matches(child, keys, child_state)):
                made = self._visit(child, child_state, row)
            elif shape is STRUCT:
                made = self._visit_struct(child, child_state, child_fields)
            elif shape is LIST or shape is TUPLE:
                made = self._visit_list(child, child_state, splice=name == SEQUENCE_FIELD)
            else:
                made = self._visit_children(child, child_state, row)
            keys.pop()
            if made is not child:
                if changes is None:
                    changes = {}
                changes[name] = made
        if changes is None:
            return node
        known = self._rebuilt.get(id(node))
        if known is not None and _has_parts(known, node, changes, fields):
            return known
        made = self._rebuilt[id(node)] = with_fields(node, changes)
        return made

    def _visit_list(self, nodes: Any, state: Any, splice: bool) -> Any:
        new: list[Any] = []
        is_changed = False
        rows, keys, step = self._rows, self._keys, self._step
        child_state = state
        for index, child in enumerate(nodes):
            row = rows.get(type(child)) or self._row(child)
            decided, shape, fields = row
            if decided is False and shape is LEAF:
                new.append(child)
                continue
            keys.append(index)
            if step is not None:
                child_state = step(state, nodes, keys, child)
            if child_state is None:
                made = child
            elif (
                splice
                and decided is not False
                and (decided or self._matches(child, keys, child_state))
            ):
                items = self._items(child, child_state)
                keys.pop()
                new.extend(items)
                is_changed = is_changed or len(items) != 1 or items[0] is not child
                continue
            elif shape is STRUCT and decided is False:
                made = self._visit_struct(child, child_state, fields)
            elif splice:
                made = self._visit_children(child, child_state, row)
            else:
                made = self._visit(child, child_state, row)
            keys.pop()
            is_changed = is_changed or made is not child
            new.append(made)
        if not is_changed:
            return nodes
        known = self._rebuilt.get(id(nodes))
        if known is not None and len(known) == len(new) and all(map(operator.is_, known, new)):
            return known
        made = self._rebuilt[id(nodes)] = new if type(nodes) is list else tuple(new)
        return made

    def _visit_other(self, node: Any, state: Any) -> Any:
        if isinstance(node, dict):
            _check_keys(node, self._keys)
        children = children_of(node)
        new: list[Any] = []
        # A node like this may make its children when it is asked for them.
        self._kept_alive.append(children)
        for key, child in children:
            row = self._rows.get(type(child)) or self._row(child)
            self._keys.append(key)
            child_state = state
            if self._step is not None:
                child_state = self._step(state, node, self._keys, child)
            new.append(child if child_state is None else self._visit(child, child_state, row))
            self._keys.pop()
        if all(made is child for made, (_, child) in zip(new, children, strict=True)):
            return node
        known = self._rebuilt.get(id(node))
        if known is not None and all(map(operator.is_, known[1], new)):
            return known[0]
        made = with_children(node, new)
        self._rebuilt[id(node)] = (made, new)
        return made

    def _items(self, node: Any, state: Any) -> tuple[Any, ...]:
        """What takes the place of a node that matches."""
        inner = node
        if self._enters(node):
            inner = self._visit_children(node, state, self._rows[type(node)])
        items = self._changed.get(id(inner)) if self._same_everywhere else None
        if items is None:
            try:
                items = self._change(inner, self._keys)
            except EditRefused as error:
                self._refused.append(error)
                items = (inner,)
            if self._same_everywhere:
                self._changed[id(inner)] = items
            self._kept_alive.append(items)
        if inner is not node:
            self._kept_alive.append(inner)
        self.count += 1
        if self._record:
            self.matches.append(Match(tuple(self._keys), node, items))
        return items


def _has_parts(made: Any, node: Any, changes: dict[str, Any], fields: tuple[str, ...]) -> bool:
    """Whether an object that was made of a node is that node with these changes."""
    return all(
        getattr(made, name) is (changes[name] if name in changes else getattr(node, name))
        for name in fields
    )


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
        above, below = cycle
        return EditRefused(
            below,
            f"this is the same {type(_at(tree, above)).__name__} as at "
            f"{keys_text(above) or 'the root'}: the model contains itself, and no JAX function "
            "takes such a tree. Take it out of itself.",
        )
    deepest = max((keys for keys, _ in nodes_of(tree)), key=len, default=())
    return EditRefused(
        (),
        f"the model is nested {len(deepest)} levels deep, and Python's limit of recursion is "
        f"{sys.getrecursionlimit()}. Raise it: sys.setrecursionlimit({20 * len(deepest) + 1000}).",
    )


def _at(tree: Any, keys: Keys) -> Any:
    for key in keys:
        tree = dict(children_of(tree))[key]
    return tree
