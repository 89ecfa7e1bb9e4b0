"""Padded placing and initialising: each device has its part, the rest is zero, values are those
of the unpadded model."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz
from penzai.models import simple_mlp

import penzai_shard as pzs
from penzai_shard import padded_arrays
from penzai_shard.errors import ShardingError
from penzai_shard.even_layouts import layouts_between, true_layout
from penzai_shard.padded_arrays import pad_to
from penzai_shard.placement import padded_on_devices, stored_padding

RULES = {"features": "data", "features_out": "model"}


def build(seed=0):
    return simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(seed), feature_sizes=[7, 5, 3]
    )


def values_of(model):
    return {v.label: v.value for v in pz.unbind_params(model, freeze=True)[1]}


@pytest.fixture(scope="module")
def mesh():
    return pzs.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def placed(mesh):
    return pzs.place(build(), mesh, RULES, on_indivisible="pad")


def assert_equal_values(model, other, exactly=True):
    own, others = values_of(model), values_of(other)
    assert list(own) == list(others)
    for name, value in own.items():
        data, expected = value.data_array, others[name].data_array
        if exactly:
            np.testing.assert_array_equal(data, expected)
        else:
            np.testing.assert_allclose(data, expected, rtol=1e-6)


def test_every_device_has_an_equal_part_and_the_padding_is_zero(placed):
    assert_equal_values(placed, build())
    weights = values_of(placed)["mlp/Affine_0/Linear.weights"]
    assert isinstance(weights, pzs.PaddedArray)
    assert weights.named_shape == {"features": 7, "features_out": 5}
    assert weights.stored.shape == (8, 6)
    assert weights.stored.sharding.spec == PartitionSpec("data", "model")
    assert {shard.data.shape for shard in weights.stored.addressable_shards} == {(2, 3)}
    stored = np.array(weights.stored)
    stored[:7, :5] = 0
    assert not stored.any()


def test_a_plan_is_carried_out_as_printed(mesh, placed):
    plan = pzs.make_plan(pzs.abstract_model(build), mesh, RULES, on_indivisible="pad")
    for model in (pzs.place(build(), plan), pzs.sharded_init(build, plan=plan)):
        for value, expected in zip(
            values_of(model).values(), values_of(placed).values(), strict=True
        ):
            assert jax.tree.structure(value) == jax.tree.structure(expected)
            layout, other = (
                jax.tree.leaves(value)[0].sharding,
                jax.tree.leaves(expected)[0].sharding,
            )
            assert layout == other
        assert_equal_values(model, placed, exactly=False)
    assert pzs.make_plan(placed, mesh, RULES, on_indivisible="pad").leaves == plan.leaves


def test_sharded_init_pads_with_zeros_each_array_that_does_not_divide(mesh):
    model = pzs.sharded_init(build, mesh=mesh, rules=RULES, on_indivisible="pad")
    whole = pzs.sharded_init(build, mesh=mesh, rules=RULES, on_indivisible="replicate")
    assert_equal_values(model, whole)
    stored = np.array(values_of(model)["mlp/Affine_0/Linear.weights"].stored)
    assert stored.shape == (8, 6)
    assert not stored[7:].any()
    assert not stored[:, 5:].any()
    for own, on_indivisible in ((RULES, "pad"), ({}, "error")):
        again = pzs.sharded_init(lambda: model, mesh=mesh, rules=own, on_indivisible=on_indivisible)
        assert_equal_values(again, whole)


def test_models_of_the_first_api_are_padded_too(mesh):
    from penzai.deprecated.v1 import pz as v1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_def = v1.nn.add_parameter_prefix(
            "linear", v1.nn.Linear.from_config({"features": 7}, {"features_out": 4})
        )
        model = pzs.initialize_parameters_sharded(
            model_def, jax.random.key(0), mesh, RULES, on_indivisible="pad"
        )
        whole = pzs.initialize_parameters_sharded(model_def, jax.random.key(0), mesh, {})
    weights = model.weights.value
    assert weights.stored.shape == (8, 4)
    np.testing.assert_array_equal(weights.data_array, whole.weights.value.data_array)


def test_another_mesh_takes_the_padding_off_and_pads_anew(placed):
    eight = pzs.make_mesh({"data": 8})
    moved = pzs.place(placed, eight, {"features": "data"}, on_indivisible="pad")
    assert_equal_values(moved, placed)
    weights = values_of(moved)["mlp/Affine_0/Linear.weights"]
    assert weights.stored.shape == (8, 5)
    two = pzs.make_mesh({"data": 2}, jax.devices()[:2])
    fewer = pzs.place(moved, two, {"features": "data"}, on_indivisible="pad")
    assert_equal_values(fewer, placed)
    whole = pzs.place(placed, eight, {"features_out": None})
    assert_equal_values(whole, placed)
    assert all(type(value) is pz.nx.NamedArray for value in values_of(whole).values())


def test_where_nothing_is_padded_nothing_changes(mesh):
    tree = {"w": pz.nx.ones({"features": 8, "features_out": 4}), "step": 3}
    placed = pzs.place(tree, mesh, RULES, on_indivisible="pad")
    assert type(placed["w"]) is pz.nx.NamedArray


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "float8_e4m3fn"])
def test_any_kind_and_dtype_is_padded(mesh, kind, dtype):
    data = kind((np.arange(21).reshape(7, 3) % 3).astype(dtype))
    tree = [pz.nx.NamedArray({"features": 7, "b": 3}, data)]
    placed = pzs.place(tree, mesh, RULES, on_indivisible="pad")[0]
    assert placed.stored.dtype == data.dtype
    np.testing.assert_array_equal(np.asarray(placed.data_array), np.asarray(data))


@pytest.mark.parametrize(
    ("sizes", "stored", "mesh_axes"),
    [
        # Two mesh axes of one dimension go to two others, and those of two dimensions to one.
        ((9, 12, 6), (16, 12, 6), (("data", "model"), (), ())),
        ((9, 11, 16), (12, 12, 16), (("data",), ("model",), ())),
        ((9, 11, 12, 6), (12, 12, 12, 6), (("data",), ("model",), (), ())),
    ],
)
def test_padding_comes_off_and_goes_on_with_no_device_gathering_the_array(
    mesh, sizes, stored, mesh_axes
):
    data = np.arange(np.prod(sizes), dtype=np.float32).reshape(sizes)
    padding = pzs.Padding(stored, mesh_axes)
    padded = pzs.PaddedArray(pad_to(data, stored), dict(zip("abcd", sizes, strict=False)), padding)
    layout = NamedSharding(mesh, padded.spec)
    padded = jax.device_put(padded, layout)
    true = padded.data_array
    np.testing.assert_array_equal(true, data)
    assert true.sharding == true_layout(layout, sizes)
    again = padded_on_devices("place", true, stored, layout)
    np.testing.assert_array_equal(again, padded.stored)
    between = layouts_between(layout, sizes)
    for program, argument in (
        (padded_arrays._cut_to(sizes, true.sharding, between), padded.stored),
        (stored_padding._padding_to(stored, layout, between[::-1]), true),
    ):
        assert "all-gather" not in program.lower(argument).compile().as_text()


def test_explicit_meshes_mean_their_auto_twin(placed):
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        model = pzs.place(build(), explicit, RULES, on_indivisible="pad")
        assert_equal_values(model, placed)
        made = pzs.sharded_init(build, mesh=explicit, rules=RULES, on_indivisible="pad")
    assert_equal_values(made, placed, exactly=False)


def test_placing_inside_of_a_program_pads_and_takes_off(mesh, placed):
    array = values_of(placed)["mlp/Affine_0/Linear.weights"]

    @jax.jit
    def replaced(x):
        return pzs.place([x], mesh, {"features": "model"}, on_indivisible="pad")[0]

    for argument in (array, array.as_namedarray()):
        result = replaced(argument)
        assert result.stored.shape == (8, 5)
        np.testing.assert_array_equal(result.data_array, array.data_array)


def test_what_has_no_value_is_refused_with_its_path(mesh):
    with pytest.raises(
        ShardingError, match=r"mlp/Affine_0/Linear.weights: build it with sharded_init"
    ):
        pzs.place(pzs.abstract_model(build), mesh, RULES, on_indivisible="pad")
    gone = build()
    for value in values_of(gone).values():
        value.data_array.delete()
    with pytest.raises(ShardingError, match=r"mlp/Affine_0/Linear.weights: was donated or deleted"):
        pzs.place(gone, mesh, RULES, on_indivisible="pad")
    large = [pz.nx.NamedArray({"features": 7}, np.full(7, 2**40))]
    with pytest.raises(ShardingError, match="0: has values of int64 beyond those of int32"):
        pzs.place(large, mesh, RULES, on_indivisible="pad")


def test_a_program_takes_what_the_plan_says_and_gathers_no_weight(mesh):
    plan = pzs.make_plan(
        pzs.abstract_model(lambda: {"w": pz.nx.ones({"vocabulary": 67, "embedding": 24})}),
        mesh,
        {"vocabulary": ("data", "model")},
        on_indivisible="pad",
    )

    def loss(weights, x):
        logits = (weights["w"] * x).untag("embedding").sum()
        return (
            pz.nx.nmap(jax.nn.logsumexp)(logits.untag("vocabulary")).untag("batch").sum().unwrap()
        )

    x = pz.nx.ones({"batch": 4, "embedding": 24})
    step = jax.jit(jax.grad(loss), out_shardings=plan.sharding_tree())
    compiled = step.lower(plan.restore_structs(), x).compile()
    arguments = compiled.memory_analysis().argument_size_in_bytes
    assert arguments == plan.bytes_per_device + 4 * 24 * 4 == (72 // 8 + 4) * 24 * 4
    assert "all-gather" not in compiled.as_text()
    assert "f32[9,24]" in compiled.as_text()
    assert "f32[67,24]" not in compiled.as_text()


def loss_of(weights, tokens):
    hidden = pz.nx.nmap(jnp.tanh)(weights["table"][{"vocabulary": tokens}])
    hidden = (hidden.untag("embedding") * weights["scale"].untag("embedding")).tag("embedding")
    logits = pz.nx.nmap(jnp.dot)(hidden.untag("embedding"), weights["head"].untag("embedding"))
    chosen = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("classes"))
    return -chosen.astype("float32").tag("classes").untag("batch", "classes").mean().unwrap()


LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 8, 13])


@settings(max_examples=4, deadline=None)
@given(
    vocabulary=LENGTHS,
    embedding=LENGTHS,
    classes=LENGTHS,
    mesh=st.sampled_from([(8, 1), (4, 2), (2, 4)]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_values_and_gradients_are_those_of_the_replicated_model(
    vocabulary, embedding, classes, mesh, dtype
):
    mesh = pzs.make_mesh({"data": mesh[0], "model": mesh[1]})
    sizes = {
        "table": {"vocabulary": vocabulary, "embedding": embedding},
        "scale": {"embedding": embedding},
        "head": {"embedding": embedding, "classes": classes},
    }
    draw = np.random.default_rng(0)
    weights = {
        name: pz.nx.wrap(jnp.asarray(draw.normal(size=tuple(shape.values())), dtype), *shape)
        for name, shape in sizes.items()
    }
    tokens = pz.nx.wrap(jnp.arange(16) % vocabulary, "batch")
    rules = {"vocabulary": "model", "classes": "model", "embedding": "data"}
    padded = pzs.place(weights, mesh, rules, on_indivisible="pad")
    whole = pzs.place(weights, mesh, {"vocabulary": None})
    run = jax.jit(jax.value_and_grad(loss_of))
    (value, gradients), (expected, of_whole) = run(padded, tokens), run(whole, tokens)
    tolerance = (
        {"rtol": 0.02, "atol": 0.02} if dtype == "bfloat16" else {"rtol": 2e-5, "atol": 1e-6}
    )
    np.testing.assert_allclose(value, expected, **tolerance)
    assert jax.tree.structure(gradients) == jax.tree.structure(padded)
    for name, gradient in gradients.items():
        own, other = (g.data_array.astype("float32") for g in (gradient, of_whole[name]))
        np.testing.assert_allclose(own, other, **tolerance)
        (stored,) = jax.tree.leaves(gradient)
        outside = np.array(stored, np.float32)
        outside[tuple(map(slice, weights[name].named_shape.values()))] = 0
        assert not outside.any()


def test_shared_parameters_stay_shared(mesh):
    model = build()
    both = pzs.place(pz.nn.Sequential([model, model]), mesh, RULES, on_indivisible="pad")
    assert len(pz.unbind_params(both)[1]) == len(values_of(model))
