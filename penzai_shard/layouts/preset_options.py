"""The options that every preset of ``Layout`` takes: what is peculiar to a model."""

from collections.abc import Mapping
from typing import Any, TypedDict, TypeGuard

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.layouts.model_roles import Names
from penzai_shard.rule_kinds import NameRule, Rule, mesh_axes_text, nearest_name
from penzai_shard.rule_presets import tensor_parallel as split_names

MeshAxis = str | tuple[str, ...]


class PresetOptions(TypedDict, total=False):
    """Options of every preset.

    Attributes:
        vocabulary: The mesh axis that the vocabulary is split over, in the embedding table, in
            the layer that gives logits, and in the logits: each device looks up the tokens and
            gives the logits of its own part. A loss such as ``cross_entropy`` needs no whole
            logits either. Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
        experts: The mesh axis that the experts of a mixture of experts are split over. Source:
            Lepikhin et al. 2020, "GShard" (arXiv:2006.16668).
        names: As for ``Layout``.
        blocks: As for ``Layout``.
        rematerialise: As for ``Layout``.
        manual: As for ``Layout``.
    """

    vocabulary: MeshAxis | None
    experts: MeshAxis | None
    names: Names
    blocks: Any
    rematerialise: str | None
    manual: bool


def read_options(
    tables: Mapping[str, AxisRules | None], options: PresetOptions, wanted: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The arguments of ``Layout`` for the tables of a preset and the options given to it.

    Args:
        tables: The tables of the preset, by the names that ``Layout`` has for them.
        options: The options.
        wanted: The roles that the preset splits anyway.

    Returns:
        The arguments.

    Raises:
        RuleTypeError: There is no such option, or what it says cannot be.
    """
    problems = []
    for name, value in options.items():
        if name not in PresetOptions.__annotations__:
            near = nearest_name(name, PresetOptions.__annotations__)
            all_options = ", ".join(PresetOptions.__annotations__)
            fix = f"Did you mean {near!r}?" if near else f"Those of every preset are {all_options}."
            problems.append(f"{name}={value!r}: this preset has no such option. {fix}")
    raise_all(RuleTypeError, "this layout cannot be read:", problems)
    added = AxisRules({})
    # Where both are split over one mesh axis, neurons and heads yield to experts.
    asked = {"experts": options.get("experts"), "vocabulary": options.get("vocabulary")}
    for role, mesh_axes in asked.items():
        if mesh_axes is not None:
            added = added | split_names(mesh_axes, (role,))
            wanted = (*wanted, role)
    _check_apart_from_batch(tables, added)
    filled = {
        what: added | rules if what != "between_blocks" else _of_vocabulary(added) | rules
        for what, rules in tables.items()
        if rules is not None
    }
    kept = {name: value for name, value in options.items() if name not in asked}
    return {**filled, **kept, "wanted": wanted}


def _of_vocabulary(rules: AxisRules) -> AxisRules:
    return AxisRules.from_rules(
        rule
        for rule in rules.rules
        if isinstance(rule, NameRule) and rule.logical_axis == "vocabulary"
    )


def _check_apart_from_batch(tables: Mapping[str, AxisRules | None], added: AxisRules) -> None:
    """Activations have both axes: one mesh axis cannot split the batch and the neurons too."""
    compute = tables["compute"]
    taken = {
        name
        for rule in (compute.rules if compute is not None else ())
        if isinstance(rule, NameRule) and rule.logical_axis == "batch"
        for name in rule.mesh_axes
    }
    raise_all(
        RuleTypeError,
        "this layout cannot be read:",
        [
            f"{option}={mesh_axes_text(rule.mesh_axes)}: the batch is split over this mesh axis "
            f"already. Give another one, such as {option}='model'{or_data}."
            for option, or_data, rule in _splitting(compute, added)
            if taken & set(rule.mesh_axes)
        ],
    )


def _splitting(compute: AxisRules | None, added: AxisRules) -> list[tuple[str, str, NameRule]]:
    """What splits activations beside the batch: the option that says so, and its rule."""
    rules = [rule for rule in (compute.rules if compute is not None else ()) if _is_split(rule)]
    return [("model", ", or data='data'", rule) for rule in rules[:1]] + [
        (str(rule.logical_axis), "", rule) for rule in added.rules if _is_split(rule)
    ]


def _is_split(rule: Rule) -> TypeGuard[NameRule]:
    return isinstance(rule, NameRule) and rule.logical_axis != "batch"
