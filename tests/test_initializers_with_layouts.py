"""Initialisers that say where their values lie, and those that return more than arrays."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import (
    ConstrainSharding,
    ConstrainShardingByName,
    abstract_model,
    make_mesh,
    make_plan,
    name_axes,
    place,
    sharded_init,
)
from penzai_shard.errors import MeshError, ShardingError, ShardingWarning
from penzai_shard.placement.initializer_splitting import flat_program

AUTO = make_mesh({"data": 4, "model": 2})
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
OTHER_SHAPE = make_mesh({"data": 2, "model": 4})
KEY = jax.random.key(7)
RULES = {"a": "data", "b": "model"}


def weights(array):
    return {"w": pz.nx.wrap(array).tag("a", "b")}


# Each takes a function that pins a value and returns an initialiser.


def flat(pin):
    return lambda key: weights(pin(jax.random.normal(key, (8, 4))))


def under_jit(pin):
    return jax.jit(flat(pin))


def in_scan(pin):
    def initializer(key):
        def body(carry, key):
            carry = pin(carry + jax.random.normal(key, (8, 4)))
            return carry, pin(carry * 2)

        last, each = jax.lax.scan(body, jnp.zeros((8, 4)), jax.random.split(key, 3))
        return weights(last) | {"each": pz.nx.wrap(each).tag("layer", "a", "b")}

    return initializer


def in_cond_and_remat(pin):
    def initializer(key):
        x = jax.checkpoint(pin)(jax.random.normal(key, (8, 4)))
        return weights(jax.lax.cond(x[0, 0] > 0, pin, lambda x: x * 2, x))

    return initializer


def before_a_sum(pin):
    # Computed on one device, since the order of summation would depend on the mesh.
    return lambda key: weights(jnp.linalg.qr(pin(jax.random.normal(key, (8, 8))))[0][:, :4])


def of_a_constant(pin):
    return lambda key: weights(pin(jnp.arange(32.0).reshape(8, 4))) | {"r": jax.random.normal(key)}


def after_a_layer(pin):
    def initializer(key):
        linear = pz.nn.Linear.from_config("linear", key, {"a": 8}, {"b": 4})
        out = linear(pz.nx.ones({"batch": 8, "a": 8}))
        return {"linear": linear, "out": pz.nx.wrap(pin(out.unwrap("batch", "b"))).tag("a", "b")}

    return initializer


INITIALIZERS = [flat, under_jit, in_scan, in_cond_and_remat, before_a_sum, of_a_constant]


def by_jax(mesh):
    return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "model")))


def by_layer(mesh):
    layer = ConstrainSharding(NamedSharding(mesh, P("data")))
    return lambda x: layer(x)


def by_name(mesh):
    layer = ConstrainShardingByName(mesh, {"a": "model"})
    return lambda x: layer(pz.nx.wrap(x).tag("a", "b")).unwrap("a", "b")


def by_device_put(mesh):
    return lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))


def by_reshard(mesh):
    return lambda x: jax.sharding.reshard(x, NamedSharding(mesh, P("data")))


def by_jit(mesh):
    return jax.jit(lambda x: x * 1, out_shardings=NamedSharding(mesh, P("data")))


def built(initializer, mesh=AUTO, context=None, **arguments):
    with jax.set_mesh(context) if context is not None else contextlib.nullcontext():
        return sharded_init(initializer, KEY, mesh=mesh, rules=RULES, **arguments)


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(pz.freeze_variables(tree))]


@functools.cache
def expected(make):
    return values(built(make(lambda x: x)))


def assert_built_as_without_constraints(tree, make):
    for one, other in zip(values(tree), expected(make), strict=True):
        np.testing.assert_array_equal(one, other)
    array = tree["w"].data_array
    assert array.sharding == NamedSharding(AUTO, P("data", "model"))
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 2)}


@pytest.mark.parametrize("make", INITIALIZERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("pin", "mesh", "context"),
    [
        (by_jax, AUTO, None),
        (by_jax, AUTO, AUTO),
        (by_layer, EXPLICIT, None),
        (by_name, EXPLICIT, EXPLICIT),
    ],
    ids=["jax", "jax in set_mesh", "layer", "layer by name in set_mesh"],
)
def test_constraints_change_neither_values_nor_layouts(make, pin, mesh, context):
    assert_built_as_without_constraints(built(make(pin(mesh)), mesh, context), make)


@pytest.mark.parametrize(
    ("make", "pin", "mesh"),
    [
        (before_a_sum, by_device_put, AUTO),
        (before_a_sum, by_jit, AUTO),
        (flat, by_reshard, EXPLICIT),
    ],
    ids=["device_put", "jit", "reshard"],
)
def test_placements_inside_are_no_obstacle(make, pin, mesh):
    assert_built_as_without_constraints(built(make(pin(mesh)), mesh), make)


@pytest.mark.parametrize("context", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_sums_are_computed_within_a_context_mesh_too(context):
    tree = built(before_a_sum(lambda x: x), context, context)
    assert_built_as_without_constraints(tree, before_a_sum)


def test_a_bare_spec_means_the_context_mesh():
    def pin(x):
        return jax.lax.with_sharding_constraint(x, P("data"))

    assert_built_as_without_constraints(built(flat(pin), AUTO, AUTO), flat)


def test_layers_of_a_model_may_be_called_with_constraints():
    make = after_a_layer(by_name(AUTO))
    for one, other in zip(
        values(built(make)), values(built(after_a_layer(lambda x: x))), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_values_are_the_same_to_the_bit_on_every_mesh():
    tree = sharded_init(in_scan(by_jax(OTHER_SHAPE)), KEY, mesh=OTHER_SHAPE, rules=RULES)
    for one, other in zip(values(tree), expected(in_scan), strict=True):
        np.testing.assert_array_equal(one, other)


def test_equal_initializations_share_one_program_with_constraints_too():
    def initializer(pin):
        keys = jax.random.split(KEY, 4)
        return [weights(pin(jax.random.normal(k, (8, 4)))) for k in keys]

    programs = [
        str(flat_program(jax.make_jaxpr(functools.partial(initializer, pin))()))
        for pin in (by_jax(AUTO), lambda x: x)
    ]
    assert programs[0] == programs[1]


def test_abstract_models_take_constraints():
    model = abstract_model(after_a_layer(by_name(AUTO)), KEY)
    assert model["linear"].weights.value.data_array.shape == (8, 4)
    assert model["out"].data_array.shape == (8, 4)


def test_a_constraint_to_other_devices_is_refused():
    half = make_mesh({"data": 4}, jax.devices()[:4])
    match = r"\(8, 4\) is constrained to .*'data'.* on devices \[0, 1, 2, 3\], and the model is bu"
    with pytest.raises(MeshError, match=match):
        built(flat(by_layer(half)))


def test_building_inside_a_traced_function_is_refused():
    for build in (
        lambda: sharded_init(flat(lambda x: x), KEY, mesh=AUTO, rules=RULES),
        lambda: abstract_model(flat(lambda x: x), KEY),
    ):
        with pytest.raises(ShardingError, match=r"built outside of jax.jit.* call the initialiser"):
            jax.jit(build)()


# Leaves that are not arrays


def mlp(key):
    # All weights have one shape, and so have all biases: two programs to compile.
    return eqx.nn.MLP(4, 4, 4, 2, key=key)


@functools.cache
def bare_mlp():
    return mlp(KEY)


def with_names(module):
    return name_axes(module, {"layers.*.weight": ("out", "in"), "layers.*.bias": ("out",)})


def named_mlp(key):
    return with_names(mlp(key))


def test_functions_in_an_equinox_module_come_back_as_they_are():
    model = sharded_init(named_mlp, KEY, mesh=AUTO, rules={"out": "model"})
    bare = bare_mlp()
    assert model.activation is bare.activation
    assert jax.tree.structure(model) == jax.tree.structure(with_names(bare))
    for layer, same in zip(model.layers, bare.layers, strict=True):
        array = layer.weight.data_array
        assert {s.data.shape for s in array.addressable_shards} == {
            (same.weight.shape[0] // 2, same.weight.shape[1])
        }
        np.testing.assert_allclose(array, same.weight, rtol=1e-6)


def test_an_equinox_module_without_names_is_copied_with_a_word():
    match = r"6 arrays are in Equinox modules, which give no names.*whole copy.*name_axes"
    x = jnp.ones(4)
    for build in (
        lambda **more: sharded_init(mlp, KEY, mesh=AUTO, rules={}, **more),
        lambda **more: place(bare_mlp(), AUTO, {}, **more),
    ):
        with pytest.warns(ShardingWarning, match=match):
            model = build()
        np.testing.assert_allclose(model(x), bare_mlp()(x), rtol=1e-5)
        assert model.layers[0].weight.sharding == NamedSharding(AUTO, P())
        build(on_unnamed="replicate")
    with pytest.warns(ShardingWarning, match=match):
        make_plan(bare_mlp(), AUTO, {})


def test_text_and_objects_come_back_as_they_are():
    marker = object()

    def initializer(key):
        words = np.array(["two", "words"])
        return weights(jax.random.normal(key, (8, 4))) | {
            "text": "gelu",
            "function": jax.nn.gelu,
            "object": marker,
            "words": words,
        }

    tree = built(initializer)
    assert tree["text"] == "gelu"
    assert tree["function"] is jax.nn.gelu
    assert tree["object"] is marker
    assert tree["words"].tolist() == ["two", "words"]
    np.testing.assert_array_equal(tree["w"].data_array, expected(flat)[0])


def test_a_plan_of_the_abstract_module_is_carried_out():
    plan = make_plan(abstract_model(named_mlp, KEY), AUTO, {"out": "model"})
    assert plan.others == ("activation", "final_activation")
    assert "2 leaves are not arrays and stay as they are: activation" in str(plan.table())
    for model in (sharded_init(named_mlp, KEY, plan=plan), place(with_names(bare_mlp()), plan)):
        assert [layer.weight.data_array.sharding.spec for layer in model.layers] == [P("model")] * 3
        assert callable(model.activation)
