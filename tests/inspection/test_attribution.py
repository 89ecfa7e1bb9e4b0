"""Whose a collective is and what it moves, judged by sizes that only one layer has."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests import models

MESH = pzs.make_mesh({"data": 4, "model": 2})
F = 4
# Each length belongs to one layer.
LENGTHS = {"up": (8, 24), "middle": (24, 40), "down": (40, 56), "head": (56, 16)}


def tower():
    layers = []
    for name, (into, out) in LENGTHS.items():
        axes = {f"d{into}": into}, {f"d{out}": out}
        linear = pz.nn.Linear.from_config(name, jax.random.key(0), *axes)
        block = pz.nn.Sequential([linear, pz.nn.Elementwise(jnp.tanh)])
        layers.append(pzs.Checkpointed(block) if name == "middle" else block)
    return pz.nn.Sequential(layers)


def loss_fn(model, rng, state, x):
    return (model(x).untag("batch", "d16").unwrap() ** 2).mean(), state, {}


@pytest.fixture(scope="module")
def tower_report():
    rules = {"batch": "data", "d24": "model", "d56": "model"}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = pzs.TrainState.initial_state(tower(), optimizer, jax.random.key(0))
    state = jax.device_put(state, pzs.train_state_sharding(state, MESH, rules))
    x = pzs.shard_batch(pz.nx.zeros({"batch": 12, "d8": 8}), MESH, rules)
    return pzs.collectives(pzs.build_train_step_fn(loss_fn), state, x=x)


def parts(report, phase):
    found = [part for one in report.collectives for part in one.parts if part.phase == phase]
    return sorted((*part.layers, part.payload_bytes // F) for part in found)


def test_layers_and_phases_follow_from_the_lengths(tower_report):
    # A layer that contracts a split length adds up its output; one that makes a split length adds
    # up the gradient of its input, but not of the step's own input.
    # With remat, XLA adds up once more what it keeps of the forward pass of "middle".
    again = ("middle", 3 * 40)
    assert parts(tower_report, "forward") == [("head", 3 * 16), ("middle", 3 * 40), again]
    activation, weights = [("down", 3 * 40)], [
        ("down", 40 * 28), ("head", 28 * 16), ("middle", 12 * 40), ("up", 8 * 12),
    ]  # fmt: skip
    assert parts(tower_report, "backward") == sorted(activation + weights)
    assert {part[0] for part in parts(tower_report, "optimizer")} == {"optimizer"}
    assert parts(tower_report, None) == []


def test_what_is_moved_follows_from_the_lengths(tower_report):
    moves = {part.moves for one in tower_report.collectives for part in one.parts}
    assert moves - {""} == {
        "activation f32[3,16] of head",
        "activation f32[3,40] of middle",
        "gradient of activation f32[3,40] of down",
        *(f"gradient of params/{name}.weights" for name in LENGTHS),
    }


def test_arrays_of_a_dictionary_are_moved_for_themselves():
    # No layer reads them: the loss does, as a whole.
    mesh = pzs.make_mesh({"data": 8})
    names = {"w": ("in", "out"), "b": ("out",)}
    model = pzs.name_axes({"w": jnp.ones((16, 4)), "b": jnp.zeros(4)}, names)
    model = pzs.place(model, mesh, pzs.fully_sharded(min_size=16))
    state = pzs.TrainState.initial_state(
        model, optax.adam(1e-2), jax.random.key(0), plain_arrays=True
    )

    def loss_fn(model, rng, state, x):
        return ((x @ model["w"] + model["b"]) ** 2).mean(), state, {}

    x = jax.device_put(jnp.ones((32, 16)), NamedSharding(mesh, P("data")))
    report = pzs.collectives(pzs.build_train_step_fn(loss_fn), state, x=x)
    found = {(part.layers, part.moves) for one in report.collectives for part in one.parts}
    assert found == {
        (("w",), "params/w"),
        (("w",), "gradient of params/w"),
        (("b",), "gradient of params/b"),
    }


def test_gradient_of_a_layer_that_stands_in_two_places():
    mesh = pzs.make_mesh({"data": 8})
    layer = pz.nn.Linear.from_config("shared", jax.random.key(0), {"d16": 16}, {"d16": 16})
    blocks = pz.nn.Sequential([layer]), pz.nn.Elementwise(jnp.tanh), pz.nn.Sequential([layer])
    model = pz.nn.Sequential([*blocks])
    state = pzs.TrainState.initial_state(model, optax.sgd(0.1), jax.random.key(0))
    rules = pzs.fully_sharded(min_size=16)
    state = jax.device_put(state, pzs.train_state_sharding(state, mesh, rules))
    x = pzs.shard_batch(pz.nx.zeros({"batch": 8, "d16": 16}), mesh, {"batch": "data"})
    report = pzs.collectives(pzs.build_train_step_fn(loss_fn), state, x=x)
    whole = [one for one in report.collectives if one.payload_bytes == 16 * 16 * F]
    assert {(one.kind, part.layers, part.moves) for one in whole for part in one.parts} == {
        ("all-gather", ("shared",), "params/shared.weights"),
        ("all-reduce", ("shared",), "gradient of params/shared.weights"),
    }


# Steps that are written by hand over models of other libraries

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(jnp.tanh(nn.remat(nn.Dense)(16, name="up")(x)))


def linen():
    net = Net()
    return net.init(jax.random.key(0), jnp.ones((2, 8))), net.apply


def equinox():
    params, static = eqx.partition(models.equinox().mlp, eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


def flax_nnx():
    graph, state = nnx.split(nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu))
    return state, lambda state, x: nnx.merge(graph, state)(x)


def haliax():
    params, static = eqx.partition(models.haliax_mlp(), eqx.is_array)
    axes = models.hax.Axis("batch", 256), models.EMBED
    return params, lambda params, x: eqx.combine(params, static)(models.hax.named(x, axes)).array


def lay_out(tree, *axes):
    """The longest dimension over the first mesh axis, another over the second."""

    def struct(x):
        order = sorted(range(x.ndim), key=lambda i: -x.shape[i])
        spec = dict(zip(order, axes if x.ndim > 1 else axes[:1], strict=False))
        sharding = NamedSharding(MESH, P(*(spec.get(i) for i in range(x.ndim))))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(struct, tree)


# At the trace of a product of Haliax.
@pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim:DeprecationWarning")
@pytest.mark.parametrize("axes", [("data",), ("model", "data")])
@pytest.mark.parametrize("family", [linen, equinox, flax_nnx, haliax])
def test_bytes_of_steps_by_hand_belong_to_layers(family, axes):
    params, apply = family()

    def step(params, opt_state, x):
        value, grads = jax.value_and_grad(lambda p: (apply(p, x) ** 2).mean())(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = lay_out(jax.eval_shape(OPTIMIZER.init, params), *axes)
    x = lay_out(jnp.zeros((256, 8)), "data")
    compiled = pzs.compile_step(jax.jit(step), lay_out(params, *axes), opt_state, x)
    report, layers = compiled.collectives, {*compiled.step.layers.order}
    by_layer = report.by_layer()
    rest = by_layer.pop("unattributed").wire_bytes
    assert report.wire_bytes > 0
    assert rest <= 0.05 * report.wire_bytes
    assert {layer for owners in by_layer for layer in owners.split(" + ")} <= layers


def test_moves_of_stacked_weights_in_a_loop_and_not_of_their_momenta():
    state = lay_out({"momenta": jnp.ones((3, 8, 64)), "weights": jnp.ones((3, 8, 64))}, "data")

    def step(state, x):
        def loss(weights):
            turn = lambda x, w: (jnp.tanh(x @ w) @ w.T, None)  # noqa: E731
            return (jax.lax.scan(turn, x, weights)[0] ** 2).mean()

        gradients = jax.grad(loss)(state["weights"])
        momenta = 0.9 * state["momenta"] + gradients
        return {"momenta": momenta, "weights": state["weights"] - momenta}

    x = lay_out(jnp.ones((256, 8)), "data")
    report = pzs.collectives(jax.jit(step, donate_argnums=0), state, x)
    moves = {part.moves for one in report.collectives for part in one.parts}
    assert moves == {"state/weights", "gradient of state/weights"}
    assert {one.times for one in report.collectives} == {3}
