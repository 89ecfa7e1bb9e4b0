"""The same with penzai_shard: a plan to look at, and one call for state and step.

The model is the guide's own: no line of it is changed, and none stands between it and the calls.
"""

from typing import Any

import penzai_shard as pzs
from benchmarks.contenders import Contender
from benchmarks.flax_guide.work import Work, parameter_count


def program(module: Any, rules: Any, mesh: Any, optimizer: Any, key: Any, x: Any) -> Any:
    """Layout, initial state and step."""

    def loss_fn(model, rng, state, x):
        loss = module.apply(model, x).sum()
        return loss, state, loss

    layout = pzs.Layout(parameters=rules, compute=rules, blocks=())
    plan = layout.plan(pzs.abstract_model(module.init, key, x), mesh)
    state, train_step = layout.build(
        module.init, key, x, mesh=mesh, loss_fn=loss_fn, optimizer=optimizer, rng=key
    )
    return plan, state, train_step


def build(work: Work) -> Contender:
    """The step with penzai_shard."""
    x = work.x
    _, state, train_step = program(*work.arguments)
    compiled = train_step.lower(state, x=x).compile()
    return Contender(
        parameter_count(state.params),
        compiled,
        lambda: program(*work.arguments)[1],
        lambda state: train_step(state, x=x),
    )
