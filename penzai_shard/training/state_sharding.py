"""Deciding how a whole train state lies, by name."""

from typing import Any

import jax

from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import make_plan, plan_tree
from penzai_shard.training.train_state import FIELDS, TrainState, peek


def train_state_sharding(
    train_state: TrainState,
    mesh: AnyMesh,
    rules: Any = None,
    optimizer_rules: Any = None,
    *,
    on_unnamed: Any = "error",
) -> TrainState:
    """The sharding of every array of a train state.

    For ``jax.device_put(state, shardings)`` and for ``train_state_shardings`` of
    ``build_train_step_fn``. Parameters, state variables, named constants and the named part of
    the loss function's state lie as the rules say, the optimizer's state under its own rules if
    there are any. With parameters replicated and the optimizer's state sharded this is stage 1 of
    ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). Scalars, keys, and other arrays without
    names are replicated over the mesh, so that nothing sits on one device.

    Args:
        train_state: A state, concrete or abstract, such as the result of
            ``jax.eval_shape(lambda: TrainState.initial_state(...))``.
        mesh: The mesh. Explicit axes are treated as Auto ones.
        rules: Rules in any form that ``AxisRules`` reads; None maps each logical axis to the
            mesh axis of the same name.
        optimizer_rules: Rules for the optimizer's state; None takes ``rules``.
        on_unnamed: What becomes of parameters without names: ``"error"`` or ``"replicate"``.

    Returns:
        A tree like the state, a ``NamedSharding`` with a canonical spec in place of each array.

    Raises:
        ShardingError: As ``make_plan`` does, for parameters and optimizer state.

    >>> import jax.numpy as jnp, optax
    >>> from penzai import pz
    >>> from penzai_shard.meshes import make_mesh
    >>> weights = {"w": pz.nx.ones({"in": 8, "out": 4})}
    >>> state = TrainState.initial_state(weights, optax.sgd(0.1, 0.9), jax.random.key(0))
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> shardings = train_state_sharding(state, mesh, {"out": "model"}, {"in": "data"})
    >>> shardings.params["w"].data_array.spec, shardings.opt_state[0].trace["w"].data_array.spec
    (P(None, 'model'), P('data',))
    """
    params = peek(train_state, "params")
    treedef = jax.tree.structure(train_state)
    others = {
        name: peek(train_state, name)
        for name in ("step", "root_rng", "state_vars", "loss_fn_state", "unbound_model")
    }
    with_params = make_plan({"params": params}, mesh, rules, on_unnamed=on_unnamed)
    planned = (
        with_params.sharding_tree()
        | plan_tree(others, mesh, rules, on_unnamed="replicate").sharding_tree()
    )
    opt_state = plan_tree(
        {"opt_state": peek(train_state, "opt_state")},
        mesh,
        rules if optimizer_rules is None else optimizer_rules,
        on_unnamed="replicate",
    ).sharding_tree()
    planned |= opt_state
    return jax.tree.unflatten(treedef, jax.tree.leaves([planned[field] for field in FIELDS]))
