"""Follows by name how what flows through a model is split, and finds what its layers ask in vain.

Nothing is propagated. The compiler keeps the layout of a logical axis where nothing says otherwise:
operations on elements keep that of their operands, and a product keeps that of the axes which it
does not sum over. So the layout of each logical axis is the last one that something asked for, in
the order of calls: first the batch, by its placement or by the rules; then each layer that pins
what flows into it or out of it. Of an array that is pinned by name, all other axes are whole from
there on. A parameter lies as the plan says, or as a ``GatherParameters`` around its layer does.
Where one mesh axis splits a parameter along one logical axis, and what flows into its layer along
another, no device can compute its part: one of the two moves in every step, in a *conflict*, unless
the batch is pinned, so that it is the parameter that moves, as in fully sharded training.
"""

import itertools
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.arrays.inputs import bound_sharding
from penzai_shard.arrays.structure import Leaf, leaves_of
from penzai_shard.errors import ShardingError
from penzai_shard.findings.rules import SEQUENCE_AXES, find_near_names
from penzai_shard.findings.set_up import Finding, SetUp, split_axes, table_of
from penzai_shard.findings.walk import Call, Walk, leaf_text, trace_call
from penzai_shard.inspection.layer_marks import is_layer, without_marked
from penzai_shard.layers import constraints
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layers.shard_mapped import ShardMapped
from penzai_shard.meshes import mesh_text, same_devices
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.rules import AxisRules, Decision, Rule
from penzai_shard.surgery.edits import find_matches
from penzai_shard.surgery.inserted import CONSTRAINTS
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


def follow_flows(set_up: SetUp, batch: Any) -> Flows:
    """Looks at the layers of a model that lay out and, with a batch, at what flows through it.

    Args:
        set_up: What is looked at.
        batch: As for ``lint``.
    """
    model = set_up.model.model if isinstance(set_up.model, TrainState) else set_up.model
    findings: list[Finding] = []
    is_laid_out = bool(find_matches(model, _LAYING_OUT))
    if set_up.layout is not None and not (is_laid_out or set_up.problems):
        try:
            with warnings.catch_warnings(action="ignore"):
                model = set_up.layout.recipe(model, set_up.mesh).apply(model)
        except ShardingError as error:
            findings += [Finding("layout", x.what, x.fix, "misfit") for x in error.problems]
    matches = find_matches(model, _LAYING_OUT, "inner first")
    by_path = [(match.path, pin) for match in matches for pin in _pins(match.before)]
    pins = [pin for _, pin in by_path]
    by_position = [pin for pin in pins if pin.side == "position"]
    names = {x for pin in pins if pin not in by_position for x in pin.rules.logical_axes}
    used = {axis for pin in pins for rule in pin.rules.rules for axis in rule.mesh_axes}

    if is_laid_out:
        findings += _find_other_meshes(set_up.mesh, by_path)
    if batch is None or not is_layer(model):
        why = "no batch was given" if batch is None else "it is no layer of Penzai"
        notes = [f"what flows through the model was not looked at: {why}"]
        return Flows(findings, names, used, notes)

    walk, notes = Walk(), list[str]()
    failures = list(walk.follow(model, batch))
    if failures and trace_call(model, batch) is None:
        notes.append(f"what flows was not followed to the end, as {failures[0].what}")
        failures = []
    arrays = list(_read_batch(set_up, batch))
    follower = _Follower(set_up, arrays, is_laid_out)
    follower.follow(walk)
    used |= follower.used
    findings += [*follower.findings, *_find_whole_batches(set_up, arrays, used), *failures]
    if by_position:
        notes.append(f"conflicts were not looked for: {by_position[0].kind} pins by position")
    else:
        findings += follower.find_conflicts()
    names |= walk.names
    walk.events.clear()  # JAX keeps the marks in what it has traced, and so the walk.
    return Flows(findings, names, used, notes)


# Layers that lay out


