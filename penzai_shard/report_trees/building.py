"""A tree from rows that each have a path: nested by the parts of the paths, with sums."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

from penzai_shard.report_trees.folding import folded, path_parts
from penzai_shard.report_trees.nodes import ReportTree, TreeFigure, TreeNode

THE_ROOT = "the root"
_SEPARATORS = "./[]"


@dataclasses.dataclass(frozen=True)
class TreeRow:
    """What is said of one place of a report.

    Attributes:
        path: Where it is; dots, slashes and brackets separate the parts. Empty for the root.
        item: What it is there, as a node of its own below the path; empty for the place itself.
        line: One line of text.
        figures: Its numbers; what is in a place adds up in it.
        details: Sentences of detail.
        ok: Whether it is good or bad; None if it is not judged.
        group: What the place is in, as an outermost node of its own; empty for none. Without a
            path, the row is about that.
    """

    path: str
    item: str = ""
    line: str = ""
    figures: tuple[TreeFigure, ...] = ()
    details: tuple[str, ...] = ()
    ok: bool | None = None
    group: str = ""


def tree_of(
    kind: str,
    verdict: str,
    rows: Iterable[TreeRow],
    *,
    ok: bool | None = None,
    notes: Iterable[str] = (),
    wholes: Mapping[str, float] | None = None,
    order: Iterable[str] = (),
    collapse: bool = True,
) -> ReportTree:
    """A tree of rows in the order of the model.

    A reader looks for a layer where it stands in the model, and sees by its share what is large;
    so nothing is sorted by size.

    Args:
        kind: What it is a tree of.
        verdict: The report in one line.
        rows: What is said of each place; rows of one place are one node.
        ok: Whether the verdict is good.
        notes: What else there is to know.
        wholes: What shares are of, by the names of figures; by default the sum of all rows.
        order: Paths in the order of the model; the others follow in the order of the rows.
        collapse: Put siblings that differ only in the numbers of their names, and are equal in all
            that is in them, into one node.

    >>> rows = [TreeRow(f"lm/block_{i}/w", figures=(TreeFigure("held", 4),)) for i in range(3)]
    >>> [(node.label, node.count, node.figures[0].value) for node in tree_of("t", "", rows).walk()]
    [('lm/block_{0-2}/w', 3, 12)]
    """
    rows = list(rows)
    root = _Draft("", "")
    for path in order:
        root.place(TreeRow(path))
    for row in rows:
        root.place(row).add(row)
    root.sum_up_and_prune()
    nodes = tuple(child.node() for child in root.compact_children())
    if collapse:
        nodes = folded(nodes)
    names = dict.fromkeys(figure.name for row in rows for figure in row.figures)
    sizes = {name: root.figures[name].value for name in names} | dict(wholes or {})
    return ReportTree(
        kind=kind,
        verdict=verdict,
        children=tuple(_with_shares(node, sizes) for node in nodes),
        figures=_shared(root.figures.values(), sizes),
        ok=ok,
        notes=tuple(notes),
    )


class _Draft:
    """A node in the making, which rows are added to."""

    def __init__(self, label: str, path: str) -> None:
        self.label = label
        self.path = path
        self.lines: dict[str, None] = {}
        self.details: dict[str, None] = {}
        self.figures: dict[str, TreeFigure] = {}
        self.ok: bool | None = None
        self.children: dict[str, _Draft] = {}
        self.is_place = False

    def place(self, row: TreeRow) -> "_Draft":
        """The node that a row belongs to."""
        node = self
        if row.group:
            node = self.child(f"\0{row.group}", row.group, "")
            node.is_place = True
        for part in path_parts(row.path):
            node = node.child(part, part.strip(_SEPARATORS) or part, node.path + part)
        if row.item:
            return node.child(f"\0{row.item}", row.item, node.path)
        return node if row.path or row.group else node.child("\0", THE_ROOT, "")

    def child(self, key: str, label: str, path: str) -> "_Draft":
        return self.children.setdefault(key, _Draft(label, path))

    def add(self, row: TreeRow) -> None:
        self.is_place = True
        self.lines |= dict.fromkeys(filter(None, [row.line]))
        self.details |= dict.fromkeys(row.details)
        self._add_figures(row.figures)
        self.ok = _both(self.ok, row.ok)

    def _add_figures(self, figures: Iterable[TreeFigure]) -> None:
        by_name: dict[str, list[TreeFigure]] = {}
        for figure in figures:
            by_name.setdefault(figure.name, []).append(figure)
        for name, members in by_name.items():
            own = [self.figures[name]] if name in self.figures else []
            value = _total(figure.value for figure in [*own, *members])
            self.figures[name] = dataclasses.replace(members[0], value=value)

    def sum_up_and_prune(self) -> None:
        """Adds what is in each node to it, and takes out what nothing was said of."""
        for draft in reversed(list(self._walk())):
            draft.children = {
                key: child
                for key, child in draft.children.items()
                if child.is_place or child.children
            }
            inside = [
                figure for child in draft.children.values() for figure in child.figures.values()
            ]
            draft._add_figures(inside)
            for child in draft.children.values():
                draft.ok = _both(draft.ok, child.ok)

    def _walk(self) -> Iterator["_Draft"]:
        waiting = [self]
        while waiting:
            draft = waiting.pop()
            yield draft
            waiting += draft.children.values()

    def compact_children(self) -> "list[_Draft]":
        """The nodes in it; of those that only lead to another, that one, with both their names."""
        return [child._compacted() for child in self.children.values()]

    def _compacted(self) -> "_Draft":
        draft = self
        while not draft.is_place and len(draft.children) == 1:
            ((key, child),) = draft.children.items()
            if key.startswith("\0"):
                break
            child.label = draft.label + key
            draft = child
        return draft

    def node(self) -> TreeNode:
        return TreeNode(
            label=self.label,
            path=self.path,
            line="; ".join(self.lines),
            figures=tuple(self.figures.values()),
            details=tuple(self.details),
            ok=self.ok,
            children=tuple(child.node() for child in self.compact_children()),
        )


def _both(one: bool | None, other: bool | None) -> bool | None:
    """Bad if any is bad; good if any is good and none bad."""
    if one is None or other is None:
        return other if one is None else one
    return one and other


def _total(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)


def _shared(figures: Iterable[TreeFigure], sizes: Mapping[str, float]) -> tuple[TreeFigure, ...]:
    """Figures with their shares, in the order of the sizes; what is taken off has no share."""
    rank = {name: number for number, name in enumerate(sizes)}
    ordered = sorted(figures, key=lambda figure: rank[figure.name])
    return tuple(
        dataclasses.replace(figure, share=_share(figure.value, sizes[figure.name]))
        for figure in ordered
    )


def _share(value: float, whole: float) -> float | None:
    return min(value / whole, 1.0) if whole > 0 and value >= 0 else None


def _with_shares(node: TreeNode, sizes: Mapping[str, float]) -> TreeNode:
    return dataclasses.replace(
        node,
        figures=_shared(node.figures, sizes),
        children=tuple(_with_shares(child, sizes) for child in node.children),
    )
