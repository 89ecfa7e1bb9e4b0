"""The plan: a decision for every array of a tree, with its reason, before anything runs."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, raise_all
from penzai_shard.fused_axes import with_factors
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.padded_arrays import Padding
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.planning.plan_table import (
    SCALARS,
    PlanTable,
    Row,
    axes_text,
    bytes_text,
    grouped_rows,
)
from penzai_shard.report_trees import ReportTree, TreeFigure, TreeRow, count_text, tree_of
from penzai_shard.rule_kinds import LogicalAxis, NameRule
from penzai_shard.text_tables import Report


@functools.lru_cache(maxsize=4096)
def shared_named_sharding(mesh: AnyMesh, spec: PartitionSpec) -> NamedSharding:
    """The one ``NamedSharding`` of a mesh and a spec; equal calls give the same object.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> shared_named_sharding(mesh, PartitionSpec("data")) is shared_named_sharding(
    ...     mesh, PartitionSpec("data")
    ... )
    True
    """
    return NamedSharding(mesh, spec)


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The decision for one array.

    Attributes:
        path: Where the array is; for a parameter or state variable, its label.
        names: Its logical axes in the order of the data, None for a positional dimension; None
            altogether for an array without names.
        shape: Its global shape, without padding.
        dtype: Its dtype, None if the tree does not say.
        spec: Its spec, without trailing ``None``; None if JAX is to infer it.
        sharding: The spec on the plan's mesh; None if JAX is to infer it.
        reason: Which rules gave the spec, in words.
        shard_shape: The shape of what one device holds.
        bytes_per_device: The size of what one device holds, in bytes.
        weak_type: Whether its dtype gives way to that of what it is combined with, as that of a
            Python number does.
        stored_shape: The global shape that it is stored with: ``shape``, or more where it is
            padded, which ``spec`` divides.
    """

    path: str
    names: tuple[LogicalAxis | None, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec | None
    sharding: NamedSharding | None
    reason: str
    shard_shape: tuple[int, ...]
    bytes_per_device: int
    weak_type: bool = False
    stored_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored_shape", self.stored_shape or self.shape)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole array."""
        # Not by the spec: a mesh axis of size 1 shards nothing.
        return self.spec is not None and self.shard_shape == self.stored_shape

    @property
    def padding(self) -> Padding | None:
        """How it is padded; None if it is not."""
        if self.stored_shape == self.shape or self.spec is None or self.names is None:
            return None
        mesh_axes = mesh_axes_by_dimension(self.spec, len(self.shape))
        kept = [i for i, name in enumerate(self.names) if name is not None]
        return Padding(tuple(self.stored_shape[i] for i in kept), tuple(mesh_axes[i] for i in kept))

    @property
    def padding_bytes(self) -> int:
        """What padding adds to its global size, in bytes."""
        added = math.prod(self.stored_shape) - math.prod(self.shape)
        return added * itemsize(self.dtype)

    def restore_struct(self) -> jax.ShapeDtypeStruct:
        """Stored shape, dtype and sharding as a ``jax.ShapeDtypeStruct``."""
        return jax.ShapeDtypeStruct(
            self.stored_shape, self.dtype, sharding=self.sharding, weak_type=self.weak_type
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardingPlan(Report):
    """A decision for every array of a tree. Pure data: it holds no arrays.

    Attributes:
        mesh: The mesh that the layouts are for, with Auto axes.
        rules: The rules that were applied.
        leaves: One ``LeafPlan`` per array; a variable that occurs several times counts once.
        others: Paths of leaves that are not arrays, such as the functions in an Equinox module,
            and stay as they are.
        transient: For a train state one ``LeafPlan`` per gradient: what a step holds beside the
            state while it runs. They count as what a device holds, and are no part of the tree.
    """

    mesh: AnyMesh
    rules: AxisRules
    leaves: tuple[LeafPlan, ...]
    # The tree with the number of its plan in place of each array, and -1 for each of the others.
    _numbers: Any
    others: tuple[str, ...] = ()
    transient: tuple[LeafPlan, ...] = ()

    def sharding_tree(self) -> Any:
        """The tree with a ``NamedSharding`` in place of every data array.

        Has the structure of the tree after ``pz.freeze_variables``, with a ``PaddedArray`` in
        place of each named array that is to be padded, as ``place`` gives it. It serves as
        ``in_shardings`` or ``out_shardings`` of ``jax.jit`` and as the layout for
        ``jax.device_put``, which takes no mutable variables: give it
        ``pz.freeze_variables(model)``, or call ``place(model, plan)`` for new ones. Arrays that
        JAX is to place have None.
        """
        return self._fill([leaf.sharding for leaf in self.leaves])

    def starting_shardings(self) -> Any:
        """``sharding_tree`` for arrays that are read, and not computed by JAX.

        An array that JAX is to place has no layout before it is used; it starts replicated.
        """
        everywhere = shared_named_sharding(self.mesh, PartitionSpec())
        return self._fill([leaf.sharding or everywhere for leaf in self.leaves])

    def restore_structs(self) -> Any:
        """The tree with a ``jax.ShapeDtypeStruct`` carrying its sharding for every data array.

        Raises:
            PlanError: The tree does not say the dtype of some array.
        """
        problems = [
            f"{leaf.path}: its data array is missing, so its dtype is not known. "
            "Plan a tree with arrays or jax.ShapeDtypeStructs."
            for leaf in self.leaves
            if leaf.dtype is None
        ]
        raise_all(PlanError, "cannot describe some arrays:", problems)
        return self._fill([leaf.restore_struct() for leaf in self.leaves])

    def _fill(self, per_leaf: list[Any]) -> Any:
        return jax.tree_util.tree_map(lambda i: None if i < 0 else per_leaf[i], self._numbers)

    @functools.cached_property
    def bytes_per_device(self) -> int:
        """What every device holds when the plan is carried out, in bytes.

        Of a train state with the gradients, which are there while a step runs.
        """
        return sum(leaf.bytes_per_device for leaf in (*self.leaves, *self.transient))

    @functools.cached_property
    def transient_bytes_per_device(self) -> int:
        """The part of ``bytes_per_device`` that is there only while a step runs, in bytes."""
        return sum(leaf.bytes_per_device for leaf in self.transient)

    @functools.cached_property
    def replicated_bytes(self) -> int:
        """The part of ``bytes_per_device`` that every device holds a whole copy of, in bytes."""
        leaves = (*self.leaves, *self.transient)
        return sum(leaf.bytes_per_device for leaf in leaves if leaf.is_replicated)

    @functools.cached_property
    def total_bytes(self) -> int:
        """The size of all arrays, gradients too, each counted once, in bytes."""
        leaves = (*self.leaves, *self.transient)
        return sum(math.prod(leaf.shape) * itemsize(leaf.dtype) for leaf in leaves)

    @functools.cached_property
    def padding_bytes(self) -> int:
        """What padding adds to ``total_bytes`` where arrays are stored, in bytes."""
        return sum(leaf.padding_bytes for leaf in (*self.leaves, *self.transient))

    @functools.cached_property
    def logical_axes(self) -> frozenset[LogicalAxis]:
        """The logical axes that the arrays have, those that a dimension is fused of among them."""
        names = {name for leaf in self.leaves for name in leaf.names or () if name is not None}
        return frozenset(with_factors(names))

    @functools.cached_property
    def unused_rules(self) -> tuple[NameRule, ...]:
        """The rules whose logical axis no array has.

        That is not an error: one set of rules serves parameters and activations.
        """
        return tuple(
            rule
            for rule in self.rules.rules
            if isinstance(rule, NameRule) and rule.logical_axis not in self.logical_axes
        )

    def table(self, *, collapse: bool = True) -> PlanTable:
        """The plan as a table: plain text for ``print``, coloured by ``rich.print``.

        Args:
            collapse: Show arrays that differ only in the numbers in their paths, such as those
                of equal blocks, as one row with a count.
        """
        rows = list(map(_row, self.leaves))
        # A table of gradients would repeat that of the parameters.
        rows += [
            ("gradients/...", "as the parameters that are trained", *_row(leaf)[2:])
            if collapse
            else _row(leaf)
            for leaf in self.transient
        ]
        return PlanTable(grouped_rows(rows, collapse), self._verdict(), self._remarks())

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The plan as a tree, in the order of the model: every array with its bytes per device.

        Args:
            collapse: Show equal blocks as one, and all scalars.
        """
        leaves = (*self.leaves, *self.transient)
        scalars = [leaf for leaf in leaves if not leaf.shape]
        if not collapse or len(scalars) < 2:
            scalars = []
        rows = [_tree_row(leaf) for leaf in leaves if leaf.shape or not scalars]
        rows += [_scalars_row(scalars)] if scalars else []
        return tree_of(
            "ShardingPlan",
            self._verdict(),
            rows,
            notes=self._remarks(),
            wholes={"replicated": self.bytes_per_device},
            collapse=collapse,
        )

    def _verdict(self) -> str:
        gradients = f" and {len(self.transient)} gradients" if self.transient else ""
        while_running = (
            f" while a step runs, of which gradients {bytes_text(self.transient_bytes_per_device)}"
            if self.transient
            else ", of which"
        )
        return (
            f"{len(self.leaves)} arrays{gradients}, {bytes_text(self.total_bytes)}; on mesh "
            f"({mesh_text(self.mesh)}) each device holds "
            f"{bytes_text(self.bytes_per_device)}{while_running}"
            f"{',' if self.transient else ''} replicated {bytes_text(self.replicated_bytes)}"
            f"{self._padding_text()}"
        )

    def _padding_text(self) -> str:
        padded = sum(leaf.padding is not None for leaf in (*self.leaves, *self.transient))
        if not padded:
            return ""
        arrays = f"{padded} array{'s' * (padded > 1)}"
        return f"; padding of {arrays} adds {bytes_text(self.padding_bytes)} in all"

    def _remarks(self) -> tuple[str, ...]:
        return (*self._remarks_on_rules(), *self._remarks_on_others())

    def _remarks_on_rules(self) -> list[str]:
        """What is to be said of rules that match nothing: of mistakes first, and loudly."""
        expected = [rule for rule in self.unused_rules if rule.is_expected_to_be_unused]
        strange = [rule for rule in self.unused_rules if not rule.is_expected_to_be_unused]
        remarks = []
        if strange:
            has = ", ".join(map(repr, sorted(self.logical_axes, key=str))) or "none"
            remarks.append(
                f"UNKNOWN NAMES, misspelt? {_rules_text(strange)} (the logical axes are {has})"
            )
        if expected:
            remarks.append(f"for other arrays, such as activations: {_rules_text(expected)}")
        return remarks

    def _remarks_on_others(self) -> list[str]:
        if not self.others:
            return []
        shown = ", ".join(self.others[:3]) + (", ..." if len(self.others) > 3 else "")
        return [f"{len(self.others)} leaves are not arrays and stay as they are: {shown}"]

    def to_json(self) -> str:
        """The whole plan as JSON text: mesh, rules, and one object per array."""
        return json.dumps(
            {
                "mesh": dict(self.mesh.shape),
                "rules": [str(rule) for rule in self.rules.rules],
                "unused_rules": [str(rule) for rule in self.unused_rules],
                "total_bytes": self.total_bytes,
                "bytes_per_device": self.bytes_per_device,
                "replicated_bytes": self.replicated_bytes,
                "padding_bytes": self.padding_bytes,
                "transient_bytes_per_device": self.transient_bytes_per_device,
                "arrays": list(map(_data, self.leaves)),
                "transient": list(map(_data, self.transient)),
            },
            indent=2,
            default=str,
        )


def _row(leaf: LeafPlan) -> Row:
    dtype = "?" if leaf.dtype is None else str(leaf.dtype)
    return (leaf.path, _axes_text(leaf), dtype, leaf.bytes_per_device, leaf.reason)


def _tree_row(leaf: LeafPlan) -> TreeRow:
    line = f"{_axes_text(leaf)}  {leaf.dtype or '?'}"
    return TreeRow(leaf.path, line=line, figures=_figures([leaf]), details=(leaf.reason,))


def _scalars_row(leaves: Sequence[LeafPlan]) -> TreeRow:
    return TreeRow(SCALARS, line=count_text(len(leaves), "array"), figures=_figures(leaves))


def _figures(leaves: Sequence[LeafPlan]) -> tuple[TreeFigure, ...]:
    figures = [TreeFigure("per device", sum(leaf.bytes_per_device for leaf in leaves))]
    if replicated := sum(leaf.bytes_per_device for leaf in leaves if leaf.is_replicated):
        figures.append(TreeFigure("replicated", replicated))
    return tuple(figures)


def _data(leaf: LeafPlan) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "names": leaf.names and [None if name is None else str(name) for name in leaf.names],
        "shape": leaf.shape,
        "stored_shape": leaf.stored_shape,
        "dtype": leaf.dtype,
        "spec": None if leaf.spec is None else list(leaf.spec),
        "reason": leaf.reason,
        "shard_shape": leaf.shard_shape,
        "bytes_per_device": leaf.bytes_per_device,
    }


def _rules_text(rules: Sequence[NameRule]) -> str:
    return "; ".join(map(str, rules))


def itemsize(dtype: Any) -> int:
    """The size of one element in bytes; 0 where the dtype is not known.

    >>> import numpy as np
    >>> itemsize(np.dtype("float32")), itemsize(None)
    (4, 0)
    """
    return 0 if dtype is None else dtype.itemsize


def _axes_text(leaf: LeafPlan) -> str:
    text = axes_text(leaf.names, leaf.shape, leaf.spec or PartitionSpec(), leaf.stored_shape)
    return text if leaf.spec is not None or not leaf.shape else f"{text} (left to JAX)"
