"""Holds the decision for every array of a tree, and shows it.

A plan touches no device. Its trees are carried out by ``place``, ``jax.jit``, a restore, or Orbax.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard import specs
from penzai_shard.arrays.kinds import device_dtype, itemsize
from penzai_shard.arrays.structure import Leaf, Structure
from penzai_shard.errors import PlanError, Problems
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.reports.quantities import bytes_text, plain_text
from penzai_shard.reports.report import Column, HasReport, Report
from penzai_shard.rules import AxisRules


@functools.lru_cache(maxsize=4096)
def shared_sharding(mesh: AnyMesh, spec: PartitionSpec | None) -> NamedSharding | None:
    """The one ``NamedSharding`` of a spec on a mesh, so that trees are small and compared fast."""
    return None if spec is None else NamedSharding(mesh, spec)


@dataclasses.dataclass(frozen=True, slots=True)
class LeafPlan:
    """The decision for one array.

    Attributes:
        path: Its path.
        names: The logical axis of each dimension, None for one without; None if it has no names.
        shape: Its shape.
        dtype: Its dtype.
        spec: Where it lies, canonical; None where it is left to JAX.
        sharding: The same on the plan's mesh. Equal layouts share one object.
        reason: Why.
        bytes_per_device: Size of the part that one device holds.
    """

    path: str
    names: tuple[Hashable | None, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec | None
    sharding: NamedSharding | None
    reason: str
    bytes_per_device: int

    @property
    def total_bytes(self) -> int:
        """Size of the whole array."""
        return 0 if self.dtype is None else math.prod(self.shape) * itemsize(self.dtype)

    @property
    def axes_text(self) -> str:
        """Each dimension with its length and mesh axes: ``vocab=32000, embed=4096/data``."""
        return write_axes(self.names, self.shape, self.spec)


def write_axes(
    names: Sequence[Hashable | None] | None, shape: Sequence[int], spec: PartitionSpec | None
) -> str:
    """Each dimension of an array with its length and mesh axes.

    >>> write_axes(("vocab", "embed"), (32000, 4096), PartitionSpec(None, "data"))
    'vocab=32000, embed=4096/data'
    """
    axes = specs.mesh_axes(spec or PartitionSpec(), len(shape))
    return ", ".join(
        (str(size) if name is None else f"{plain_text(name)}={size}")
        + (f"/{'+'.join(over)}" if over else "")
        for name, size, over in zip(names or (None,) * len(shape), shape, axes, strict=True)
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardingPlan(HasReport):
    """Where every array of one tree lies on a mesh, and why.

    Attributes:
        mesh: The mesh, with Auto axes.
        rules: The rules.
        leaves: The decision for each array, in the order of the tree.
        structure: The rest of the tree.
        remarks: What else a reader should know.
    """

    mesh: AnyMesh
    rules: AxisRules
    leaves: tuple[LeafPlan, ...]
    structure: Structure
    remarks: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[str, ...]:
        """The paths of leaves that are no arrays; they stay as they are."""
        return tuple(path for path, _ in self.structure.statics)

    @property
    def bytes_per_device(self) -> int:
        """What each device holds."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the arrays that every device holds whole."""
        # What is left to JAX, with the spec None, may lie anywhere.
        whole = PartitionSpec()
        return sum(leaf.bytes_per_device for leaf in self.leaves if leaf.spec == whole)

    @property
    def total_bytes(self) -> int:
        """Size of all arrays, each counted once."""
        return sum(leaf.total_bytes for leaf in self.leaves)

    @property
    def logical_axes(self) -> tuple[Hashable, ...]:
        """The names that arrays of the tree have, in the order of their first."""
        names = (name for leaf in self.leaves for name in leaf.names or () if name is not None)
        return tuple(dict.fromkeys(names))

    @property
    def unused_rules(self) -> tuple[Hashable, ...]:
        """The logical axes of rules that no array of the tree has."""
        present = set(self.logical_axes)
        return tuple(axis for axis in self.rules.logical_axes if axis not in present)

    def sharding_tree(self) -> Any:
        """The tree with a ``NamedSharding`` for each array, None where it is left to JAX.

        For ``jax.device_put``, and for ``in_shardings`` and ``out_shardings`` of ``jax.jit``.
        Variables are frozen in it, and settings of modules that are numbers are None.
        """
        return self.structure.fill([leaf.sharding for leaf in self.leaves], settings=False)

    def restore_structs(self) -> Any:
        """The tree with a ``ShapeDtypeStruct`` for each array, which carries its sharding."""
        rows = ((leaf.shape, leaf.dtype, leaf.sharding) for leaf in self.leaves)
        structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=own) for shape, dtype, own in rows]
        return self.structure.fill(structs)

    def on(self, mesh: AnyMesh) -> "ShardingPlan":
        """The same decisions on another mesh with the same axes, for instance one with devices."""
        # Specs name mesh axes, and no devices.
        pairs = ((leaf, shared_sharding(mesh, leaf.spec)) for leaf in self.leaves)
        leaves = tuple(dataclasses.replace(leaf, sharding=own) for leaf, own in pairs)
        return dataclasses.replace(self, mesh=mesh, leaves=leaves)

    def check_same_tree(self, leaves: Sequence[Leaf]) -> None:
        """Refuses a tree that is not the one of the plan.

        Raises:
            PlanError: Paths, names, shapes or dtypes differ; all differences are in it.
        """
        self.structure.check_paths()
        problems = Problems("the plan is one of another tree:")
        fix = "Plan this tree: make_plan(tree, mesh, rules)."
        # By dtypes of devices: NumPy's float64 is planned as the float32 that JAX makes of it.
        planned: dict[str, Any] = {x.path: (x.names, x.shape, x.dtype) for x in self.leaves}
        found: dict[str, Any] = {x.path: (x.names, x.shape, device_dtype(x.dtype)) for x in leaves}
        what = "names, shape and dtype: the plan has {}, and the tree has {}"
        problems.compare(planned, found, what, fix, "misfit")
        problems.raise_if_any(PlanError)

    def to_data(self) -> dict[str, Any]:
        """The plan as a dictionary, with a row for each array."""
        # Tables have names, lengths and mesh axes in one column, which code would have to parse.
        rows = [
            {name: getattr(leaf, name) for name in LeafPlan.__slots__ if name != "sharding"}
            | {"dtype": str(leaf.dtype), "spec": None if leaf.spec is None else tuple(leaf.spec)}
            for leaf in self.leaves
        ]
        return {**super().to_data(), "rows": rows}

    def report(self) -> Report:
        """The plan as a table."""
        columns = (
            Column("array", "path"),
            Column("logical axes/mesh axes"),
            Column("dtype"),
            Column("per device", "bytes"),
            Column("reason"),
        )
        rows = tuple(
            (leaf.path, leaf.axes_text, str(leaf.dtype), leaf.bytes_per_device, leaf.reason)
            for leaf in self.leaves
        )
        count = f"{len(self.leaves):,} array{'s' * (len(self.leaves) != 1)}"
        verdict = (
            f"{count}, {bytes_text(self.total_bytes)}; on mesh ({mesh_text(self.mesh)}) each "
            f"device holds {bytes_text(self.bytes_per_device)}, of which replicated "
            f"{bytes_text(self.replicated_bytes)}"
        )
        facts = {
            "mesh": dict(self.mesh.shape),
            "rules": self.rules.to_data(),
            "total_bytes": self.total_bytes,
            "bytes_per_device": self.bytes_per_device,
            "replicated_bytes": self.replicated_bytes,
            "others": list(self.others),
        }
        return Report("Plan", verdict, columns, rows, notes=self._notes(), facts=facts)

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.remarks)
        if self.unused_rules:
            names = ", ".join(map(repr, self.unused_rules))
            notes.append(f"no array has these logical axes of the rules: {names}")
        # Entries of a spec are mesh axes, tuples of them, or None, which is no leaf to JAX.
        used = jax.tree_util.tree_leaves([tuple(leaf.spec or ()) for leaf in self.leaves])
        unused = [repr(axis) for axis in self.mesh.axis_names if axis not in used]
        if unused and self.leaves:
            notes.append(f"no array is split over mesh axis {' or '.join(unused)}")
        if self.others:
            notes.append(f"leaves that are no arrays stay as they are: {len(self.others):,}")
        if left := sum(leaf.spec is None for leaf in self.leaves):
            notes.append(f"arrays without names are left to JAX: {left:,}")
        return tuple(notes)
