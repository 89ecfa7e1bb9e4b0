"""Computing in another precision than parameters are kept in."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

import penzai_shard as pzs
from penzai_shard.layers.in_precision import is_sensitive
from tests.layers.calls import Calls

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
X = pz.nx.wrap(jax.random.normal(jax.random.key(0), (4, 8)), "batch", "embedding")
NORM = pz.nn.RMSLayerNorm.from_config("norm", jax.random.key(0), {"embedding": 8})
LINEAR = pz.nn.Linear.from_config("up", jax.random.key(1), {"embedding": 8}, {"neurons": 8})


def spy(seen):
    """Notes the dtypes of its inputs."""
    note = lambda x, **sides: seen.extend(y.dtype for y in (x, *sides.values()))  # noqa: E731
    return Calls(lambda _, x, **sides: note(x, **sides) or x)


def remember(variable, x):
    variable.value = variable.value + x
    return variable.value


def mask(value):
    return Calls(lambda value, x: pz.nx.nmap(jnp.where)(x < 0, value, x), jnp.float32(value))


def in_bf16(*layers, **options):
    return pzs.InPrecision(pz.nn.Sequential([*layers]), "bfloat16", **options)


def gradients(layer):
    slots, parameters = pz.unbind_params(layer, freeze=True)

    def loss(parameters, x):
        return jnp.sin(pz.bind_variables(slots, parameters)(x).data_array).sum()

    by_parameter, by_input = jax.jit(jax.grad(loss, (0, 1)))(parameters, X)
    return by_parameter[0].value.data_array, by_input


def rounded(array):
    return array.astype(BF16).astype(F32)


def test_layers_compute_in_the_compute_dtype_and_all_else_keeps_its_own():
    seen = []
    parameter, array = LINEAR.weights, LINEAR.weights.value
    output = in_bf16(LINEAR, spy(seen))(X)
    assert (seen, output.dtype) == ([BF16], F32)
    assert LINEAR.weights is parameter
    assert LINEAR.weights.value is array
    # An oracle: cast by hand.
    x, weights = (value.data_array.astype(BF16) for value in (X, array))
    names = "".join(name[0] for name in array.named_axes)
    by_hand = jnp.einsum(f"be,{names}->bn", x, weights).astype(F32)
    np.testing.assert_array_equal(output.order_as("batch", "neurons").data_array, by_hand)
    by_parameter, by_input = gradients(in_bf16(LINEAR))
    assert (by_parameter.dtype, by_input.dtype) == (F32, F32)
    np.testing.assert_allclose(by_parameter, gradients(LINEAR)[0], 3e-2, 3e-2)


def test_what_does_not_float_stays_and_what_is_finite_stays_finite():
    seen, others = [], {"a": jnp.array(True), "b": jnp.arange(3), "c": jax.random.key(0)}
    in_bf16(spy(seen))(X, **others)
    assert seen == [BF16, *(value.dtype for value in others.values())]
    for value, is_finite in ((-2.4e38, True), (-np.inf, False)):
        output = pzs.InPrecision(mask(value), "float16")(X).data_array
        assert bool(jnp.isfinite(output).all()) == is_finite


@pytest.mark.parametrize("layer", [NORM, pz.nn.Softmax("embedding")])
def test_norms_and_softmax_are_computed_in_float32(layer):
    seen = []
    found = in_bf16(spy(seen), layer, spy(seen))(X)
    expected = rounded(layer(pz.nx.nmap(rounded)(X)).order_like(X).data_array)
    np.testing.assert_array_equal(found.order_like(X).data_array, expected)
    assert seen == [BF16, BF16]
    if layer is NORM:
        gradient = gradients(in_bf16(layer))[0]
        assert not jnp.array_equal(gradient, rounded(gradient))


def test_what_is_kept_is_a_type_several_or_a_function():
    def inside(keep):
        seen = []
        in_bf16(pz.nn.NamedGroup("spied", [spy(seen)]), keep=keep)(X)
        return seen[0]

    assert inside(pz.nn.NamedGroup) == inside((pz.nn.Linear, pz.nn.NamedGroup)) == F32
    assert inside(lambda layer: getattr(layer, "name", "") == "spied") == F32
    assert inside(()) == inside(is_sensitive) == BF16
    assert is_sensitive(pz_v1.nn.LayerNorm.from_config(across_axes={"embedding": 8}))


@pytest.mark.parametrize("freeze", [lambda model: model, pz.freeze_params])
def test_a_tied_table_is_kept_in_one_layer_and_cast_in_the_other(freeze):
    seen = []
    table = pz.nn.EmbeddingTable.from_config("table", jax.random.key(0), 5, {"embedding": 8})
    look_up = pz.nn.Sequential([pz.nn.EmbeddingLookup(table), spy(seen)])
    model = freeze(pz.nn.Sequential([look_up, pz.nn.EmbeddingDecode(table)]))
    tokens = pz.nx.wrap(jnp.arange(3), "seq")
    assert in_bf16(model, keep=pz.nn.EmbeddingDecode)(tokens).dtype == F32
    assert in_bf16(model, output_dtype="float16")(tokens).dtype == jnp.float16
    assert seen == [BF16, BF16]
    # A constant does not decide on the dtype of the output.
    short = jax.tree.map(lambda array: array.astype(BF16), pz.freeze_params(table))
    assert in_bf16(pz.nn.EmbeddingLookup(short), mask(0))(tokens).dtype == BF16


@pytest.mark.parametrize("wrap", [lambda layer: layer, pzs.Jitted])
def test_state_is_read_in_the_compute_dtype_and_kept_in_its_own(wrap):
    total, unused = (pz.StateVariable(jnp.float32(1 / 3), label=label) for label in "ab")
    wrap(in_bf16(Calls(lambda total, x, unused: remember(total, x), total)))(1.0, unused=unused)
    assert 0 < abs(float(total.value) - 4 / 3) < 0.01
    assert total.value.dtype == F32
    assert float(unused.value) == float(jnp.float32(1 / 3))


@pytest.mark.parametrize("own", [lambda x: pzs.InPrecision(x, "float32"), lambda x: x])
def test_layers_with_their_own_precision_do_not_round_their_state(own):
    total = pz.StateVariable(jnp.float32(256), label="total")
    in_bf16(own(Calls(remember, total)), keep=Calls)(jnp.float32(1))
    assert float(total.value) == 257  # In bfloat16 it stays 256.


def test_functions_and_modules_of_other_libraries():
    x = X.data_array[0]
    model = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    arrays, rest = eqx.partition(pzs.InPrecision(model, "bfloat16"), eqx.is_array)
    call = lambda arrays: eqx.combine(arrays, rest)(x).sum()  # noqa: E731
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.jit(jax.grad(call))(arrays))} == {F32}
    assert 0 < abs(float(call(arrays) - model(x).sum())) < 0.02
    assert in_bf16(lambda x: x.dtype == BF16)(x)
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    with pytest.warns(FutureWarning):  # Flax writes a float32 mean into what it has.
        pzs.InPrecision(norm, "bfloat16")(X.data_array)
    assert norm.mean[...].dtype == F32
    assert bool((norm.mean[...] != 0).all())
