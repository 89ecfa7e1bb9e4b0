"""Computing in another precision than the parameters are kept in."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz
from penzai.deprecated.v1 import pz as v1

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import Checkpointed, InPrecision, Jitted, RolledLayerStack
from penzai_shard.layers.in_precision import is_sensitive

BF16, F16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")


@pz.pytree_dataclass
class Spy(pz.nn.Layer):
    """Notes what dtypes flow through it, those of side inputs by the order of their names."""

    seen: Any = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, x, /, **side_inputs):
        self.seen.append(x.dtype)
        self.seen.extend(side_inputs[name].dtype for name in sorted(side_inputs))
        return x


@pz.pytree_dataclass
class Remembers(pz.nn.Layer):
    """Adds its input to a state variable, and counts."""

    total: pz.StateVariable
    count: pz.StateVariable

    def __call__(self, x, /, **side_inputs):
        self.total.value = self.total.value + x
        self.count.value = self.count.value + 1
        return self.total.value


@pz.pytree_dataclass
class Masked(pz.nn.Layer):
    """Puts a constant where its input is negative."""

    value: jax.Array

    def __call__(self, x, /, **side_inputs):
        return pz.nx.nmap(jnp.where)(x < 0, self.value, x)


def linear(name="up", inputs="embedding", outputs="neurons"):
    return pz.nn.Linear.from_config(
        name, jax.random.key(len(name)), {inputs: 8}, {outputs: 8}, dtype=jnp.float32
    )


def remembers(dtype=jnp.float32):
    return Remembers(
        pz.StateVariable(pz.nx.zeros({"embedding": 8}, dtype), label="total"),
        pz.StateVariable(0, label="count"),
    )


X = pz.nx.wrap(jax.random.normal(jax.random.key(0), (4, 8))).tag("batch", "embedding")


def gradients(layer, x=X):
    slots, parameters = pz.unbind_params(layer, freeze=True)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree_util.tree_leaves(output))

    by_parameter, by_input = jax.grad(loss, argnums=(0, 1))(parameters, x)
    return {p.label: p.value for p in by_parameter}, by_input


def test_layers_compute_in_the_compute_dtype_and_outputs_come_back():
    seen = []
    layer = InPrecision(pz.nn.Sequential([linear(), Spy(seen)]), "bfloat16")
    output = layer(X)
    assert seen == [BF16]
    assert output.dtype == F32
    expected = layer.body.sublayers[0](X).data_array
    assert jnp.allclose(output.data_array, expected, rtol=2e-2, atol=2e-2)
    assert not jnp.array_equal(output.data_array, expected)


def test_masters_stay_the_same_objects_in_their_own_dtype():
    layer = InPrecision(linear(), "bfloat16")
    parameter, array = layer.body.weights, layer.body.weights.value
    layer(X)
    assert layer.body.weights is parameter
    assert parameter.value is array
    assert parameter.value.dtype == F32


def test_gradients_arrive_in_the_dtypes_of_parameters_and_inputs():
    by_parameter, by_input = gradients(InPrecision(linear(), "bfloat16"))
    assert by_parameter["up.weights"].dtype == F32
    assert by_input.dtype == F32
    expected, _ = gradients(linear())
    assert jnp.allclose(
        by_parameter["up.weights"].data_array,
        expected["up.weights"].data_array,
        rtol=3e-2,
        atol=3e-2,
    )


def test_the_same_precision_changes_nothing():
    body = pz.nn.Sequential([linear(), pz.nn.Softmax("neurons")])
    assert jnp.array_equal(body(X).data_array, InPrecision(body, "float32")(X).data_array)


def test_side_inputs_are_cast_and_what_is_not_floating_is_not():
    seen = []
    flag, count, key = jnp.array(True), jnp.arange(3), jax.random.key(0)
    InPrecision(Spy(seen), "bfloat16")(X, scale=jnp.ones(2), flag=flag, count=count, key=key)
    assert seen == [BF16, count.dtype, flag.dtype, key.dtype, BF16]


def test_the_output_dtype_can_be_chosen():
    assert InPrecision(linear(), "bfloat16", output_dtype="float16")(X).dtype == F16


def test_constants_do_not_decide_the_dtype_of_the_output():
    table = pz.nx.wrap(jnp.ones((3, 4), BF16), "vocabulary", "embedding")
    lookup = pz.nn.EmbeddingLookup(
        pz.nn.EmbeddingTable(pz.Parameter(value=table, label="table"), vocabulary_axis="vocabulary")
    )
    model = pz.nn.Sequential([lookup, Masked(jnp.float32(0))])
    assert InPrecision(model, "bfloat16")(pz.nx.wrap(jnp.arange(3), "seq")).dtype == BF16


def test_without_a_floating_input_the_output_has_the_dtype_of_the_parameters():
    table = pz.nn.EmbeddingTable.from_config("table", jax.random.key(0), 5, {"embedding": 8})
    layer = InPrecision(pz.nn.EmbeddingLookup(table), "bfloat16")
    assert layer(pz.nx.wrap(jnp.arange(3)).tag("seq")).dtype == F32


@pytest.mark.parametrize(
    "kept",
    [
        pz.nn.Softmax("embedding"),
        pz.nn.Standardize("embedding"),
        pz.nn.RMSStandardize("embedding"),
        pz.nn.LayerNorm.from_config("norm", jax.random.key(0), {"embedding": 8}),
        pz.nn.RMSLayerNorm.from_config("norm", jax.random.key(0), {"embedding": 8}),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_norms_and_softmax_are_computed_in_float32(kept):
    before, after = [], []
    body = pz.nn.Sequential([Spy(before), kept, Spy(after)])
    output = InPrecision(body, "bfloat16")(X)
    assert before == after == [BF16]
    rounded = pz.nx.nmap(lambda x: x.astype(BF16).astype(F32))(X)
    exact = pz.nx.nmap(lambda x: x.astype(BF16).astype(F32))(kept(rounded))
    assert jnp.array_equal(output.data_array, exact.order_like(output).data_array)


def test_gradients_of_a_kept_layer_s_parameters_are_not_rounded():
    norm = pz.nn.RMSLayerNorm.from_config("norm", jax.random.key(0), {"embedding": 8})
    gradient = gradients(InPrecision(norm, "bfloat16"))[0]["norm/scale.weights"].data_array
    assert not jnp.array_equal(gradient, gradient.astype(BF16).astype(F32))


def test_what_is_kept_can_be_types_or_a_function_or_nothing():
    def inside(keep):
        seen = []
        group = pz.nn.NamedGroup("spied", [Spy(seen)])
        InPrecision(pz.nn.Sequential([group]), "bfloat16", keep=keep)(X)
        return seen[0]

    assert inside(pz.nn.NamedGroup) == F32
    assert inside((pz.nn.Linear, pz.nn.NamedGroup)) == F32
    assert inside(lambda layer: getattr(layer, "name", "") == "spied") == F32
    assert inside(()) == inside(is_sensitive) == BF16


def test_a_finite_constant_stays_finite():
    masked = Masked(jnp.float32(-2.3819763e38))
    output = InPrecision(masked, "float16", output_dtype="float16")(X)
    assert bool(jnp.isfinite(output.data_array).all())
    assert InPrecision(Masked(jnp.float32(-jnp.inf)), "float16")(X).data_array.min() == -jnp.inf


@pytest.mark.parametrize("wrap", [lambda x: x, Jitted], ids=["eager", "jitted"])
def test_state_variables_are_updated_and_keep_their_dtypes(wrap):
    body = remembers()
    layer = wrap(InPrecision(body, "bfloat16"))
    x = pz.nx.ones({"embedding": 8})
    for _ in range(2):
        layer(x)
    assert body.total.value.dtype == F32
    assert float(body.total.value.data_array[0]) == 2.0
    assert int(body.count.value) == 2


def test_a_layer_that_returns_a_variable_is_refused():
    @pz.pytree_dataclass
    class Returns(pz.nn.Layer):
        state: pz.StateVariable

        def __call__(self, x, /, **side_inputs):
            return self.state

    layer = InPrecision(Returns(pz.StateVariable(value=jnp.ones(2), label="s")), BF16)
    with pytest.raises(ValueError, match="inside InPrecision returned mutable variables"):
        layer(jnp.ones(2))


def test_state_variables_that_are_only_read_are_not_rounded():
    exact = pz.StateVariable(jnp.float32(1 / 3), label="exact")

    @pz.pytree_dataclass
    class Reads(pz.nn.Layer):
        variable: Any

        def __call__(self, x, /, **side_inputs):
            return x * side_inputs["scale"].value * self.variable.value

    InPrecision(Reads(exact), "bfloat16")(jnp.ones(2), scale=exact)
    assert float(exact.value) == float(jnp.float32(1 / 3))


def test_random_streams_in_side_inputs_advance():
    stream = pz.RandomStream.from_base_key(jax.random.key(0), "offset")
    dropout = pz.nn.StochasticDropout(drop_rate=0.5)
    InPrecision(dropout, "bfloat16")(X, random_stream=stream)
    assert int(stream.offset.value) == 1


def test_an_inner_layer_keeps_its_own_precision_and_its_masters():
    seen = []
    inner_linear = linear("inner", "neurons", "outputs")
    inner = InPrecision(pz.nn.Sequential([Spy(seen), inner_linear, Spy(seen)]), "float32")
    outer = InPrecision(pz.nn.Sequential([linear(), inner, Spy(seen)]), "bfloat16")
    outer(X)
    assert seen == [F32, F32, BF16]
    by_parameter, _ = gradients(outer)
    inner_gradient = by_parameter["inner.weights"].data_array
    assert not jnp.array_equal(inner_gradient, inner_gradient.astype(BF16).astype(F32))


def test_tied_parameters_get_the_sum_of_their_gradients():
    tied = linear("tied", "embedding", "embedding_out")
    back = pz.nn.RenameAxes("embedding_out", "embedding")
    body = pz.nn.Sequential([tied, back, tied, back])
    found, _ = gradients(InPrecision(body, "float32"))
    expected, _ = gradients(body)
    assert jnp.array_equal(found["tied.weights"].data_array, expected["tied.weights"].data_array)


def stack_of_two():
    return pz.nn.LayerStack.from_sublayer_builder(
        lambda init_base_rng: pz.nn.Sequential(
            [
                pz.nn.RMSLayerNorm.from_config("norm", init_base_rng, {"embedding": 8}),
                pz.nn.Linear.from_config("mix", init_base_rng, {"embedding": 8}, {"embedding": 8}),
            ]
        ),
        "layers",
        2,
        jax.random.key(0),
        {},
    )


@pytest.fixture(scope="module")
def expected_of_stack():
    stack = stack_of_two()
    return stack, gradients(InPrecision(stack, "bfloat16"))[0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda stack: Jitted(InPrecision(stack, "bfloat16")),
        lambda stack: InPrecision(Jitted(stack), "bfloat16"),
        lambda stack: InPrecision(Checkpointed(stack), "bfloat16"),
        lambda stack: Checkpointed(InPrecision(stack, "bfloat16")),
        lambda stack: InPrecision(RolledLayerStack.from_layer_stack(stack), "bfloat16"),
    ],
    ids=["inside jitted", "around jitted", "around remat", "inside remat", "around rolled"],
)
def test_it_goes_inside_and_around_other_wrapper_layers(edit, expected_of_stack):
    stack, expected = expected_of_stack
    found, _ = gradients(edit(stack))
    for name, value in expected.items():
        assert found[name].dtype == F32
        same = value.order_as(*found[name].named_axes).data_array
        assert jnp.allclose(found[name].data_array, same, rtol=3e-2, atol=3e-2)


def test_explicit_meshes_come_out_on_the_auto_twin():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    body = pz.nn.Sequential([pz.nn.Softmax("c"), pz.nn.ConstantRescale(by=jnp.float32(2.0))])
    with jax.set_mesh(mesh):
        output = InPrecision(body, "bfloat16")(pz.nx.wrap(x).tag("b", "c"))
    assert output.dtype == F32
    assert output.data_array.sharding.mesh.axis_types == (AxisType.Auto,)
    assert output.data_array.sharding.spec == PartitionSpec("data")


def test_the_first_api_s_models_are_cast_and_their_norms_kept():
    norm = v1.nn.LayerNorm.from_config(across_axes={"embedding": 8})
    model = v1.nn.initialize_parameters(norm, jax.random.key(0))
    assert is_sensitive(model)
    assert InPrecision(model, "bfloat16", output_dtype="bfloat16")(X).dtype == BF16


@pytest.mark.parametrize("dtype", ["int8", "no such dtype", None])
def test_dtypes_that_are_not_floating_are_refused(dtype):
    with pytest.raises(RuleTypeError, match="compute_dtype must be a floating-point dtype"):
        InPrecision(linear(), dtype)(X)


def test_an_unreadable_keep_is_refused():
    with pytest.raises(RuleTypeError, match=r"keep must be a layer type.*Use \(\)"):
        InPrecision(linear(), "bfloat16", keep="norms")(X)


def test_what_cannot_be_read_is_refused_where_it_is_written():
    for wrong in ({"compute_dtype": "bf16"}, {"output_dtype": "bf16"}):
        with pytest.raises(RuleTypeError, match="Did you mean 'bfloat16'"):
            InPrecision(linear(), **{"compute_dtype": "bfloat16", **wrong})
    with pytest.raises(RuleTypeError, match="keep must be"):
        InPrecision(linear(), "bfloat16", keep="norms")
