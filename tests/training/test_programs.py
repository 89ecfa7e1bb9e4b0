"""The compiled step against one that is written by hand: no more work, memory or communication."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 8})
NAMES = {"up*": ("embed", "mlp"), "down*": ("mlp", "embed"), "b*": ("embed",)}
OPTIMIZER = optax.adamw(1e-3)
COLLECTIVES = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)


def make_arrays():
    key, arrays = jax.random.key(0), {}
    for block in range(3):
        for name, shape in {"up": (32, 64), "down": (64, 32), "b": (32,)}.items():
            arrays[f"{name}{block}"] = jax.random.normal(key, shape) / 8
    return arrays


def find_loss(arrays, x):
    for block in range(3):
        hidden = jax.nn.gelu(x @ arrays[f"up{block}"])
        x = x + hidden @ arrays[f"down{block}"] + arrays[f"b{block}"]
    return jnp.mean(x**2)


def loss_fn(model, rng, state, x):
    return find_loss(model, x), state, {}


def make_state(rules, optimizer_rules=None):
    model = pzs.name_axes(make_arrays(), NAMES)
    state = pzs.TrainState.initial_state(model, OPTIMIZER, jax.random.key(0), plain_arrays=True)
    return jax.device_put(state, pzs.train_state_sharding(state, MESH, rules, optimizer_rules))


def compile_by_hand(state, x):
    params, opt_state = state.trained_arrays, state.opt_arrays
    layouts = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (params, opt_state)]

    def update(params, opt_state, x):
        loss, gradients = jax.value_and_grad(find_loss)(params, x)
        gradients = jax.lax.with_sharding_constraint(gradients, layouts[0])
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(update, donate_argnums=(0, 1), out_shardings=(*layouts, None))
    return jitted.lower(params, opt_state, x).compile()


def read_costs(compiled):
    text, memory, costs = compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "flops": costs["flops"],
        "bytes": costs["bytes accessed"],
        "temporaries": memory.temp_size_in_bytes,
        "aliases": memory.alias_size_in_bytes,
        "collectives": collections.Counter(COLLECTIVES.findall(text)),
    }, len(INSTRUCTION.findall(text))


def batch():
    return jax.device_put(np.ones((32, 32), np.float32), NamedSharding(MESH, P("data")))


@pytest.mark.parametrize("rules", [{}, {"embed": "data"}], ids=["data parallel", "fully sharded"])
def test_step_costs_what_it_costs_by_hand(rules):
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True, step_metrics=["loss"])
    state, x = make_state(rules), batch()
    ours, count = read_costs(step.lower(state, x=x).compile())
    hand, count_by_hand = read_costs(compile_by_hand(state, x))
    assert ours["collectives"].total()
    # The number of the step is an addition of two integers that those by hand leave out.
    for name, more in {"flops": 1, "bytes": 32, "temporaries": 64}.items():
        assert ours.pop(name) <= hand.pop(name) + more
    assert ours == hand
    assert count <= 1.01 * count_by_hand


def test_step_updates_in_the_layout_of_the_moments():
    state = make_state({}, {"embed": "data"})
    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    lowered = step.lower(state, x=batch())
    for path in state.trained_arrays:
        assert f"gradient/{path}/sharding_constraint" in lowered.as_text(debug_info=True)
    text = lowered.compile().as_text()
    # Each device computes the moments of its own part, and gathers parameters only.
    shapes = set(re.findall(r"f32\[(\d+),(\d+)\]\S* sqrt", text))
    assert shapes == {("4", "64"), ("64", "4")}
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) <= len(state.trained_arrays)
    after, _ = step(state, x=batch())
    assert after.trained_arrays["up0"].sharding.is_fully_replicated
    assert after.opt_arrays[0].mu["up0"].sharding.spec == P("data")
