"""Findings about constraint layers: what each says, and what flows through it."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jax.sharding import Mesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layers import ConstrainActivations, GatherParameters, ShardMapped
from penzai_shard.linting.findings import Change, Finding, FindingKind
from penzai_shard.linting.findings_in_layers import (
    FindingInLayers,
    FoundInLayer,
    grouped,
    layers_laying_out,
)
from penzai_shard.linting.flow_layouts import PinnedArray
from penzai_shard.linting.layer_changes import on_mesh, with_other_rules, without_pin
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.model_flows import PASSERS
from penzai_shard.linting.pins import Pin, pins_of
from penzai_shard.linting.rule_changes import change_of_table, rules_text
from penzai_shard.linting.split_axes import moved_bytes
from penzai_shard.linting.subject_flows import SubjectFlows
from penzai_shard.meshes import is_same_mesh, mesh_shape_of, mesh_text
from penzai_shard.planning import PlanRequest, bytes_text
from penzai_shard.rule_kinds import (
    LogicalAxis,
    NameRule,
    array_text,
    meant_name,
    mesh_axes_text,
    nearest_name,
)


def constraints_of_other_meshes(subject: LintSubject) -> Iterator[Finding]:
    """Layers that lay something out over another mesh than that of the subject."""
    flows = subject.flows
    if not flows.is_edited_here:
        yield from grouped(_of_other_meshes(subject, flows.model))


def _of_other_meshes(subject: LintSubject, model: Any) -> Iterator[FoundInLayer]:
    for place, label, layer in layers_laying_out(model):
        meshes = [pin.mesh for pin in pins_of(layer)]
        if isinstance(layer, GatherParameters | ShardMapped | ConstrainActivations):
            meshes = [layer.mesh]
        other = next((mesh for mesh in meshes if not is_same_mesh(mesh, subject.mesh)), None)
        if other is None:
            continue
        own = mesh_text(subject.mesh)
        of_devices = (
            " of other devices, or of the same in another order"
            if mesh_text(other) == own and isinstance(other, Mesh)
            else ""
        )
        problem = (
            f"this {type(layer).__name__} is for the mesh ({mesh_text(other)}){of_devices}, and "
            f"the model is laid out over the mesh ({own})."
        )
        rules = [pin.rules for pin in pins_of(layer) if pin.rules is not None]

        def changes(
            places: tuple[str, ...], layer: Any = layer, rules: list[AxisRules] = rules
        ) -> Iterator[Change]:
            fitting = [table for own in rules for table in _for_mesh(subject, own)]
            yield from on_mesh(subject, layer, places, (None, *fitting))
            yield from without_pin(subject, layer, Pin(subject.mesh), places)

        about = f"{type(layer).__name__} {mesh_text(other)} {rules}"
        yield place, label, FindingInLayers("other mesh", problem, about, {}, changes)


def _for_mesh(subject: LintSubject, rules: AxisRules) -> Iterator[AxisRules]:
    """Rules that the subject's mesh has all mesh axes for.

    With mesh axes that are called nearly so, with those that the subject's rules have for the
    logical axes, and without the unknown ones.
    """
    shape = mesh_shape_of(subject.mesh)
    own = {
        rule.logical_axis: rule.mesh_axes
        for table in subject.tables
        for rule in subject.name_rules(table)
    }

    def near(rule: Any) -> Iterable[str | None]:
        return (name if name in shape else nearest_name(name, shape) for name in rule.mesh_axes)

    def as_own(rule: Any) -> Iterable[str | None]:
        return own.get(getattr(rule, "logical_axis", None), ())

    def known(rule: Any) -> Iterable[str | None]:
        return (name if name in shape else None for name in rule.mesh_axes)

    for of_rule in (near, as_own, known):
        changed = [
            dataclasses.replace(
                rule, mesh_axes=tuple(dict.fromkeys(name for name in of_rule(rule) if name))
            )
            for rule in rules.rules
        ]
        if any(rule.mesh_axes for rule in changed):
            yield AxisRules.from_rules(changed)


def constraints_that_split_nothing(subject: LintSubject) -> Iterator[Finding]:
    """Constraint layers all of whose mesh axes have size 1, on a mesh with longer ones."""
    shape = mesh_shape_of(subject.mesh)
    flows = subject.flows
    if max(shape.values(), default=1) == 1 or flows.is_edited_here:
        return
    yield from grouped(_splitting_nothing(subject, flows.model))


def _splitting_nothing(subject: LintSubject, model: Any) -> Iterator[FoundInLayer]:
    shape = mesh_shape_of(subject.mesh)
    for place, label, layer in layers_laying_out(model):
        for pin in pins_of(layer):
            if not pin.mesh_axes or not is_same_mesh(pin.mesh, subject.mesh):
                continue
            if any(shape[axis] > 1 for axis in pin.mesh_axes):
                continue
            axes = mesh_axes_text(sorted(pin.mesh_axes))
            problem = (
                f"{_constraint_text(pin)} splits over mesh axis {axes} alone, which has size 1 on "
                f"the mesh ({mesh_text(subject.mesh)}): every device gets a whole copy."
            )

            def changes(
                places: tuple[str, ...], layer: Any = layer, pin: Pin = pin
            ) -> Iterator[Change]:
                for axis in (axis for axis, size in shape.items() if size > 1):
                    for rules in _with_mesh_axis(pin, axis):
                        yield from with_other_rules(subject, layer, pin, places, rules)
                yield from without_pin(subject, layer, pin, places)

            about = f"{_about(layer, pin)} size 1"
            yield place, label, FindingInLayers("idle constraint", problem, about, {}, changes)


def _with_mesh_axis(pin: Pin, axis: str) -> Iterator[AxisRules]:
    """A pin's rules with another mesh axis for the first of them."""
    rules = () if pin.rules is None else pin.rules.rules
    for i, rule in enumerate(rules):
        if rule.mesh_axes:
            changed = dataclasses.replace(rule, mesh_axes=(axis,))
            yield AxisRules.from_rules([*rules[:i], changed, *rules[i + 1 :]])


