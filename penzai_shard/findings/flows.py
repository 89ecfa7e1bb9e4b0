"""Follows by name how what flows through a model is split, and finds what its layers ask in vain.

Nothing is propagated. The compiler keeps the layout of a logical axis where nothing says otherwise:
operations on elements keep that of their operands, and a product keeps that of the axes which it
does not sum over. So the layout of each logical axis is the last one that something asked for, in
the order of calls: first the batch, by its placement or by the rules; then each layer that pins
what flows into it or out of it. Of an array that is pinned by name, all other axes are whole from
there on. A parameter lies as the plan says, or as a ``GatherParameters`` around its layer does.
Where one mesh axis splits a parameter along one logical axis, and what flows into its layer along
another, no device can compute its part: one of the two moves in every step, in a *conflict*, unless
the flow is pinned, so that it is the parameter that moves, as in fully sharded training.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.arrays.inputs import bound_sharding
from penzai_shard.arrays.structure import Leaf, leaves_of
from penzai_shard.errors import ShardingError
from penzai_shard.findings.rules import SEQUENCE_AXES, find_near_names
from penzai_shard.findings.subject import Finding, Subject, split_axes
from penzai_shard.findings.walk import Call, Recorded, Walk, leaf_text, row_of, trace
from penzai_shard.inspection.layer_marks import is_layer
from penzai_shard.layers import constraints
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layers.shard_mapped import ShardMapped
from penzai_shard.meshes import mesh_text, same_devices
from penzai_shard.paths import join_paths
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.rules import AxisRules, Rule
from penzai_shard.surgery.edits import find_matches
from penzai_shard.surgery.inserted import CONSTRAINTS
from penzai_shard.surgery.rewriting import Match
from penzai_shard.training.train_state import TrainState

_LAYING_OUT = (*CONSTRAINTS, constraints.ConstrainActivations, GatherParameters, ShardMapped)
_Split = Mapping[Hashable, tuple[str, ...]]


class Flows(NamedTuple):
    """What was found in what flows.

    Attributes:
        findings: The findings.
        logical_axes: The logical axes that something that flows has, or that a layer pins.
        mesh_axes: The mesh axes that split something that flows.
        notes: What was not looked at.
    """

    findings: list[Finding]
    logical_axes: set[Hashable]
    mesh_axes: set[str]
    notes: list[str]


def follow_flows(subject: Subject, batch: Any, min_bytes: int) -> Flows:
    """Looks at the layers of a model that lay out and, with a batch, at what flows through it.

    Args:
        subject: What is looked at.
        batch: As for ``lint``.
        min_bytes: Of which size a looked-up activation is worth a finding.
    """
    model = subject.model.model if isinstance(subject.model, TrainState) else subject.model
    findings: list[Finding] = []
    is_laid_out = bool(find_matches(model, _LAYING_OUT))
    if subject.layout is not None and not (is_laid_out or subject.problems):
        try:
            with warnings.catch_warnings(action="ignore"):
                model = subject.layout.recipe(model, subject.mesh).apply(model)
        except ShardingError as error:
            findings += [Finding("misfit", "layout", x.what, x.fix) for x in error.problems]
    matches = find_matches(model, _LAYING_OUT, "inner first")
    pins = [pin for match in matches for pin in _pins(match.before)]
    names = {name for pin in pins for name in pin.rules.logical_axes}
    used = {axis for pin in pins for axis in pin.mesh_axes}

    is_called = batch is not None and is_layer(model)
    if is_laid_out:
        findings += _check_layers(subject, matches)
    if not is_called:
        why = "no batch was given"
        if batch is not None:
            why = f"a {type(model).__name__} is no layer of Penzai that could be called with it"
        notes = [f"what flows through the model was not looked at: {why}"]
        return Flows(findings, names, used, notes)

    walk, notes = Walk(), []
    errors = list(trace(walk, model, batch))
    # Whether it can be called, with all that lays it out, the model says as it is.
    plain_errors = list(trace(None, model, batch)) if errors or matches else []
    if errors and not plain_errors:
        notes.append(f"what flows was not followed to the end, as {errors[0].what}")
    elif plain_errors and not errors:
        errors = list(trace(Walk(is_bare=False), model, batch))
    errors = plain_errors and (errors or plain_errors)
    follower = _Follower(subject, batch, min_bytes, is_laid_out)
    follower.follow(walk)
    findings += [*follower.findings, *follower.find_whole_batches(used), *errors]
    findings += follower.find_conflicts()
    return Flows(findings, names | walk.names, used | follower.used, notes)


# Layers that lay out


class _Pin(NamedTuple):
    """What a layer lays out, on which side of it: ``side`` is also "parameters" or "region".

    A sharding is one by position, and has no rules.
    """

    kind: str
    mesh: Any
    side: str
    rules: AxisRules
    sharding: NamedSharding | None = None

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes that it splits over."""
        spec = tuple(self.sharding.spec) if self.sharding else ()
        entries = [*spec, *(rule.mesh_axes for rule in self.rules.rules)]
        return frozenset(axis for axis in jax.tree.leaves(entries) if isinstance(axis, str))

    def split(self, leaf: Leaf, mesh: Any) -> _Split:
        """How an array lies."""
        if self.sharding is None:
            return _split_by(self.rules, leaf, mesh)
        is_open = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(None if x is is_open else x for x in self.sharding.spec))
        return split_axes(leaf.names, spec, mesh)


