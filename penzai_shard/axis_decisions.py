"""The decision for one array: which rule gives which dimension to which mesh axis, and why.

A pure function of the rules, the array's logical axis names and sizes, and the mesh's axis sizes.
Nothing else in this library decides a layout.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from jax.sharding import PartitionSpec

from penzai_shard.fused_axes import divided_length, factors_of, lengths_of_fused, why_whole
from penzai_shard.partition_specs import canonical_spec, padded_length, part_count
from penzai_shard.rule_kinds import (
    IdentityRule,
    LargestDimensionRule,
    LogicalAxis,
    NameRule,
    OnIndivisible,
    Rule,
    mesh_axes_text,
    sized_mesh_axes_text,
)
from penzai_shard.text_tables import TextTable


@dataclasses.dataclass(frozen=True)
class DimensionDecision:
    """What was decided for one dimension of an array, and by which rule.

    Attributes:
        logical_axis: Its logical axis, or None for a positional dimension.
        size: Its length.
        mesh_axes: The mesh axes it is sharded over; empty when it is not sharded.
        rule: The rule that gave this, or None if no rule names it.
        reason: One phrase for people.
        stored_size: The length that it is stored with, more than its own where it is padded.
    """

    logical_axis: LogicalAxis | None
    size: int
    mesh_axes: tuple[str, ...]
    rule: Rule | None
    reason: str
    stored_size: int


PADDING_FIX = ' Or store it padded: on_indivisible="pad".'
"""What a problem with a length that does not divide ends with, for those who can store arrays."""

Misfit: TypeAlias = Literal["indivisible", "doubled", "unknown"]


@dataclasses.dataclass(frozen=True)
class UnfitAxis:
    """Why a logical axis of an array cannot be split as its rules ask.

    Attributes:
        logical_axis: The logical axis.
        misfit: Its length does not divide, another dimension has the mesh axis, or the mesh has
            no such mesh axis.
        problem: What is wrong, and what to write instead.
    """

    logical_axis: LogicalAxis
    misfit: Misfit
    problem: str


@dataclasses.dataclass(frozen=True, repr=False)
class SpecExplanation(TextTable):
    """The spec of one array with the reason for each of its dimensions, as a table.

    Attributes:
        spec: The spec, without trailing ``None``.
        dimensions: One decision per dimension.
        unfit: The logical axes that the rules do not fit; empty when they fit all.
        notes: What else was decided for the array as a whole.
        is_unnamed: Whether the array has no names, in place of positional dimensions.
    """

    headings = ("logical axis", "size", "mesh axes", "reason")
    right_aligned = frozenset({"size"})

    spec: PartitionSpec
    dimensions: tuple[DimensionDecision, ...]
    unfit: tuple[UnfitAxis, ...] = ()
    notes: tuple[str, ...] = ()
    is_unnamed: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the rules do not fit this array; empty when they do."""
        return tuple(each.problem for each in self.unfit)

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """The length that each dimension is stored with."""
        return tuple(d.stored_size for d in self.dimensions)

    @property
    def reason(self) -> str:
        """The reasons of all sharded or relaxed dimensions, in one line."""
        reasons = [d.reason for d in self.dimensions if d.rule is not None]
        nothing = "is for arrays without names" if self.is_unnamed else "names its logical axes"
        return "; ".join([*reasons, *self.notes]) or f"no rule {nothing}"

    def text_verdict(self) -> str:
        """The spec."""
        return str(self.spec)

    def text_rows(self) -> list[tuple[str, ...]]:
        """One row per dimension."""
        nameless = "no name" if self.is_unnamed else "positional"
        return [
            (
                nameless if d.logical_axis is None else repr(d.logical_axis),
                str(d.size),
                ", ".join(d.mesh_axes),
                d.reason,
            )
            for d in self.dimensions
        ]

    def text_summary(self) -> list[str]:
        """What was decided for the array as a whole, and why the rules do not fit it."""
        return [*self.notes, *(f"problem: {problem}" for problem in self.problems)]


