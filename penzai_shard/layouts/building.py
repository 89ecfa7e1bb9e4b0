"""A train state and its step, every array made where it stays."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.meshes import AnyMesh
from penzai_shard.placement import abstract_model, described, put, sharded_init
from penzai_shard.planning import make_plan, plan_before_padding
from penzai_shard.readers import foreign_nodes
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.training import (
    TrainState,
    TrainStep,
    build_train_step_fn,
    train_state_sharding,
)

# Options of other functions than the step's; the last two are the step's too, for which the state
# keeps something.
_OF_STATE = (
    "loss_fn_state",
    "trainable",
    "plain_arrays",
    "on_unnamed",
    "loss_scaling",
    "skip_nonfinite",
)
_OF_PLANS = ("on_unnamed", "on_indivisible")
# What the layout decides itself is none.
_DECIDED = {
    "train_state_shardings": "Leave it out.",
    "optimizer_rules": "Leave it out, and give the layout other ones: "
    "dataclasses.replace(layout, optimizer=rules).",
    "rules": "Leave it out; rules of your own make a layout: Layout(parameters=rules, "
    "compute=rules).",
}
_OF_STEP = tuple(
    name
    for name, parameter in inspect.signature(build_train_step_fn).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in _DECIDED
)


def build_state_and_step(
    initializer: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    mesh: AnyMesh,
    parameters: AxisRules,
    optimizer_rules: AxisRules | None,
    edited: Callable[[Any], Any],
    loss_fn: Callable[..., Any],
    optimizer: Any,
    rng: jax.Array,
    step_options: dict[str, Any],
) -> tuple[TrainState, TrainStep]:
    """Carries out a layout; see ``Layout.build``."""
    _refuse_unknown(step_options)
    of_state, of_plans, of_step = (
        {name: value for name, value in step_options.items() if name in names}
        for names in (_OF_STATE, _OF_PLANS, _OF_STEP)
    )
    pads = of_plans.get("on_indivisible") == "pad"
    if pads or isinstance(mesh, AbstractMesh):
        abstract = abstract_model(initializer, *args)
        if pads and foreign_nodes(abstract):
            on_unnamed = of_plans.get("on_unnamed", "error")
            plan = plan_before_padding(abstract, mesh, parameters, on_unnamed)
        else:
            plan = make_plan(abstract, mesh, parameters, **of_plans)
        if isinstance(mesh, AbstractMesh):
            model = plan.restore_structs()
        else:
            model = sharded_init(initializer, *args, plan=plan)
    else:
        model = sharded_init(initializer, *args, mesh=mesh, rules=parameters, **of_plans)
    model = edited(model)
    state = TrainState.initial_state(
        model,
        optimizer,
        rng,
        optimizer_rules=optimizer_rules,
        on_indivisible=of_plans.get("on_indivisible", "error"),
        **of_state,
    )
    shardings = train_state_sharding(state, mesh, parameters, optimizer_rules, **of_plans)
    placed = described if isinstance(mesh, AbstractMesh) else put
    state = placed(state, shardings, "Layout.build")
    of_step.setdefault("donate_params_and_state", of_step.get("jit", True))
    return state, build_train_step_fn(loss_fn, train_state_shardings=shardings, **of_step)


def refuse_made_already(initializer: Any) -> None:
    """Raises for a model, or for arrays, in the place of the function that makes them.

    >>> refuse_made_already(dict)
    """
    if not callable(initializer):
        raise RuleTypeError(
            "Layout.build makes the model in its place, and needs the function that does: "
            "layout.build(build_model, 0, mesh=mesh, ...). This is a "
            f"{type(initializer).__name__}. Arrays that exist already: "
            "layout.build(lambda: weights, mesh=mesh, ...)."
        )


def _refuse_unknown(options: dict[str, Any]) -> None:
    known = {*_OF_STATE, *_OF_PLANS, *_OF_STEP}
    problems = []
    for name in sorted(options.keys() - known):
        if name in _DECIDED:
            problems.append(f"{name}: the layout says this itself. {_DECIDED[name]}")
            continue
        near = nearest_name(name, known)
        fix = (
            f"Did you mean {near!r}?"
            if near
            else "If the initializer takes it: functools.partial(initializer, "
            f"{name}=...). The options are {', '.join(sorted(known))}."
        )
        problems.append(f"{name}: neither a train step nor its state has this option. {fix}")
    raise_all(RuleTypeError, "Layout.build got unknown options:", problems)