def _split_by(rules: AxisRules, leaf: Any, mesh: Any) -> _Split:
    """How rules split an array, as far as they fit it."""
    if leaf.names is None:
        return {}
    return split_axes(leaf.names, rules.explain(leaf.names, leaf.shape, mesh).spec, mesh)


def _pins(layer: Any) -> Iterator[_Pin]:
    kind = type(layer).__name__
    match layer:
        case constraints.ConstrainShardingByName(mesh=mesh, axis_name_to_mesh_name=rules):
            yield _Pin(kind, mesh, "inputs", rules)
        case constraints.ConstrainSharding(sharding=NamedSharding() as sharding):
            yield _Pin(kind, sharding.mesh, "inputs", AxisRules({}), sharding)
        case constraints.ConstrainActivations(mesh=mesh):
            yield from (_Pin(kind, mesh, "inputs", rules) for rules in layer.inputs)
            yield from (_Pin(kind, mesh, "outputs", rules) for rules in layer.outputs)
        case GatherParameters(mesh=mesh, rules=rules):
            yield _Pin(kind, mesh, "parameters", rules)
        case ShardMapped(mesh=mesh):
            yield _Pin(kind, mesh, "parameters", layer.parameter_rules)
            yield _Pin(kind, mesh, "region", layer.activation_rules)


def _check_layers(subject: Subject, matches: Sequence[Match]) -> Iterator[Finding]:
    """Layers for another mesh, those that split over one device, and rules for no parameter."""
    mesh = subject.mesh
    for match in matches:
        layer, path = match.before, match.path
        for pin in _pins(layer):
            say = f"this {pin.kind}"
            if not same_devices(pin.mesh, mesh):
                what = f"{say} is for the mesh ({mesh_text(pin.mesh)}), and the model is laid over "
                fix = f"Write mesh=make_mesh({dict(mesh.shape)})."
                yield Finding("other mesh", path, f"{what}({mesh_text(mesh)})", fix)
                break
            if pin.mesh_axes and mesh.size > 1 and all(mesh.shape[x] == 1 for x in pin.mesh_axes):
                what = f"{say} splits over {sorted(pin.mesh_axes)}, of one device on the mesh"
                yield Finding("idle constraint", path, f"{what} ({mesh_text(mesh)})")
            if pin.side == "parameters":
                names = {name for leaf in leaves_of(layer.body) for name in leaf.names or ()}
                yield from _find_idle(pin, path, names, "the parameters in it")