def constraints_of_nothing(subject: LintSubject) -> Iterator[Finding]:
    """Constraint layers whose rules do not fit what flows through them."""
    flows = subject.flows

    def found() -> Iterator[FoundInLayer]:
        for call in flows.calls:
            for one in call.pinned:
                if not is_same_mesh(one.pin.mesh, subject.mesh):
                    continue
                for group in _unfit(flows, call.call.layer, one, call.call.manual):
                    yield call.call.place, call.call.label, group

    yield from grouped(found(), "layout.compute" if flows.is_edited_here else "")


def _unfit(
    flows: SubjectFlows, layer: Any, one: PinnedArray, manual: frozenset[str]
) -> Iterator[FindingInLayers]:
    """What is wrong with one pin of one array."""
    pin, array = one.pin, one.array
    about = _about(layer, pin)
    flowing = array_text(array.names, array.shape) if array.names else str(list(array.shape))

    def changes(places: tuple[str, ...]) -> Iterator[Change]:
        for rules in _meant(flows, one):
            if flows.is_edited_here:
                yield change_of_table(flows.subject, "compute", rules.rules)
            else:
                yield from with_other_rules(flows.subject, layer, pin, places, rules)
        if not flows.is_edited_here:
            yield from without_pin(flows.subject, layer, pin, places)

    axes = pin.mesh_axes
    if axes and axes <= manual:
        problem = (
            f"{_constraint_text(pin)} is inside of a region that runs per device along mesh axis "
            f"{mesh_axes_text(sorted(axes))}, where each device has its part already: it pins "
            "nothing."
        )

        def removed(places: tuple[str, ...]) -> Iterator[Change]:
            yield from without_pin(flows.subject, layer, pin, places)

        yield FindingInLayers("idle constraint", problem, f"{about} manual", {}, removed)
        return
    if pin.rules is None:
        return
    if array.names is None:
        if pin.needs_names and array.shape:
            problem = (
                f"{_constraint_text(pin)} is by name, and what flows through it, {flowing}, has "
                "no names."
            )
            yield FindingInLayers("unnamed", problem, about, {}, changes)
        return
    present = frozenset(array.sizes)
    request = PlanRequest.read("lint", pin.mesh, pin.rules)
    # Rules of a layout that name nothing are found in the layout.
    for doubt in () if flows.is_edited_here else request.doubts(present, constrains=True):
        said = doubt.replace("of this tree, which has", "of what flows through, which has")
        figures = {"flows": flowing, "flowing_bytes": array.nbytes}
        problem = f"{said} {flowing} flows through, {bytes_text(array.nbytes)}."
        yield FindingInLayers("idle constraint", problem, f"{about} {doubt}", figures, changes)
    if pin.on_indivisible == "error":
        explained = pin.rules.explain(array.names, array.shape, pin.mesh)
        for unfit in explained.unfit:
            text = f"{flowing} flows through {_constraint_text(pin)}: {unfit.problem}"
            what = f"{about} {unfit.logical_axis!r}"
            yield FindingInLayers(unfit.misfit, text, what, {"flows": flowing}, changes)


