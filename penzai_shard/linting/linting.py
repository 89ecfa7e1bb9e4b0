"""``lint``: every check, and of what may mend a finding what does, found by trying it out."""

import dataclasses
import functools
import numbers
from collections.abc import Iterable
from typing import Any, TypeAlias

from penzai_shard.errors import RuleTypeError
from penzai_shard.linting.checks import CHECKS
from penzai_shard.linting.findings import KINDS, Change, Finding
from penzai_shard.linting.lint_report import LintReport
from penzai_shard.linting.lint_subject import MIN_BYTES, LintSubject
from penzai_shard.meshes import AnyMesh, auto_twin, refuse_other_than_mesh
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed, check_option
from penzai_shard.tree_arguments import refuse_builder

Key: TypeAlias = tuple[str, str, str]

# A fix may need another one, where one mistake hides the next; so many are tried together.
_MOST_IN_A_ROW = 3

# What follows from other findings, and is looked for once these are mended.
_OF_WASTE = frozenset({"under-sharded", "idle mesh axis"})


def lint(
    model_or_state: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    batch: Any = None,
    min_bytes: int = MIN_BYTES,
    on_indivisible: OnIndivisible = "error",
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
        batch: What the model is called with, concrete or abstract: one input; a tuple of inputs,
            whose last may be a dictionary of side inputs; or a dictionary, whose first entry is the
            input, unless the model has a parameter of its name, and whose others are side inputs,
            as in the batch of a loss function. With it the model is traced, and what flows through
            it is looked at too; without it the report's ``notes`` say that it was not.
        min_bytes: An array of which each device holds less than this, in bytes, is not called
            wasteful. By default 1 MiB, which is what ``fully_sharded()`` leaves whole in float32.
        on_indivisible: As for ``make_plan``; lengths that do not divide are findings by default.
            Those of a batch are always, but where parameters have the same logical axis.
        on_unnamed: As for ``make_plan``; arrays without names are findings by default.

    Returns:
        The findings, the worst first. The report is true if there is none.

    Raises:
        RuleTypeError: The mesh is not a mesh, the model is a function, or ``min_bytes`` is not a
            number.

    >>> import jax
    >>> from penzai import pz
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> weights = {"up": pz.nx.ones({"embedding": 8, "neurons": 16})}
    >>> report = lint(weights, mesh, {"embedding": "data", "neurons": "modle"})
    >>> print(report.findings[0])
    rules: rule 'neurons' -> 'modle': the mesh (data=4, model=2) has no mesh axis 'modle'. Did you
    mean 'model'? Fix: rules = {'embedding': 'data', 'neurons': 'model'}
    """
    refuse_other_than_mesh(mesh, "lint(model, mesh, rules)", (model_or_state, rules))
    refuse_builder("lint", model_or_state)
    check_option("on_indivisible", on_indivisible)
    check_option("on_unnamed", on_unnamed)
    if not isinstance(min_bytes, numbers.Real):
        raise RuleTypeError(
            f"lint: min_bytes is a number of bytes, for instance min_bytes=2**20, not "
            f"{min_bytes!r}."
        )
    subject = LintSubject(
        model_or_state, auto_twin(mesh), rules, batch, min_bytes, on_indivisible, on_unnamed
    )
    findings = _with_fixes(subject)
    findings.sort(key=_badness)
    missing = subject.flows.missing
    notes = (missing,) if missing else ()
    return LintReport(tuple(findings), subject.mesh, len(subject.plan.leaves), notes)


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
    # Changes are tried out on one of each of the equal blocks.
    tried = _Trials(subject.changed({"sampled": True}))
    findings = [tried.fixed(finding) for finding in _errors(subject)]
    mended = subject
    while findings:
        # Each of those changes was made for the subject as given; here they have to go together.
        change = tried.first_change()
        if change is None:
            break
        mended, tried = mended.changed(change.fields), _Trials(tried.subject.changed(change.fields))
    wasted = [finding for finding in _found(mended) if finding.kind in _OF_WASTE]
    return findings + [tried.fixed(finding) for finding in wasted]


def _errors(subject: LintSubject) -> list[Finding]:
    return [finding for finding in _found(subject) if finding.kind not in _OF_WASTE]


def _is_waste(keys: Iterable[Key]) -> bool:
    return all(kind in _OF_WASTE for kind, *_ in keys)


@dataclasses.dataclass
class _Trials:
    """Trying changes out.

    Attributes:
        subject: What is linted, with one of each of its equal blocks.
        choices: The changes that were chosen, by what they mend.
    """

    subject: LintSubject
    choices: dict[Key, Change | None] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def found(self) -> dict[Key, Finding]:
        """The findings; of errors, if there are any, without waste."""
        found = _errors(self.subject) or _found(self.subject)
        return {finding.key: finding for finding in found}

    def fixed(self, finding: Finding) -> Finding:
        """A finding with the change that mends it, if there is one."""
        change = self.chosen(finding.key)
        fix = finding.fix if change is None else change.code
        return dataclasses.replace(finding, fix=fix, changes=())

    def first_change(self) -> Change | None:
        """The change that mends the first error; None without one."""
        first = next(iter(self.found.values()), None)
        return None if first is None or first.kind in _OF_WASTE else self.chosen(first.key)

    def chosen(self, key: Key) -> Change | None:
        """The first change that mends a finding and brings no new one.

        If there is none, the one that brings the fewest, with what mends these; None if nothing
        mends it.
        """
        if key not in self.choices:
            self.choices[key] = self._chosen(key, _MOST_IN_A_ROW)
        return self.choices[key]

    def _chosen(self, key: Key, in_a_row: int) -> Change | None:
        changes = self.found[key].changes if key in self.found else ()
        best: tuple[int, Change] | None = None
        tried: set[str] = set()
        for change in changes:
            if change.code in tried:
                continue
            tried.add(change.code)
            new = self._new_after(change, key)
            if new is not None and (not new or (change.is_meant and _is_waste(new))):
                return change
            if new is not None and (best is None or len(new) < best[0]):
                best = len(new), change
        if best is None or in_a_row == 1:
            return None if best is None else best[1]
        return self._with_next(*best, key, in_a_row - 1)

    def _new_after(self, change: Change, key: Key) -> set[Key] | None:
        """The findings that a change brings; None if it does not mend the one that it is for."""
        left = {each.key for each in _found(self.subject.changed(change.fields))}
        return None if key in left else left - self.found.keys()

    def _with_next(self, new: int, change: Change, key: Key, in_a_row: int) -> Change:
        """A change together with the one that mends what it brings, if that is better."""
        after = _Trials(self.subject.changed(change.fields))
        brought = [
            key
            for key, finding in after.found.items()
            if key not in self.found and finding.kind not in _OF_WASTE
        ]
        following = after._chosen(brought[0], in_a_row) if brought else None
        # Another assignment to all rules says what the first one did too.
        if following is not None and following.code.startswith("rules = "):
            left = self._new_after(following, key)
            if left is not None and len(left) < new:
                return following
        return change
