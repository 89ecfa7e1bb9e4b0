"""What about rules is probably not meant though it is allowed: messages of warnings."""

import math
from collections.abc import Collection

from penzai_shard.axis_rules import AxisRules
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import NAMELESS_MODULE, Planner
from penzai_shard.rule_kinds import (
    IdentityRule,
    LogicalAxis,
    NameRule,
    mesh_axes_text,
    nearest_name,
)


def rule_doubts(
    called: str,
    planner: Planner,
    rules_given: bool,
    present: Collection[LogicalAxis],
    constrains: bool = False,
) -> list[str]:
    """Finds rules that are probably mistakes.

    Args:
        called: The function that was called, for messages.
        planner: Mesh and rules.
        rules_given: Whether the caller gave any rules; if not, they are the identity.
        present: The logical axes of the arrays.
        constrains: Whether the rules pin what flows through a layer. If none of them applies it is
            not idle, as it would be in a plan of parameters: every device computes everything.

    Returns:
        One message for each rule that matches nothing and whose name is nearly that of a logical
        axis, and for each logical axis that is a tuple of mesh axes and has no rule; or one if no
        rules were given, and no logical axis has the name of a mesh axis; or
        one if no rule of a constraint applies.

    >>> import jax
    >>> planner = Planner(jax.sharding.AbstractMesh((2,), ("data",)), {"neuron": "data"})
    >>> rule_doubts("place", planner, True, {"neurons"})
    ["rule 'neuron' -> 'data' matches no logical axis of this tree, which has 'neurons'. Did ...]
    """
    mesh, rules = planner.mesh, planner.rules
    doubts = [
        f"rule {rule} matches no logical axis of this tree, which has {name!r}. "
        f"Did you mean {name!r}?"
        for rule, name in near_names(rules, present).items()
    ]
    if rules_given:
        doubts += [
            f"no rule names logical axis {name!r}, a tuple of mesh axes, which therefore stays "
            f"whole. If it means these, say so: ({name!r}, {mesh_axes_text(axes)})."
            for name, axes in tuples_of_mesh_axes(rules, mesh, present).items()
        ]
    if not present or math.prod(mesh.shape.values()) == 1:
        return doubts
    if not rules_given and not any(IdentityRule.mesh_axes_of(n, mesh.shape) for n in present):
        listed, example = _listed_with_example(planner, present)
        doubts.append(
            f"{called} was given no rules, and none of the logical axes ({listed}) has the name of "
            f"a mesh axis ({mesh_text(mesh)}), so every device gets a whole copy. Say what is "
            f"split over what, for instance rules={example!r}, or that copies are wanted: "
            "rules={}."
        )
    elif constrains and rules_given and not doubts and _applies_nowhere(rules, present):
        listed, example = _listed_with_example(planner, present)
        doubts.append(
            f"the rules of this constraint ({'; '.join(map(str, rules.rules))}) name none of the "
            f"logical axes of what flows through it ({listed}), so every device gets a whole copy "
            f"of it. Name one of them, for instance {example!r}, or write "
            f"{dict.fromkeys(example)!r} if copies are wanted."
        )
    return doubts


def _listed_with_example(
    planner: Planner, present: Collection[LogicalAxis]
) -> tuple[str, dict[LogicalAxis, str]]:
    """Logical axes as text, and a rule for the first of them."""
    axes = sorted(present, key=str)
    listed = ", ".join(map(repr, axes[:6])) + (", ..." if len(axes) > 6 else "")
    return listed, {axes[0]: next(iter(planner.mesh.shape))}


def _applies_nowhere(rules: AxisRules, present: Collection[LogicalAxis]) -> bool:
    # The rules of a preset are alternatives, of which a value need not have any.
    only_names = all(isinstance(rule, NameRule) and not rule.yields for rule in rules.rules)
    return bool(rules.rules) and only_names and not set(rules.logical_axes) & set(present)


def near_names(rules: AxisRules, present: Collection[LogicalAxis]) -> dict[NameRule, str]:
    """The rules that match nothing, and whose name is nearly that of a logical axis, with that.

    >>> near_names(AxisRules({"neuron": "data", "batch": "data"}), ["neurons"])
    {NameRule(logical_axis='neuron', mesh_axes=('data',), ...): 'neurons'}
    """
    free = set(present) - set(rules.logical_axes)
    near = {
        rule: nearest_name(rule.logical_axis, _not_longer_by_a_word(rule.logical_axis, free))
        for rule in rules.rules
        if isinstance(rule, NameRule) and rule.logical_axis not in present
    }
    return {rule: name for rule, name in near.items() if name is not None}


def tuples_of_mesh_axes(
    rules: AxisRules, mesh: AnyMesh, present: Collection[LogicalAxis]
) -> dict[LogicalAxis, tuple[str, ...]]:
    """Names that stand for mesh axes, as Flax reads them, where rules say nothing of them.

    >>> import jax
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> tuples_of_mesh_axes(AxisRules({}), mesh, [("data",), "embed"])
    {('data',): ('data',)}
    """
    if any(isinstance(rule, IdentityRule) for rule in rules.rules):
        return {}
    free = set(present) - set(rules.logical_axes)
    return {
        name: axes
        for name in sorted(free, key=str)
        if isinstance(name, tuple) and (axes := IdentityRule.mesh_axes_of(name, mesh.shape))
    }


def _not_longer_by_a_word(name: LogicalAxis, others: Collection[LogicalAxis]) -> list[LogicalAxis]:
    """Names without those that have a word more or less, which are names of other things.

    >>> _not_longer_by_a_word("features_out", ["features", "feature_out"])
    ['feature_out']
    """
    return [
        other
        for other in others
        for shorter, longer in [sorted((str(name), str(other)), key=len)]
        if not longer.startswith(f"{shorter}_") and not longer.endswith(f"_{shorter}")
    ]


def nameless_module_doubts(plan: ShardingPlan) -> list[str]:
    """One message if arrays are copied to every device because they are in Equinox modules."""
    paths = [leaf.path for leaf in plan.leaves if leaf.reason == NAMELESS_MODULE]
    if not paths:
        return []
    arrays = f"the array {paths[0]} is" if len(paths) == 1 else f"{len(paths)} arrays are"
    return [
        f"{arrays} in Equinox modules, which give no names to logical axes, so that every device "
        "gets a whole copy. Name what is to be split, for instance "
        f'name_axes(module, {{"**/weight": ("out", "in"), ...}}); or split what is large, '
        'rules | fully_sharded(unnamed="largest"); or pass on_unnamed="replicate" if copies are '
        "wanted."
    ]
