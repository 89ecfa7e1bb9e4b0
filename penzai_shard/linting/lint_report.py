"""The findings of a linter, as a table and for programs."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from penzai_shard.linting.findings import KINDS, MARK, Finding
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.report_trees import (
    ReportTree,
    TreeFigure,
    TreeRow,
    bytes_text,
    count_text,
    tree_of,
)
from penzai_shard.text_tables import FindingsTable, Report


class LintTable(FindingsTable):
    """Findings, each over two lines where it is long."""

    headings = ("where", "count", "finding", "wasted per device", "what to do")
    right_aligned = frozenset({"count", "wasted per device"})
    unwrapped = frozenset({"finding"})
    paths = frozenset({"where"})
    below = "what to do"
    wide = 240


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LintReport(Report):
    """What ``lint`` found. It is true if there is nothing.

    Attributes:
        findings: The findings, the worst first: what keeps a plan from being made, then by the
            bytes that are wasted.
        mesh: The mesh.
        array_count: How many arrays were looked at.
        notes: What could not be looked at, and why.
    """

    findings: tuple[Finding, ...]
    mesh: AnyMesh
    array_count: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    @property
    def wasted_bytes(self) -> int:
        """What each device holds for nothing, in bytes; an array over two free mesh axes once."""
        worst: dict[tuple[str, ...], int] = {}
        for finding in self.findings:
            worst[finding.paths] = max(worst.get(finding.paths, 0), finding.wasted_bytes)
        return sum(worst.values())

    def table(self, *, collapse: bool = True) -> LintTable:
        """The findings as a table.

        Args:
            collapse: Show the arrays that a finding is about as one row; otherwise one for each.
        """
        rows = []
        mended_by: dict[str, str] = {}
        for finding in self.findings:
            first = mended_by.setdefault(finding.fix, finding.path)
            text = finding.sentences()
            if finding.fix and first is not finding.path:
                text = f"{finding.problem} {MARK}the same as of {first}."
            wasted = bytes_text(finding.wasted_bytes) if finding.wasted_bytes else ""
            count = str(finding.count) if finding.paths else ""
            if collapse or finding.count == 1:
                place = f"{finding.path} and others" if finding.others else finding.path
                rows.append((place, count, finding.kind, wasted, text))
                continue
            each = bytes_text(finding.wasted_bytes // finding.count) if wasted else ""
            rows += [(path, "1", finding.kind, each, text) for path in finding.paths]
        return LintTable(tuple(rows), self._verdict(), self.notes, self.ok)

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The findings as a tree, each where its arrays are, the worst first.

        Args:
            collapse: Show arrays of equal blocks as one.
        """
        rows = [row for finding in self.findings for row in self._tree_rows(finding)]
        return tree_of(
            "LintReport", self._verdict(), rows, ok=self.ok, notes=self.notes, collapse=collapse
        )

    def _tree_rows(self, finding: Finding) -> Iterator[TreeRow]:
        """A row for each place; what is wasted there counts with the worst finding about it."""
        rivals = [other for other in self.findings if other.paths == finding.paths]
        counts = finding is max(rivals, key=lambda other: other.wasted_bytes)
        each, rest = divmod(finding.wasted_bytes if counts else 0, finding.count)
        for path in finding.paths or (finding.path,):
            wasted, rest = each + rest, 0
            yield TreeRow(
                path,
                line=finding.kind,
                figures=(TreeFigure("wasted", wasted),) * (wasted > 0),
                details=(finding.problem, *[f"{MARK}{finding.fix}"] * bool(finding.fix)),
                ok=False,
            )

    def _verdict(self) -> str:
        on = f"on mesh ({mesh_text(self.mesh)})"
        if self.ok:
            return f"nothing found: {count_text(self.array_count, 'array')} {on}"
        kinds = [finding.kind for finding in self.findings]
        listed = ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)
        wasted = self.wasted_bytes
        more = f"; each device holds {bytes_text(wasted)} more than it must" if wasted else ""
        return f"{count_text(len(kinds), 'finding')} {on}: {listed}{more}"

    def to_json(self) -> str:
        """All of it as JSON text: one object per finding, with all its paths."""
        return json.dumps(
            {
                "ok": self.ok,
                "mesh": dict(self.mesh.shape),
                "arrays": self.array_count,
                "wasted_bytes": self.wasted_bytes,
                "findings": list(map(_data, self.findings)),
                "notes": list(self.notes),
            },
            indent=2,
            default=str,
        )


def _data(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "path": finding.path,
        "count": finding.count,
        "problem": finding.problem,
        "fix": finding.fix,
        "wasted_bytes": finding.wasted_bytes,
        "figures": dict(finding.figures),
        "paths": list(finding.paths),
    }
