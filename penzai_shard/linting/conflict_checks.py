"""Findings about activations and parameters that meet and are split over one mesh axis.

Where a batch and a parameter are split over the same mesh axis, one of them has to be moved in
every step. In fully sharded training that is the parameter, and it is said: by a preset, by layers
that gather parameters, or by constraint layers that pin the batch. Where nothing says so, the
compiler decides. What it makes of an embedding table that is split along the axis that flows on is
the worst: the batch becomes whole on every device, and whole activations are summed in each layer.
That is found under presets too, once the activations are large.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import ShardingError
from penzai_shard.linting.findings import Change, Finding, common_path
from penzai_shard.linting.flow_layouts import HeldParameter, LaidOutCall, PinnedArray, SplitAxis
from penzai_shard.linting.layer_changes import with_other_rules
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.model_flows import FlowingArray
from penzai_shard.linting.rule_changes import change_of_table, rules_text
from penzai_shard.linting.split_axes import moved_bytes, split_of
from penzai_shard.linting.subject_flows import SubjectFlows
from penzai_shard.planning import bytes_text
from penzai_shard.report_trees import count_text
from penzai_shard.rule_kinds import LogicalAxis, NameRule, array_text
from penzai_shard.surgery import constrain_blocks
from penzai_shard.surgery.tree_nodes import nodes_of
from penzai_shard.training import TrainState


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """An activation and a parameter that are split over one mesh axis in different ways.

    Attributes:
        mesh_axis: The mesh axis.
        activation: What flows into the layer.
        axis: The logical axis of it that is split.
        split: How, and what says so.
        parameter: The parameter.
        parameter_axis: The logical axis of it that is split.
        stored: How it is stored.
        is_lookup: Whether the layer looks up rows of it, so that what comes out has its axes.
        call: The call of the layer.
    """

    mesh_axis: str
    activation: FlowingArray
    axis: LogicalAxis
    split: SplitAxis
    parameter: HeldParameter
    parameter_axis: LogicalAxis
    stored: Mapping[LogicalAxis, tuple[str, ...]]
    is_lookup: bool
    call: LaidOutCall


def conflicts(subject: LintSubject) -> Iterator[Finding]:
    """Activations and parameters that meet and are split over one mesh axis, undecided which moves.

    What it costs is measured on compiled programs: an embedding table that is split along what
    flows on sends two to five times the bytes of the same with the activations pinned; elsewhere
    parameters are gathered, as many bytes as is said.
    """
    flows = subject.flows
    pinned = {
        (name, axis)
        for call in flows.calls
        for one in call.pinned
        for name, split in one.after.items()
        for axis in split.mesh_axes
    }
    groups: dict[tuple[str, LogicalAxis], list[_Meeting]] = {}
    for call in flows.calls:
        for one in _meetings(flows, call):
            if _is_undecided(flows, one, pinned):
                groups.setdefault((one.mesh_axis, one.axis), []).append(one)
    for meetings in groups.values():
        yield _finding(flows, meetings)


def _meetings(flows: SubjectFlows, call: LaidOutCall) -> Iterator[_Meeting]:
    for parameter in call.parameters:
        stored = _used_as(flows, call, parameter)
        for activation, layout in zip(call.call.inputs, call.inputs, strict=True):
            for name, axes in stored.items():
                for axis, split in layout.items():
                    if axis == name or name not in parameter.sizes:
                        continue
                    for mesh_axis in axes:
                        if mesh_axis in split.mesh_axes and mesh_axis not in call.call.manual:
                            is_lookup = jnp.issubdtype(activation.dtype, jnp.integer)
                            yield _Meeting(
                                mesh_axis,
                                activation,
                                axis,
                                split,
                                parameter,
                                name,
                                stored,
                                is_lookup and any(name in out.sizes for out in call.call.outputs),
                                call,
                            )


def _used_as(
    flows: SubjectFlows, call: LaidOutCall, parameter: HeldParameter
) -> Mapping[LogicalAxis, tuple[str, ...]]:
    """How a parameter is split where it is used, once what gathers it has."""
    if not call.gathers:
        return flows.of_parameter(parameter.label)
    names, sizes = tuple(parameter.sizes), tuple(parameter.sizes.values())
    try:
        gather = call.gathers[-1]
        explained = AxisRules.of(gather.rules).explain(
            names, sizes, flows.subject.mesh, on_indivisible=gather.on_indivisible
        )
    except ShardingError:  # For another mesh, which is found elsewhere.
        return {}
    return split_of(names, explained.spec, flows.sizes)


def _is_undecided(flows: SubjectFlows, one: _Meeting, pinned: set[tuple[LogicalAxis, str]]) -> bool:
    """Whether nothing says that the parameter is what is moved."""
    is_batch = one.axis in flows.batch_axes
    if one.split.source == "parameter":
        return False
    if one.split.source == "constraint":
        return not is_batch
    if (one.axis, one.mesh_axis) in pinned:
        return False
    if isinstance(_rule_of(flows, one), NameRule):
        return True
    # A preset is meant as it is, except for where it is known to cost much.
    outputs = one.call.call.outputs
    return one.is_lookup and any(out.nbytes >= flows.subject.min_bytes for out in outputs)


def _rule_of(flows: SubjectFlows, one: _Meeting) -> Any:
    """The rule that splits the parameter."""
    leaf = flows.leaf_of(one.parameter.label)
    if leaf is None:
        return None
    decisions = flows.subject.decision(leaf).dimensions
    return next((d.rule for d in decisions if d.logical_axis == one.parameter_axis), None)


def _finding(flows: SubjectFlows, meetings: Sequence[_Meeting]) -> Finding:
    by_parameter = {one.parameter.label: one for one in meetings}
    distinct = sorted(
        by_parameter.values(), key=lambda one: (not one.is_lookup, -one.parameter.nbytes)
    )
    worst = distinct[0]
    axis = worst.mesh_axis
    gathered = sum(
        moved_bytes(one.parameter.nbytes, one.stored, _without(one.stored, axis), flows.sizes)
        for one in distinct
    )
    largest = max(
        (array for one in distinct for array in (one.activation, *one.call.call.outputs)
         if one.axis in array.sizes),
        key=lambda array: array.nbytes,
    )  # fmt: skip
    paths = tuple(flows.path_of(one.parameter.label) for one in distinct)
    return Finding(
        "conflict",
        common_path(paths),
        _problem(flows, distinct, gathered, largest),
        figures={
            "mesh_axis": axis,
            "mesh_axis_size": flows.sizes[axis],
            "moved_parameter_bytes": gathered,
            "activation_bytes": largest.nbytes,
        },
        paths=paths,
        about=f"{worst.axis!r} over {axis!r}",
        changes=tuple(_changes(flows, distinct)),
    )


def _problem(
    flows: SubjectFlows, distinct: Sequence[_Meeting], gathered: int, largest: FlowingArray
) -> str:
    """What is wrong, in sentences.

    Args:
        flows: What flows.
        distinct: One meeting of each parameter, the worst first.
        gathered: What each device receives if the parameters are moved, in bytes.
        largest: The largest of the activations.
    """
    worst = distinct[0]
    axis, size = worst.mesh_axis, flows.sizes[worst.mesh_axis]
    more = len(distinct) - 1
    others = ""
    if more:
        others = f", as {count_text(more, 'other parameter')} {'is' if more == 1 else 'are'}"
    flowing = array_text(worst.activation.names or (), worst.activation.shape)
    said = {
        "batch": "as the batch is, and no layer pins or gathers anything",
        "constraint": "as a constraint layer asks",
        "parameter": "",
    }[worst.split.source]
    after = (
        f" What comes out has both axes, so that the compiler may compute the whole batch "
        f"everywhere, and sum whole activations in each layer, such as "
        f"{array_text(largest.names or (), largest.shape)} of {bytes_text(largest.nbytes)}."
        if worst.is_lookup
        else ""
    )
    return (
        f"mesh axis {axis!r} ({size}) splits logical axis {worst.parameter_axis!r} "
        f"({worst.parameter.sizes[worst.parameter_axis]}) of this parameter, rule "
        f"{_rule_of(flows, worst)}{others}, and {worst.axis!r} of what flows into its layer, "
        f"{flowing}, {said}. One has to be moved in every step: each device receives "
        f"{bytes_text(gathered)} of parameters, or activations.{after}"
    )


def _without(
    stored: Mapping[LogicalAxis, tuple[str, ...]], mesh_axis: str
) -> dict[LogicalAxis, tuple[str, ...]]:
    return {name: tuple(a for a in axes if a != mesh_axis) for name, axes in stored.items()}


def _changes(flows: SubjectFlows, meetings: Sequence[_Meeting]) -> Iterator[Change]:
    """The parameters over another mesh axis; activations that are pinned; whole parameters."""
    for axis in flows.free_mesh_axes:
        yield from _with_parameters_over(flows, meetings, (axis,))
    worst = meetings[0]
    if worst.split.source == "constraint":
        yield from _without_pinned_axis(flows, worst)
    else:
        yield from _with_pinned_activations(flows, worst)
    yield from _with_parameters_over(flows, meetings, ())


def _with_parameters_over(
    flows: SubjectFlows, meetings: Sequence[_Meeting], mesh_axes: tuple[str, ...]
) -> Iterator[Change]:
    """Rules by which the parameters are split over other mesh axes, or not."""
    subject = flows.subject
    table = subject.table_of_parameters
    count = math.prod(flows.sizes[axis] for axis in mesh_axes)
    split = {one.parameter_axis: one.parameter.sizes[one.parameter_axis] for one in meetings}
    if any(size % count for size in split.values()):
        return
    taken = meetings[0].mesh_axis

    def changed(rule: Any) -> Any:
        if not isinstance(rule, NameRule) or rule.logical_axis not in split:
            return rule
        if taken not in rule.mesh_axes:
            return rule
        left = tuple(axis for axis in rule.mesh_axes if axis != taken)
        return dataclasses.replace(rule, mesh_axes=(*left, *mesh_axes))

    given = subject.given_tables[table].rules
    new = list(map(changed, given))
    if new != list(given):
        yield change_of_table(subject, table, new)


def _with_pinned_activations(flows: SubjectFlows, worst: _Meeting) -> Iterator[Change]:
    """The model with constraint layers after its blocks, and after what looks up."""
    subject = flows.subject
    if flows.is_edited_here or isinstance(subject.model, TrainState):
        return
    rules = AxisRules({worst.axis: worst.split.mesh_axes})
    kinds = [pz.nn.EmbeddingLookup, TransformerBlock]
    names = ["pz.nn.EmbeddingLookup", "'penzai.models.transformer.model_parts:TransformerBlock'"]
    nodes = [node for _, node in nodes_of(subject.model)]
    present = [i for i, kind in enumerate(kinds) if any(isinstance(n, kind) for n in nodes)]
    places = [tuple(kinds[i] for i in present)] if present else []
    texts = []
    if present:
        listed = ", ".join(names[i] for i in present)
        texts = [f"({listed})" if len(present) > 1 else listed]
    of_layer = type(worst.call.call.layer)
    if of_layer.__module__.startswith("penzai.nn"):
        places.append((of_layer,))
        texts.append(f"pz.nn.{of_layer.__name__}")
    for place, text in zip(places, texts, strict=True):
        try:
            model = constrain_blocks(place, subject.mesh, rules).apply(subject.model)
        except ShardingError:
            continue
        code = f"model = constrain_blocks({text}, mesh, {rules_text(rules)}).apply(model)"
        yield Change(code, {"model": model})


def _without_pinned_axis(flows: SubjectFlows, worst: _Meeting) -> Iterator[Change]:
    """The model whose constraint layers leave the axis of the activation whole."""
    if flows.is_edited_here:
        return
    places: dict[str, tuple[Any, PinnedArray]] = {}
    for call in flows.calls:
        for one in call.pinned:
            split = one.after.get(worst.axis)
            if split is not None and worst.mesh_axis in split.mesh_axes:
                places[call.call.place] = call.call.layer, one
    alike: dict[tuple[type, Any], list[str]] = {}
    for place, (layer, one) in places.items():
        alike.setdefault((type(layer), one.pin.rules), []).append(place)
    for same in alike.values():
        layer, one = places[same[0]]
        if one.pin.rules is None:
            continue
        kept = [
            dataclasses.replace(
                rule, mesh_axes=tuple(a for a in rule.mesh_axes if a != worst.mesh_axis)
            )
            if isinstance(rule, NameRule) and rule.logical_axis == worst.axis
            else rule
            for rule in one.pin.rules.rules
        ]
        yield from with_other_rules(flows.subject, layer, one.pin, same, AxisRules.from_rules(kept))
