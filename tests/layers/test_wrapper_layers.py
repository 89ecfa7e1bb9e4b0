"""What all wrapper layers have in common: they change how a model runs, not what it computes."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard.layers import (
    AxesInPlace,
    Checkpointed,
    ConstrainShardingByName,
    GatherParameters,
    Jitted,
    Scoped,
    ShardMapped,
)
from penzai_shard.meshes import make_mesh

MESH = make_mesh({"data": 4, "model": 2})
WRAPPERS = {
    "jitted": Jitted,
    "checkpointed": Checkpointed,
    "scoped": lambda body: Scoped(body, "scope"),
    "axes in place": AxesInPlace,
    "gathering": lambda body: GatherParameters(body, MESH, {"features_out": "model"}),
    "nested": lambda body: Jitted(Checkpointed(AxesInPlace(Jitted(body)))),
}


@pytest.fixture(params=WRAPPERS)
def wrap(request):
    return WRAPPERS[request.param]


def assert_same(actual, expected):
    actual, expected = jax.tree_util.tree_leaves(actual), jax.tree_util.tree_leaves(expected)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2e-5, atol=2e-5)


def count_of(model):
    (state,) = pz.unbind_state_vars(model)[1]
    return float(state.value)


def test_output_and_state_are_those_of_the_bare_layer(small, wrap):
    bare, wrapped = small.counting_mlp(), wrap(small.counting_mlp())
    for _ in range(3):
        assert_same(wrapped(small.features()), bare(small.features()))
    assert count_of(wrapped) == count_of(bare) == 3


def test_gradients_and_state_are_those_of_the_bare_layer(small, wrap):
    bare, wrapped = small.counting_mlp(), wrap(small.counting_mlp())
    for _ in range(2):
        expected = small.loss_and_gradients(bare, small.features())
        actual = small.loss_and_gradients(wrapped, small.features())
        assert actual[1].keys() == expected[1].keys()
        assert_same(actual, expected)
    assert count_of(wrapped) == count_of(bare) == 2


@pytest.mark.parametrize("mesh_name", ["AUTO", "EXPLICIT"])
def test_output_and_gradients_on_meshes(small, wrap, mesh_name):
    mesh = getattr(small, mesh_name)
    if mesh_name == "EXPLICIT" and wrap is WRAPPERS["scoped"]:
        mesh = small.AUTO  # A bare layer cannot compute with Explicit arrays, named or not.
    wrapped = wrap(small.placed(small.counting_mlp(), mesh))
    argument = small.placed(small.features(), mesh, PartitionSpec("data"))
    assert_same(wrapped(argument), small.counting_mlp()(small.features()))
    expected = small.loss_and_gradients(small.counting_mlp(), small.features())[1]
    wrapped = wrap(small.placed(small.counting_mlp(), mesh))
    assert_same(small.loss_and_gradients(wrapped, argument)[1], expected)


def test_under_an_explicit_ambient_mesh(small, wrap):
    expected = small.counting_mlp()(small.features())
    twin = jax.sharding.Mesh(small.EXPLICIT.devices, small.EXPLICIT.axis_names)
    wrapped = wrap(small.placed(small.counting_mlp(), twin))
    argument = small.placed(small.features(), twin, PartitionSpec("data"))
    with jax.set_mesh(small.EXPLICIT):
        assert_same(wrapped(argument), expected)
        frozen = pz.freeze_variables(wrap(small.placed(small.mlp(), twin)))
        jitted = jax.jit(lambda model, value: model(value))(frozen, argument)
    assert_same(jitted, small.mlp()(small.features()))


def test_under_jit_and_vmap(small, wrap):
    expected = small.mlp()(small.features())
    frozen = pz.freeze_variables(wrap(small.mlp()))
    assert_same(jax.jit(lambda model, value: model(value))(frozen, small.features()), expected)
    rows = small.features().untag("batch").with_positional_prefix()
    mapped = jax.vmap(lambda row: frozen(row))(rows)
    assert_same(mapped.tag("batch").order_like(expected), expected)
    both = jax.vmap(lambda model, row: model(row), in_axes=(None, 0))(frozen, rows)
    assert_same(both.tag("batch").order_like(expected), expected)


def test_gradients_per_example(small, wrap):
    def gradients(model):
        rows = small.features().untag("batch").with_positional_prefix()
        return jax.vmap(
            jax.grad(lambda row: model(row).untag("features").sum().unwrap()),
        )(rows)

    assert_same(gradients(wrap(small.mlp())), gradients(small.mlp()))


def test_random_streams_as_side_inputs_advance(small, wrap):
    bare, wrapped = small.dropout_mlp(), wrap(small.dropout_mlp())
    key = jax.random.key(7)
    expected_stream, stream = (pz.RandomStream.from_base_key(key) for _ in range(2))
    for _ in range(2):
        expected = bare(small.features(), random_stream=expected_stream)
        assert_same(wrapped(small.features(), random_stream=stream), expected)
    assert int(stream.offset.value) == int(expected_stream.offset.value) == 2


def test_one_variable_in_the_layer_and_in_a_side_input(small, wrap):
    @pz.pytree_dataclass
    class Reader(pz.nn.Layer):
        count: pz.StateVariable

        def __call__(self, value, /, *, shared, **side_inputs):
            shared.value = shared.value + 1
            return value + self.count.value

    variable = pz.StateVariable(jnp.asarray(0.0), label="shared")
    wrapped = wrap(Reader(variable))
    assert float(wrapped(jnp.asarray(1.0), shared=variable)) == 2
    assert float(wrapped(jnp.asarray(1.0), shared=variable)) == 3
    assert float(variable.value) == 2


def test_variables_in_the_argument_are_updated(small, wrap):
    variable = pz.StateVariable(jnp.asarray(1.0), label="argument")

    @pz.pytree_dataclass
    class Doubles(pz.nn.Layer):
        def __call__(self, value, /, **side_inputs):
            value["x"].value = value["x"].value * 2
            return value["x"].value + value["y"]

    assert float(wrap(Doubles())({"x": variable, "y": jnp.asarray(1.0)})) == 3
    assert float(variable.value) == 2


def test_errors_of_the_layer_pass_through(small, wrap):
    class OddError(Exception):
        pass

    @pz.pytree_dataclass
    class Fails(pz.nn.Layer):
        def __call__(self, value, /, **side_inputs):
            raise OddError("just so")

    model = pz.nn.Sequential([small.counter(), Fails()])
    wrapped = wrap(model)
    with pytest.raises(OddError, match="just so"):
        wrapped(jnp.ones(2))


def test_a_wrong_input_shape_gives_the_layers_own_error(small, wrap):
    def message(model):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            model(pz.nx.ones({"batch": 2, "other": 3}))
        return type(raised.value), str(raised.value)

    assert message(wrap(small.mlp())) == message(small.mlp())


@pytest.mark.parametrize("wrapper", [Jitted, Checkpointed, WRAPPERS["scoped"]])
def test_body_gives_the_layer_back(small, wrapper):
    body = small.mlp()
    wrapped = wrapper(body)
    wrapped(small.features())
    assert wrapped.body is body


def test_wrapping_with_selectors_keeps_names_and_values(small, wrap):
    model = small.counting_mlp()
    wrapped = pz.select(model).at_instances_of(pz.nn.Affine).apply(wrap)
    names = [variable.label for variable in pz.unbind_variables(model)[1]]
    assert [variable.label for variable in pz.unbind_variables(wrapped)[1]] == names
    assert_same(wrapped(small.features()), small.counting_mlp()(small.features()))


def test_checkpointed_and_constrained_blocks_of_a_transformer(small):
    model = small.llama()
    constraint = ConstrainShardingByName(small.AUTO, {"batch": "data", "vocabulary": "model"})
    edited = pz.select(model).at_instances_of(TransformerBlock).insert_after(constraint)
    edited = pz.select(edited).at_instances_of(TransformerBlock).apply(Checkpointed)
    assert pz.select(edited).at_instances_of(ConstrainShardingByName).count() == 2
    positions = pz.nx.arange("seq", 4)
    expected = Jitted(model)(small.tokens(), token_positions=positions)
    assert_same(Jitted(edited)(small.tokens(), token_positions=positions), expected)


def test_inside_a_first_generation_model(small, wrap):
    model = small.mlp_v1()
    expected = model(small.features())
    edited = pz.select(model).at_instances_of(pz_v1.nn.Affine).apply(wrap)
    assert_same(edited(small.features()), expected)
    gradients = jax.grad(lambda m: m(small.features()).untag("batch", "features").sum().unwrap())
    assert_same(gradients(edited), gradients(model))


def test_around_a_first_generation_model(small, wrap):
    model = small.mlp_v1()
    wrapped = wrap(model)
    assert_same(wrapped(small.features()), model(small.features()))
    assert_same(jax.jit(lambda m, x: m(x))(wrapped, small.features()), model(small.features()))


def test_renders_in_treescope_before_and_after_a_call(small, wrap):
    wrapped = wrap(small.mlp())
    before = treescope.render_to_text(wrapped)
    wrapped(small.features())
    assert treescope.render_to_text(wrapped) == before
    assert type(wrapped).__name__ in before
    assert "reading" not in treescope.render_to_html(wrapped)


def test_copies_and_trees_are_those_of_a_fresh_layer(small, wrap):
    wrapped = wrap(pz.freeze_variables(small.mlp()))
    structure = jax.tree_util.tree_structure(wrapped)
    wrapped(small.features())
    assert jax.tree_util.tree_structure(wrapped) == structure
    for duplicate in (copy.copy(wrapped), copy.deepcopy(wrapped)):
        assert vars(duplicate).keys() == wrapped.attributes_dict().keys()
        assert_same(duplicate(small.features()), wrapped(small.features()))


def test_explicit_inputs_come_out_on_the_auto_twin(small):
    argument = small.placed(small.features(), small.EXPLICIT, PartitionSpec("data"))
    for wrapper in (Jitted, Checkpointed):
        output = wrapper(small.placed(small.mlp(), small.EXPLICIT))(argument)
        sharding = output.data_array.sharding
        assert isinstance(sharding, NamedSharding)
        assert sharding.mesh.axis_types == small.AUTO.axis_types


@pytest.mark.usefixtures("compiled_as_by_users")
def test_outputs_and_gradients_are_those_of_the_bare_layer_as_users_compile_them(small):
    """The last of this file, since every test after it is compiled so."""
    wrappers = WRAPPERS | {
        "bare": lambda body: body,
        "per device": lambda body: ShardMapped(
            body, small.AUTO, {"features_out": "model"}, {"batch": "data"}
        ),
    }
    unbound, parameters = pz.unbind_params(small.placed(small.mlp(), small.AUTO))
    argument = small.placed(small.features(), small.AUTO, PartitionSpec("data"))

    @jax.jit
    def all_of_them(values, argument):
        found = {}
        for name, wrap in wrappers.items():
            copies = [value.unfreeze_as_copy() for value in values]
            model = wrap(pz.bind_variables(unbound, copies))
            found[name] = model(argument), small.loss_and_gradients(model, argument)
        return found

    found = all_of_them([parameter.freeze() for parameter in parameters], argument)
    expected = (
        small.mlp()(small.features()),
        small.loss_and_gradients(small.mlp(), small.features()),
    )
    for one in found.values():
        assert_same(one, expected)
