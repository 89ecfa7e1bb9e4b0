"""Tensors of torch are arrays, to the last bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import penzai_shard as pzs
from penzai_shard.arrays.structure import flatten, leaves_of

torch = pytest.importorskip("torch")


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))


def test_state_dict_becomes_arrays_of_the_same_memory():
    state = layers().state_dict()
    found = {leaf.path: leaf.value for leaf in leaves_of(dict(state))}
    assert found.keys() == state.keys()
    for path, tensor in state.items():
        np.testing.assert_array_equal(found[path], tensor.numpy())
    assert np.shares_memory(found["0.weight"], state["0.weight"].numpy())
    # A count of 64 bits becomes what JAX keeps.
    assert found["1.num_batches_tracked"].dtype == np.int32


def test_parameters_views_and_conjugates_are_read():
    matrix = torch.arange(6.0).reshape(2, 3)
    conjugate = torch.complex(matrix, matrix).conj()
    for tensor in (torch.nn.Parameter(matrix), matrix.T, conjugate):
        (leaf,) = leaves_of(tensor)
        np.testing.assert_array_equal(leaf.value, tensor.detach().resolve_conj().numpy())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_narrow_floats_are_exact(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    width = np.uint16 if dtype.itemsize == 2 else np.uint8
    bits = np.random.default_rng(0).integers(0, np.iinfo(width).max, 64).astype(width)
    tensor = torch.from_numpy(bits.view(np.uint8).copy()).view(getattr(torch, name))
    (leaf,) = leaves_of(tensor)
    assert leaf.dtype == dtype
    np.testing.assert_array_equal(np.asarray(jnp.asarray(leaf.value)).view(width), bits)


def test_meta_tensors_become_structs():
    with torch.device("meta"):
        state = layers().state_dict()
    found = {leaf.path: leaf.value for leaf in leaves_of(dict(state))}
    assert found["0.weight"] == jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert found["1.num_batches_tracked"] == jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.tensor(2**40), torch.tensor(0.1, dtype=torch.float64)],
    ids=["sparse", "wide integer", "wide float"],
)
def test_tensors_that_jax_cannot_keep_are_problems(tensor):
    (problem,) = flatten({"a": tensor, "b": torch.ones(2)})[1].problems
    assert (problem.path, problem.kind) == ("a", "unreadable")
    assert problem.fix


def test_tensor_that_stands_for_an_array_of_jax_is_that_array():
    # As torchax's tensors do.
    class JaxTensor(torch.Tensor):
        def jax(self):
            return jnp.arange(8.0)

    tensor = torch.Tensor._make_subclass(JaxTensor, torch.zeros(8))
    named = pzs.name_axes({"w": tensor}, {"w": ("batch",)})
    placed = pzs.name_to_name_device_put(named, pzs.make_mesh({"data": 8}), {"batch": "data"})
    assert placed["w"].data_array.sharding.spec == jax.P("data")
    assert placed["w"].data_array[7] == 7
