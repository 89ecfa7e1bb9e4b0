"""Converters become views of tensors where each of their operations can be done part by part."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard.errors import ShardingError
from penzai_shard.pretrained.tensor_views import WholeTensor
from penzai_shard.pretrained.traced_converters import converted_views
from tests.pretrained.tensors_in_memory import TensorsInMemory, whole_index

ARRAYS = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b": np.arange(24, 48, dtype=np.float32).reshape(4, 6),
}


def views_of(convert):
    """The view of a converter's only parameter, and what it makes of real arrays."""
    reader = TensorsInMemory(ARRAYS)

    def model(arrays):
        value = pz.nx.wrap(convert(**arrays))
        return pz.Parameter(value=value, label="p")

    tensors = {name: WholeTensor(tensor) for name, tensor in reader.tensors.items()}
    _, views = converted_views(model, tensors)
    expected = convert(**{name: jnp.asarray(array) for name, array in ARRAYS.items()})
    return views["p"].read(reader, whole_index(views["p"].shape)), np.asarray(expected), reader


@pytest.mark.parametrize(
    "convert",
    [
        lambda a, b: a,
        lambda a, b: a.T.reshape(2, 3, 4),
        lambda a, b: a.reshape(2, 2, 6)[1],
        lambda a, b: a[-1],
        lambda a, b: a[1:3, 2:],
        lambda a, b: a[None, :, None],
        lambda a, b: jax.jit(lambda x: x[:, 5])(a),
        lambda a, b: jnp.stack([a, b], 1)[:, 1],
        lambda a, b: jnp.concatenate([a, b], 1).astype(jnp.bfloat16) + 1,
        lambda a, b: 1 + a.astype(jnp.bfloat16).astype(jnp.float32),
        lambda a, b: pz.nx.wrap(a).tag("x", "y")[{"x": 3}].unwrap("y"),
        lambda a, b: jnp.expand_dims(a, (0, 2)).squeeze(),
        lambda a, b: jnp.concatenate([a.ravel(), b.ravel()]).reshape(6, 8)[2:4],
    ],
)
def test_known_operations_give_what_jax_computes(convert):
    found, expected, reader = views_of(convert)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()
    assert reader.elements_read == found.size


@pytest.mark.parametrize(
    ("convert", "operation"),
    [
        (lambda a, b: a @ b.T, "dot_general"),
        (lambda a, b: a + b, "add"),
        (lambda a, b: a + jnp.arange(6.0), "add"),
        (lambda a, b: a * 2, "mul"),
        (lambda a, b: a - 1, "sub"),
        (lambda a, b: a[::-1], "rev"),
        (lambda a, b: a[::2], "slice"),
        (lambda a, b: a[jnp.array(2)], "dynamic_slice"),
        (lambda a, b: a[jnp.array([0, 2])], "gather"),
        (lambda a, b: a[jnp.array([1, 0]), jnp.array([1, 2])], "gather"),
        (lambda a, b: jnp.broadcast_to(a, (3, 4, 6)), "broadcast_in_dim"),
        (lambda a, b: jnp.concatenate([a, jnp.zeros((1, 6))]), "concatenate"),
        (lambda a, b: jnp.sum(a, 0), "reduce_sum"),
        (lambda a, b: jnp.sort(a), "sort"),
        (lambda a, b: jax.lax.fori_loop(0, 2, lambda i, x: x + 1, a), "scan"),
    ],
)
def test_other_operations_are_refused_by_name(convert, operation):
    message = re.escape(f"Penzai's converter computes {operation!r} of ")
    with pytest.raises(ShardingError, match=message):
        views_of(convert)


def test_tensors_that_become_no_parameters_are_refused():
    tensors = {name: WholeTensor(t) for name, t in TensorsInMemory(ARRAYS).tensors.items()}
    with pytest.raises(ShardingError, match="puts tensors beside the parameters"):
        converted_views(lambda arrays: {"scale": arrays["a"]}, tensors)
    with pytest.raises(ShardingError, match=r"p: is not made of one tensor or more"):
        converted_views(
            lambda arrays: pz.Parameter(value=pz.nx.wrap(jnp.ones(2)), label="p"), tensors
        )


def test_constants_of_layers_are_computed_and_stay_what_they_are():
    def convert(arrays):
        weights = pz.Parameter(value=pz.nx.wrap(arrays["a"]), label="p")
        return [weights, 1e-6, jnp.sqrt(5.0), jnp.asarray(2, jnp.bfloat16), pz.nn.Identity()]

    tensors = {name: WholeTensor(t) for name, t in TensorsInMemory(ARRAYS).tensors.items()}
    (parameter, number, root, two, layer), views = converted_views(convert, tensors)
    assert parameter.value.unwrap() == jax.ShapeDtypeStruct((4, 6), jnp.float32)
    assert (number, float(two), two.dtype) == (1e-6, 2.0, jnp.bfloat16)
    assert root == jnp.sqrt(5.0)
    assert layer == pz.nn.Identity()
    assert list(views) == ["p"]