class _Pin(NamedTuple):
    """What a layer lays out, and on which side of it.

    Attributes:
        kind: The type of the layer.
        mesh: The mesh.
        side: Its ``"inputs"``, ``"outputs"`` or ``"parameters"``; ``"position"`` where rules are
            for the numbers of dimensions.
        rules: The rules.
    """

    kind: str
    mesh: Any
    side: str
    rules: AxisRules


def _split_by(rules: AxisRules, leaf: Any, mesh: Any) -> _Split:
    """How rules split an array, as far as they fit it."""
    return split_axes(leaf.names, rules.explain(leaf.names, leaf.shape, mesh).spec, mesh)


def _pins(layer: Any) -> Iterator[_Pin]:
    kind = type(layer).__name__
    match layer:
        case constraints.ConstrainShardingByName(mesh=mesh, axis_name_to_mesh_name=rules):
            yield _Pin(kind, mesh, "inputs", rules)
        case constraints.ConstrainSharding(sharding=NamedSharding() as sharding):
            is_open = PartitionSpec.UNCONSTRAINED
            given = {i: over for i, over in enumerate(sharding.spec) if over not in (None, is_open)}
            yield _Pin(kind, sharding.mesh, "position", AxisRules(given))
        case constraints.ConstrainActivations(mesh=mesh):
            yield from (_Pin(kind, mesh, "inputs", rules) for rules in layer.inputs)
            yield from (_Pin(kind, mesh, "outputs", rules) for rules in layer.outputs)
        case GatherParameters(mesh=mesh, rules=rules):
            yield _Pin(kind, mesh, "parameters", rules)
        case ShardMapped(mesh=mesh):
            yield _Pin(kind, mesh, "parameters", layer.parameter_rules)
            yield _Pin(kind, mesh, "inputs", layer.activation_rules)


def _find_other_meshes(mesh: Any, by_path: Iterable[tuple[str, _Pin]]) -> Iterator[Finding]:
    """Layers for another mesh than that of the model."""
    for path, pin in by_path:
        if not same_devices(pin.mesh, mesh):
            what = f"this {pin.kind} is for the mesh ({mesh_text(pin.mesh)}), and the model is "
            fix = f"Write mesh=make_mesh({dict(mesh.shape)})."
            yield Finding(path, f"{what}laid over ({mesh_text(mesh)})", fix, "other mesh")


def _find_idle(pin: _Pin, path: str, present: set[Any], known: set[Hashable]) -> Iterator[Finding]:
    """Rules of a layer that split what is not there, and is known nowhere else, or all that do."""
    near = find_near_names(pin.rules, present)
    there = {*present} if present.isdisjoint(pin.rules.logical_axes) else {*present, *known}
    names = ", ".join(map(repr, sorted(present - {None}, key=str)))
    for rule in pin.rules.rules if names else ():
        is_of_preset = rule != Rule(rule.logical_axis, rule.mesh_axes)
        if rule.mesh_axes and not is_of_preset and rule.logical_axis not in there:
            what = f"rule {rule} of this {pin.kind} names no logical axis of what flows through "
            fix = f"Write {near[rule]!r} in place of {rule.logical_axis!r}." if rule in near else ""
            yield Finding(path, f"{what}it, which are {names}", fix, "idle constraint")


# The batch


class _BatchArray(NamedTuple):
    """A named array of the batch.

    Attributes:
        leaf: The array.
        counting: The logical axis that counts examples, if one seems to.
        split: How it lies.
        decision: What the rules say of it; None if it is placed already.
    """

    leaf: Leaf
    counting: Hashable | None
    split: _Split
    decision: Decision | None


