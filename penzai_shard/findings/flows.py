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
Layers that only lay out are passed by in this walk: one that fits nothing must not hide the rest.
"""

import dataclasses
import itertools
import re
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import specs
from penzai_shard.arrays.inputs import bound_sharding
from penzai_shard.arrays.kinds import is_array
from penzai_shard.arrays.steps import make_struct
from penzai_shard.arrays.structure import Leaf, flatten, leaves_of
from penzai_shard.errors import ShardingError
from penzai_shard.findings.rules import SEQUENCE_AXES, find_near_names
from penzai_shard.findings.subject import Finding, Subject, split_axes
from penzai_shard.inspection.layer_marks import Layers, is_layer
from penzai_shard.layers.axis_order import KeepAxisOrder
from penzai_shard.layers.constraints import (
    ConstrainActivations,
    ConstrainSharding,
    ConstrainShardingByName,
)
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layers.jitted import Jitted
from penzai_shard.layers.manual import manual_axes
from penzai_shard.layers.pure_call import PureCall, read_settings
from penzai_shard.layers.remat import Checkpointed
from penzai_shard.layers.shard_mapped import ShardMapped
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import auto_context, mesh_text, same_devices
from penzai_shard.paths import join_paths
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.rules import AxisRules, Rule
from penzai_shard.surgery.edits import find_matches
from penzai_shard.training.train_state import TrainState

_PINNING = (ConstrainSharding, ConstrainShardingByName)
_LAYING_OUT = (*_PINNING, ConstrainActivations, GatherParameters, ShardMapped)
# Their bodies compute the same without them.
_PASSED_BY = (Checkpointed, GatherParameters, Jitted, KeepAxisOrder)
_Split = Mapping[Hashable, tuple[str, ...]]


class Flows(NamedTuple):
    """What was found in what flows.

    Attributes:
        findings: The findings.
        logical_axes: The logical axes that something that flows has, or that a layer pins.
        mesh_axes: The mesh axes that split something that flows.
        notes: What was not looked at.
        model: The model that can be called with the batch; None if there is none.
    """

    findings: list[Finding]
    logical_axes: frozenset[Hashable]
    mesh_axes: set[str]
    notes: list[str]
    model: Any = None


def follow_flows(subject: Subject) -> Flows:
    """Looks at the layers of a model that lay out and, with a batch, at what flows through it."""
    model = subject.model.model if isinstance(subject.model, TrainState) else subject.model
    findings: list[Finding] = []
    is_laid_out = bool(find_matches(model, _LAYING_OUT))
    if subject.layout is not None and not (is_laid_out or subject.findings):
        model, findings = _edit(subject, model)
    pins = [
        pin
        for match in find_matches(model, _LAYING_OUT, "inner first")
        for pin in _pins(match.before)
    ]
    names = {name for pin in pins for name in pin.logical_axes}
    used = {axis for pin in pins for axis in pin.mesh_axes}
    walk, is_called = _Walk(), subject.batch is not None and is_layer(model)
    # Only what is used of it: of a large model the marks take longer than its plan.
    recorded = walk.record(model) if is_called or is_laid_out else None
    if is_laid_out:
        findings += _check_layers(subject, walk.layers)
    if not is_called:
        why = "no batch was given"
        if subject.batch is not None:
            why = f"a {type(model).__name__} is no layer of Penzai that could be called with it"
        notes = [f"what flows through the model was not looked at: {why}"]
        return Flows(findings, frozenset(names), used, notes)

    error = None
    try:
        _trace(recorded, subject.batch)
    except Exception as raised:  # A layer may fail in any way.
        error = raised
    follower = _Follower(subject, is_laid_out)
    follower.follow(walk)
    findings += follower.findings
    findings += follower.find_batch_findings(used)
    findings += follower.find_conflicts()
    if error is not None:
        findings.append(_say_uncallable(subject, walk.failed, error))
    flowing = {name for call, _ in walk.events for leaf in call.inputs for name in leaf.names or ()}
    flowing |= {name for call, _ in walk.events for x in call.outputs for name in x.names or ()}
    return Flows(
        findings,
        frozenset((flowing | names) - {None}),
        used | follower.used,
        [],
        model if error is None else None,
    )


def find_call_errors(flows: Flows, subject: Subject) -> Iterator[Finding]:
    """What fails when the model is traced as it is, with all that lays it out."""
    if flows.model is None:
        return
    try:
        _trace(flows.model, subject.batch)
    except ShardingError as error:
        for problem in error.problems:
            where = f" for {problem.path!r}" if problem.path else ""
            what = f"its call fails{where}: {problem.what}"
            yield Finding(problem.kind or "uncallable", "model", what, problem.fix)
    except Exception as error:
        yield _say_uncallable(subject, None, error)


def _edit(subject: Subject, model: Any) -> tuple[Any, list[Finding]]:
    """The model with the edits of its layout."""
    assert subject.layout is not None
    try:
        with warnings.catch_warnings(action="ignore"):
            return subject.layout.recipe(model, subject.mesh).apply(model), []
    except ShardingError as error:
        return model, [Finding("misfit", "layout", x.what, x.fix) for x in error.problems]


# Tracing


def _trace(model: Any, batch: Any) -> None:
    """Traces the call of a model; its variables and those of the batch stay as they are."""
    argument, side_inputs = batch, dict[str, Any]()
    if type(batch) is tuple and len(batch) == 2 and type(batch[1]) is dict:
        argument, side_inputs = batch
    elif type(batch) is dict and batch:
        (_, argument), *others = batch.items()
        side_inputs = dict(others)
    tree = {"argument": argument, "body": model, "side_inputs": side_inputs}
    leaves, structure = flatten(tree)
    call = PureCall(structure, read_settings(tree))

    def run(values: Any) -> None:
        call(values)

    with auto_context(), warnings.catch_warnings(action="ignore"):
        jax.eval_shape(run, [make_struct(leaf.value) for leaf in leaves])


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a layer; ``manual`` are the mesh axes that a region around it has taken over."""

    layer: Any
    label: str
    around: "_Call | None"
    inputs: list[Leaf]
    manual: frozenset[str]
    outputs: list[Leaf] = dataclasses.field(default_factory=list)

    @property
    def chain(self) -> list["_Call"]:
        """The calls around it and itself, the outermost first."""
        return [*(self.around.chain if self.around else ()), self]


