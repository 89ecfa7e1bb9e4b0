"""Placing batches on a mesh by name."""

from typing import Any

from jax.sharding import Mesh

from penzai_shard.meshes import AnyMesh
from penzai_shard.placement import put
from penzai_shard.planning import PlacingRequest, ShardingPlan
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed
from penzai_shard.training.local_batches import shard_parts


def shard_batch(
    batch: Any,
    mesh: AnyMesh | None = None,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    plan: ShardingPlan | None = None,
    local: bool = False,
) -> Any:
    """Places a batch on a mesh, each named array as the rules say.

    In a job of several processes, each gives either the same whole batch, or its own part of it
    (``local=True``), with ``jax.make_array_from_process_local_data``. Nothing goes through
    the devices, so that a thread may make the next batch while a step runs; all processes make the
    same calls in the same order, in threads of the same names.

    Args:
        batch: A tree of named arrays; their data may be NumPy or JAX arrays. Scalars are
            replicated.
        mesh: The mesh. Explicit axes are treated as Auto ones.
        rules: Rules in any form that ``AxisRules`` reads; None maps each logical axis to the
            mesh axis of the same name.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: A plan to carry out instead of mesh, rules and options; of the whole batch.
        local: Whether each process gives its own part of the batch: the rows of its own devices,
            as many as every other process. Along dimensions that are split over processes, the
            length of the whole is the sum. Processes whose devices have the same part give the
            same data. With one process it changes nothing.

    Returns:
        The batch, its arrays on the mesh. Arrays that are laid out so already are not copied.

    Raises:
        ShardingError: An array has no names, or has no valid layout; all are reported at once.
            Of several processes: what they give differs where it must be the same, in form or
            data; all of them raise it.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> import numpy as np
    >>> from penzai import pz
    >>> from penzai_shard.meshes import make_mesh
    >>> batch = {"x": pz.nx.wrap(np.ones((16, 4)), "batch", "features")}
    >>> shard_batch(batch, make_mesh({"data": 8}), {"batch": "data"})["x"].data_array.sharding.spec
    P('data',)
    """
    request = PlacingRequest.read(
        "shard_batch", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed, plan
    )
    mesh = request.mesh
    if local and isinstance(mesh, Mesh) and mesh.is_multi_process:
        return shard_parts(batch, request)
    return put(batch, request.sharding_tree(batch), "shard_batch")