def _read_batch(set_up: SetUp, batch: Any) -> Iterator[_BatchArray]:
    known, mesh = set_up.logical_axes, set_up.mesh
    role = "batch" if set_up.layout is None else set_up.layout.names.get("batch", "batch")
    for leaf in leaves_of({"batch": batch}):
        names = leaf.names or ()
        # What counts examples no parameter has, and results do not depend on one another.
        others = [name for name in names if name not in known | SEQUENCE_AXES | {None}]
        counting = role if role in names else next(iter(others), None)
        own, decision = bound_sharding(leaf.value), None
        if isinstance(own, NamedSharding) and same_devices(own.mesh, mesh):
            spec = own.spec
        else:
            # By axes that parameters have, batches are not split.
            plain = [None if name in known else name for name in names] if names else None
            # Nor is it meant to be split along its largest dimension, which may be the sequence.
            rules = set_up.tables[set_up.of_activations].rules
            named = AxisRules([r for r in rules if r.logical_axis is not None or not r.mesh_axes])
            mode = set_up.request.on_indivisible
            decision = named.explain(plain, leaf.shape, mesh, on_indivisible=mode)
            spec = decision.spec
        if names:
            split = split_axes(names, spec, mesh)
            yield _BatchArray(leaf, counting, split, decision)


def _find_whole_batches(
    set_up: SetUp, arrays: Sequence[_BatchArray], used: set[str]
) -> Iterator[Finding]:
    """What of the batch does not divide, and batches of which every device computes all."""
    for array in arrays:
        for own in array.decision.problems if array.decision else ():
            what = f"of {leaf_text(array.leaf)}, {own.what}"
            yield Finding(array.leaf.path, what, own.fix, own.kind)

    table, sizes = set_up.of_activations, set_up.mesh.shape
    # Along a mesh axis of which parameters are only gathered, devices are to compute examples.
    rules = [rule for own in set_up.tables.values() for rule in own.rules]
    by_name = {x for rule in rules if rule.logical_axis is not None for x in rule.mesh_axes}
    gathered = {x for rule in rules for x in rule.mesh_axes} - by_name
    taken = used | (set_up.stored_axes - gathered)
    is_asked = any(rules.rules for rules in set_up.given.values())
    for array in arrays if is_asked else ():
        name, names = array.counting, array.leaf.names or ()
        is_ruled = array.decision is not None and name in set_up.tables[table].logical_axes
        if name is None or is_ruled or name in array.split:
            continue
        length = array.leaf.shape[names.index(name)]
        free = [x for x, n in sizes.items() if n > 1 and x not in taken and length % n == 0]
        free.sort(key=lambda x: x not in gathered)
        if free:
            why = "has no rule" if array.decision else "is placed whole"
            what = f"{name!r} of {leaf_text(array.leaf)} {why}: each device computes all of it, "
            what += f"and nothing that flows is split over mesh axis {free[0]!r}"
            changed = AxisRules({name: free[0]}) | set_up.given[table]
            fix = set_up.offer(table, changed) if array.decision else ""
            yield Finding(array.leaf.path, what, fix, "whole batch")


# Following


