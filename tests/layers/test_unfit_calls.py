"""Calls that JAX refuses are refused in terms of parameters, inputs and devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.layers import Checkpointed, InPrecision, Jitted, Scoped
from penzai_shard.placement import abstract_model, place
from penzai_shard.surgery import scope_layers


def message(error, call):
    with pytest.raises(error) as raised:
        call()
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    return str(raised.value)


def test_an_input_on_other_devices_than_the_model(small):
    jitted = Jitted(small.placed(small.mlp(), small.AUTO))
    pair = Mesh(jax.devices()[:2], ("pair",))
    expected = (
        "Jitted(MLP) was called with arrays in places that do not fit:\n"
        "  argument: is on {}, and the model (for instance "
        "mlp/Affine_0/Linear.weights) on a mesh data=4, model=2. "
        "Place it there: shard_batch(x, mesh, rules)."
    )
    for value, where in (
        (small.placed(small.features(), pair), "a mesh pair=2"),
        (jax.device_put(small.features(), jax.devices()[3]), "device 3"),
    ):
        assert message(MeshError, lambda value=value: jitted(value)) == expected.format(where)
    fixed = small.placed(small.features(), small.AUTO, PartitionSpec("data"))
    assert jitted(fixed).data_array.shape == (8, 4)


def test_side_inputs_and_single_devices(small):
    @pz.pytree_dataclass
    class Masked(pz.nn.Layer):
        body: Any

        def __call__(self, value, /, *, mask, **side_inputs):
            return self.body(value) * mask["causal"]

    model = jax.device_put(pz.freeze_variables(small.mlp()), jax.devices()[1])
    value = jax.device_put(jnp.ones(()), jax.devices()[2])
    assert message(
        MeshError, lambda: Jitted(Masked(model))(small.features(), mask={"causal": value})
    ) == (
        "Jitted(Masked) was called with arrays in places that do not fit:\n"
        "  mask/causal: is on device 2, and the model (for instance "
        "mlp/Affine_0/Linear.weights) on device 1. "
        "Place it there: jax.device_put(x, jax.devices()[1])."
    )
    unused = Jitted(model)(small.features(), mask={"causal": value})
    assert unused.data_array.devices() == {jax.devices()[1]}


def test_a_model_in_two_places(small):
    model = small.placed(small.mlp(), small.AUTO)
    parameter = pz.unbind_variables(model)[1][1]
    parameter.value = jax.device_put(parameter.value, jax.devices()[0])
    text = message(MeshError, lambda: Jitted(model)(small.features()))
    assert text == (
        "Jitted(MLP) was called with arrays in places that do not fit:\n"
        f"  {parameter.label}: is on device 0, and most of the model (for instance "
        "mlp/Affine_0/Linear.weights) on a mesh data=4, model=2. "
        "Place the whole model: place(model, mesh, rules)."
    )
    placed = place(model, small.AUTO, {})
    assert Jitted(placed)(small.features()).data_array.shape == (8, 4)


def test_a_mesh_with_the_devices_in_another_order(small):
    jitted = Jitted(small.placed(small.mlp(), small.AUTO))
    backwards = Mesh(small.AUTO.devices[::-1], ("data", "model"))
    value = small.placed(small.features(), backwards, PartitionSpec("data"))
    assert message(MeshError, lambda: jitted(value)) == (
        "Jitted(MLP) was called with arrays in places that do not fit:\n"
        "  argument: is on a mesh data=4, model=2 with the devices in another order, and the model "
        "(for instance mlp/Affine_0/Linear.weights) on a mesh data=4, model=2. Place it there: "
        "shard_batch(x, mesh, rules)."
    )


def test_an_argument_placed_otherwise_than_declared(small):
    declared = NamedSharding(small.AUTO, PartitionSpec("data"))
    jitted = Jitted(small.placed(small.mlp(), small.AUTO), in_shardings=declared)
    value = small.placed(small.features(), small.AUTO, PartitionSpec("model"))
    assert message(MeshError, lambda: jitted(value)) == (
        "Jitted(MLP) was called with arrays in places that do not fit:\n"
        "  argument: is on a mesh data=4, model=2 as P('model',), and in_shardings places it as "
        "P('data',). Place it so: jax.device_put(x, layer.in_shardings)."
    )
    fixed = jax.device_put(value, jitted.in_shardings)
    assert jitted(fixed).data_array.shape == (8, 4)


def test_arrays_that_were_donated(small):
    model = small.mlp()
    jitted = Jitted(model)
    value = jax.device_put(jnp.ones((8, 8)), jax.devices()[0])
    value.delete()
    pz.unbind_variables(model)[1][0].value.data_array.delete()
    text = message(RuleTypeError, lambda: jitted(pz.nx.wrap(value, "batch", "features")))
    assert text == (
        "Jitted(MLP) was called with arrays that are no longer there. Whatever donates an array, "
        "as a train step that donates its state does, returns the one to go on with: take the "
        "model from the newest state, or call before that with a copy.\n"
        "  mlp/Affine_0/Linear.weights: was donated or deleted.\n"
        "  argument: was donated or deleted."
    )


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda layer: Jitted(layer, in_shardings="data"),
            "in_shardings takes a sharding or a tree of them, not 'data'. Write for instance "
            "NamedSharding(mesh, PartitionSpec('data')).",
        ),
        (
            lambda layer: Jitted(layer, out_shardings={"x": 3}),
            "out_shardings takes a sharding or a tree of them, not 3. Write for instance "
            "NamedSharding(mesh, PartitionSpec('data')).",
        ),
        (
            lambda layer: Scoped(layer, 3),
            "the name of a Scoped layer is text, not 3. "
            "Write for instance Scoped(layer, 'block_3').",
        ),
    ],
)
def test_options_are_refused_where_they_are_written(build, text):
    with pytest.raises(RuleTypeError) as raised:
        build(pz.nn.Identity())
    assert str(raised.value) == text


def test_uncommitted_arrays_go_anywhere(small):
    jitted = Jitted(small.placed(small.mlp(), small.AUTO))
    assert jitted(small.features()).data_array.shape == (8, 4)


WRAPPERS = {
    "Jitted": Jitted,
    "Checkpointed": Checkpointed,
    "Scoped": lambda layer: Scoped(layer, "scope"),
    "InPrecision": lambda layer: InPrecision(layer, "bfloat16"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_abstract_model(small, name):
    wrapped = WRAPPERS[name](abstract_model(small.mlp))
    text = message(RuleTypeError, lambda: wrapped(small.features()))
    assert text.splitlines()[:2] == [
        f"{name}(MLP) was called as an abstract model, whose parameters have no values. Build it "
        "with sharded_init, fill it with restore_params or with_params, or trace it: "
        "jax.eval_shape(model, x).",
        "  mlp/Affine_0/Linear.weights: has a shape and no value.",
    ]
    assert jax.eval_shape(wrapped, small.features()).named_shape == {"batch": 8, "features": 4}


@pytest.mark.parametrize("name", WRAPPERS)
def test_other_devices_and_donated_arrays_in_every_wrapper(small, name):
    wrapped = WRAPPERS[name](small.placed(small.mlp(), small.AUTO))
    elsewhere = jax.device_put(small.features(), jax.devices()[3])
    text = message(MeshError, lambda: wrapped(elsewhere))
    assert text.startswith(f"{name}(MLP) was called with arrays in places that do not fit:\n")
    assert "  argument: is on device 3, and the model (for instance mlp/Affine_0/" in text
    pz.unbind_variables(wrapped)[1][0].value.data_array.delete()
    text = message(RuleTypeError, lambda: wrapped(small.features()))
    assert text.endswith("\n  mlp/Affine_0/Linear.weights: was donated or deleted.")


def test_the_innermost_wrapper_explains(small):
    model = scope_layers().apply(abstract_model(small.mlp))
    text = message(RuleTypeError, lambda: Jitted(Checkpointed(model))(small.features()))
    assert text.startswith("Jitted(Checkpointed) was called as an abstract model")
    text = message(RuleTypeError, lambda: model(small.features()))
    assert text.splitlines()[0].startswith("Scoped(Linear) was called as an abstract model")
    assert text.splitlines()[1:] == ["  mlp/Affine_0/Linear.weights: has a shape and no value."]


def test_a_wrong_use_of_an_abstract_model_keeps_its_own_message(small):
    wrong = pz.nx.ones({"batch": 8, "other": 3})
    for wrap in WRAPPERS.values():
        with pytest.raises(Exception, match="Mismatch while checking structures"):
            jax.eval_shape(wrap(abstract_model(small.mlp)), wrong)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda layer, x: layer("text"), "argument: 'text' is not an array."),
        (lambda layer, x: layer(x, mode="train"), "mode: 'train' is not an array."),
        (lambda layer, x: layer({"a": x, "b": [len]}), "argument/b/0: <built-in function len> is"),
        (
            lambda layer, x: layer(np.asarray(["text"])),
            "argument: array(['text'], dtype='<U4') is not an array that a device can hold.",
        ),
        (
            lambda layer, x: layer(jax.eval_shape(lambda: x)),
            "argument: is a jax.ShapeDtypeStruct, which has a shape and no value.",
        ),
    ],
)
def test_inputs_that_are_not_arrays(small, call, problem):
    layer = Jitted(small.mlp())
    text = message(RuleTypeError, lambda: call(layer, small.features()))
    assert text.startswith(f"Jitted(MLP) cannot take these inputs:\n  {problem}")


def test_errors_of_the_layer_itself_are_not_touched(small):
    @pz.pytree_dataclass
    class Refuses(pz.nn.Layer):
        def __call__(self, value, /, **side_inputs):
            raise ValueError("its own reason")

    with pytest.raises(ValueError, match=r"^its own reason"):
        Jitted(Refuses())(small.placed(small.features(), small.AUTO))


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("wrapper", [lambda layer: layer, lambda layer: Scoped(layer, "scope")])
def test_compiling_what_is_compiled(small, transform, wrapper):
    layer = wrapper(Jitted(small.mlp()))
    with pytest.raises(RuleTypeError) as raised:
        transform(layer)(small.features())
    assert str(raised.value) == (
        "Jitted(MLP) cannot be hashed, as jax.jit(layer) and jax.checkpoint(layer) ask for, "
        "because it holds lists. It is compiled as it is: call layer(argument). Inside a larger "
        "compiled function, give it the model as an argument: "
        "jax.jit(lambda model, x: model(x))(pz.freeze_variables(layer), x)."
    )
    x = small.features()
    expected = layer(x)
    fixed = jax.jit(lambda model, x: model(x))(pz.freeze_variables(layer), x)
    np.testing.assert_allclose(fixed.data_array, expected.data_array, rtol=2e-5)


def test_what_can_be_hashed_is_as_before():
    layer = Jitted(pz.nn.Elementwise(jnp.sin))
    assert hash(layer) == hash(Jitted(pz.nn.Elementwise(jnp.sin)))
    assert float(jax.jit(layer)(1.0)) == pytest.approx(float(jnp.sin(1.0)))
    assert re.search("Jitted", str(jax.make_jaxpr(layer)(1.0)))


def test_a_function_that_builds_a_model_is_named_in_the_error_of_its_call():
    def build(seed):
        return pz.nn.Linear.from_config("w", jax.random.key(seed), {"a": 2}, {"b": 3})

    with pytest.raises(Exception, match=r"seed|key|integer") as caught:
        Jitted(build)(jnp.ones((2, 2)))
    assert caught.value.__notes__[-1] == (
        "Jitted runs the function build itself here. If that builds a model, call it: "
        "Jitted(build(...))."
    )
    assert Jitted(jnp.sin)(0.0) == 0  # A function of arrays is as good as a layer.
