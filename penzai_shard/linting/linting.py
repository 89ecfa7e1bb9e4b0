"""``lint``: every check, and of what may mend a finding what does, found by trying it out."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from penzai_shard.linting.checks import CHECKS
from penzai_shard.linting.findings import KINDS, Change, Finding
from penzai_shard.linting.lint_report import LintReport
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.meshes import AnyMesh, auto_twin, refuse_other_than_mesh
from penzai_shard.rule_kinds import OnUnnamed, check_option
from penzai_shard.tree_arguments import refuse_builder

# What follows from other findings, and is looked for once these are mended.
_OF_WASTE = frozenset({"under-sharded", "idle mesh axis"})


def lint(
    model_or_state: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    batch: Any = None,
    min_bytes: int = 2**20,
    on_unnamed: OnUnnamed = "error",
) -> LintReport:
    """Finds what in a model, its rules and its batch is probably a mistake or a waste.

    Nothing is run and no device is touched: model, batch and mesh may be abstract. Rules that
    cannot be followed, which ``make_plan`` refuses, are findings here, all of them.

    Each finding says what to write instead, as a line of code that was tried out: with it the
    finding is gone, and no new one comes.

    A mesh axis is *free* for an array if the rules forgot it, not if they say that the array is
    whole over it. They say so by a rule ``name -> None`` for each dimension that would divide; by
    a preset, which is meant as it is; by splitting activations alone over the mesh axis, as in
    data parallel training; and by being empty: ``rules={}``.

    Args:
        model_or_state: A model, a ``TrainState``, or any other tree that ``make_plan`` takes,
            concrete or abstract.
        mesh: The mesh, concrete or abstract.
        rules: Rules in any form that ``AxisRules`` reads, or a ``Layout``.
        batch: What the model is called with, concrete or abstract: a tree of named arrays. With it
            also what flows through the model is looked at.
        min_bytes: An array of which each device holds less than this, in bytes, is not called
            wasteful. By default 1 MiB, which is what ``fully_sharded()`` leaves whole in float32.
        on_unnamed: As for ``make_plan``; arrays without names are findings by default.

    Returns:
        The findings, the worst first. The report is true if there is none.

    Raises:
        RuleTypeError: The mesh is not a mesh, or the model is a function.

    >>> import jax
    >>> from penzai import pz
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> weights = {"up": pz.nx.ones({"embedding": 8, "neurons": 16})}
    >>> report = lint(weights, mesh, {"embedding": "data", "neurons": "modle"})
    >>> print(report.findings[0])
    rules: rule 'neurons' -> 'modle': the mesh (data=4, model=2) has no mesh axis 'modle'. Did you
    mean 'model'? Fix: rules = {'embedding': 'data', 'neurons': 'model'}
    """
    refuse_other_than_mesh(mesh)
    refuse_builder("lint", model_or_state)
    check_option("on_unnamed", on_unnamed)
    subject = LintSubject(model_or_state, auto_twin(mesh), rules, batch, min_bytes, on_unnamed)
    findings = _with_fixes(subject)
    findings.sort(key=_badness)
    return LintReport(tuple(findings), subject.mesh, len(subject.plan.leaves))


def _badness(finding: Finding) -> tuple[bool, int, int]:
    """What cannot be planned first, then by what is wasted."""
    return finding.kind in _OF_WASTE, -finding.wasted_bytes, KINDS.index(finding.kind)


def _found(subject: LintSubject) -> list[Finding]:
    """What all checks find; the same finding once."""
    found = {finding.key: finding for check in CHECKS for finding in check(subject)}
    return list(found.values())


def _with_fixes(subject: LintSubject) -> list[Finding]:
    """The findings, each with the change that mends it.

    Waste may be but the consequence of an error: what is told of it is what is left once the
    errors are mended, one after the other.
    """
    found = _found(subject)
    findings = []
    mended = subject
    for finding in found:
        if finding.kind not in _OF_WASTE:
            change = _mending(subject, finding, found)
            findings.append(_fixed(finding, change))
    errors = {finding.key for finding in findings}
    while errors:
        # Each change was made for the subject as given; here they have to go together.
        left = [each for each in _found(mended) if each.kind not in _OF_WASTE]
        change = _mending(mended, left[0], left) if left else None
        if change is None:
            break
        mended = mended.changed(change.fields)
        errors.discard(left[0].key)
    found = _found(mended)
    for finding in found:
        if finding.kind in _OF_WASTE:
            findings.append(_fixed(finding, _mending(mended, finding, found)))
    return findings


def _fixed(finding: Finding, change: Change | None) -> Finding:
    fix = finding.fix if change is None else change.code
    return dataclasses.replace(finding, fix=fix, changes=())


def _mending(subject: LintSubject, finding: Finding, found: Iterable[Finding]) -> Change | None:
    """The first change that mends a finding and brings no new one.

    If there is none, the one that brings the fewest; None if nothing mends it.
    """
    known = {each.key for each in found}
    best: tuple[int, Change] | None = None
    for change in finding.changes:
        left = {each.key for each in _found(subject.changed(change.fields))}
        if finding.key in left:
            continue
        new = len(left - known)
        if not new:
            return change
        if best is None or new < best[0]:
            best = new, change
    return None if best is None else best[1]
