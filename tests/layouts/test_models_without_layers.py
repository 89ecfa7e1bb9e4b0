"""Layouts of models that nothing is put into: dictionaries of arrays, and `blocks=()`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from penzai import pz
from penzai.models.simple_mlp import MLP

from penzai_shard import (
    Layout,
    ShardingError,
    ShardingWarning,
    TrainState,
    make_mesh,
    restore_train_state,
    save_train_state,
    without_names,
)
from penzai_shard.errors import PlanError, RuleTypeError
from penzai_shard.surgery import Recipe, axes_in_place

MESH = make_mesh({"data": 4, "model": 2})
NAMES = {"neurons": "mlp", "heads": None}
INPUTS = pz.nx.wrap(jax.random.normal(jax.random.key(1), (16, 8)), "batch", "embed")


def build_mlp():
    return MLP.from_config(name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[8, 16, 8])


def weights(key):
    up, down = (0.1 * jax.random.normal(k, (8, 64)) for k in jax.random.split(key))
    return {"up": pz.nx.wrap(up, "embed", "mlp"), "down": pz.nx.wrap(down, "embed", "mlp")}


def loss_fn(model, rng, state, inputs):
    hidden = pz.nx.nmap(jnp.dot)(inputs.untag("embed"), model["up"].untag("embed"))
    hidden = pz.nx.nmap(jax.nn.relu)(hidden)
    outputs = pz.nx.nmap(jnp.dot)(hidden.untag("mlp"), model["down"].untag("mlp"))
    loss = ((outputs - inputs) ** 2).untag("batch", "embed").mean().unwrap()
    return loss, state, {"loss": loss}


def losses_and_state(layout, mesh=MESH):
    state, step = layout.build(
        weights,
        jax.random.key(0),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-2),
        rng=jax.random.key(0),
    )
    losses = []
    for _ in range(2):
        state, aux = step(state, inputs=layout.shard_batch(INPUTS, mesh))
        losses.append(float(aux["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def on_one_device():
    return losses_and_state(Layout.data_parallel(), make_mesh({"data": 1}, jax.devices()[:1]))[0]


def test_a_dictionary_of_arrays_is_trained_data_parallel(on_one_device):
    losses, state = losses_and_state(Layout.data_parallel())
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-5)
    assert state.params["up"].data_array.sharding.spec == PartitionSpec()


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (Layout.fully_sharded(min_size=0), PartitionSpec(None, "data")),
        (Layout.two_dimensional(min_size=0, names=NAMES), PartitionSpec("data", "model")),
    ],
)
def test_a_dictionary_whose_arrays_are_split_warns_of_what_the_compiler_decides(
    on_one_device, layout, spec
):
    with pytest.warns(
        ShardingWarning,
        match=r"the dict has no layers that a layout could edit.*Say that this is meant, "
        r"blocks=\(\), or pin what the loss function computes",
    ):
        losses, state = losses_and_state(layout)
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-5)
    assert state.params["up"].data_array.sharding.spec == spec


def test_what_is_meant_does_not_warn(on_one_device):
    losses, _ = losses_and_state(Layout.tensor_parallel(names=NAMES, blocks=()))
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-5)


def test_without_blocks_only_the_order_of_dimensions_is_edited():
    model = build_mlp()
    recipe = Layout.fully_sharded(min_size=0, blocks=()).recipe(model, MESH)
    assert [row.count for row in recipe.report(model).rows] == [1]
    assert Layout.data_parallel().recipe({"w": pz.nx.ones({"a": 8})}, MESH) == Recipe()


@pytest.mark.parametrize(
    ("layout", "tree", "message"),
    [
        (
            Layout.data_parallel(blocks=(), rematerialise="nothing"),
            build_mlp(),
            r"rematerialise: it is done to blocks, and blocks=\(\) says that there are none",
        ),
        (
            Layout.fully_sharded(reshard_after_forward=True),
            weights(jax.random.key(0)),
            r"reshard_after_forward: it is done to blocks, and the dict has none\. Leave it out",
        ),
    ],
)
def test_what_is_done_to_blocks_needs_some(layout, tree, message):
    with pytest.raises(RuleTypeError, match=message):
        layout.recipe(tree, MESH)


def test_a_model_with_unknown_layers_is_told_of_both_ways_out():
    with pytest.raises(RuleTypeError, match=r"blocks=MyBlock.* to the compiler: blocks=\(\)"):
        Layout.data_parallel().recipe(build_mlp(), MESH)


def plain_weights(key):
    return without_names(weights(key))


def plain_loss_fn(model, rng, state, inputs):
    outputs = jax.nn.relu(inputs @ model["up"]) @ model["down"].T
    loss = ((outputs - inputs) ** 2).mean()
    return loss, state, {"loss": loss}


def test_a_dictionary_of_plain_arrays_is_fully_sharded_when_that_is_asked_for(
    on_one_device, tmp_path
):
    layout = Layout.fully_sharded(min_size=0, unnamed="largest", blocks=())
    key = jax.random.key(0)
    options = {"loss_fn": plain_loss_fn, "optimizer": optax.adam(1e-2), "rng": key}
    state, step = layout.build(plain_weights, key, mesh=MESH, **options)
    plan = layout.plan(plain_weights(key), MESH)
    assert {name: x.sharding for name, x in state.params.items()} == plan.sharding_tree()
    assert state.params["up"].sharding.spec == PartitionSpec(None, "data")
    assert state.opt_state[0].nu["up"].sharding == state.params["up"].sharding
    batch = layout.shard_batch(without_names(INPUTS), MESH, first_axis="batch")
    losses = []
    for _ in range(2):
        state, aux = step(state, inputs=batch)
        losses.append(float(aux["loss"]))
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-5)
    path = save_train_state(tmp_path / "state", state)
    other = make_mesh({"data": 8})
    again = restore_train_state(path, state, other, layout.parameters)
    assert again.params["up"].addressable_shards[0].data.shape == (8, 8)
    np.testing.assert_array_equal(again.params["up"], state.params["up"])


def test_a_plan_of_plain_arrays_that_are_copied_is_asked_for_as_the_state_is():
    layout, tree = Layout.data_parallel(), plain_weights(jax.random.key(0))
    with pytest.raises(PlanError, match=r"up: .* or pass on_unnamed=\"replicate\""):
        layout.plan(tree, MESH)
    assert (
        layout.plan(tree, MESH, on_unnamed="replicate").leaves[0].reason == "no names: replicated"
    )
    odd = {"w": pz.nx.ones({"mlp": 7})}
    layout = Layout(parameters={"mlp": "model"}, compute={"batch": "data"})
    assert layout.plan(odd, MESH, on_indivisible="replicate").leaves[0].spec == PartitionSpec()


def test_named_weights_are_given_plain_to_code_that_computes_so(on_one_device):
    layout = Layout(parameters={"mlp": "model"}, compute={"batch": "data"}, blocks=())
    key = jax.random.key(0)
    options = {"loss_fn": plain_loss_fn, "optimizer": optax.adam(1e-2), "rng": key}
    state, step = layout.build(weights, key, mesh=MESH, plain_arrays=True, **options)
    state, aux = step(state, inputs=layout.shard_batch(INPUTS.data_array, MESH, first_axis="batch"))
    np.testing.assert_allclose(aux["loss"], on_one_device[0], rtol=1e-5)
    assert state.model["up"].named_shape == {"embed": 8, "mlp": 64}
    assert state.params["up"].data_array.sharding.spec == PartitionSpec(None, "model")


def test_layers_of_penzai_are_not_given_plain_arrays():
    with pytest.raises(ShardingError, match="layers of Penzai compute with named arrays"):
        TrainState.initial_state(build_mlp(), optax.sgd(0.1), jax.random.key(0), plain_arrays=True)
    with pytest.raises(RuleTypeError, match="plain_arrays is True, False or None, not 'yes'"):
        TrainState.initial_state(
            weights(jax.random.key(0)), optax.sgd(0.1), jax.random.key(0), plain_arrays="yes"
        )


def test_only_models_with_layers_of_penzai_are_edited_to_leave_arrays_in_place():
    layout = Layout(parameters={}, compute={"batch": "data"}, blocks=())
    module = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    assert layout.recipe(build_mlp(), MESH) == axes_in_place()
    assert layout.recipe(module, MESH) == Recipe()
    assert layout.recipe(module, MESH).apply(module) is module


def test_weights_in_the_place_of_the_function_that_makes_them_are_refused_with_what_to_write():
    with pytest.raises(
        RuleTypeError, match=r"This is a dict. Arrays that exist .*layout.build\(lambda: weights, "
    ):
        Layout.fully_sharded(blocks=()).build(
            weights(jax.random.key(0)),
            mesh=MESH,
            loss_fn=loss_fn,
            optimizer=optax.adam(1e-2),
            rng=jax.random.key(0),
        )
