"""Nests the rows of a report by the pieces of their paths, with sums and shares of the whole.

Text, treescope and HTML show the same nodes. A node that only leads to one other is merged with
it, so that ``decoder/blocks`` is one line.
"""

import collections
import dataclasses
import re
import shutil
from collections.abc import Iterator
from typing import Any

from penzai_shard.reports.quantities import plain_text
from penzai_shard.reports.report import FOLDED, SUMMED, Report
from penzai_shard.reports.text import is_bad, row_details, wrap

# A piece of a path with the separators behind it; those within folded numbers part nothing.
_PIECE = re.compile(r"[./:\[\]]*(?:\{[^{}]*\}|[^./:\[\]])+[./:\[\]]*")
# Before the second line of what is wrapped, and before details.
_HANG = "    "


@dataclasses.dataclass
class Node:
    """One line of a tree, and what is below it.

    Attributes:
        label: The piece of the path that its parent does not have.
        is_row: Whether a row of the report stands here.
        texts: What the row says, in the order of the columns.
        details: The sentences below the row.
        sums: Quantities of the row and of all that is below, by the column's name.
        is_bad: Whether the row, or one below, says that something is not as it should be.
        children: What is below, by piece.
    """

    label: str
    is_row: bool = False
    texts: list[str] = dataclasses.field(default_factory=list)
    details: list[str] = dataclasses.field(default_factory=list)
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    is_bad: bool = False
    children: dict[str, "Node"] = dataclasses.field(default_factory=dict)


def make_tree(report: Report) -> "Tree":
    """Nests the rows of a report, in their order."""
    report = report.condense()
    root = Node("")
    is_path = any(column.kind == "path" for column in report.columns[:1])
    times = collections.Counter(str(row[0]) for row in report.rows)
    for number, row in enumerate(report.rows):
        # The nodes from the root to the row's own.
        way = [root]
        place = report.columns[0].text(row[0])
        for piece in (is_path and _PIECE.findall(place)) or [place]:
            node = way[-1].children.setdefault(piece.strip("./:[]"), Node(piece))
            # "a" becomes "a/" once something below it comes.
            node.label = max(node.label, piece, key=len)
            way.append(node)
        if times[str(row[0])] > 1:
            # Several rows of one path are lines below it. No piece begins with a slash.
            way.append(way[-1].children.setdefault(f"/{number}", Node("")))
        _add_row(report, row, way)
    _merge_chains(root)
    return Tree(report, root)


def _add_row(report: Report, row: tuple[Any, ...], way: list[Node]) -> None:
    node = way[-1]
    node.is_row = True
    node.details = row_details(report, row)
    for column, value in zip(report.columns[1:], row[1:], strict=True):
        if value is None or column is FOLDED:
            continue
        if column.kind in SUMMED:
            for each in way:
                each.sums[column.name] = each.sums.get(column.name, 0) + value
        elif column.kind in ("percent", "ok"):
            node.texts.append(f"{column.name} {column.text(value)}")
        elif column.kind != "detail":
            node.texts.append(column.text(value))
    for each in way:
        each.is_bad |= is_bad(report, row)
    if not node.label and node.texts:
        node.label = node.texts.pop(0)


def _merge_chains(node: Node) -> None:
    for piece, child in node.children.items():
        _merge_chains(child)
        if len(child.children) == 1 and not child.is_row:
            (only,) = child.children.values()
            only.label = child.label + only.label
            node.children[piece] = only
        elif child.children:
            # A slash says that something is below; a dot would end a sentence.
            child.label = child.label.rstrip(".")


@dataclasses.dataclass(frozen=True, repr=False)
class Tree:
    """A report as a tree: ``print`` writes it, a notebook unfolds it.

    Attributes:
        report: The report without columns that say nothing, with equal blocks folded.
        root: Its children are the outermost pieces of the paths.
    """

    report: Report
    root: Node

    def _share(self, name: str, node: Node) -> float | None:
        whole = self.root.sums[name]
        return node.sums[name] / whole if whole else None

    def quantities(self, node: Node) -> str:
        """The sums of a node, and their shares of the whole, as text."""
        texts = []
        for column in self.report.columns:
            if column.name in node.sums:
                share = self._share(column.name, node)
                texts.append(f"{column.name} {column.text(node.sums[column.name])}")
                texts[-1] += "" if share is None else f" ({share:z.0%})"
        return "  ".join(texts)

    def shade(self, node: Node) -> str:
        """CSS that colours a node: the larger its share of bytes, the stronger."""
        names = [c.name for c in self.report.columns if c.kind == "bytes" and c.name in node.sums]
        share = max([0, *(self._share(name, node) or 0 for name in names)])
        # Transparent, so that text can be read on light pages and on dark ones.
        return f"background: rgba(235, 125, 35, {0.5 * min(share, 1):.2f})"

    def __str__(self) -> str:
        width = shutil.get_terminal_size((100, 0)).columns
        verdict, *notes = [("", plain_text(t)) for t in (self.report.verdict, *self.report.notes)]
        lines: list[str] = []
        for indent, text in [verdict, *self._sentences(self.root, ""), *notes]:
            first, *rest = wrap(text, width - len(indent) - len(_HANG), "path")
            lines += [indent + first, *(indent + _HANG + line for line in rest)]
        return "\n".join(lines)

    def _sentences(self, node: Node, indent: str) -> Iterator[tuple[str, str]]:
        for child in node.children.values():
            parts = [child.label, self.quantities(child), *child.texts]
            yield indent, "  ".join(filter(None, parts))
            yield from ((indent + _HANG, detail) for detail in child.details)
            yield from self._sentences(child, indent + "  ")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from penzai_shard.reports.html import write_tree

        return write_tree(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        title = plain_text(f"{self.report.title}: {self.report.verdict}")
        notes = ["".join(text for text, _ in line) for line in self.report.drawing(100)]
        notes += map(plain_text, self.report.notes)
        root = dataclasses.replace(self.root, label=title, details=notes)
        return self._part(root, path, is_open=True)

    def _part(self, node: Node, path: str | None = None, is_open: bool = False) -> Any:
        from treescope import rendering_parts as parts

        label = parts.text(node.label)
        line = [parts.error_color(label) if node.is_bad else label]
        if quantities := self.quantities(node):
            line += [parts.text("  "), parts.custom_style(parts.text(quantities), self.shade(node))]
        line += [parts.comment_color(parts.text("  " + text)) for text in node.texts]
        below = [self._part(child) for child in node.children.values()]
        below += [parts.comment_color(parts.text(detail)) for detail in node.details]
        if not below:
            return parts.build_one_line_tree_node(parts.siblings(*line), path)
        contents = parts.fold_condition(parts.text(" ..."), parts.indented_children(below))
        state = parts.ExpandState.EXPANDED if is_open else parts.ExpandState.WEAKLY_COLLAPSED
        return parts.build_custom_foldable_tree_node(contents, path, parts.siblings(*line), state)
