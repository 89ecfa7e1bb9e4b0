"""Puts batches on a mesh by the logical axes of their dimensions.

In a job of several processes each gives the same whole batch, or its own rows of it. Own rows stay
where they are: no row is sent to another process.
"""

import collections
import dataclasses
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_struct
from penzai_shard.arrays.structure import Leaf, Named
from penzai_shard.errors import check_arguments
from penzai_shard.meshes import AnyMesh
from penzai_shard.placement.place import check_devices, place_tree
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import examine, plan_tree
from penzai_shard.processes.agreement import refuse_differences
from penzai_shard.rules import OnIndivisible


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
    axes = [rule.logical_axis for rule in request.rules.rules if rule.mesh_axes] or ["batch"]
    request = dataclasses.replace(request, naming=f"Write first_axis={axes[0]!r}")
    leaves, structure = run_inputs(batch, called, allow_structs=True)
    is_right = not local or on_unnamed != "infer"
    check_arguments(called, {"on_unnamed": (on_unnamed, is_right, "on_unnamed='replicate'")})

    def name(values: Sequence[Any]) -> Any:
        """The batch with these values, in which all arrays have the names that are given."""
        named = [*values]
        for index, leaf in enumerate(leaves):
            if first_axis is not None and leaf.names is None and leaf.shape:
                names = first_axis, *(None,) * (len(leaf.shape) - 1)
                named[index] = Named(named[index], names)
        return structure.fill_alike(named)

    values = [leaf.value for leaf in leaves]
    if any(map(is_struct, values)):
        return plan_tree(name(values), request).restore_structs()
    if not local or jax.process_count() == 1:
        return place_tree(name(values), request)
    return structure.fill_alike(_place_own_rows(leaves, name, request))


# Rows of several processes


def _place_own_rows(
    leaves: Sequence[Leaf], name: Callable[[Sequence[Any]], Any], request: arguments.Request
) -> list[Any]:
    check_devices(request)

    def describe(shapes: Sequence[tuple[int, ...]]) -> Any:
        pairs = zip(leaves, shapes, strict=True)
        return name([jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf, shape in pairs])

    # Where the names put a dimension, with a length that divides; its own follows from that.
    size = request.mesh.size
    guess, _, _ = examine(describe([tuple(size * n for n in x.shape) for x in leaves]), request)
    counts = [_count_parts(row.sharding, row.shape) for row in guess.leaves]
    pairs = zip(leaves, counts, strict=True)
    shapes = [tuple(np.multiply(leaf.shape, own).tolist()) for leaf, own in pairs]
    plan = plan_tree(describe(shapes), request)

    # Rows of other shapes, and other data where all processes have the same rows.
    values = [np.asarray(leaf.value) for leaf in leaves]
    texts = {}
    for row, value, own in zip(plan.leaves, values, counts, strict=True):
        data = zlib.crc32(value.tobytes()) if set(own) <= {1} else "rows of its own"
        texts[row.path] = f"{row.dtype}{list(row.shape)} {row.spec}, data {data}"
    refuse_differences(request.called, texts)

    make: Any = jax.make_array_from_process_local_data
    triples = zip(plan.leaves, values, shapes, strict=True)
    return [make(row.sharding, value, shape) for row, value, shape in triples]


def _count_parts(sharding: Any, shape: Sequence[int]) -> list[int]:
    """For each dimension how many different parts of it processes have."""
    counts = []
    for dim in range(len(shape)):
        starts = collections.defaultdict(set)
        for device, index in sharding.devices_indices_map(tuple(shape)).items():
            starts[device.process_index].add(index[dim].start)
        counts.append(len(set(map(frozenset, starts.values()))))
    return counts