def decide(
    rules: tuple[Rule, ...],
    names: tuple[LogicalAxis | None, ...] | None,
    sizes: tuple[int, ...],
    mesh_items: tuple[tuple[str, int], ...],
    on_indivisible: OnIndivisible,
) -> SpecExplanation:
    """Decides the layout of one array; remembers the answer.

    Args:
        rules: The rules, in the order in which they count.
        names: The logical axis of each dimension; None for a positional one. None altogether for
            an array without names, for which there are the rules that say so, and no others.
        sizes: The length of each dimension.
        mesh_items: Name and size of each mesh axis; every mesh axis of the rules is among them.
        on_indivisible: Whether a length that does not divide is a problem, stays whole or is
            stored padded.

    Returns:
        The spec, its reasons, and the problems, if the rules do not fit the array.

    >>> decide((NameRule("b", ("data",)),), ("a", "b"), (3, 4), (("data", 2),), "error").spec
    P(None, 'data')
    """
    lengths = lengths_of_fused(names)
    return _decided(rules, names, sizes, mesh_items, on_indivisible, lengths)


@functools.lru_cache(maxsize=65536)
def _decided(
    rules: tuple[Rule, ...],
    names: tuple[LogicalAxis | None, ...] | None,
    sizes: tuple[int, ...],
    mesh_items: tuple[tuple[str, int], ...],
    on_indivisible: OnIndivisible,
    lengths: tuple[tuple[int, ...] | None, ...],
) -> SpecExplanation:
    """As ``decide``; names that are equal and were fused of other lengths are told apart."""
    mesh_shape = dict(mesh_items)
    if names is not None:
        return _Decider(rules, names, sizes, mesh_shape, on_indivisible).explanation()
    fitting = tuple(r for r in rules if isinstance(r, LargestDimensionRule) and r.splits_unnamed)
    nameless = (None,) * len(sizes)
    return _Decider(fitting, nameless, sizes, mesh_shape, on_indivisible, True).explanation()


