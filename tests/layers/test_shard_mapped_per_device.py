"""Layers written for one device's part, parameters that stay split, and operations vouched for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from penzai import pz

from penzai_shard.layers import ManualRegionError, ShardMapped
from penzai_shard.meshes import make_mesh
from penzai_shard.surgery import Recipe, wrap

MESH = make_mesh({"data": 4, "model": 2})
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
BATCH = {"batch": "data"}
X = pz.nx.wrap(jax.random.normal(jax.random.key(9), (8, 8))).tag("batch", "embedding")
UP = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 16})
DOWN = pz.nn.Linear.from_config("down", jax.random.key(1), {"neurons": 16}, {"embedding": 8})
TANH = pz.nn.Elementwise(jnp.tanh)
MLP = pz.nn.Sequential([UP, TANH, DOWN])
RULES = {"neurons": "model", "embedding": "data"}
SPLIT_OUT = {"batch": "data", "neurons": "model"}


@pz.pytree_dataclass
class Does(pz.nn.Layer):
    """A function of the array with its batch and its last dimension."""

    function: Any
    names: Any = ("batch", "embedding")

    def __call__(self, x, /, **side_inputs):
        value = pz.nx.nmap(self.function)(x.untag("batch", *x.named_shape.keys() - {"batch"}))
        return value.tag(*self.names)


def does(function, *names):
    return Does(function, names or ("batch", "embedding"))


def scalar(function):
    return Does(function, ())


PSUM = does(lambda x: jax.lax.psum(x, "model"))
TENSOR_PARALLEL = pz.nn.Sequential([*MLP.sublayers, PSUM])
AROUND = [(i, (i + 1) % 4) for i in range(4)]

COLLECTIVES = {
    "pmean": (scalar(lambda x: jax.lax.pmean(x.mean(), "data")), lambda x: x.mean()),
    "psum": (scalar(lambda x: jax.lax.psum(x.sum(), "data")), lambda x: x.sum()),
    "pmax": (scalar(lambda x: jax.lax.pmax(x.max(), "data")), lambda x: x.max()),
    "ppermute": (
        does(lambda x: jax.lax.ppermute(x, "data", AROUND)),
        lambda x: jnp.roll(x, 2, 0),
    ),
    "all_gather": (
        does(lambda x: jax.lax.all_gather(x, "data", tiled=True), "all", "embedding"),
        lambda x: x,
    ),
    "psum_scatter": (
        does(lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)[:, :1]),
        lambda x: x.reshape(4, 2, 8).sum(0).reshape(2, 4, 2)[:, :, 0].T.reshape(8, 1),
    ),
    "all_to_all": (
        does(
            lambda x: jax.lax.all_to_all(
                jax.lax.all_to_all(x, "data", 1, 0, tiled=True), "data", 0, 1, tiled=True
            )
        ),
        lambda x: x,
    ),
    "axis_index": (
        does(lambda x: x + jax.lax.axis_index("data")),
        lambda x: x + jnp.repeat(jnp.arange(4), 2)[:, None],
    ),
}


def mapped(layer, rules=BATCH, mesh=MESH, **options):
    return ShardMapped(layer, mesh, RULES, rules, **options)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_layer_that_moves_data_is_refused_by_the_operation_and_names_the_option(name):
    with pytest.raises(
        ManualRegionError,
        match=rf"of Does \(test_shard_mapped_per_device\.py:\d+\): a layer that calls "
        rf"jax\.lax\.{name} is written for one device's part\. Say per_device=True to run it as it "
        "is, unchecked",
    ):
        mapped(COLLECTIVES[name][0])(X)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_per_device_runs_it_as_it_is(name, mesh):
    layer, whole = COLLECTIVES[name]
    found = mapped(layer, mesh=mesh, per_device=True)(X)
    expected = whole(X.data_array)
    np.testing.assert_allclose(found.unwrap(*found.named_shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["pmean", "psum", "ppermute", "all_gather", "axis_index"])
def test_per_device_gradients_are_those_of_the_whole(name):
    layer, whole = COLLECTIVES[name]

    def loss(function):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(function(x)) * 3)))(X.data_array)

    def through(array):
        output = mapped(layer, per_device=True)(pz.nx.wrap(array).tag("batch", "embedding"))
        return output.unwrap(*output.named_shape)

    np.testing.assert_allclose(loss(through), loss(whole), rtol=1e-5, atol=1e-6)


def test_the_repr_says_what_is_not_checked():
    assert "per_device=True" in repr(mapped(PSUM, per_device=True))
    vouched = mapped(PSUM, assume_independent=("rev",), keep_split=("neurons",))
    assert "assume_independent=('rev',)" in repr(vouched)
    assert "keep_split=('neurons',)" in repr(vouched)


def test_per_device_output_that_nothing_makes_the_same_is_refused():
    with pytest.raises(ManualRegionError, match=r"output: it differs .* jax\.lax\.psum or pmean"):
        mapped(scalar(jnp.mean), per_device=True)(X)


@pytest.mark.parametrize("per_device", [False, True])
def test_a_mesh_axis_that_is_not_taken_over_is_named(per_device):
    with pytest.raises(
        ManualRegionError,
        match=r"mesh axis that the region does not take over \(test_shard_mapped_per_device\.py:\d+"
        r"\): .*unbound axis name: model.*It takes over \('data',\); see manual_axes",
    ):
        mapped(PSUM, manual_axes="data", per_device=per_device)(X)


# Parameters that stay split.


def output_and_gradients(layer):
    slots, parameters = pz.unbind_params(layer, freeze=True)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x)
        output = output.unwrap("batch", *output.named_shape.keys() - {"batch"})
        return jnp.sum(jnp.sin(output)), output

    (_, output), (by_parameter, by_input) = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    )(parameters, X)
    gradients = {p.label: p.value.data_array for p in by_parameter}
    return {"output": output, "x": by_input.data_array, **gradients}


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_tensor_parallelism_by_hand_equals_the_bare_layer(mesh):
    layer = mapped(TENSOR_PARALLEL, mesh=mesh, per_device=True, keep_split=("neurons",))
    check_same(output_and_gradients(layer), output_and_gradients(MLP))
    text = str(jax.make_jaxpr(lambda x: layer(x))(X))
    assert text.count(" = all_gather") == 2  # each weight over 'data', none over 'model'


@pytest.mark.parametrize("per_device", [False, True])
@pytest.mark.parametrize("kept", ["neurons", ("neurons",)])
def test_a_column_parallel_layer_with_a_split_output_equals_the_bare_layer(per_device, kept):
    layer = mapped(UP, SPLIT_OUT, per_device=per_device, keep_split=kept)
    check_same(output_and_gradients(layer), output_and_gradients(UP))
    assert layer(X).data_array.sharding.shard_shape((8, 16)) == (2, 8)


def test_a_contraction_over_a_kept_split_axis_is_refused():
    with pytest.raises(
        ManualRegionError,
        match=r"'dot_general' at '2' of Sequential > Linear .*: it contracts logical axis "
        r"'neurons', which is split over mesh axis 'model'",
    ):
        mapped(MLP, keep_split=("neurons",))(X)


def test_an_undeclared_split_output_is_refused():
    with pytest.raises(
        ManualRegionError,
        match=r"output: logical axis 'neurons' \(16\) should be whole by activation_rules, and "
        r"inside it is logical axis 'neurons', which is split over mesh axis 'model'",
    ):
        mapped(UP, keep_split=("neurons",))(X)


def test_a_misspelt_kept_axis_is_refused():
    with pytest.raises(ManualRegionError, match=r"axis 'neuron'\. Did you mean 'neurons'"):
        mapped(UP, keep_split=("neuron",))(X)


# Operations vouched for.


def test_what_the_user_vouches_for_runs_on_each_part():
    flip = does(lambda x: jnp.flip(x, 0))
    for name in ("rev", "flip"):
        found = mapped(flip, assume_independent=name)(X)
        expected = X.data_array.reshape(4, 2, 8)[:, ::-1].reshape(8, 8)
        assert jnp.array_equal(found.unwrap("batch", "embedding"), expected)
    with pytest.raises(ManualRegionError, match=r"assume_independent=\('rev',\)"):
        mapped(flip, assume_independent=("cumsum",))(X)


def test_an_independent_callback_can_be_vouched_for():
    host = does(lambda x: jax.pure_callback(np.sin, jax.typeof(x), x, vmap_method="expand_dims"))
    with pytest.raises(ManualRegionError, match=r"'pure_callback' .* is not known to treat"):
        mapped(host)(X)
    found = mapped(host, assume_independent=("pure_callback",))(X)
    np.testing.assert_allclose(found.unwrap("batch", "embedding"), jnp.sin(X.data_array), 1e-6)


def test_options_are_part_of_equality_and_go_through_json():
    assert mapped(UP) != mapped(UP, assume_independent=("rev",))
    recipe = Recipe(
        wrap(
            pz.nn.Linear,
            ShardMapped,
            mesh=MESH,
            parameter_rules=RULES,
            activation_rules=SPLIT_OUT,
            keep_split=("neurons",),
            assume_independent=("rev",),
            per_device=True,
        )
    )
    again = Recipe.from_json(recipe.to_json())
    assert again.apply(UP) == recipe.apply(UP)
    check_same(output_and_gradients(again.apply(UP)), output_and_gradients(UP))
