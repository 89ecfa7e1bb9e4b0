"""One edit carried out on a tree: a recursive rewrite that shares all that it does not touch.

Every node is looked at once. Subtrees without a match are the same objects in the result, and
places that share a node still share one afterwards, as long as they were edited alike.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from penzai_shard.surgery.inserted_layers import InsertedSequence
from penzai_shard.surgery.places import Tracker
from penzai_shard.surgery.tree_nodes import (
    LEAF,
    LIST,
    STRUCT,
    TUPLE,
    LinkedPath,
    children_of,
    kind_of,
    linked_path_text,
    with_children,
    with_fields,
)

Change = Callable[[Any, LinkedPath], list[Any]]

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

    path: LinkedPath
    before: Any
    after: tuple[Any, ...]

    @property
    def path_text(self) -> str:
        """The path as readable text; empty for the root."""
        return linked_path_text(self.path)


class Rewriter:
    """Carries out one edit on one tree.

    Args:
        tracker: Where.
        change: Gives what shall stand in the place of a node: one thing, or several to run in
            order.
        same_everywhere: Whether ``change`` depends on the node alone, and not on its path.
        nested: Whether to look for matches in matches, the inner ones being changed first.
    """

    def __init__(
        self, tracker: Tracker, change: Change, same_everywhere: bool, nested: bool
    ) -> None:
        self._tracker = tracker
        self._has_state = tracker.has_state
        self._change = change
        self._same_everywhere = same_everywhere
        self._nested = nested
        self._rows: dict[type, _Row] = {}
        # Both keep the nodes that they know by id alive, so that no id is used again.
        self._changed: dict[int, tuple[Any, list[Any]]] = {}
        self._joined: dict[int, tuple[list[Any], Any]] = {}
        self._rebuilt: dict[int, list[tuple[Any, list[Any], Any]]] = {}
        self.matches: list[Match] = []

    def run(self, tree: Any) -> Any:
        """The edited tree; the tree itself if nothing changed."""
        return self._visit(tree, None, self._tracker.root(tree) if self._has_state else True)

    def _row(self, node: Any) -> _Row:
        kind = kind_of(node)
        decided = self._tracker.decide(type(node), kind.is_layer)
        row = self._rows[type(node)] = (decided, kind.shape, kind.fields)
        return row

    def _visit(self, node: Any, path: LinkedPath, state: Any) -> Any:
        decided, shape, fields = self._rows.get(type(node)) or self._row(node)
        if decided is not False and (decided or self._tracker.matches(node, path, state)):
            items = self._items(node, path, state)
            return items[0] if len(items) == 1 else self._join(items)
        return node if shape is LEAF else self._visit_children(node, path, state, shape, fields)

    def _visit_children(
        self, node: Any, path: LinkedPath, state: Any, shape: str, fields: tuple[str, ...]
    ) -> Any:
        if shape is STRUCT:
            return self._visit_struct(node, path, state, fields)
        if shape is LIST or shape is TUPLE:
            return self._visit_list(node, path, state, splice=False)
        children = children_of(node)
        new = [
            self._visit(child, below, child_state)
            if (child_state := self._state(state, node, below, child)) is not None
            else child
            for below, child in [((path, key), child) for key, child in children]
        ]
        if all(made is child for made, (_, child) in zip(new, children, strict=True)):
            return node
        return self._rebuild(node, new, lambda: with_children(node, new))

    def _visit_struct(
        self, node: Any, path: LinkedPath, state: Any, fields: tuple[str, ...]
    ) -> Any:
        changes: dict[str, Any] | None = None
        rows = self._rows
        child_state = state
        for name in fields:
            child = getattr(node, name)
            row = rows.get(type(child)) or self._row(child)
            decided, shape, child_fields = row
            if decided is False and shape is LEAF:
                continue
            below = (path, name)
            if self._has_state:
                child_state = self._tracker.child(state, node, below, child)
                if child_state is None:
                    continue
            if name == SEQUENCE_FIELD and (shape is LIST or shape is TUPLE):
                if decided is False or not self._tracker.matches(child, below, child_state):
                    made = self._visit_list(child, below, child_state, splice=True)
                else:
                    made = self._visit(child, below, child_state)
            elif decided is False:
                made = self._visit_children(child, below, child_state, shape, child_fields)
            else:
                made = self._visit(child, below, child_state)
            if made is not child:
                if changes is None:
                    changes = {}
                changes[name] = made
        if changes is None:
            return node
        found = changes
        key = [found.get(name) for name in fields]
        return self._rebuild(node, key, lambda: with_fields(node, found))

    def _visit_list(self, nodes: Any, path: LinkedPath, state: Any, splice: bool) -> Any:
        new: list[Any] = []
        is_changed = False
        rows = self._rows
        child_state = state
        for index, child in enumerate(nodes):
            row = rows.get(type(child)) or self._row(child)
            decided, shape, fields = row
            if decided is False and shape is LEAF:
                new.append(child)
                continue
            below = (path, index)
            if self._has_state:
                child_state = self._tracker.child(state, nodes, below, child)
                if child_state is None:
                    new.append(child)
                    continue
            if decided is not False and (
                decided or self._tracker.matches(child, below, child_state)
            ):
                items = self._items(child, below, child_state)
                if splice:
                    new.extend(items)
                else:
                    new.append(items[0] if len(items) == 1 else self._join(items))
                is_changed = is_changed or len(items) != 1 or items[0] is not child
                continue
            made = (
                child
                if shape is LEAF
                else self._visit_children(child, below, child_state, shape, fields)
            )
            is_changed = is_changed or made is not child
            new.append(made)
        if not is_changed:
            return nodes
        return self._rebuild(nodes, new, lambda: new if type(nodes) is list else tuple(new))

    def _state(self, state: Any, parent: Any, path: LinkedPath, child: Any) -> Any:
        return self._tracker.child(state, parent, path, child) if self._has_state else state

    def _items(self, node: Any, path: LinkedPath, state: Any) -> list[Any]:
        inner = node
        if self._nested:
            kind = kind_of(node)
            if kind.shape is not LEAF:
                inner = self._visit_children(node, path, state, kind.shape, kind.fields)
        known = self._changed.get(id(inner)) if self._same_everywhere else None
        if known is not None:
            items = known[1]
        else:
            items = self._change(inner, path)
            self._changed[id(inner)] = (inner, items)
        self.matches.append(Match(path, node, tuple(items)))
        return items

    def _join(self, items: list[Any]) -> Any:
        """Several layers as one; the same layers give the same object."""
        known = self._joined.get(id(items))
        if known is None:
            known = self._joined[id(items)] = (items, InsertedSequence(list(items)))
        return known[1]

    def _rebuild(self, node: Any, parts: list[Any], make: Callable[[], Any]) -> Any:
        """The node with other parts; the same node with the same parts gives the same object."""
        variants = self._rebuilt.setdefault(id(node), [])
        for _, known, made in variants:
            if len(known) == len(parts) and all(
                old is new for old, new in zip(known, parts, strict=True)
            ):
                return made
        made = make()
        variants.append((node, parts, made))
        return made
