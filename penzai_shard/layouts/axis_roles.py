"""Finds which logical axes of a model play the roles that the rules of a layout speak of.

A preset says "heads" and means whatever the model calls them: a name of Penzai's transformers, or
the one that ``names=`` gives. Of several axes of one role the first that divides is split, and the
others are whole.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penzai_shard import specs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.paths import nearest
from penzai_shard.rules import TRANSFORMER_AXES, AxisRules, Rule

# The roles that parameters have and that layers compute a part of, and those of activations.
_HEADS = tuple(name for name in TRANSFORMER_AXES if name not in ("neurons", "vocabulary"))
IN_LAYERS = ("neurons", "heads", "experts")
IN_ACTIVATIONS = ("batch", "seq")
ROLES: dict[str, tuple[Any, ...]] = {
    **{name: (name,) for name in (*IN_ACTIVATIONS, "embedding", *IN_LAYERS, "vocabulary")},
    "heads": _HEADS,
}


def axes_of_role(role: str, names: Mapping[str, Any]) -> tuple[Any, ...]:
    """The logical axes that may play a role, the most wanted first; another axis plays itself.

    >>> axes_of_role("heads", {}), axes_of_role("heads", {"heads": "q"})
    (('heads', 'head_groups', 'query_heads'), ('q',))
    """
    if role not in names:
        return ROLES.get(role, (role,))
    given = names[role]
    return () if given is None else tuple(given) if isinstance(given, tuple | list) else (given,)


def mesh_axes_of(role: str, tables: Iterable[AxisRules]) -> tuple[str, ...]:
    """The mesh axes over which tables of rules split a role."""
    rules = (rule for table in tables for rule in table.rules if rule.logical_axis == role)
    return next((rule.mesh_axes for rule in rules if rule.mesh_axes), ())


@dataclasses.dataclass(frozen=True)
class FoundRoles:
    """The roles of a layout in one model.

    Attributes:
        tables: The layout's tables of rules, in the model's own names.
        split: The logical axes that are split, by role.
        notes: What a plan should say of them.
    """

    tables: dict[str, Any]
    split: dict[str, tuple[Any, ...]]
    notes: tuple[str, ...]

    @property
    def split_in_layers(self) -> set[Any]:
        """The logical axes of which each device computes a part in layers."""
        return {name for role in IN_LAYERS for name in self.split[role]}

    @property
    def pins_regions(self) -> bool:
        """Whether the compiler is told what flows in and out of each region, not of blocks only."""
        has_between = "between_blocks" in self.tables
        return bool(self.split_in_layers or self.split["vocabulary"] or has_between)


def find_roles(
    tree: Any, mesh: AnyMesh, tables: Mapping[str, AxisRules], names: Mapping[str, Any]
) -> FoundRoles:
    """Finds the roles that tables of rules speak of among the logical axes of a model.

    Args:
        tree: A model or a train state, concrete or abstract.
        mesh: The mesh.
        tables: The tables of rules by name.
        names: What the model calls its axes.

    Raises:
        MeshError: A rule names a mesh axis that the mesh does not have.
        RuleTypeError: The model has no axis of a role that is to be split.
    """
    # A mesh of as many devices that has what is asked for; the table of the batch has it in order.
    rules = [rule for table in [*tables.values()][::-1] for rule in table.rules]
    needed = {axis: mesh.shape.get(axis, 1) for rule in rules for axis in rule.mesh_axes}
    for axis in [axis for axis in needed if axis not in mesh.shape][:1]:
        needed[axis] = mesh.size // math.prod(needed.values())
    for table in tables.values():
        table.on(mesh.shape, f"This layout is for a mesh such as make_mesh({needed}).")
    sizes: dict[Any, set[int]] = {}
    for leaf in leaves_of(tree):
        for name, size in zip(leaf.names or (), leaf.shape, strict=False):
            sizes.setdefault(name, set()).add(size)
    sizes.pop(None, None)
    # What infer_names calls "heads*projection" is split along its first factor.
    members: dict[Any, list[Any]] = {name: [name] for name in sizes}
    for name in sizes:
        first = str(name).partition("*")[0]
        if first != name and isinstance(name, str):
            members.setdefault(first, []).append(name)
    _check_present(tables, names, members)

    split: dict[str, tuple[Any, ...]] = {}
    whole: dict[str, tuple[Any, ...]] = {}
    notes: list[str] = []
    for role in ROLES:
        axes, over = axes_of_role(role, names), mesh_axes_of(role, tables.values())
        present = [x for x in axes if x in members or role in IN_ACTIVATIONS]
        own = {axis: members.get(axis, [axis]) for axis in present}
        parts = specs.part_count(over, mesh.shape)
        odd = {name for name, lengths in sizes.items() if any(n % parts for n in lengths)}
        fitting = [axis for axis in present if odd.isdisjoint(own[axis])]
        # Where none divides, the rule stays, and plans say what does not fit.
        chosen = fitting[:1] or present[:1]
        if role == "vocabulary" and over and present and _is_optional(role, tables.values()):
            chosen = fitting[:1]
            notes.append(_vocabulary_note(chosen, present, over, parts))
        split[role] = tuple(name for axis in chosen for name in own[axis]) if over else ()
        whole[role] = tuple(x for axis in present for x in own[axis] if x not in split[role])

    def resolve(rule: Rule) -> list[Rule]:
        role: Any = rule.logical_axis
        if role not in ROLES:
            return [rule]
        if not split[role] and not rule.optional and role not in names:
            # A rule of the user's own, for an axis that no parameter has, or that keeps one whole.
            return [rule]
        if not rule.mesh_axes:
            return [dataclasses.replace(rule, logical_axis=x) for x in split[role] + whole[role]]
        kept = [dataclasses.replace(rule, logical_axis=name) for name in split[role]]
        return kept + [Rule(name, ()) for name in whole[role]]

    resolved = {
        name: AxisRules([new for rule in table.rules for new in resolve(rule)])
        for name, table in tables.items()
    }
    return FoundRoles(resolved, split, tuple(notes))


def _is_optional(role: str, tables: Iterable[AxisRules]) -> bool:
    return all(x.optional for table in tables for x in table.rules if x.logical_axis == role)


def _check_present(
    tables: Mapping[str, AxisRules], names: Mapping[str, Any], sizes: Mapping[Any, Any]
) -> None:
    """Refuses roles of parameters, and names for them, that the model does not have."""
    known = ", ".join(map(repr, sorted(sizes, key=str))) or "none"
    lacking: dict[str, tuple[Any, ...]] = {}
    for role in (*IN_LAYERS, "vocabulary"):
        axes, rules = axes_of_role(role, names), [tables["parameters"]]
        is_asked = role in names or bool(mesh_axes_of(role, rules))
        is_automatic = role == "vocabulary" and role not in names and _is_optional(role, rules)
        if axes and is_asked and not is_automatic and not {*axes} & sizes.keys():
            lacking[role] = axes
    # One text for all of them, which can be pasted: what the model seems to lack stays whole.
    near = {role: nearest(str(axes[0]), map(str, sizes)) for role, axes in lacking.items()}
    fix = f"Write names={ {**names, **near} }, with the model's own names where it has such axes."
    problems = Problems("this layout splits what the model does not name:")
    for role, axes in lacking.items():
        what = f"the model has no logical axis {' or '.join(map(repr, axes))}; it has {known}"
        problems.add(role, what, fix)
    problems.raise_if_any(RuleTypeError)


def _vocabulary_note(chosen: Sequence[Any], present: Sequence[Any], over: Any, parts: int) -> str:
    """What a plan says of a vocabulary that is split where that is possible."""
    where = f"mesh axis {' and '.join(map(repr, over))} ({parts})"
    if chosen:
        return f"the vocabulary {chosen[0]!r} is split over {where}: no device has all logits"
    fix = "pad it, and give cross_entropy classes="
    return f"each device computes all logits, as {present[0]!r} does not divide over {where}: {fix}"
