"""Findings about layers that gather parameters, or that run per device."""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layers import GatherParameters, ShardMapped
from penzai_shard.layouts.model_roles import logical_axes_of
from penzai_shard.linting.findings import Change, Finding
from penzai_shard.linting.findings_in_layers import (
    FindingInLayers,
    FoundInLayer,
    grouped,
    layers_laying_out,
)
from penzai_shard.linting.layer_changes import change_of_layers
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.rule_changes import rules_text
from penzai_shard.planning import PlanRequest
from penzai_shard.rule_kinds import LogicalAxis, NameRule, meant_name


def regions_of_nothing(subject: LintSubject) -> Iterator[Finding]:
    """Layers whose rules for parameters, or for what flows, look like mistakes."""
    flows = subject.flows
    if flows.is_edited_here:
        return

    def found() -> Iterator[FoundInLayer]:
        for place, label, layer in layers_laying_out(flows.model):
            field = {GatherParameters: "rules", ShardMapped: "parameter_rules"}.get(type(layer))
            if field is not None:
                present = logical_axes_of(layer.body).keys()
                yield from _doubted(subject, place, label, layer, field, present)
        for call in flows.calls:
            layer = call.call.layer
            if isinstance(layer, ShardMapped) and call.call.inputs:
                names = frozenset(name for array in call.call.inputs for name in array.sizes)
                place, label = call.call.place, call.call.label
                yield from _doubted(subject, place, label, layer, "activation_rules", names)

    yield from grouped(found())


def _doubted(
    subject: LintSubject,
    place: str,
    label: str,
    layer: Any,
    field: str,
    present: Collection[LogicalAxis],
) -> Iterator[FoundInLayer]:
    """What about a table of rules of a layer is probably not meant."""
    rules = AxisRules.of(getattr(layer, field))
    flows = field == "activation_rules"
    of = "what flows into" if flows else "the parameters in"
    for doubt in PlanRequest.read("lint", layer.mesh, rules).doubts(present, constrains=flows):
        said = doubt.replace("of this tree", f"of {of} this {type(layer).__name__}")
        said = said.replace("this constraint", f"this {type(layer).__name__}")

        def changes(places: tuple[str, ...]) -> Iterator[Change]:
            for meant in _meant(rules, present, subject):
                code = f"dataclasses.replace(layer, {field}={rules_text(meant)})"
                yield from change_of_layers(
                    subject, places, code, functools.partial(_with_field, field=field, rules=meant)
                )

        about = f"{type(layer).__name__} {field} {rules} {doubt}"
        yield place, label, FindingInLayers("idle constraint", said, about, {}, changes)


def _with_field(layer: Any, *, field: str, rules: AxisRules) -> Any:
    return dataclasses.replace(layer, **{field: rules})


def _meant(
    rules: AxisRules, present: Collection[LogicalAxis], subject: LintSubject
) -> Iterator[AxisRules]:
    """Rules that may have been meant, the most likely first."""
    made = []
    for rule in rules.rules:
        name = rule.logical_axis if isinstance(rule, NameRule) else None
        others = [str(other) for other in present if other not in rules.logical_axes]
        near = None if name is None or name in present else meant_name(name, others)
        changed: Any = rule
        made.append(changed if near is None else dataclasses.replace(changed, logical_axis=near))
    yield AxisRules.from_rules(made)
    of_batch = subject.flows.batch_rules.rules
    yield AxisRules.from_rules(
        rule for rule in of_batch if isinstance(rule, NameRule) and rule.logical_axis in present
    )
    yield AxisRules.from_rules(rule for rule in made if _is_named(rule, present))


def _is_named(rule: Any, present: Collection[LogicalAxis]) -> bool:
    return not isinstance(rule, NameRule) or rule.logical_axis in present
