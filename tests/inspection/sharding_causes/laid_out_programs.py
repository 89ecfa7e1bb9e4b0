"""Small programs on an abstract mesh, for tests of where layouts come from."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import (
    TrainState,
    build_train_step_fn,
    make_mesh,
    make_plan,
    roll_layer_stacks,
    train_state_sharding,
)

P = PartitionSpec
WHOLE = P()
MESH = make_mesh({"data": 4, "model": 2}, abstract=True)


@pz.pytree_dataclass
class OfData(pz.nn.Layer):
    """A layer of a user, which does something with the data of a named array."""

    function: Callable[..., Any] = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, value, /, **_):
        data = self.function(value.data_array)
        return dataclasses.replace(value, data_array=data)


def laid_out(spec=WHOLE):
    return NamedSharding(MESH, spec)


def struct(*shape, spec=WHOLE, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=laid_out(spec))


def named(spec=WHOLE, dtype="float32", **sizes):
    data = struct(*sizes.values(), spec=spec, dtype=dtype)
    return pz.nx.NamedArray(collections.OrderedDict(sizes), data)


def planned(model, rules):
    return make_plan(model, MESH, rules, on_unnamed="replicate").restore_structs()


def linear(name, rules=(), inputs=None, outputs=None, **options):
    key = jax.random.key(0)
    made = pz.nn.Linear.from_config(name, key, inputs or {"a": 8}, outputs or {"b": 8}, **options)
    return planned(made, dict(rules))


def x(spec=WHOLE, **sizes):
    return named(spec, **(sizes or {"batch": 8, "a": 8}))


def on(is_there, **rules):
    return rules if is_there else {}


def train_step(model, rules, *, optimizer_rules=None, split=WHOLE, gives="b", trainable=None, **of):
    """A train step of a model that takes the axis a; ``of`` are its options."""

    def loss(*, model, rng, state, x):
        return jnp.mean(model(x).unwrap("batch", gives) ** 2), state, {}

    state = TrainState.initial_state(
        planned(model, rules), optax.adam(0.1), jax.random.key(0), trainable=trainable
    )
    return (
        build_train_step_fn(loss, **of),
        (laid_out_state(state, rules, optimizer_rules),),
        {"x": x(split)},
    )


def laid_out_state(state, rules, optimizer_rules=None):
    """A train state of structs with layouts."""
    shardings = train_state_sharding(state, MESH, rules, optimizer_rules)
    return jax.tree.map(
        lambda leaf, sharding: struct(*leaf.shape, spec=sharding.spec, dtype=leaf.dtype),
        state,
        shardings,
    )


def stacked(rules):
    """Three blocks in a loop."""
    key = jax.random.key(0)

    def block(init_base_rng):
        del init_base_rng
        up = pz.nn.Linear.from_config("up", key, {"a": 8}, {"b": 8})
        down = pz.nn.Linear.from_config("down", key, {"b": 8}, {"a": 8})
        return pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down])

    stack = pz.nn.LayerStack.from_sublayer_builder(
        builder=block, stack_axis="blocks", stack_axis_size=3, init_base_rng=None, builder_kwargs={}
    )
    return planned(roll_layer_stacks().apply(stack), rules)
