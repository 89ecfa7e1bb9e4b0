"""What a person has decided before a layout is looked for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.candidates.mesh_uses import MeshUse
from penzai_shard.choosing.candidates.problem_axes import ProblemAxes
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.layouts.model_roles import groups_of
from penzai_shard.rule_kinds import LogicalAxis, nearest_name

MeshAxes: TypeAlias = tuple[str, ...]
Keep: TypeAlias = Mapping[LogicalAxis, str | Sequence[str] | None]
"""Logical axis, or role, to mesh axes; None for one that stays whole."""


@dataclasses.dataclass(frozen=True)
class KeptAxes:
    """What is decided.

    Attributes:
        roles: The mesh axes of the batch, the sequence, and what layers are split along.
        storing: The mesh axes of other axes, by which parameters are stored.
    """

    roles: Mapping[LogicalAxis, MeshAxes]
    storing: Mapping[LogicalAxis, MeshAxes]

    @classmethod
    def read(
        cls, keep: Keep, axes: ProblemAxes, mesh_shapes: Sequence[Mapping[str, int]]
    ) -> "KeptAxes":
        """Reads what is decided.

        Args:
            keep: What was said.
            axes: What the problem has.
            mesh_shapes: The meshes that are looked at.

        Raises:
            RuleTypeError: The problem has no such logical axis, or no mesh has such a mesh axis.
        """
        by_name = {
            name: role
            for role in ("batch", "seq", *axes.split)
            for group in (groups_of(role, axes.names) if role in _ROLES else ((role,),))
            for name in (role, *group)
        }
        mesh_axes = sorted({axis for shape in mesh_shapes for axis in shape})
        roles: dict[LogicalAxis, MeshAxes] = {}
        storing: dict[LogicalAxis, MeshAxes] = {}
        problems = []
        for name, given in keep.items():
            over = () if given is None else (given,) if isinstance(given, str) else tuple(given)
            known = [str(each) for each in dict.fromkeys((*by_name, "embedding", *axes.axes))]
            unknown = [axis for axis in over if axis not in mesh_axes]
            if str(name) not in known:
                near = nearest_name(str(name), known)
                fix = f"Did you mean {near!r}?" if near else f"There are {', '.join(known)}."
                if str(name) in mesh_axes and over and all(each in known for each in over):
                    turned = {each: str(name) for each in over}
                    fix = f"Logical axes come first. Write keep={turned}."
                problems.append(f"keep[{name!r}]: the model has no such logical axis. {fix}")
            elif unknown:
                near = nearest_name(unknown[0], mesh_axes)
                fix = f"Did you mean {near!r}?" if near else f"There are {', '.join(mesh_axes)}."
                problems.append(f"keep[{name!r}]: no mesh has mesh axis {unknown[0]!r}. {fix}")
            elif len(set(over)) < len(over):
                once = tuple(dict.fromkeys(over))
                fix = repr(once[0] if len(once) == 1 else once)
                problems.append(
                    f"keep[{name!r}]: a mesh axis is there twice. Write keep={{{name!r}: {fix}}}."
                )
            elif name in by_name:
                roles[by_name[name]] = over
            else:
                storing[axes.stored if name == "embedding" else name] = over
        raise_all(RuleTypeError, "what is to be kept cannot be read:", problems)
        return cls(roles, storing)

    def allows(self, use: MeshUse) -> bool:
        """Whether a way to use a mesh has the mesh axes that are decided, for what they are."""
        shape = use.mesh_shape
        wanted = {axis for over in (*self.roles.values(), *self.storing.values()) for axis in over}
        if not wanted <= shape.keys():
            return False
        if "batch" in self.roles and tuple(
            axis for axis in self.roles["batch"] if shape[axis] > 1
        ) != (use.batch):
            return False
        of_model = {axis for role, over in self.roles.items() if role != "batch" for axis in over}
        return of_model.isdisjoint(use.batch)

    def choices_of(self, role: LogicalAxis, free: Sequence[MeshAxes]) -> Sequence[MeshAxes]:
        """The mesh axes that a role may be split over."""
        return (self.roles[role],) if role in self.roles else free

    @property
    def stored(self) -> AxisRules | None:
        """How parameters are stored, if that is decided."""
        split = {name: over for name, over in self.storing.items() if over}
        return AxisRules(split) if split else None

    @property
    def whole(self) -> AxisRules:
        """Rules for the axes that parameters are not to be split along."""
        return AxisRules({name: None for name, over in self.storing.items() if not over})


_ROLES = ("batch", "seq", "neurons", "heads", "vocabulary", "experts")
