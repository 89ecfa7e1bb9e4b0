"""Placing batches on a mesh by name."""

from typing import Any

import jax

from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import make_plan


def shard_batch(batch: Any, mesh: AnyMesh, rules: Any = None) -> Any:
    """Places a batch on a mesh, each named array as the rules say.

    Args:
        batch: A tree of named arrays; their data may be NumPy or JAX arrays. Scalars are
            replicated.
        mesh: The mesh. Explicit axes are treated as Auto ones.
        rules: Rules in any form that ``AxisRules`` reads; None maps each logical axis to the
            mesh axis of the same name.

    Returns:
        The batch, its arrays on the mesh. Arrays that lie so already are not copied.

    Raises:
        ShardingError: An array has no names, or has no valid layout; all are told at once.

    >>> import numpy as np
    >>> from penzai import pz
    >>> from penzai_shard.meshes import make_mesh
    >>> batch = {"x": pz.nx.wrap(np.ones((16, 4)), "batch", "features")}
    >>> shard_batch(batch, make_mesh({"data": 8}), {"batch": "data"})["x"].data_array.sharding.spec
    P('data',)
    """
    return jax.device_put(batch, make_plan(batch, mesh, rules).sharding_tree())