class _Follower:
    """Follows how what flows is split.

    Attributes:
        findings: What layers ask in vain.
        used: The mesh axes that split something that flows.
    """

    def __init__(self, set_up: SetUp, arrays: Sequence[_BatchArray], is_laid_out: bool) -> None:
        self.set_up, self.mesh = set_up, set_up.mesh
        self.is_laid_out = is_laid_out
        self.findings: list[Finding] = []
        self.used: set[str] = set()
        self._counting = {array.counting for array in arrays}
        # By logical axis and length the mesh axes that were last asked for.
        self._split: dict[tuple[Hashable, int], tuple[str, ...]] = {}
        self._pinned: set[tuple[Hashable, str]] = set()
        # By mesh axis, logical axis of parameters and that of what flows.
        self._meetings: dict[tuple[str, Hashable, Hashable], dict[str, tuple[Call, LeafPlan]]] = {}
        self._rows = {row.path.removeprefix("params/"): row for row in set_up.rows}
        for array in arrays:
            self._note(array.leaf, array.split)

    def _note(self, leaf: Leaf, split: _Split) -> None:
        """Notes how an array, and what is computed of it, lies."""
        for name, length in zip(leaf.names or (), leaf.shape, strict=False):
            self._split[name, length] = split.get(name, ())
        self.used.update(axis for axes in split.values() for axis in axes)

    def follow(self, walk: Walk) -> None:
        """Goes through the calls in their order."""
        known = {*self.set_up.logical_axes, *walk.names}
        for call, side in walk.events:
            for pin in _pins(call.layer):
                if pin.side == side and same_devices(pin.mesh, self.mesh):
                    self._pin(call, pin, known)
            if side == "inputs":
                self._meet(call)

    def _pin(self, call: Call, pin: _Pin, known: set[Hashable]) -> None:
        leaves = call.inputs if pin.side == "inputs" else call.outputs
        present = {name for leaf in leaves for name in leaf.names or ()}
        if self.is_laid_out:
            self.findings += _find_idle(pin, call.place, present, known)
        for leaf in leaves:
            split = _split_by(pin.rules, leaf, self.mesh)
            new = {name: axes for name, axes in split.items() if call.manual.isdisjoint(axes)}
            self._note(leaf, new)
            self._pinned |= {(name, axis) for name, axes in new.items() for axis in axes}

    # Conflicts

    def _meet(self, call: Call) -> None:
        """Notes parameters that one mesh axis splits otherwise than what flows into their layer."""
        flowing = []
        for leaf in call.inputs:
            for key in zip(leaf.names or (), leaf.shape, strict=False):
                axes = self._split.get(key, ())
                flowing += [(axis, key[0]) for axis in axes if axis not in call.manual]
        gathers = [layer for layer in call.layers if isinstance(layer, GatherParameters)]
        for held in leaves_of(without_marked(call.layer)) if flowing else ():
            row = self._rows.get(held.path)
            if row is None or row.names is None:
                continue
            stored: _Split = self.set_up.split(row)
            if gathers:
                stored = _split_by(gathers[-1].rules, row, self.mesh)
            # Of what a preset splits, the compiler gathers parameters. Layers in a stack hold a
            # slice, without the axis of the stack.
            tables = self.set_up.tables
            ruled = tables[table_of(row.path, tables)].logical_axes
            names = {*ruled}.intersection(held.names or ())
            for axis, other in flowing:
                own = [name for name in names if axis in stored.get(name, ())]
                for name in own if other not in own else ():
                    meetings = self._meetings.setdefault((axis, name, other), {})
                    meetings.setdefault(row.path, (call, row))

    def find_conflicts(self) -> Iterator[Finding]:
        """Meetings of which nothing says that it is the parameter that moves."""
        for (axis, name, other), meetings in self._meetings.items():
            is_batch = other in self._counting
            if is_batch and (other, axis) in self._pinned:
                continue
            moved = bytes_text(sum(row.total_bytes for _, row in meetings.values()))
            what = (
                f"mesh axis {axis!r} splits {name!r} of a parameter, and {other!r} of what flows "
                f"into its layer: in every step the compiler gathers {moved} of parameters, or more"
            )
            fix = f"Split {name!r} or {other!r} over another mesh axis."
            if is_batch:
                kinds = [*dict.fromkeys(_block_of(call) for call, _ in meetings.values())]
                place = kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
                pin = f"constrain_blocks({place}, mesh, {{{other!r}: {axis!r}}})"
                fix = f"Write model={pin}.apply(model)."
            for _, row in meetings.values():
                yield Finding(row.path, what, fix, "conflict")


def _block_of(call: Call) -> str:
    """The type of the layer in a model's outermost sequence that a call is in."""
    pairs = itertools.pairwise(call.layers)
    blocks = (inner for around, inner in pairs if len(getattr(around, "sublayers", ())) > 1)
    kind = type(next(blocks, call.layer)).__name__
    return f"pz.nn.{kind}" if hasattr(pz.nn, kind) else kind
