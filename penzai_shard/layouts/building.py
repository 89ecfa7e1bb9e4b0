"""A train state and its step, every array made where it stays."""

from collections.abc import Callable
from typing import Any

import jax

from penzai_shard.axis_rules import AxisRules
from penzai_shard.placement import sharded_init
from penzai_shard.training import (
    TrainState,
    TrainStep,
    build_train_step_fn,
    train_state_sharding,
)

# Options of other functions than the step's.
_OF_STATE = ("loss_fn_state", "trainable", "on_unnamed")
_OF_PLANS = ("on_unnamed", "on_indivisible")


def build_state_and_step(
    initializer: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    mesh: jax.sharding.Mesh,
    parameters: AxisRules,
    optimizer_rules: AxisRules | None,
    edited: Callable[[Any], Any],
    loss_fn: Callable[..., Any],
    optimizer: Any,
    rng: jax.Array,
    step_options: dict[str, Any],
) -> tuple[TrainState, TrainStep]:
    """Carries out a layout; see ``Layout.build``."""
    options = dict(step_options)
    of_state = {name: options[name] for name in _OF_STATE if name in options}
    relaxed = {
        name: options.pop(name) for name in ("on_unnamed", "on_indivisible") if name in options
    }
    for name in (*_OF_STATE, *_OF_PLANS):
        options.pop(name, None)
    model = edited(sharded_init(initializer, *args, mesh=mesh, rules=parameters, **relaxed))
    state = TrainState.initial_state(
        model, optimizer, rng, optimizer_rules=optimizer_rules, **of_state
    )
    shardings = train_state_sharding(state, mesh, parameters, optimizer_rules, **relaxed)
    state = jax.device_put(state, shardings)
    options.setdefault("donate_params_and_state", options.get("jit", True))
    step = build_train_step_fn(loss_fn, train_state_shardings=shardings, **options)
    return state, step
