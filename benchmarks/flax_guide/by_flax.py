"""The guide's own program: Flax' helpers give the layout, and ``jax.jit`` is told of it.

The step is the guide's but for one thing: it also returns the loss, so that losses can be compared.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
from flax.training import train_state

from benchmarks.contenders import Contender
from benchmarks.flax_guide.modules import mesh_sharding
from benchmarks.flax_guide.work import Work, parameter_count


def program(module: Any, rules: Any, mesh: Any, optimizer: Any, key: Any, x: Any) -> Any:
    """Layout, initial state and step, as the guide writes them."""

    def init_fn(key, x):
        variables = module.init(key, x)
        return train_state.TrainState.create(
            apply_fn=module.apply, params=variables["params"], tx=optimizer
        )

    abstract_state = jax.eval_shape(init_fn, key, x)
    if rules is None:
        state_sharding = nn.get_sharding(abstract_state, mesh)
    else:
        logical_specs = nn.get_partition_spec(abstract_state)
        state_sharding = nn.logical_to_mesh_sharding(logical_specs, mesh, rules)
    in_shardings = (mesh_sharding(), mesh_sharding("data", None))
    jit_init_fn = jax.jit(init_fn, in_shardings=in_shardings, out_shardings=state_sharding)
    state = jit_init_fn(key, x)

    @functools.partial(
        jax.jit,
        in_shardings=(state_sharding, mesh_sharding("data", None)),
        out_shardings=(state_sharding, None),
    )
    def train_step(state, x):
        def loss_fn(params):
            return module.apply({"params": params}, x).sum()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return state_sharding, state, train_step


def build(work: Work) -> Contender:
    """The guide's step."""
    x = work.x
    _, state, train_step = program(*work.arguments)
    with jax.set_mesh(work.mesh):
        compiled = train_step.lower(state, x).compile()

    def step(state: Any) -> Any:
        with jax.set_mesh(work.mesh):
            return train_step(state, x)

    return Contender(
        parameter_count(state.params), compiled, lambda: program(*work.arguments)[1], step
    )


def build_donating(work: Work) -> Contender:
    """The same with the old state's memory used for the new one, which the guide does not do."""
    guide = build(work)
    layout, state, train_step = program(*work.arguments)
    donating = jax.jit(train_step.__wrapped__, donate_argnums=0, out_shardings=(layout, None))
    x = work.x
    with jax.set_mesh(work.mesh):
        compiled = donating.lower(state, x).compile()

    def step(state: Any) -> Any:
        with jax.set_mesh(work.mesh):
            return donating(state, x)

    return Contender(guide.parameters, compiled, guide.start, step)
