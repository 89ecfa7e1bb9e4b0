"""`ConstrainActivations`: what flows into a layer and out of it is where it is said to be."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from penzai import pz

from penzai_shard.errors import MeshError, PlanError, RuleTypeError
from penzai_shard.layers import ConstrainActivations, GatherParameters, laid_out
from penzai_shard.meshes import make_mesh
from penzai_shard.placement import place

MESHES = {
    "auto": make_mesh({"data": 4, "model": 2}),
    "explicit": jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
}
SPLIT, WHOLE = {"batch": "data", "seq": "model"}, {"batch": "data"}


@pz.pytree_dataclass
class Seen(pz.nn.Layer):
    """Keeps how its input is laid out."""

    found: list = None

    def __call__(self, value, /, **side_inputs):
        self.found.append(value.data_array.sharding.spec)
        return value * 2.0


def linear():
    return pz.nn.Linear.from_config("w", jax.random.key(0), {"embedding": 8}, {"neurons": 4})


def activations():
    return pz.nx.wrap(jax.random.normal(jax.random.key(1), (8, 6, 8)), "batch", "seq", "embedding")


@pytest.mark.parametrize("kind", MESHES)
def test_inputs_and_outputs_are_laid_out_and_have_the_values_of_the_bare_layer(kind):
    mesh, bare = MESHES[kind], linear()
    layer = laid_out(
        place(linear(), mesh, {"embedding": "data"}),
        mesh,
        (SPLIT, WHOLE),
        (WHOLE, SPLIT),
        {},
        False,
    )

    def loss(layer, x):
        return (layer(x).untag("batch", "seq", "neurons").unwrap() ** 2).sum()

    argument = place(activations(), mesh, WHOLE)
    output = jax.jit(lambda x: layer(x))(argument)
    assert output.data_array.sharding.shard_shape(output.data_array.shape)[:2] == (2, 3)
    expected = bare(activations()).order_as("batch", "seq", "neurons").data_array
    np.testing.assert_allclose(
        output.order_as("batch", "seq", "neurons").data_array, expected, rtol=1e-5, atol=1e-6
    )
    gradient = jax.jit(jax.grad(lambda x: loss(layer, x)))(argument)
    expected = jax.grad(lambda x: loss(bare, x))(activations())
    np.testing.assert_allclose(gradient.data_array, expected.data_array, rtol=1e-4, atol=1e-5)


def test_the_last_of_several_layouts_is_what_the_layer_sees():
    seen = []
    layer = ConstrainActivations(Seen(seen), MESHES["auto"], inputs=(SPLIT, WHOLE))
    layer(activations())
    assert seen == [PartitionSpec("data")]


def test_a_length_that_does_not_divide_is_an_error():
    layer = ConstrainActivations(pz.nn.Identity(), MESHES["auto"], outputs=(SPLIT,))
    with pytest.raises(PlanError, match=r"logical axis 'seq' \(5\) does not divide over mesh axis"):
        layer(pz.nx.ones({"batch": 8, "seq": 5}))


@pytest.mark.parametrize(("way", "side"), [("into", "inputs"), ("out of", "outputs")])
def test_the_error_names_the_layer_of_the_model(way, side):
    layer = ConstrainActivations(pz.nn.Identity(), MESHES["auto"], **{side: (SPLIT,)})
    message = (
        rf"no valid layout for what flows {way} the Identity:\n"
        r"  the array: logical axis 'seq' \(3\) does not divide over mesh axis 'model' \(2\)"
    )
    with pytest.raises(PlanError, match=message):
        ConstrainActivations(layer, MESHES["auto"])(pz.nx.ones({"batch": 8, "seq": 3}))


def test_rules_are_read_where_they_are_written():
    with pytest.raises(RuleTypeError, match=r"one for each layout in turn.*Write inputs=\(\{'batc"):
        ConstrainActivations(pz.nn.Identity(), MESHES["auto"], inputs=WHOLE)
    with pytest.raises(MeshError, match=r"has no mesh axis 'modle'. Did you mean 'model'\?"):
        ConstrainActivations(pz.nn.Identity(), MESHES["auto"], outputs=({"seq": "modle"},))


def test_laid_out_gathers_parameters_only_where_it_is_told_how():
    mesh = MESHES["auto"]
    assert isinstance(laid_out(linear(), mesh, parameters={}).body, GatherParameters)
    assert isinstance(laid_out(linear(), mesh).body, pz.nn.Linear)
