"""Deciding how a whole train state is laid out, by name."""

from typing import Any

from penzai_shard.errors import RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import PlanRequest
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed
from penzai_shard.training.train_state import TrainState


def train_state_sharding(
    train_state: TrainState,
    mesh: AnyMesh,
    rules: Any = None,
    optimizer_rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
) -> TrainState:
    """The sharding of every array of a train state.

    For ``jax.device_put(state, shardings)`` and for ``train_state_shardings`` of
    ``build_train_step_fn``. Parameters, state variables, constants and the loss function's state
    are laid out as the rules say, the optimizer's state under its own rules if there are any. With
    parameters replicated and the optimizer's state sharded this is stage 1 of ZeRO (Rajbhandari
    et al. 2020, arXiv:1910.02054). Scalars and keys are replicated over the mesh, so that nothing
    sits on one device.

    Args:
        train_state: A state, concrete or abstract, such as the result of
            ``jax.eval_shape(lambda: TrainState.initial_state(...))``.
        mesh: The mesh. Explicit axes are treated as Auto ones.
        rules: Rules in any form that ``AxisRules`` reads; None maps each logical axis to the
            mesh axis of the same name.
        optimizer_rules: Rules for the optimizer's state; None takes ``rules``.
        axis_name_to_mesh_name: The same as ``rules`` under Penzai's name; give one of the two.
        on_indivisible: As for ``make_plan``. With ``"pad"`` the tree has a ``PaddedArray`` in place
            of each array that is to be padded. ``jax.device_put`` does not pad a state that is not
            padded yet; ``place(state, mesh, rules, on_indivisible="pad")`` does.
        on_unnamed: As for ``make_plan``. It also decides on what an optimizer keeps that is not
            made of its parameter's dimensions, such as a matrix of second moments. Leaves that
            JAX is to infer are None, and so not declared to a train step.

    Returns:
        A tree like the state, a ``NamedSharding`` with a canonical spec in place of each array.

    Raises:
        ShardingError: As ``make_plan`` does; the arrays of all fields are reported at once.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> import jax, optax
    >>> from penzai import pz
    >>> from penzai_shard.meshes import make_mesh
    >>> weights = {"w": pz.nx.ones({"in": 8, "out": 4})}
    >>> state = TrainState.initial_state(weights, optax.sgd(0.1, 0.9), jax.random.key(0))
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> shardings = train_state_sharding(state, mesh, {"out": "model"}, {"in": "data"})
    >>> shardings.params["w"].data_array.spec, shardings.opt_state[0].trace["w"].data_array.spec
    (P(None, 'model'), P('data',))
    """
    if not isinstance(train_state, TrainState):
        kind = type(train_state)
        # Other libraries have a type of this name too.
        is_namesake = kind.__name__ == TrainState.__name__
        raise RuleTypeError(
            "train_state_sharding takes a TrainState, not a "
            f"{f'{kind.__module__}.' if is_namesake else ''}{kind.__name__}. "
            "For another tree: make_plan(tree, mesh, rules).sharding_tree()."
        )
    request = PlanRequest.read(
        "train_state_sharding", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed
    )
    shardings: TrainState = request.plan_state(train_state, optimizer_rules).sharding_tree()
    return shardings
