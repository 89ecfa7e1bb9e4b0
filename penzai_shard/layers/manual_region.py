"""Regions of a program that run per device, and what JAX tracks of the arrays in them.

Inside ``jax.shard_map`` some mesh axes are *manual*: the code says what each device along them
computes. A value's type says along which of them it *varies*, which is to say that devices may
hold different ones.
"""

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from penzai_shard.axis_rules import AxisRules
from penzai_shard.meshes import AnyMesh
from penzai_shard.partition_specs import part_count, restricted_spec
from penzai_shard.planning import plan_tree


def manual_axes() -> frozenset[str]:
    """The mesh axes that a surrounding ``jax.shard_map`` has taken over; empty outside.

    >>> manual_axes()
    frozenset()
    """
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(value: Any) -> frozenset[str]:
    """The manual mesh axes along which devices may hold different values.

    Args:
        value: An array, a tracer, or what stands for its type.

    >>> varying_axes(jax.numpy.ones(2))
    frozenset()
    """
    kind = jax.typeof(value) if isinstance(value, jax.Array | np.ndarray) else value
    tracked = getattr(kind, "manual_axis_type", None) or getattr(kind, "mat", None)
    varying = getattr(kind, "vma", None) if tracked is None else tracked.varying
    return frozenset(varying or ())


def as_varying(array: Any, mesh_axes: Iterable[str]) -> Any:
    """The same array, typed as varying along more mesh axes.

    The transpose of this is the sum over those axes: a gradient that differs between devices
    becomes that of the one value that they all hold.

    Args:
        array: An array inside ``jax.shard_map``.
        mesh_axes: Manual mesh axes.

    >>> float(as_varying(jax.numpy.ones(()), ()))
    1.0
    """
    missing = tuple(sorted(set(mesh_axes) - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


@dataclasses.dataclass(frozen=True)
class Region:
    """Which mesh axes a region of the program takes over, and what is split over them.

    Attributes:
        mesh: The mesh, with Auto axes.
        parameter_rules: Rules for parameters.
        activation_rules: Rules for everything else.
        manual: The mesh axes that the region takes over.
        min_size: Parameters with fewer elements than this are not split.
        keep_split: The logical axes over which parameters stay split inside.
        per_device: Whether the layer is written for one device's part.
        assume_independent: Operations that are taken to treat elements independently.
    """

    mesh: AnyMesh
    parameter_rules: AxisRules
    activation_rules: AxisRules
    manual: tuple[str, ...]
    min_size: int = 0
    keep_split: tuple[Hashable, ...] = ()
    per_device: bool = False
    assume_independent: tuple[str, ...] = ()

    def parameter_specs(self, tree: Any) -> list[PartitionSpec]:
        """The specs of the arrays of a tree, over the manual mesh axes alone."""
        return self._specs(tree, self.parameter_rules, self.min_size)

    def activation_specs(self, tree: Any) -> list[PartitionSpec]:
        """The specs of the arrays of a tree, over the manual mesh axes alone."""
        return self._specs(tree, self.activation_rules)

    def parts(self, mesh_axes: Iterable[str]) -> int:
        """How many parts some mesh axes make."""
        return part_count(mesh_axes, self.mesh.shape)

    def _specs(self, tree: Any, rules: AxisRules, min_size: int = 0) -> list[PartitionSpec]:
        plan = plan_tree(tree, self.mesh, rules, on_unnamed="replicate", min_size=min_size)
        return [
            restricted_spec(sharding.spec, self.manual)
            for sharding in jax.tree_util.tree_leaves(plan.sharding_tree())
        ]
