"""Puts batches on a mesh by the logical axes of their dimensions.

In a job of several processes each gives the same whole batch, or its own rows of it. Own rows stay
where they are: no row is sent to another process.
"""

import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_struct
from penzai_shard.arrays.structure import Named
from penzai_shard.meshes import AnyMesh
from penzai_shard.placement.place import check_devices, place_tree
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import examine, plan_tree
from penzai_shard.processes.agreement import refuse_differences
from penzai_shard.rules import OnIndivisible
from penzai_shard.training.train_state import check_arguments


def shard_batch(
    batch: Any,
    mesh: AnyMesh | ShardingPlan | None = None,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
    plan: ShardingPlan | None = None,
    local: bool = False,
    first_axis: Hashable | None = None,
) -> Any:
    """Puts a batch on a mesh.

    Args:
        batch: A tree of arrays. If one of them is a ``jax.ShapeDtypeStruct``, all become structs
            with their layouts, to lower a step with.
        mesh: As for ``make_plan``; or a plan of the batch.
        rules: As for ``make_plan``.
        axis_name_to_mesh_name: The same under Penzai's name.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: A plan of the whole batch, in place of the rules.
        local: Whether each process gives its own rows: along a dimension that is split over
            processes its part, in the order of its devices. With one process this changes nothing.
        first_axis: The logical axis of the first dimension of arrays without names, which stay
            plain.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``.
        ShardingError: Processes give other shapes, or other data where they have the same rows.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> batch = shard_batch({"x": np.ones((16, 4))}, mesh, {"batch": "data"}, first_axis="batch")
    >>> batch["x"].sharding.spec
    P('data',)
    """
    called = "shard_batch"
    options = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed, "plan": plan}
    request = arguments.read(called, mesh, rules, axis_name_to_mesh_name, **options)
    leaves, structure = run_inputs(batch, called, allow_structs=True)
    is_abstract = any(is_struct(leaf.value) for leaf in leaves)
    is_described = request.plan is not None
    checks = {
        "local": (local, not (local and is_abstract), "local=False: structs are whole"),
        "first_axis": (first_axis, first_axis is None or not is_described, "it in the plan"),
    }
    check_arguments(called, checks)

    def name(values: Sequence[Any]) -> Any:
        """The batch with these values, in which all arrays have the names that are given."""
        return structure.fill_alike(
            [
                Named(value, (first_axis, *(None,) * (len(leaf.shape) - 1)))
                if first_axis is not None and leaf.names is None and leaf.shape
                else value
                for leaf, value in zip(leaves, values, strict=True)
            ]
        )

    def describe(shapes: Sequence[tuple[int, ...]]) -> Any:
        pairs = zip(leaves, shapes, strict=True)
        return name([jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf, shape in pairs])

    values = [leaf.value for leaf in leaves]
    if is_abstract:
        return plan_tree(describe([leaf.shape for leaf in leaves]), request).restore_structs()
    if not local or jax.process_count() == 1:
        return place_tree(name(values), request)
    check_devices(request)
    # Where the names put a dimension, with a length that divides; its own follows from that.
    size = request.mesh.size
    guess, _, _ = examine(describe([tuple(size * n for n in x.shape) for x in leaves]), request)
    parts = [_own_parts(row.sharding, row.shape) for row in guess.leaves]
    shapes = [
        tuple(length * count for length, (_, count) in zip(leaf.shape, own, strict=True))
        for leaf, own in zip(leaves, parts, strict=True)
    ]
    plan = plan_tree(describe(shapes), request)
    _refuse_other_parts(plan, values, parts)
    make: Any = jax.make_array_from_process_local_data
    triples = zip(plan.leaves, map(np.asarray, values), shapes, strict=True)
    return structure.fill_alike([make(row.sharding, *given) for row, *given in triples])


# Rows of several processes


def _own_parts(sharding: NamedSharding | None, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Of each dimension the number of this process's part, and how many processes have another."""
    found = []
    for dim in range(len(shape)):
        starts: dict[int, set[int]] = {jax.process_index(): set()}
        devices: Any = {} if sharding is None else sharding.devices_indices_map(tuple(shape))
        for device, index in devices.items():
            starts.setdefault(device.process_index, set()).add(index[dim].start or 0)
        known = sorted({tuple(sorted(own)) for own in starts.values()})
        found.append((known.index(tuple(sorted(starts[jax.process_index()]))), len(known)))
    return found


def _refuse_other_parts(
    plan: ShardingPlan, values: Sequence[Any], parts: Sequence[Sequence[tuple[int, int]]]
) -> None:
    """Refuses parts of other shapes, and other data where all processes have the same part."""
    texts = {}
    for row, value, own in zip(plan.leaves, values, parts, strict=True):
        is_same = all(count == 1 for _, count in own)
        data = zlib.crc32(np.asarray(value).tobytes()) if is_same else "rows of its own"
        texts[row.path] = f"{row.dtype}{list(row.shape)} {row.spec}, data {data}"
    refuse_differences("shard_batch", texts)