def _find_idle(
    pin: _Pin,
    path: str,
    present: set[Hashable | None],
    where: str,
    known: Collection[Hashable] = (),
) -> Iterator[Finding]:
    """Rules of a layer that split what is not there, and is known nowhere else, or all that do."""
    near, kind = find_near_names(pin.rules, present), pin.kind
    is_idle = present.isdisjoint(pin.rules.logical_axes)
    names = ", ".join(map(repr, sorted(present - {None}, key=str)))
    for rule in pin.rules.rules if names else ():
        is_plain = rule == Rule(rule.logical_axis, rule.mesh_axes)
        is_unknown = rule.logical_axis not in ({*present} if is_idle else {*present, *known})
        if is_plain and is_unknown and rule.mesh_axes:
            what = f"rule {rule} of this {kind} names no logical axis of {where}, which are {names}"
            fix = f"Write {near[rule]!r} in place of {rule.logical_axis!r}." if rule in near else ""
            yield Finding("idle constraint", path, what, fix)


# Following


class _Meeting(NamedTuple):
    """A parameter, and what flows into its layer split over the same mesh axis."""

    call: Call
    leaf: Leaf
    row: LeafPlan
    source: str


class _Follower:
    """Follows how what flows is split.

    Attributes:
        findings: What layers ask in vain.
        used: The mesh axes that split something that flows.
    """

    def __init__(self, subject: Subject, batch: Any, min_bytes: int, is_laid_out: bool) -> None:
        self.subject, self.mesh = subject, subject.mesh
        self.min_bytes, self.is_laid_out = min_bytes, is_laid_out
        self.rules = subject.tables[subject.of_activations]
        self.findings: list[Finding] = []
        self.used: set[str] = set()
        # By logical axis its length, mesh axes, and who asked for them.
        self._split: dict[Hashable, tuple[int, tuple[str, ...], str]] = {}
        self._pinned: set[tuple[Hashable, str]] = set()
        # By the value that comes out of a constraint what it asks for.
        self._after: dict[int, _Split] = {}
        self._meetings: dict[tuple[str, Hashable, Hashable], dict[str, _Meeting]] = {}
        self._rows = {row.path.removeprefix("params/"): row for row in subject.rows}
        self._known: Collection[Hashable] = ()
        self._batch = [leaf for leaf in leaves_of(batch) if leaf.names]
        # What counts examples: no parameter has it, and results do not depend on one another.
        role = "batch" if subject.layout is None else subject.layout.names.get("batch", "batch")
        known = subject.logical_axes | SEQUENCE_AXES | {None}
        self._counting: dict[str, Hashable] = {}
        for leaf in self._batch:
            names = leaf.names or ()
            others = [name for name in names if name not in known]
            self._counting[leaf.path] = role if role in names else next(iter(others), None)
            for name, axes in self._split_of_batch(leaf).items():
                self._split[name] = leaf.shape[names.index(name)], axes, "batch"
                self.used.update(axes)

    def _split_of_batch(self, leaf: Leaf) -> _Split:
        """How an array of the batch lies: as it is placed, or by the rules."""
        own = bound_sharding(leaf.value)
        if isinstance(own, NamedSharding) and same_devices(own.mesh, self.mesh):
            return split_axes(leaf.names, own.spec, self.mesh)
        return _split_by(self.rules, self._without_model_axes(leaf), self.mesh)

    def _without_model_axes(self, leaf: Leaf) -> Leaf:
        """An array of the batch without names that parameters have: batches are not split by it."""
        known = self.subject.logical_axes
        names = tuple(None if name in known else name for name in leaf.names or ())
        return dataclasses.replace(leaf, names=names)

    def follow(self, walk: Walk) -> None:
        """Goes through the calls in their order."""
        self._known = self.subject.logical_axes | walk.names
        for call, side in walk.events:
            for pin in _pins(call.layer):
                if same_devices(pin.mesh, self.mesh):
                    self._pin(call, pin, side)
            if side == "inputs":
                self._meet(call)

    def _pin(self, call: Call, pin: _Pin, side: str) -> None:
        leaves = call.inputs if side == "inputs" else call.outputs
        is_region = pin.side == "region" and side == "inputs"
        if pin.side != side and not is_region:
            return
        present = {name for leaf in leaves for name in leaf.names or ()}
        if self.is_laid_out:
            where = "what flows through it"
            self.findings += _find_idle(pin, call.place, present, where, self._known)
        if is_region:
            return
        if pin.mesh_axes and pin.mesh_axes <= call.manual:
            what = f"it is in a region that runs per device along {sorted(pin.mesh_axes)}, where "
            self._add("idle constraint", call, f"{what}it pins nothing", "Leave it out.")
            return
        for number, leaf in enumerate(leaves):
            split = pin.split(leaf, self.mesh)
            new = {name: axes for name, axes in split.items() if call.manual.isdisjoint(axes)}
            if isinstance(call.layer, CONSTRAINTS):
                self._compare_with_previous(call, leaf, new)
                for output in call.outputs[number : number + 1]:
                    self._after[id(output.value)] = new
            self.used.update(axis for axes in new.values() for axis in axes)
            for name, length in zip(leaf.names or (), leaf.shape, strict=False):
                self._split.pop(name, None)
                if name in new:
                    self._split[name] = length, new[name], "constraint"
                    self._pinned |= {(name, axis) for axis in new[name]}

    def _compare_with_previous(self, call: Call, leaf: Leaf, new: _Split) -> None:
        """Finds a constraint that follows another directly, and does nothing or undoes that."""
        old = self._after.get(id(leaf.value))
        if not old or not self.is_laid_out:
            return
        if old == new:
            what = "it directly follows a constraint that pins the same"
            self._add("idle constraint", call, what, "Leave it out.")
        # To gather what was split, or to split more, undoes nothing.
        keeps = all(new.get(name, ())[: len(axes)] == axes for name, axes in old.items())
        gathers = all(old.get(name, ())[: len(axes)] == axes for name, axes in new.items())
        if not keeps and not gathers:
            what = f"it directly follows a constraint by {old}, which it undoes by {new}"
            self._add("contradiction", call, what)

    def _add(self, kind: str, call: Call, what: str, fix: str = "") -> None:
        self.findings.append(Finding(kind, call.place, what, fix))

    # Conflicts

    def _meet(self, call: Call) -> None:
        """Notes parameters that one mesh axis splits otherwise than what flows into their layer."""
        own = jax.tree.map(
            lambda node: None if type(node) is Recorded else node,
            call.layer,
            is_leaf=lambda node: type(node) is Recorded,
        )
        gathers = [x.layer for x in call.chain if isinstance(x.layer, GatherParameters)]
        for held in leaves_of(own):
            row = self._rows.get(held.path)
            if row is None or row.names is None or held.names is None:
                continue
            stored: _Split = self.subject.split(row)
            if gathers:
                stored = _split_by(gathers[-1].rules, row, self.mesh)
            # Layers in a stack hold a slice, without the axis of the stack.
            stored = {name: axes for name, axes in stored.items() if name in held.names}
            for leaf in call.inputs:
                sizes = dict(zip(leaf.names or (), leaf.shape, strict=False))
                for other, (size, over, source) in self._split.items():
                    for name, axes in stored.items() if sizes.get(other) == size else ():
                        for axis in (x for x in axes if x in over and x not in call.manual):
                            key, meeting = (axis, name, other), _Meeting(call, leaf, row, source)
                            if name != other:
                                self._meetings.setdefault(key, {}).setdefault(row.path, meeting)

    def find_conflicts(self) -> Iterator[Finding]:
        """Meetings of which nothing says that it is the parameter that moves."""
        for (axis, name, other), meetings in self._meetings.items():
            kept = [x for x in meetings.values() if self._is_undecided(x, axis, name, other)]
            moved = bytes_text(sum(x.row.total_bytes for x in kept))
            what = (
                f"mesh axis {axis!r} splits {name!r} of a parameter, and {other!r} of what flows "
                f"into its layer: in every step the compiler gathers {moved} of parameters, or more"
            )
            fix = f"Split {name!r} or {other!r} over another mesh axis."
            if other in self._counting.values():
                kinds = [*dict.fromkeys(_block_of(x.call) for x in kept)]
                place = kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
                pin = f"constrain_blocks({place}, mesh, {{{other!r}: {axis!r}}})"
                fix = f"Write model={pin}.apply(model)."
            for meeting in kept:
                yield Finding("conflict", meeting.row.path, what, fix)

    def _is_undecided(self, meeting: _Meeting, axis: str, name: Hashable, other: Hashable) -> bool:
        if meeting.source == "constraint":
            return other not in self._counting.values()
        if (other, axis) in self._pinned:
            return False
        rules = self.subject.tables[self.subject.table_of(meeting.row.path)].rules
        if any(rule.logical_axis == name and rule.mesh_axes for rule in rules):
            return True
        # A preset gathers parameters, but a lookup of a split table sums what is looked up.
        outputs = [row_of(leaf) for leaf in meeting.call.outputs if name in (leaf.names or ())]
        is_lookup = jax.numpy.issubdtype(meeting.leaf.dtype, jax.numpy.integer)
        return is_lookup and any(row.total_bytes >= self.min_bytes for row in outputs)

    # The batch

    def find_whole_batches(self, pinned: set[str]) -> Iterator[Finding]:
        """What of the batch does not divide, and batches of which every device computes all."""
        subject, sizes = self.subject, self.mesh.shape
        taken = pinned.union(self.used, *map(subject.axes_of, subject.rows))
        for table in subject.tables.values():
            taken.update(x for r in table.rules if r.logical_axis is None for x in r.mesh_axes)
        free = [axis for axis, size in sizes.items() if size > 1 and axis not in taken]
        is_asked = any(table.rules for table in subject.given.values())
        for leaf in self._batch:
            path, name = join_paths("batch", leaf.path), self._counting[leaf.path]
            names = leaf.names or ()
            is_placed = isinstance(bound_sharding(leaf.value), NamedSharding)
            own_names, mode = self._without_model_axes(leaf).names, subject.request.on_indivisible
            decision = self.rules.explain(own_names, leaf.shape, self.mesh, on_indivisible=mode)
            for own in decision.problems if not is_placed else ():
                yield Finding(own.kind, path, f"of {leaf_text(leaf)}, {own.what}", own.fix)
            length = leaf.shape[names.index(name)] if name in names else 1
            fitting = [axis for axis in free if length % sizes[axis] == 0]
            is_ruled = name in self.rules.logical_axes and not is_placed
            is_split = name is None or is_ruled or name in self._split_of_batch(leaf)
            if is_split or not (fitting and is_asked):
                continue
            why = "is placed whole" if is_placed else "has no rule"
            what = f"{name!r} of {leaf_text(leaf)} {why}: each device computes all of it, and mesh "
            what += f"axis {fitting[0]!r} is free"
            changed = AxisRules({name: fitting[0]}) | subject.given[subject.of_activations]
            fix = "" if is_placed else subject.offer(subject.of_activations, changed)
            yield Finding("whole batch", path, what, fix)


def _block_of(call: Call) -> str:
    """The type of the layer in a model's outermost sequence that a call is in."""
    pairs = itertools.pairwise(call.chain)
    blocks = (inner for around, inner in pairs if len(getattr(around.layer, "sublayers", ())) > 1)
    kind = type(next(blocks, call).layer).__name__
    return f"pz.nn.{kind}" if hasattr(pz.nn, kind) else kind
