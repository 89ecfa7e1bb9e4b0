"""Train steps of small MLPs on eight devices, and what they need, for tests of reports."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    Jitted,
    TrainState,
    abstract_model,
    build_train_step_fn,
    data_parallel,
    device_memory,
    fully_sharded,
    make_mesh,
    make_plan,
    place,
    shard_batch,
    tensor_parallel,
    train_state_sharding,
)

MESH = make_mesh({"data": 4, "model": 2})
EVERYTHING = data_parallel() | tensor_parallel() | fully_sharded(min_size=64)


def build_mlp(blocks=2, embedding=16, neurons=32):
    key = jax.random.key(0)
    layers = []
    for i in range(blocks):
        layers += [
            pz.nn.Linear.from_config(
                f"block_{i}/up", key, {"embedding": embedding}, {"neurons": neurons}
            ),
            pz.nn.Elementwise(jnp.tanh),
            pz.nn.Linear.from_config(
                f"block_{i}/down", key, {"neurons": neurons}, {"embedding": embedding}
            ),
        ]
    return pz.nn.Sequential(layers)


def squares(*, model, rng, state, x):
    del rng
    return jnp.mean(model(x).unwrap("batch", "embedding") ** 2), state, {}


def placed_state(rules, optimizer):
    model = place(build_mlp(), MESH, rules)
    return TrainState.initial_state(Jitted(model), optimizer, jax.random.key(0))


def batch(rules=EVERYTHING, mesh=MESH):
    return shard_batch(pz.nx.ones({"batch": 8, "embedding": 16}), mesh, rules)


def report_of(
    rules,
    *,
    build=build_mlp,
    edit=lambda model: model,
    donate=True,
    optimizer=None,
    optimizer_rules=None,
    split=None,
    embedding=16,
    examples=1024,
    **options,
):
    """The report of a step on abstract arrays; the batch is split as ``split`` says."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    structs = edit(make_plan(abstract_model(build), mesh, rules).restore_structs())
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    state = TrainState.initial_state(structs, optimizer, jax.random.key(0))
    shardings = train_state_sharding(state, mesh, rules, optimizer_rules)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    step = build_train_step_fn(squares, donate_params_and_state=donate, **options)
    x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(split))
        ),
        jax.eval_shape(lambda: pz.nx.ones({"batch": examples, "embedding": embedding})),
    )
    return device_memory(step, state, x=x)
