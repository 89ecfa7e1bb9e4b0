"""Which logical axes of a model play the roles that the presets speak of.

A preset says "heads" and means whatever the model calls them. By default these are the names of
Penzai's transformers; ``names=`` of a preset gives others.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, RuleTypeError, raise_all, warn_caller
from penzai_shard.fused_axes import divided_length, factors_of
from penzai_shard.meshes import AnyMesh, mesh_shape_of
from penzai_shard.named_leaves import leaves_of
from penzai_shard.partition_specs import padded_length, part_count
from penzai_shard.rule_kinds import (
    LogicalAxis,
    NameRule,
    OnIndivisible,
    Rule,
    nearest_name,
    sized_mesh_axes_text,
)

Names: TypeAlias = Mapping[str, LogicalAxis | tuple[LogicalAxis, ...] | None]
"""What a model calls its axes: a name for each role, several of which one is split, or None."""

# Of each group, the first that the model has and that divides is split. In grouped-query attention
# a query has both head axes, and keys and values have the first alone.
DEFAULT_NAMES: dict[str, tuple[tuple[LogicalAxis, ...], ...]] = {
    "batch": (("batch",),),
    "seq": (("seq",),),
    "embedding": (("embedding",),),
    "neurons": (("neurons",),),
    "heads": (("heads",), ("head_groups", "query_heads")),
    "vocabulary": (("vocabulary",),),
    "experts": (("experts",),),
}
OF_ACTIVATIONS = ("batch", "seq")
# Splitting any of these makes a layout one that splits the model, and not only its storage.
OF_LAYERS = ("neurons", "heads", "experts")


@dataclasses.dataclass(frozen=True)
class FoundAxis:
    """A logical axis of a model.

    Attributes:
        path: Where it first occurs.
        sizes: All lengths that it has.
    """

    path: str
    sizes: frozenset[int]


def logical_axes_of(tree: Any) -> dict[LogicalAxis, FoundAxis]:
    """The logical axes of a tree's arrays, and those that are the major ones of fused dimensions.

    >>> from penzai import pz
    >>> logical_axes_of({"w": pz.nx.ones({"neurons": 4})})
    {'neurons': FoundAxis(path='w', sizes=frozenset({4}))}
    """
    found: dict[LogicalAxis, FoundAxis] = {}
    for leaf in leaves_of(tree):
        for name, size in zip(leaf.names or (), leaf.shape, strict=False):
            for part in () if name is None else (name, *factors_of(name)):
                length = divided_length(name, size, part)
                if length is not None:
                    first = found.get(part, FoundAxis(leaf.path, frozenset()))
                    found[part] = FoundAxis(first.path, first.sizes | {length})
    return found


def check_names(names: Names) -> None:
    """Refuses names for roles that there are not.

    Raises:
        RuleTypeError: There are some; all are reported.

    >>> check_names({"neurons": "mlp"})
    """
    problems = []
    for role in names:
        if role not in DEFAULT_NAMES:
            near = nearest_name(role, DEFAULT_NAMES)
            fix = f"Did you mean {near!r}?" if near else f"Roles are {', '.join(DEFAULT_NAMES)}."
            problems.append(f"names={{{role!r}: {names[role]!r}}}: there is no such role. {fix}")
    raise_all(RuleTypeError, "these names cannot be read:", problems)


def groups_of(role: str, names: Names) -> tuple[tuple[LogicalAxis, ...], ...]:
    """The groups of alternative names of a role.

    >>> groups_of("heads", {"heads": "q"}), groups_of("heads", {"heads": None})
    ((('q',),), ())
    """
    if role not in names:
        return DEFAULT_NAMES[role]
    given = names[role]
    return () if given is None else (given if isinstance(given, tuple) else (given,),)


@dataclasses.dataclass(frozen=True)
class RolesOfModel:
    """The logical axes that play the roles of a layout in one model.

    Attributes:
        tables: The layout's tables, in the model's own names.
        split: The logical axes that are split, by role.
    """

    tables: dict[str, AxisRules]
    split: dict[str, tuple[LogicalAxis, ...]]


def roles_of_model(
    tree: Any,
    mesh: AnyMesh,
    tables: Mapping[str, AxisRules],
    names: Names,
    wanted: Sequence[str] = (),
    on_indivisible: OnIndivisible = "error",
) -> RolesOfModel:
    """Finds the roles that tables of rules speak of among the logical axes of a model.

    Args:
        tree: The model, or its train state, concrete or abstract.
        mesh: The mesh.
        tables: The tables. Rules for what is not a role stay as they are.
        names: What the model calls its axes.
        wanted: Roles that must be found.
        on_indivisible: Of lengths of parameters; with ``"pad"`` one that does not divide is split.

    Returns:
        The tables in the model's names. Alternatives that were not chosen are kept whole by a rule
        of their own, so that a plan shows it.

    Raises:
        RuleTypeError: A role that was asked for is not in the model, or has another name than
            was said.
        PlanError: A length does not divide.

    Warns:
        ShardingWarning: The model has some of the axes that a layout splits in layers, not all.
    """
    axes = logical_axes_of(tree)
    _check_found(axes, names, wanted)
    problems: list[str] = []
    split: dict[str, list[LogicalAxis]] = {}
    whole: dict[str, list[LogicalAxis]] = {}
    as_said = {role for role in DEFAULT_NAMES if _is_said_by_name(role, names, wanted, axes)}
    for role in DEFAULT_NAMES:
        over = mesh_axes_of(role, tables.values())
        if role in as_said:
            split[role], whole[role] = [role] if role in axes else [], []
            continue
        split[role], whole[role] = _chosen(
            role, groups_of(role, names), axes, over, mesh, problems, on_indivisible
        )
    raise_all(PlanError, "this layout does not fit the model:", problems)

    def resolved(rule: Rule) -> Iterable[Rule]:
        role = rule.logical_axis if isinstance(rule, NameRule) else None
        if not isinstance(role, str) or role not in DEFAULT_NAMES or role in as_said:
            return (rule,)
        assert isinstance(rule, NameRule)
        chosen = [dataclasses.replace(rule, logical_axis=name) for name in split[role]]
        return [*chosen, *(NameRule(name, ()) for name in whole[role])]

    return RolesOfModel(
        {
            what: AxisRules.from_rules(new for rule in rules.rules for new in resolved(rule))
            for what, rules in tables.items()
        },
        {
            role: tuple(split[role]) if mesh_axes_of(role, tables.values()) else ()
            for role in DEFAULT_NAMES
        },
    )


def speaks_of_parameters(tables: Iterable[AxisRules]) -> bool:
    """Whether some rule is for a role that parameters have, so that the model must be asked."""
    return any(
        isinstance(rule, NameRule)
        and rule.logical_axis in DEFAULT_NAMES
        and rule.logical_axis not in OF_ACTIVATIONS
        for rules in tables
        for rule in rules.rules
    )


def mesh_axes_of(role: str, tables: Iterable[AxisRules]) -> tuple[str, ...]:
    """The mesh axes that a role is split over.

    >>> mesh_axes_of("batch", [AxisRules({"batch": "data"})])
    ('data',)
    """
    for rules in tables:
        for rule in rules.rules:
            if isinstance(rule, NameRule) and rule.logical_axis == role and rule.mesh_axes:
                return rule.mesh_axes
    return ()


def _is_said_by_name(
    role: str, names: Names, wanted: Sequence[str], axes: Mapping[LogicalAxis, FoundAxis]
) -> bool:
    """Whether rules of a user's own mean the axis of that very name, as any other rules do.

    Then they stay as they are: it may be an axis of activations alone, and where its length does
    not divide, a further rule for it or what the plan's options say counts.
    """
    if role in names or role in wanted or role in OF_ACTIVATIONS:
        return False
    present = {name for group in groups_of(role, names) for name in group if name in axes}
    return present <= {role}


def _chosen(
    role: str,
    groups: tuple[tuple[LogicalAxis, ...], ...],
    axes: Mapping[LogicalAxis, FoundAxis],
    mesh_axes: tuple[str, ...],
    mesh: AnyMesh,
    problems: list[str],
    on_indivisible: OnIndivisible,
) -> tuple[list[LogicalAxis], list[LogicalAxis]]:
    """The names of a role that are split, and those that stay whole beside them."""
    if role in OF_ACTIVATIONS:
        return [name for group in groups for name in group], []
    split: list[LogicalAxis] = []
    whole: list[LogicalAxis] = []
    shape = mesh_shape_of(mesh)
    count = part_count(mesh_axes, shape)
    for group in groups:
        present = [name for name in group if name in axes]
        fitting = [name for name in present if not any(s % count for s in axes[name].sizes)]
        if present and not fitting and on_indivisible == "pad":
            # The first of those that grow least.
            fitting = [min(present, key=lambda name: _growth(axes[name].sizes, count))]
        if present and not fitting:
            problems.append(_indivisible(role, present, axes, mesh_axes, shape))
        split += fitting[:1]
        whole += [name for name in present if name not in fitting[:1]]
    return split, whole


def _growth(sizes: Iterable[int], count: int) -> float:
    """By how much the lengths of an axis grow at most that are padded to divide."""
    return max(padded_length(size, count) / size for size in sizes)


def _check_found(
    axes: Mapping[LogicalAxis, FoundAxis], names: Names, wanted: Sequence[str]
) -> None:
    problems: list[str] = []
    known = ", ".join(map(repr, sorted(axes, key=str))) or "none"
    for role, given in names.items():
        listed = given if isinstance(given, tuple) else () if given is None else (given,)
        if role in OF_ACTIVATIONS or any(name in axes for name in listed) or not listed:
            continue
        near = nearest_name(listed[0], map(str, axes))
        fix = f"Did you mean {near!r}?" if near else f"It has {known}."
        problems.append(f"names={{{role!r}: {given!r}}}: the model has no such logical axis. {fix}")
    raise_all(RuleTypeError, "these names are not of this model:", problems)
    missing = [
        role
        for role in wanted
        if groups_of(role, names)
        and not any(name in axes for group in groups_of(role, names) for name in group)
    ]
    said = [
        f"{role!r}: the model has no logical axis of this role; it has {known}. Say which it is: "
        f'names={{{role!r}: "..."}}, or names={{{role!r}: None}} if there is none.'
        for role in missing
    ]
    of_layers = [role for role in wanted if role in OF_LAYERS and groups_of(role, names)]
    is_hopeless = of_layers and not set(of_layers) - set(missing)
    if is_hopeless or {"vocabulary", "experts"} & set(missing):
        raise_all(RuleTypeError, "this layout splits what the model does not name:", said)
    warn_caller(f"a layout splits {problem}" for problem in said)


def _indivisible(
    role: str,
    present: Sequence[LogicalAxis],
    axes: Mapping[LogicalAxis, FoundAxis],
    mesh_axes: tuple[str, ...],
    shape: Mapping[str, int],
) -> str:
    """Why no name of a role can be split, with what to write instead."""
    count = part_count(mesh_axes, shape)
    lengths = {name: sorted(axes[name].sizes) for name in present}
    described = " and ".join(
        f"logical axis {name!r} ({', '.join(map(str, sizes))})" for name, sizes in lengths.items()
    )
    verb = "do" if len(present) > 1 or any(len(s) > 1 for s in lengths.values()) else "does"
    worst = max(size for size in lengths[present[0]] if size % count)
    fitting = max(
        (n for n in range(1, count) if not any(s % n for s in lengths[present[0]])), default=1
    )
    fix = f"Pad it to {padded_length(worst, count)}"
    if len(mesh_axes) == 1:
        fix += f", use a mesh with {mesh_axes[0]}={fitting}"
    return (
        f"{axes[present[0]].path}: {described} {verb} not divide over "
        f"{sized_mesh_axes_text(mesh_axes, shape)}. {fix}, or leave it whole: "
        f'names={{{role!r}: None}}. Or store it padded: on_indivisible="pad".'
    )
