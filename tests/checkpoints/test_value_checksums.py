"""The checksum of an array's numbers: one for every layout and cut, another for other numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import penzai_shard as pzs
from penzai_shard.checkpoints.value_checksums import (
    compute_checksums,
    sum_piece,
    write_checksum,
)

NUMBERS = np.random.default_rng(0).normal(size=(40, 16, 40)) * 3
MESH = pzs.make_mesh({"data": 4, "model": 2})
SPECS = [(), ("data",), ("model", "data"), (None, ("data", "model"))]


def checksum(array):
    return compute_checksums({"x": array})["x"]


@pytest.mark.parametrize("shape", [(40, 16, 40), (8, 16, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "complex64"])
def test_compute_checksums_does_not_depend_on_the_layout(dtype, shape):
    # The larger shape is added up on devices, the smaller one by NumPy.
    array = jnp.asarray(NUMBERS[tuple(map(slice, shape))]).astype(dtype)
    explicit = pzs.make_mesh(dict(MESH.shape), explicit=True)
    found = {checksum(np.asarray(array))}
    for spec in SPECS:
        placed = jax.device_put(array, NamedSharding(MESH, jax.P(*spec)))
        # Whatever mesh is set, be it one of other devices.
        for mesh in (explicit, pzs.make_mesh({"x": 2}, jax.devices()[:2])):
            with jax.set_mesh(mesh):
                found.add(checksum(placed))
    assert len(found) == 1


def test_compute_checksums_reads_64_bits_where_jax_has_32():
    with jax.enable_x64(True):
        large = jnp.asarray(NUMBERS)
    assert checksum(large) == checksum(np.asarray(large))
    assert checksum(large) != checksum(NUMBERS + 1e-12)


def test_compute_checksums_refuses_copies_that_differ():
    copies = [jax.device_put(np.full(20_000, i == 3), d) for i, d in enumerate(jax.devices())]
    sharding = NamedSharding(pzs.make_mesh({"x": 8}), jax.P())
    torn = jax.make_array_from_single_device_arrays((20_000,), sharding, copies)
    with pytest.raises(pzs.ShardingError) as caught:
        compute_checksums({"whole": np.ones(3), "torn": torn})
    assert [problem.path for problem in caught.value.problems] == ["torn"]


@given(cuts=st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=3, max_size=3))
def test_sum_piece_adds_up_to_the_whole_however_it_is_cut(cuts):
    array = NUMBERS[:12, :12, :12]
    ends = [sorted({0, *cut, size}) for cut, size in zip(cuts, array.shape, strict=True)]
    total = np.zeros(2, np.uint64)
    for box in itertools.product(*(itertools.pairwise(places) for places in ends)):
        piece = array[tuple(slice(*place) for place in box)]
        total += np.array(sum_piece(piece, [a for a, _ in box], array.shape), np.uint64)
    assert write_checksum([int(lane) for lane in total]) == checksum(array)


@settings(max_examples=200)
@given(
    words=st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), min_size=2, max_size=64),
    data=st.data(),
)
def test_sum_piece_tells_exchanges_and_flips(words, data):
    array = np.array(words, np.uint32)
    places = st.integers(0, len(words) - 1)
    first, second = data.draw(places), data.draw(places)
    exchanged, flipped = array.copy(), array.copy()
    exchanged[[first, second]] = array[[second, first]]
    flipped[first] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    others = [flipped, exchanged, np.roll(array, 1), array[::-1].copy()]
    for other in others:
        is_equal = bool((other == array).all())
        assert (checksum(other) == checksum(array)) == is_equal
