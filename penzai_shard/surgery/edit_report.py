"""What a recipe does to a model, as a table."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from penzai_shard.path_folding import folded_rows
from penzai_shard.report_trees import ReportTree, TreeFigure, TreeRow, count_text, tree_of
from penzai_shard.surgery.inserted_layers import library_role, original_in
from penzai_shard.surgery.tree_nodes import children_of, kind_of
from penzai_shard.text_tables import PreparedTable, TextTable


@dataclasses.dataclass(frozen=True, repr=False)
class EditRow:
    """What one edit does.

    Attributes:
        edit: The edit as text that evaluates back.
        title: The edit in few words.
        count: How many places it changes.
        paths: Their paths, in the model as the edits before left it; empty for the root.
        before: What stands at each before the edit.
        after: What stands at each after it, in order.
        problem: Why the edit does not fit the model; empty when it does.
    """

    edit: str
    title: str
    count: int
    paths: tuple[str, ...]
    before: tuple[Any, ...]
    after: tuple[tuple[Any, ...], ...]
    problem: str = ""

    @property
    def before_types(self) -> tuple[str, ...]:
        """What stands at each place before the edit, by the names of the types."""
        return tuple(type_text(node) for node in self.before)

    @property
    def after_types(self) -> tuple[str, ...]:
        """What stands at each place after the edit, by the names of the types."""
        return tuple(", ".join(type_text(node) for node in nodes) for nodes in self.after)


def type_text(node: Any) -> str:
    """A node by the name of its type; for a layer put around another, with what it holds.

    >>> from penzai import pz
    >>> from penzai_shard.layers import Jitted
    >>> type_text(Jitted(pz.nn.Identity()))
    'Jitted(Identity)'
    """
    match library_role(type(node)):
        case "inserted":
            return _holder_text(node.body) if node.holds_original else type_text(node.body)
        case "original":
            return type_text(node.body)
        case "wrapper":
            return f"{type(node).__name__}({type_text(node.body)})"
    return type(node).__name__


def _holder_text(node: Any) -> str:
    """A layer that was put around another, with the layers on the way to that one."""
    if library_role(type(node)) == "original" or original_in(node) is None:
        return type_text(node)
    held = [child for _, child in children_of(node)]
    if len(held) == 1 and isinstance(held[0], list | tuple):
        held = list(held[0])
    inside = ", ".join(_holder_text(part) for part in held if kind_of(part).is_layer)
    return f"{type(node).__name__}({inside})"


class RecipeTable(PreparedTable):
    """The edits of a recipe, in order, as a notebook shows them: kind, where, and what."""

    headings = ("edit", "where", "what")


@dataclasses.dataclass(frozen=True, repr=False)
class EditReport(TextTable):
    """What a recipe does to a model; ``print`` shows it as a table.

    Attributes:
        rows: One per edit, in order.
        model: Name of the model's type.
    """

    headings = ("edit", "count", "paths", "before", "after")
    right_aligned = frozenset({"count"})
    paths = frozenset({"paths"})

    rows: tuple[EditRow, ...]
    model: str

    @property
    def ok(self) -> bool:
        """Whether every edit fits the model."""
        return not any(row.problem for row in self.rows)

    def table(self, collapse: bool = True) -> list[tuple[str, ...]]:
        """The rows as text.

        Args:
            collapse: Whether paths that differ in numbers only are one row, the numbers as ``*``.

        Returns:
            For each row the edit, the count, the path, the types before and after.
        """
        lines: list[tuple[str, ...]] = []
        for row in self.rows:
            paths = (path or "the root" for path in row.paths)
            found = folded_rows(
                zip(paths, row.before_types, row.after_types, strict=True), collapse
            )
            edit = row.title
            for path, count, before, after in found or [("", "0", "", "")]:
                lines.append((edit, count, path, before, after))
                edit = ""
        return lines

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The edits in their order, and in each the places that it changes.

        Args:
            collapse: Show equal places as one.
        """
        rows = [row for number, edit in enumerate(self.rows, 1) for row in _tree_rows(edit, number)]
        return tree_of(
            "EditReport",
            self.text_verdict(),
            rows,
            ok=None if self.ok else False,
            notes=self.text_summary(),
            collapse=collapse,
        )

    def text_rows(self) -> list[tuple[str, ...]]:
        """The rows, paths alike folded into one."""
        return self.table()

    def text_verdict(self) -> str:
        """Whether the recipe fits, and how much it does."""
        places = count_text(sum(row.count for row in self.rows), "place")
        fits = "" if self.ok else ": does NOT fit"
        return f"{count_text(len(self.rows), 'edit')} of {self.model}, {places}{fits}"

    def verdict_style(self) -> str:
        """Red where an edit does not fit."""
        return "bold" if self.ok else "bold red"

    def text_summary(self) -> list[str]:
        """What does not fit, and what is put around its like."""
        twice = [row.title for row in self.rows if any(map(_is_twice, row.before, row.after))]
        return [
            *(f"does not fit: {row.problem}" for row in self.rows if row.problem),
            *(
                f"{title}: is around the layer already, and is put around it once more"
                for title in twice
            ),
        ]


def _tree_rows(edit: EditRow, number: int) -> Iterator[TreeRow]:
    """An edit, and each place that it changes."""
    # With its number: two edits may be the same, and each is a node of its own.
    group = f"{number}. {edit.title}"
    problems = (edit.problem,) if edit.problem else ()
    nothing = (TreeFigure("places", 0, "count"),) * (not edit.paths)
    yield TreeRow(
        "",
        group=group,
        figures=nothing,
        details=(edit.edit, *problems),
        ok=False if problems else None,
    )
    for path, before, after in zip(edit.paths, edit.before_types, edit.after_types, strict=True):
        yield TreeRow(
            path,
            item="" if path else "the root",
            group=group,
            line=f"{before} -> {after}",
            figures=(TreeFigure("places", 1, "count"),),
        )


def _is_twice(before: Any, after: tuple[Any, ...]) -> bool:
    return type(before) is type(after[0]) and library_role(type(before)) == "wrapper"