@dataclasses.dataclass
class _Decider:
    """Applies rules to one array. Rules for names come first, in their order; what they leave
    free is then offered to the rules for the largest dimension."""

    rules: tuple[Rule, ...]
    names: tuple[LogicalAxis | None, ...]
    sizes: tuple[int, ...]
    mesh_shape: dict[str, int]
    on_indivisible: OnIndivisible
    # Whether the array has no names at all, in place of positional dimensions.
    is_unnamed: bool = False
    # The decision for a dimension, by its number.
    decided: dict[int, DimensionDecision] = dataclasses.field(default_factory=dict)
    unfit: list[UnfitAxis] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def explanation(self) -> SpecExplanation:
        for rule in self.rules:
            if isinstance(rule, NameRule):
                self._apply_name_rule(rule)
            elif isinstance(rule, IdentityRule):
                self._apply_identity(rule)
        self._decide_unfit_names()
        for rule in self.rules:
            if isinstance(rule, LargestDimensionRule):
                self._apply_largest(rule)
        dimensions = tuple(
            self.decided.get(i) or self._undecided(i) for i in range(len(self.names))
        )
        spec = canonical_spec(d.mesh_axes for d in dimensions)
        unfit, notes = tuple(self.unfit), tuple(self.notes)
        return SpecExplanation(spec, dimensions, unfit, notes, self.is_unnamed)

    def _undecided(self, i: int) -> DimensionDecision:
        reason = "positional, stays unsharded" if self.names[i] is None else "no rule"
        reason = "stays unsharded" if self.is_unnamed else reason
        return DimensionDecision(self.names[i], self.sizes[i], (), None, reason, self.sizes[i])

    def _decide(
        self,
        i: int,
        mesh_axes: tuple[str, ...],
        rule: Rule,
        reason: str,
        stored_size: int | None = None,
    ) -> None:
        size = self.sizes[i]
        self.decided[i] = DimensionDecision(
            self.names[i], size, mesh_axes, rule, reason, stored_size or size
        )

    def _refuse(self, name: LogicalAxis, misfit: Misfit, problem: str) -> None:
        self.unfit.append(UnfitAxis(name, misfit, problem))

    @property
    def taken(self) -> dict[str, DimensionDecision]:
        """The mesh axes that some dimension is sharded over already, and which."""
        return {axis: d for d in self.decided.values() for axis in d.mesh_axes}

    @functools.cached_property
    def _ruled(self) -> frozenset[LogicalAxis]:
        """The logical axes that have rules of their own."""
        return frozenset(rule.logical_axis for rule in self.rules if isinstance(rule, NameRule))

    def _length(self, i: int, rule: NameRule) -> int | None:
        """The length that a rule must divide to split a dimension; None if it is not for it."""
        name = self.names[i]
        # Of a fused dimension the rule for its whole name says more than those for its parts.
        if name is None or (name in self._ruled and name != rule.logical_axis):
            return None
        return divided_length(name, self.sizes[i], rule.logical_axis)

    def _divides(self, length: int, mesh_axes: Sequence[str]) -> bool:
        return length % part_count(mesh_axes, self.mesh_shape) == 0

    def _apply_name_rule(self, rule: NameRule) -> None:
        for i in range(len(self.names)):
            length = None if i in self.decided else self._length(i, rule)
            is_free = all(name not in self.taken for name in rule.mesh_axes)
            if length is not None and is_free and self._divides(length, rule.mesh_axes):
                self._decide(i, rule.mesh_axes, rule, self._reason(i, rule))

    def _reason(self, i: int, rule: NameRule) -> str:
        name = self.names[i]
        return str(rule) if rule.logical_axis == name else f"{rule}, the major part of {name!r}"

    def _apply_identity(self, rule: IdentityRule) -> None:
        for i, name in enumerate(self.names):
            for part in (name, *factors_of(name)):
                mesh_axes = rule.mesh_axes_of(part, self.mesh_shape)
                if i not in self.decided and part not in self._ruled and mesh_axes:
                    self._apply_same_name(i, NameRule(part, mesh_axes))

    def _apply_same_name(self, i: int, same: NameRule) -> None:
        length = self._length(i, same)
        missing = [axis for axis in same.mesh_axes if axis not in self.mesh_shape]
        if missing:
            self._not_in_mesh(same, missing[0])
        elif length is None:
            if self.names[i] not in self._ruled:
                self._leave_whole(i, same)
        elif any(axis in self.taken for axis in same.mesh_axes):
            self._asked_twice(i, same)
        elif self._divides(length, same.mesh_axes):
            self._decide(i, same.mesh_axes, same, self._reason(i, same))
        else:
            self._indivisible(i, same)

    def _leave_whole(self, i: int, rule: NameRule) -> None:
        """A rule for a part of a fused dimension of which equal parts of it are not whole parts."""
        name, why = self.names[i], why_whole(self.names[i], self.sizes[i], rule.logical_axis)
        fix = f"to split it anyway, map {name!r} to {mesh_axes_text(rule.mesh_axes)}"
        self._decide(i, (), rule, f"{name!r} stays whole: {why}, rule {rule}; {fix}")

    def _not_in_mesh(self, rule: NameRule, missing: str) -> None:
        known = ", ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items())
        kept = tuple(axis for axis in rule.mesh_axes if axis in self.mesh_shape)
        self._refuse(
            rule.logical_axis,
            "unknown",
            f"logical axis {rule.logical_axis!r} names mesh axes, and the mesh ({known}) has no "
            f"{missing!r}. Say where it goes: rules={{{rule.logical_axis!r}: "
            f"{mesh_axes_text(kept)}}}.",
        )

    def _decide_unfit_names(self) -> None:
        """Names that have rules of which none fitted: a problem, or a recorded relaxation."""
        for i, name in enumerate(self.names):
            if name is None or i in self.decided:
                continue
            rules = [rule for rule in self.rules if isinstance(rule, NameRule)]
            candidates = [rule for rule in rules if self._length(i, rule) is not None]
            if not candidates:
                of_parts = [r for r in rules if r.logical_axis in factors_of(name) and r.mesh_axes]
                if of_parts:
                    self._leave_whole(i, of_parts[0])
                continue
            busy = [rule for rule in candidates if any(a in self.taken for a in rule.mesh_axes)]
            free = [rule for rule in candidates if rule not in busy]
            if len(busy) == len(candidates) and all(rule.yields for rule in busy):
                self._decide(i, (), busy[0], f"{busy[0]} yields: {self._holders(busy[0])}")
            elif self.on_indivisible == "pad" and free:
                self._indivisible(i, free[0])
            elif len(candidates) == 1:
                if busy:
                    self._asked_twice(i, candidates[0])
                else:
                    self._indivisible(i, candidates[0])
            else:
                self._none_fits(i, candidates, busy)

    def _holders(self, rule: NameRule) -> str:
        return " and ".join(
            f"{axis!r} is taken by logical axis {self.taken[axis].logical_axis!r}"
            for axis in rule.mesh_axes
            if axis in self.taken
        )

    def _indivisible(self, i: int, rule: NameRule) -> None:
        name, size = self.names[i], self.sizes[i]
        length = self._length(i, rule)
        assert length is not None
        what = f"{rule.logical_axis!r} ({length})"
        if rule.logical_axis != name:
            what += f" of {name!r} ({size})"
        parts = part_count(rule.mesh_axes, self.mesh_shape)
        over = sized_mesh_axes_text(rule.mesh_axes, self.mesh_shape)
        if self.on_indivisible == "replicate":
            reason = f"{what} replicated: does not divide over {over}, rule {rule}"
            self._decide(i, (), rule, reason)
            return
        if self.on_indivisible == "pad":
            # Compilers split the true length into equal parts, and so is the dimension stored.
            stored = padded_length(size, parts)
            reason = f"{what} padded to {stored} over {over}, rule {rule}"
            if rule.logical_axis != name:
                reason = (
                    f"{what} does not divide over {over}: equal parts of {stored // parts} cut "
                    f"through it, rule {rule}"
                )
            self._decide(i, rule.mesh_axes, rule, reason, stored)
            return
        self._refuse(
            name,
            "indivisible",
            f"logical axis {what} does not divide over {over}, asked by rule {rule}. "
            f"Pad it to {padded_length(length, parts)}, or map {name!r} to None.{PADDING_FIX}",
        )

    def _asked_twice(self, i: int, rule: NameRule) -> None:
        mesh_axis = next(a for a in rule.mesh_axes if a in self.taken)
        other = self.taken[mesh_axis]
        name, size = self.names[i], self.sizes[i]
        self._refuse(
            name,
            "doubled",
            f"mesh axis {mesh_axis!r} ({self.mesh_shape[mesh_axis]}) is asked for twice: "
            f"by logical axis {other.logical_axis!r} ({other.size}), rule {other.rule}, and "
            f"by logical axis {name!r} ({size}), rule {rule}. "
            f"Map one of them to another mesh axis, or map {name!r} to None.",
        )

    def _none_fits(self, i: int, candidates: list[NameRule], busy: list[NameRule]) -> None:
        name, size = self.names[i], self.sizes[i]
        reasons = "; ".join(
            f"rule {rule}: "
            + (
                self._holders(rule)
                if rule in busy
                else f"does not divide over {sized_mesh_axes_text(rule.mesh_axes, self.mesh_shape)}"
            )
            for rule in candidates
        )
        if self.on_indivisible == "replicate" and len(busy) < len(candidates):
            self._decide(i, (), candidates[0], f"{name!r} ({size}) replicated: {reasons}")
            return
        self._refuse(
            name,
            "doubled" if len(busy) == len(candidates) else "indivisible",
            f"logical axis {name!r} ({size}) fits none of its rules: {reasons}. "
            f"Add ({name!r}, None) as the last of them to leave it unsharded."
            + (PADDING_FIX if len(busy) < len(candidates) else ""),
        )

    def _apply_largest(self, rule: LargestDimensionRule) -> None:
        over = sized_mesh_axes_text(rule.mesh_axes, self.mesh_shape)
        taken = [a for a in rule.mesh_axes if a in self.taken]
        if math.prod(self.sizes) < rule.min_size or taken:
            # That all of them are taken is said by the rules that took them.
            if self.sizes and len(taken) < len(rule.mesh_axes):
                why = (
                    f"{mesh_axes_text(tuple(taken))} taken"
                    if taken
                    else f"under {rule.min_size} elements"
                )
                self.notes.append(f"{why}, not split over {mesh_axes_text(rule.mesh_axes)}")
            return
        if self.is_unnamed and not math.prod(self.sizes):
            self.notes.append("no elements")
            return
        # Names say what a dimension is; where some have one, a positional one is left alone.
        free = [
            i
            for i, name in enumerate(self.names)
            if (name is not None or self.is_unnamed) and i not in self.decided
        ]
        dividing = [i for i in free if self._divides(self.sizes[i], rule.mesh_axes)]
        pads = self.on_indivisible == "pad" and not self.is_unnamed
        if not dividing and not (pads and free):
            self.notes.append(f"no free dimension divides over {over}")
            return
        # max keeps the first of equals, so the choice does not depend on anything but the array.
        i = max(dividing or free, key=lambda j: self.sizes[j])
        size = self.sizes[i]
        what = f"dimension {i} ({size})" if self.is_unnamed else repr(self.names[i])
        if dividing:
            reason = f"{what} -> {mesh_axes_text(rule.mesh_axes)} (largest free)"
            self._decide(i, rule.mesh_axes, rule, reason)
            return
        parts = part_count(rule.mesh_axes, self.mesh_shape)
        padded = padded_length(size, parts)
        reason = f"{what} ({size}) padded to {padded} over {over} (largest free)"
        self._decide(i, rule.mesh_axes, rule, reason, padded)
