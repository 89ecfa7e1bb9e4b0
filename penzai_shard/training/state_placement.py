"""Laying out a new train state as the model's parameters are already."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.array_kinds import is_traced
from penzai_shard.meshes import auto_context
from penzai_shard.planning import Planner, shardings_like_params
from penzai_shard.rule_kinds import OnUnnamed
from penzai_shard.training.flat_state import CONSTANT_FIELDS
from penzai_shard.training.optimizer_calls import initial_optimizer_state
from penzai_shard.training.state_layout import (
    as_array,
    committed,
    mesh_of,
    with_strong_type,
)
from penzai_shard.tree_paths import array_path_text


def place_initial_fields(
    fields: dict[str, Any],
    optimizer_def: Any,
    trainable: frozenset[str],
    on_unnamed: OnUnnamed = "error",
    optimizer_rules: Any = None,
) -> dict[str, Any]:
    """Places the fields of a new state and makes the optimizer's.

    Args:
        fields: The trees of all other fields. Weak types are kept in those that a step only reads.
        optimizer_def: The optimizer.
        trainable: Names of the parameters that the optimizer is to know.
        on_unnamed: What becomes of its arrays that are not made of a parameter's dimensions.
        optimizer_rules: How they are laid out on a mesh; None as the parameters are.

    Returns:
        All fields. On one device they stay where they are; if any array is on a mesh, all are.

    Raises:
        ShardingError: Some array is committed to other devices than the rest, or the optimizer
            cannot take these parameters.
    """
    init = functools.partial(initial_optimizer_state, optimizer_def)
    fields = {
        name: jax.tree.map(as_array if name in CONSTANT_FIELDS else with_strong_type, tree)
        for name, tree in fields.items()
    }
    flat, treedef = jax.tree_util.tree_flatten_with_path(fields)
    leaves = [leaf for _, leaf in flat]
    mesh = None if any(map(is_traced, leaves)) else mesh_of(leaves)
    if mesh is not None:
        placed = committed(leaves, mesh, lambda: [array_path_text(path) for path, _ in flat])
        fields = jax.tree.unflatten(treedef, placed)
    params = {name: value for name, value in fields["params"].items() if name in trainable}
    if mesh is None:
        # What the optimizer hands out may be its own, such as a random key, or a parameter.
        opt_state = jax.tree.map(lambda leaf: jnp.copy(with_strong_type(leaf)), init(params))
        return fields | {"opt_state": opt_state}
    with auto_context():
        abstract = jax.eval_shape(init, params)
        if optimizer_rules is None:
            shardings = shardings_like_params(abstract, params, mesh, on_unnamed)
        else:
            planner = Planner(mesh, optimizer_rules, on_unnamed=on_unnamed)
            plan = planner.plan({"opt_state": abstract}, parameters=params)
            shardings = plan.sharding_tree()["opt_state"]
        opt_state = jax.jit(
            lambda params: jax.tree.map(with_strong_type, init(params)), out_shardings=shardings
        )(params)
    return fields | {"opt_state": opt_state}
