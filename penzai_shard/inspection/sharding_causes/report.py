"""Which layout each layer's output and each gradient gets, and why."""

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from penzai_shard.inspection.sharding_causes.cause_table import (
    RowGroup,
    WhyTable,
    groups_of,
    table_rows,
)
from penzai_shard.inspection.sharding_causes.records import RowKind, WhyRow
from penzai_shard.inspection.sharding_causes.selection import selected_rows
from penzai_shard.meshes import mesh_text
from penzai_shard.report_trees import ReportTree, TreeFigure, TreeRow, count_text, tree_of
from penzai_shard.text_tables import Report
from penzai_shard.tree_paths import name_matches


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class WhyReport(Report):
    """Where the layouts of a step's arrays come from, as ``why`` found it.

    It prints as a table, in the order in which the step makes the arrays; ``sentences`` says the
    same in words.

    Attributes:
        rows: The outputs of layers, the gradients of parameters, and the results.
        mesh_shape: The sizes of the mesh axes by name; empty without a mesh.
        notes: What else there is to know, in sentences.
        at: What it was narrowed to; empty if it is of the whole step.
        known: The labels and paths of all layers, also of those that have no row.
    """

    rows: tuple[WhyRow, ...]
    mesh_shape: Mapping[str, int]
    notes: tuple[str, ...] = ()
    at: str = ""
    known: frozenset[str] = frozenset()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The same in words, equal blocks in one sentence; narrowed, with the whole way."""
        return tuple(group.sentence(bool(self.at)) for group in groups_of(self.rows))

    def of_kind(self, kind: RowKind) -> tuple[WhyRow, ...]:
        """The rows about ``"output"``, ``"gradient"`` or ``"result"``."""
        return tuple(row for row in self.rows if row.kind == kind)

    @property
    def lost(self) -> tuple[WhyRow, ...]:
        """The rows of arrays on whose way a sharding was lost; parameters that are gathered for use
        do not count."""
        return tuple(row for row in self.rows if row.lost)

    @property
    def unexplained(self) -> tuple[WhyRow, ...]:
        """The rows with a mesh axis of which it is not known where it comes from."""
        return tuple(row for row in self.rows if any(c.kind == "unknown" for c in row.causes))

    def narrowed(self, at: str) -> "WhyReport":
        """The report on a layer and all in it, a parameter or a result.

        Args:
            at: Its label, as the table has it, or its path; or a pattern, as ``**/mlp``.

        Raises:
            SelectionError: The step has nothing of this name.
        """
        return dataclasses.replace(self, rows=selected_rows(self.rows, at, self.known), at=at)

    def table(self, *, collapse: bool = True) -> WhyTable:
        """The table.

        Args:
            collapse: Show the arrays of equal blocks in one row.
        """
        groups = groups_of(self.rows, collapse)
        asked = [group for group in groups if any(self._is_asked(row) for row in group.rows)]
        told = [group.sentence(with_way=True) for group in asked or groups] if self.at else []
        return WhyTable(table_rows(groups), self._verdict(), (*told, *self.notes))

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The report as a tree of the model: in each layer its output, and its gradients.

        Args:
            collapse: Show equal blocks as one.
        """
        return tree_of(
            "WhyReport",
            self._verdict(),
            self._tree_rows(),
            ok=False if self.lost else None,
            notes=self.notes,
            collapse=collapse,
        )

    def _tree_rows(self) -> Iterator[TreeRow]:
        places = collections.Counter((row.kind, row.label) for row in self.rows)
        for row in self.rows:
            group = RowGroup((row,))
            is_only = places[row.kind, row.label] == 1
            lost = TreeFigure("shardings lost", len(row.lost), "count")
            yield TreeRow(
                row.label,
                # A layer and one in it may be called the same.
                item="" if is_only else f"{row.kind} of {row.path}",
                line=f"{f'{row.kind} ' * is_only}[{row.axes}]  {group.short}",
                figures=(lost,) * bool(row.lost),
                details=(group.sentence(bool(self.at)),),
                ok=False if row.lost else None,
            )

    def _is_asked(self, row: WhyRow) -> bool:
        """Whether a row is about what the report was narrowed to itself, not about a part of it."""
        return any(name_matches(self.at, name) for name in (row.label, row.path))

    def _verdict(self) -> str:
        where = f"on mesh ({mesh_text(self.mesh_shape)})" if self.mesh_shape else "without a mesh"
        counts = ", ".join(
            _counted(kind, rows) for kind in get_args(RowKind) if (rows := self.of_kind(kind))
        )
        text = f"{where}: {counts or 'no array has a name that is known'}"
        if self.at:
            text = f"{self.at} {text}"
        if self.lost:
            places = {(loss.operation, loss.layer) for row in self.lost for loss in row.lost}
            text += f"; shardings were lost at {count_text(len(places), 'place')}"
        return text

    def to_json(self) -> str:
        """All of it as JSON text: mesh, and one object per array."""
        return json.dumps(
            {
                "mesh": dict(self.mesh_shape),
                "at": self.at,
                "rows": [_data(row) for row in self.rows],
                "notes": list(self.notes),
            },
            indent=2,
        )


def _counted(kind: str, rows: Sequence[WhyRow]) -> str:
    split = sum(not row.is_whole for row in rows)
    return f"{split:,} of {count_text(len(rows), kind)} split"


def _data(row: WhyRow) -> dict[str, Any]:
    def text(name: Any) -> str | None:
        return None if name is None else str(name)

    causes = [
        {**dataclasses.asdict(cause), "logical_axis": text(cause.logical_axis)}
        for cause in row.causes
    ]
    losses = [
        {**dataclasses.asdict(loss), "logical_axis": text(loss.logical_axis)} for loss in row.losses
    ]
    return {
        **dataclasses.asdict(row),
        "names": row.names and [text(name) for name in row.names],
        "causes": causes,
        "losses": losses,
    }