def _split(flows: SubjectFlows, array: Any) -> dict[LogicalAxis, tuple[str, ...]]:
    """How an array would be split if it were laid out as the batch is."""
    rules = flows.batch_rules
    explained = rules.explain(
        array.names, array.shape, flows.subject.mesh, on_indivisible="replicate"
    )
    return {d.logical_axis: d.mesh_axes for d in explained.dimensions if d.mesh_axes}


def _meant(flows: SubjectFlows, one: PinnedArray) -> Iterator[AxisRules]:
    """Rules that may have been meant, the most likely first."""
    assert one.pin.rules is not None
    rules = one.pin.rules.rules
    sizes = one.array.sizes
    fitting: list[Any] = []
    for rule in rules:
        name = rule.logical_axis if isinstance(rule, NameRule) else None
        if name is None or name in sizes:
            fitting.append(rule)
            continue
        assert isinstance(rule, NameRule)
        near = meant_name(name, (str(n) for n in sizes if n not in one.pin.rules.logical_axes))
        fitting.append(rule if near is None else dataclasses.replace(rule, logical_axis=near))
    if tuple(fitting) != rules:
        yield AxisRules.from_rules(fitting)
    batch = _split(flows, one.array)
    if batch:
        yield AxisRules.from_rules(NameRule(name, axes) for name, axes in batch.items())
    for rule in one.pin.rules.name_rules:
        if rule.logical_axis in sizes and rule.mesh_axes:
            # What does not divide, or is wanted twice, is left whole.
            yield AxisRules.from_rules(
                dataclasses.replace(other, mesh_axes=()) if other == rule else other
                for other in rules
            )
    for rule in one.pin.rules.name_rules:
        for name in sizes:
            if rule.mesh_axes and rule.logical_axis not in sizes:
                yield AxisRules.from_rules([NameRule(name, rule.mesh_axes)])


def constraints_in_a_row(subject: LintSubject) -> Iterator[Finding]:
    """Constraint layers that follow each other and say the same, or undo each other."""
    flows = subject.flows
    if not flows.is_edited_here:
        yield from grouped(_in_a_row(flows))


def _in_a_row(flows: SubjectFlows) -> Iterator[FoundInLayer]:
    last: dict[int, tuple[str, PinnedArray]] = {}
    for found in flows.calls:
        call = found.call
        if not isinstance(call.layer, PASSERS):
            continue
        for given, one in zip(call.inputs, found.pinned, strict=False):
            before = last.get(given.value)
            last[one.array.value] = call.label, one
            if before is None or not is_same_mesh(before[1].pin.mesh, one.pin.mesh):
                continue
            group = _undone(flows, call.layer, before, one)
            if group is not None:
                yield call.place, call.label, group


def _undone(
    flows: SubjectFlows, layer: Any, before: tuple[str, PinnedArray], one: PinnedArray
) -> FindingInLayers | None:
    """What is wrong with a constraint right after another one."""
    label, first = before
    old, new = ({n: split.mesh_axes for n, split in each.after.items()} for each in (first, one))
    if not old and not new:
        return None
    moved = moved_bytes(one.array.nbytes, old, new, flows.sizes)
    said = f"{_constraint_text(one.pin)} follows {label} directly"
    if old == new:
        kind: FindingKind = "idle constraint"
        problem = f"{said}, which pins the same: it does nothing."
    elif moved:
        kind = "contradiction"
        problem = (
            f"{said} and undoes what {_constraint_text(first.pin)} asks for: in between each "
            f"device receives {bytes_text(moved)} of "
            f"{array_text(one.array.names or (), one.array.shape)}."
        )
    else:
        return None

    def changes(places: tuple[str, ...]) -> Iterator[Change]:
        yield from without_pin(flows.subject, layer, one.pin, places)

    about = f"{_about(layer, one.pin)} after {first.pin.rules}"
    return FindingInLayers(kind, problem, about, {"moved_bytes": moved}, changes)


def _about(layer: Any, pin: Pin) -> str:
    """Which pin of which layers."""
    return f"{type(layer).__name__} {pin.side} {pin.number} {pin.rules}"


def _constraint_text(pin: Pin) -> str:
    if pin.rules is None:
        return "this constraint"
    return f"this constraint ({rules_text(pin.rules)})"