class _Walk:
    """Notes what goes into the layers of one model and comes out of them.

    Attributes:
        layers: The layers with their labels.
        events: The calls, each when it begins and when it ends.
        failed: The innermost call that failed.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Any, str]] = []
        self.events: list[tuple[_Call, str]] = []
        self.failed: _Call | None = None
        self._running: list[_Call] = []

    def record(self, model: Any) -> Any:
        """The model with layers that report their calls."""
        return self._record(Layers().mark(model))

    def _record(self, tree: Any) -> Any:
        previous = ""

        def record_mark(node: Any) -> Any:
            nonlocal previous
            if not _is_mark(node):
                return node
            body = self._record(node.body)
            label = node.mark_layers.marked[node.mark_number].label
            if isinstance(body, _PINNING):
                # People know it by the layer that it follows.
                label = join_paths(previous, label.rpartition("/")[2])
            previous = label
            self.layers.append((body, label))
            return _Recorded(body, self, label)

        return jax.tree.map(record_mark, tree, is_leaf=_is_mark)

    def run(self, layer: Any, label: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a layer."""
        around, manual = self._running[-1] if self._running else None, manual_axes()
        if around is not None:
            manual |= around.manual
            if isinstance(around.layer, ShardMapped):
                manual |= {*around.layer.mesh.axis_names}
        call = _Call(layer, label, around, leaves_of(list(args)), manual)
        self.events.append((call, "inputs"))
        self._running.append(call)
        try:
            output = _run_bare(layer, args, kwargs)
            call.outputs = leaves_of(output)
        except Exception:
            self.failed = self.failed or call
            raise
        finally:
            self._running.pop()
            self.events.append((call, "outputs"))
        return output


def _is_mark(node: Any) -> bool:
    # A wrapper answers for its body, but not by its own dictionary.
    return "mark_number" in getattr(node, "__dict__", ())


def _is_recorded(node: Any) -> bool:
    return type(node) is _Recorded


