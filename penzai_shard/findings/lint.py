"""Reads a model, its rules and its batch for what is probably a mistake or a waste."""

import dataclasses
from typing import Any

from penzai_shard.errors import check_arguments
from penzai_shard.findings.flows import follow_flows
from penzai_shard.findings.rules import find_near_names, find_unused, find_waste
from penzai_shard.findings.set_up import ERRORS, Finding, fold_findings, read_set_up
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.planning import arguments
from penzai_shard.reports.report import Column, HasReport, Report
from penzai_shard.rules import OnIndivisible


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LintReport(HasReport):
    """What ``lint`` found. Its truth value is whether that is nothing.

    Attributes:
        findings: What is probably a mistake, then what is probably a waste, the largest first.
        notes: What was not looked at, in sentences.
        subject: What was looked at, in a few words.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    subject: str

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def report(self) -> Report:
        """The findings as a table, with what to write below each."""
        texts = Column("what", "detail"), Column("fix", "detail")
        columns = Column("where", "path"), Column("kind"), Column("wasted", "bytes"), *texts
        rows = [
            (x.path, x.kind, x.wasted_bytes or None, f"{x.what}.", x.fix) for x in self.findings
        ]
        count = len(rows)
        found = "nothing found" if self.ok else f"{count} finding{'s' * (count > 1)}"
        verdict = f"{found}: {self.subject}"
        return Report("Lint", verdict, columns, rows, self.notes, self.ok, collapse=False)


def lint(
    model_or_state: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    batch: Any = None,
    min_bytes: int = 2**20,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
) -> LintReport:
    """Finds what is probably a mistake or a waste in how a model is laid over a mesh.

    Nothing runs: the model is planned and, with a batch, traced. Each rule that a finding offers
    was planned before, and breaks nothing else.

    Args:
        model_or_state: A model, a train state, or any tree of arrays or of their shapes.
        mesh: The mesh, concrete or abstract.
        rules: As for ``make_plan``, or a ``Layout``; a model without the edits of its layout is
            looked at as with them.
        batch: What a model of Penzai is called with, arrays or their shapes: its argument; or a
            dictionary whose first entry is the argument, and whose others are side inputs. Without
            it, what flows through the model is not looked at.
        min_bytes: Which arrays are worth splitting: those of which a device holds so much.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Raises:
        RuleTypeError: There is no mesh or no model, or an option cannot be read.

    >>> import jax
    >>> import penzai_shard as pzs
    >>> weights = {"up": jax.ShapeDtypeStruct((64, 256), "float32")}
    >>> named = pzs.name_axes(weights, {"up": ("embed", "mlp")})
    >>> mesh = pzs.make_mesh({"data": 4, "model": 2}, abstract=True)
    >>> (finding,) = lint(named, mesh, {"embd": "data", "mlp": "model"}).findings[:1]
    >>> finding.kind, finding.fix
    ('unused', "Write rules={'embed': 'data', 'mlp': 'model'}.")
    """
    options = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed}
    request = arguments.read("lint", mesh, {}, **options)
    arguments.check_tree("lint", model_or_state)
    is_size = isinstance(min_bytes, int) and min_bytes >= 0
    check_arguments("lint", {"min_bytes": (min_bytes, is_size, "min_bytes=2**20")})

    set_up = read_set_up(model_or_state, request, rules)
    flows = follow_flows(set_up, batch)
    known = set_up.logical_axes | flows.logical_axes
    mistakes = [Finding(own.path, own.what, own.fix, own.kind) for own in set_up.problems]
    mistakes += [*find_unused(set_up, known), *flows.findings]
    found = fold_findings(mistakes)
    # What a misspelt rule does not split would be waste besides.
    is_misspelt = any(find_near_names(table, known) for table in set_up.tables.values())
    if is_misspelt or any(one.kind in ERRORS for one in found):
        flows.notes.append("mend the rules, and lint again: waste was not looked for")
    else:
        waste = fold_findings(find_waste(set_up, known, flows.mesh_axes, min_bytes))
        found += sorted(waste, key=lambda one: -one.wasted_bytes)
    count = len(set_up.rows)
    what = f"{count:,} array{'s' * (count != 1)} on mesh ({mesh_text(request.mesh)})"
    return LintReport(tuple(found), tuple(flows.notes), what)