@pz.pytree_dataclass
class _Recorded(WrapperLayer):
    """A layer around another that no other can tell from it: layers ask each other's types."""

    body: Any
    walk: Any = dataclasses.field(metadata={"pytree_node": False})
    label: str = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fields = self.__dict__
        return fields["walk"].run(fields["body"], fields["label"], args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__dict__["body"].__class__ if "body" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__") and "body" in self.__dict__:
            return getattr(self.__dict__["body"], name)
        return super().__getattr__(name)


def _run_bare(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a layer computes, without what only lays it out."""

    def renew(tree: Any) -> Any:
        # What is pinned is another value, so that a constraint behind another is seen.
        return jax.tree.map(lambda x: jax.lax.optimization_barrier(x) if is_array(x) else x, tree)

    if isinstance(layer, _PINNING):
        return renew(args[0])
    if isinstance(layer, ConstrainActivations):
        return layer.body(renew(args[0]), *args[1:], **kwargs)
    is_bare = isinstance(layer, ShardMapped) and not layer.per_device
    if is_bare or isinstance(layer, _PASSED_BY):
        return layer.body(*args, **kwargs)
    return layer(*args, **kwargs)


def _say_uncallable(subject: Subject, failed: _Call | None, error: Exception) -> Finding:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = re.sub(r"\b\w+Tracer\b", "array", " ".join(lines[:3])).rstrip(".")
    which = "the model"
    if failed is not None:
        given = ", ".join(map(_text, failed.inputs)) or "nothing"
        which = f"this {type(failed.layer).__name__}, which gets {given}"
    what = f"{which}, cannot be called: {type(error).__name__}: {said}"
    fix = ""
    if not any(leaf.names for leaf in subject.batch_leaves):
        fix = "Name the arrays of the batch: pz.nx.wrap(array).tag('batch', 'seq')."
    return Finding("uncallable", failed.label if failed else "model", what, fix)


def _text(leaf: Leaf) -> str:
    row = LeafPlan(leaf.path, leaf.names, leaf.shape, leaf.dtype, None, None, "", 0)
    return f"[{row.axes_text}]"


# Layers that lay out


class _Pin(NamedTuple):
    """What a layer lays out, on which side of it: ``side`` is also "parameters" or "region"."""

    mesh: Any
    rules: AxisRules | PartitionSpec
    side: str
    on_indivisible: Any = "error"

    @property
    def logical_axes(self) -> Sequence[Hashable]:
        """The logical axes that it names."""
        return self.rules.logical_axes if isinstance(self.rules, AxisRules) else ()

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes that it splits over."""
        if isinstance(self.rules, AxisRules):
            return frozenset(axis for rule in self.rules.rules for axis in rule.mesh_axes)
        return frozenset(jax.tree.leaves(tuple(self.rules)))

    def split(self, leaf: Leaf, mesh: Any) -> _Split:
        """How an array lies."""
        if isinstance(self.rules, PartitionSpec):
            return split_axes(leaf.names, self.rules, mesh)
        return split_by(self.rules, leaf, mesh, self.on_indivisible)


def split_by(rules: AxisRules, leaf: Any, mesh: Any, on_indivisible: Any = "error") -> _Split:
    """How rules split an array, as far as they fit it."""
    if leaf.names is None:
        return {}
    own = rules.explain(leaf.names, leaf.shape, mesh, on_indivisible=on_indivisible)
    return split_axes(leaf.names, own.spec, mesh)


def _pins(layer: Any) -> Iterator[_Pin]:
    match layer:
        case ConstrainShardingByName():
            rules = layer.axis_name_to_mesh_name
            yield _Pin(layer.mesh, rules, "inputs", layer.on_indivisible)
        case ConstrainSharding(sharding=NamedSharding() as sharding):
            is_open = PartitionSpec.UNCONSTRAINED
            decided = specs.canonical(None if x is is_open else x for x in sharding.spec)
            yield _Pin(sharding.mesh, decided, "inputs")
        case ConstrainActivations():
            for side in ("inputs", "outputs"):
                for rules in getattr(layer, side):
                    yield _Pin(layer.mesh, rules, side)
        case GatherParameters():
            yield _Pin(layer.mesh, layer.rules, "parameters")
        case ShardMapped():
            yield _Pin(layer.mesh, layer.parameter_rules, "parameters")
            yield _Pin(layer.mesh, layer.activation_rules, "region")


def _check_layers(subject: Subject, layers: Sequence[tuple[Any, str]]) -> Iterator[Finding]:
    """Layers for another mesh, those that split over one device, and rules for no parameter."""
    mesh = subject.mesh
    for layer, label in layers:
        for pin in _pins(layer):
            say = f"this {type(layer).__name__}"
            if not same_devices(pin.mesh, mesh):
                what = f"{say} is for the mesh ({mesh_text(pin.mesh)}), and the model is laid over "
                fix = f"Write mesh=make_mesh({dict(mesh.shape)})."
                yield Finding("other mesh", label, f"{what}({mesh_text(mesh)})", fix)
                break
            if pin.mesh_axes and mesh.size > 1 and all(mesh.shape[x] == 1 for x in pin.mesh_axes):
                what = f"{say} splits over {sorted(pin.mesh_axes)}, of one device on the mesh"
                yield Finding("idle constraint", label, f"{what} ({mesh_text(mesh)})")
            if pin.side == "parameters":
                names = {name for leaf in leaves_of(layer.body) for name in leaf.names or ()}
                for what, fix in _find_idle(subject, pin, names, "the parameters in it"):
                    yield Finding("idle constraint", label, what, fix)


def _find_idle(
    subject: Subject, pin: _Pin, present: set[Hashable], where: str
) -> Iterator[tuple[str, str]]:
    """Rules of a layer for what is nearly there, or for nothing that is there."""
    if not isinstance(pin.rules, AxisRules):
        return
    near = find_near_names(pin.rules, present)
    for rule, name in near.items():
        what = f"its rule {rule} names no logical axis of {where}; the nearest is {name!r}"
        yield what, f"Write {name!r} in place of {rule.logical_axis!r}."
    named = pin.rules.rules
    is_plain = all(rule == Rule(rule.logical_axis, rule.mesh_axes) for rule in named)
    if near or not (named and is_plain and present) or not present.isdisjoint(pin.logical_axes):
        return
    known = ", ".join(map(repr, sorted(present - {None}, key=str)))
    by_mesh_axes = {
        rule.mesh_axes: rule.logical_axis
        for rule in subject.activation_rules.rules
        if rule.logical_axis in present
    }
    name = by_mesh_axes.get(named[0].mesh_axes)
    fix = f"Write {name!r} in place of {named[0].logical_axis!r}." if name else ""
    text = "; ".join(map(str, named))
    yield f"its rules ({text}) name none of the logical axes of {where} ({known})", fix


# Following


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """A parameter, and what flows into its layer split over the same mesh axis."""

    call: _Call
    leaf: Leaf
    row: LeafPlan
    name: Hashable
    source: str


class _Follower:
    """Follows how what flows is split.

    Attributes:
        findings: What layers ask in vain.
        used: The mesh axes that split something that flows.
    """

    def __init__(self, subject: Subject, is_laid_out: bool) -> None:
        self.subject, self.mesh, self.is_laid_out = subject, subject.mesh, is_laid_out
        self.findings: list[Finding] = []
        self.used: set[str] = set()
        # By logical axis its length, mesh axes, and who asked for them.
        self._split: dict[Hashable, tuple[int, tuple[str, ...], str]] = {}
        self._pinned: set[tuple[Hashable, str]] = set()
        # By the value that comes out of a constraint what it asks for.
        self._after: dict[int, tuple[str, _Split]] = {}
        self._meetings: dict[tuple[str, Hashable, Hashable], dict[str, _Meeting]] = {}
        self._rows = {row.path.removeprefix("params/"): row for row in subject.rows}
        self._batch_axes: set[Hashable] = set()
        for leaf in subject.batch_leaves:
            sizes = dict(zip(leaf.names or (), leaf.shape, strict=False))
            for name, axes in self._split_of_batch(leaf).items():
                self._split[name] = sizes[name], axes, "batch"
                self.used.update(axes)

    def _split_of_batch(self, leaf: Leaf) -> _Split:
        """How an array of the batch lies: as it is placed, or by the rules."""
        if (placed := self._find_placement(leaf)) is not None:
            return split_axes(leaf.names, placed.spec, self.mesh)
        return split_by(self.subject.activation_rules, leaf, self.mesh)

    def _find_placement(self, leaf: Leaf) -> NamedSharding | None:
        own = bound_sharding(leaf.value)
        is_placed = isinstance(own, NamedSharding) and same_devices(own.mesh, self.mesh)
        return own if is_placed else None  # type: ignore[return-value]

    def follow(self, walk: _Walk) -> None:
        """Goes through the calls in their order."""
        for call, side in walk.events:
            for pin in _pins(call.layer):
                if same_devices(pin.mesh, self.mesh):
                    self._pin(call, pin, side)
            if side == "inputs":
                self._meet(call)

    def _pin(self, call: _Call, pin: _Pin, side: str) -> None:
        leaves = call.inputs if side == "inputs" else call.outputs
        say = f"this {type(call.layer).__name__}"
        if pin.side == "region" and side == "inputs":
            names = {name for leaf in leaves for name in leaf.names or ()}
            self._add_idle(call, pin, names, "what flows into it")
        if pin.side != side:
            return
        if pin.mesh_axes and pin.mesh_axes <= call.manual:
            what = f"{say} is in a region that runs per device along {sorted(pin.mesh_axes)}"
            self._add("idle constraint", call, f"{what}, where it pins nothing", "Leave it out.")
            return
        for number, leaf in enumerate(leaves):
            if leaf.names is not None:
                self._add_idle(call, pin, {*leaf.names} - {None}, "what flows through it")
            self._check_fit(call, pin, leaf)
            new = {
                name: axes
                for name, axes in pin.split(leaf, self.mesh).items()
                if call.manual.isdisjoint(axes)
            }
            if isinstance(call.layer, _PINNING):
                self._compare_with_previous(call, leaf, new)
                self._after[id(call.outputs[number].value)] = call.label, new
            self.used.update(axis for axes in new.values() for axis in axes)
            for name, length in zip(leaf.names or (), leaf.shape, strict=False):
                self._split.pop(name, None)
                if name in new:
                    self._split[name] = length, new[name], "constraint"
                    self._pinned |= {(name, axis) for axis in new[name]}

    def _add_idle(self, call: _Call, pin: _Pin, names: set[Hashable], where: str) -> None:
        if self.is_laid_out:
            for what, fix in _find_idle(self.subject, pin, names, where):
                self._add("idle constraint", call, what, fix)

    def _check_fit(self, call: _Call, pin: _Pin, leaf: Leaf) -> None:
        if isinstance(pin.rules, AxisRules) and leaf.names is not None:
            options = {"on_indivisible": pin.on_indivisible}
            for problem in pin.rules.explain(leaf.names, leaf.shape, self.mesh, **options).problems:
                what = f"of {_text(leaf)}, which flows through, {problem.what}"
                self._add(problem.kind, call, what, problem.fix)

    def _compare_with_previous(self, call: _Call, leaf: Leaf, new: _Split) -> None:
        """Finds a constraint that follows another directly, and does nothing or undoes that."""
        before, old = self._after.get(id(leaf.value), ("", {}))
        if not (old or (before and new)) or not self.is_laid_out:
            return
        say = f"this {type(call.layer).__name__} directly follows a layer"
        if old == new:
            self._add("idle constraint", call, f"{say} that pins the same", "Leave it out.")
        # To gather what was split, or to split more, undoes nothing.
        keeps = all(new.get(name, ())[: len(axes)] == axes for name, axes in old.items())
        gathers = all(old.get(name, ())[: len(axes)] == axes for name, axes in new.items())
        if not keeps and not gathers:
            self._add("contradiction", call, f"{say} and undoes what that pins: {old}, then {new}")

    def _add(self, kind: str, call: _Call, what: str, fix: str = "") -> None:
        self.findings.append(Finding(kind, call.label, what, fix))

    # Conflicts

    def _meet(self, call: _Call) -> None:
        """Notes parameters that one mesh axis splits otherwise than what flows into their layer."""
        own = jax.tree.map(
            lambda node: None if _is_recorded(node) else node, call.layer, is_leaf=_is_recorded
        )
        for held in leaves_of(own):
            row = self._rows.get(held.path)
            if row is None or row.names is None:
                continue
            stored = split_axes(row.names, row.spec, self.mesh)
            for around in call.chain:
                if isinstance(around.layer, GatherParameters):
                    stored = split_by(around.layer.rules, row, self.mesh)
            for leaf in call.inputs:
                sizes = dict(zip(leaf.names or (), leaf.shape, strict=False))
                for name, axes in stored.items():
                    for other, (size, split, source) in self._split.items():
                        if (
                            other != name
                            and sizes.get(other) == size
                            and name in (held.names or ())
                        ):
                            for axis in {*axes} & {*split} - call.manual:
                                meeting = _Meeting(call, leaf, row, name, source)
                                key = axis, name, other
                                self._meetings.setdefault(key, {}).setdefault(row.path, meeting)

    def find_conflicts(self) -> Iterator[Finding]:
        """Meetings of which nothing says that it is the parameter that moves."""
        for (axis, name, other), meetings in self._meetings.items():
            kept = [x for x in meetings.values() if self._is_undecided(x, axis, other)]
            if not kept:
                continue
            moved = bytes_text(sum(x.row.total_bytes for x in kept))
            what = (
                f"mesh axis {axis!r} splits {name!r} of a parameter, and {other!r} of what flows "
                f"into its layer: in every step the compiler gathers one of the two, as {moved} of "
                f"parameters or {_text(kept[0].leaf)}"
            )
            fix = f"Split {name!r} or {other!r} over another mesh axis."
            if other in self._batch_axes:
                kinds = [*dict.fromkeys(_block_of(x.call) for x in kept)]
                place = f"({', '.join(kinds)})" if len(kinds) > 1 else kinds[0]
                pin = f"constrain_blocks({place}, mesh, {{{other!r}: {axis!r}}})"
                fix = f"Write model={pin}.apply(model)."
            for meeting in kept:
                yield Finding("conflict", meeting.row.path, what, fix)

    def _is_undecided(self, meeting: _Meeting, axis: str, other: Hashable) -> bool:
        if meeting.source == "constraint":
            return other not in self._batch_axes
        if (other, axis) in self._pinned:
            return False
        rules = self.subject.tables[self.subject.table_of(meeting.row.path)]
        if any(rule.logical_axis == meeting.name and rule.mesh_axes for rule in rules.rules):
            return True
        # A preset gathers parameters, but a lookup of a split table sums what is looked up.
        outputs = [x for x in meeting.call.outputs if meeting.name in (x.names or ())]
        is_lookup = jax.numpy.issubdtype(meeting.leaf.dtype, jax.numpy.integer)
        return is_lookup and any(_bytes(leaf) >= self.subject.min_bytes for leaf in outputs)

    # The batch

    def find_batch_findings(self, pinned: set[str]) -> Iterator[Finding]:
        """What of the batch does not divide, and batches of which every device computes all."""
        subject, rules = self.subject, self.subject.activation_rules
        role = "batch" if subject.layout is None else subject.layout.names.get("batch", "batch")
        taken = {*pinned, *self.used}
        for row in subject.rows:
            taken.update(jax.tree.leaves(tuple(row.spec or ())))
        for table in subject.tables.values():
            taken.update(x for r in table.rules if r.logical_axis is None for x in r.mesh_axes)
        free = [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in taken]
        for leaf in subject.batch_leaves:
            if leaf.names is None:
                continue
            path = f"batch/{leaf.path}" if leaf.path else "batch"
            placed = self._find_placement(leaf)
            options = {"on_indivisible": subject.request.on_indivisible}
            found = rules.explain(leaf.names, leaf.shape, self.mesh, **options).problems
            for problem in found if placed is None else ():
                if problem.kind == "indivisible":
                    what = f"of {_text(leaf)}, {problem.what}"
                    yield Finding(problem.kind, path, what, problem.fix)
            known = subject.logical_axes | SEQUENCE_AXES | {None}
            others = [name for name in leaf.names if name not in known]
            name = role if role in leaf.names else next(iter(others), None)
            self._batch_axes.add(name)
            length = dict(zip(leaf.names, leaf.shape, strict=True)).get(name, 1)
            fitting = [axis for axis in free if length % self.mesh.shape[axis] == 0]
            is_ruled = name in rules.logical_axes or name in find_near_names(rules, [name]).values()
            is_asked = any(table.rules for table in subject.given.values())
            if not fitting or name is None or not is_asked or (is_ruled and placed is None):
                continue
            if name in self._split_of_batch(leaf):
                continue
            how = "has no rule" if placed is None else "is placed whole"
            what = f"{name!r} of {_text(leaf)} {how}: each device computes the whole batch, and "
            table = "rules" if subject.layout is None else "compute"
            changed = AxisRules({name: fitting[0]}) | subject.given[table]
            fix = subject.offer(table, changed) if placed is None else ""
            what += f"mesh axis {fitting[0]!r} ({self.mesh.shape[fitting[0]]}) is free"
            yield Finding("whole batch", path, what, fix)


def _bytes(leaf: Leaf) -> int:
    return LeafPlan("", None, leaf.shape, leaf.dtype, None, None, "", 0).total_bytes


def _block_of(call: _Call) -> str:
    """The type of the layer in a model's outermost sequence that a call is in."""
    chain = call.chain
    pairs = itertools.pairwise(chain)
    block = next(
        (inner for outer, inner in pairs if len(getattr(outer.layer, "sublayers", ())) > 1), call
    )
    kind = type(block.layer)
    return f"pz.nn.{kind.__name__}" if hasattr(pz.nn, kind.__name__) else kind.__name__
