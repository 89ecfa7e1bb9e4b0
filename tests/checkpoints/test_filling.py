"""What an array is read from: stored ones that are split, picked from, added to; once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import penzai_shard as pzs
from penzai_shard.checkpoints import filling
from penzai_shard.checkpoints.filling import ChecksumStore, Source, fill_arrays
from penzai_shard.checkpoints.value_checksums import compute_checksums

STORED = {
    name: np.arange(72, dtype="float32").reshape(12, 6) / 7 + i for i, name in enumerate("ab")
}


class Memory:
    """A store of arrays in memory, and how often each chunk was unpacked."""

    def __init__(self, arrays=STORED, chunk=(1, 1)):
        self._arrays, self._chunk, (array, *_) = arrays, chunk, arrays.values()
        self.counts = np.zeros([-(-n // c) for n, c in zip(array.shape, chunk, strict=True)], int)

    def chunk(self, name):
        return self._chunk

    def read(self, name, index, shape=None):
        pairs = zip(index, self._chunk, strict=False)
        if shape in (None, self._arrays[name].shape):
            self.counts[tuple(slice(i.start // c, -(-i.stop // c)) for i, c in pairs)] += 1
        return self._arrays[name].reshape(shape or self._arrays[name].shape)[index]


A, B = STORED.values()
# A source, its dtype, and the array that it makes.
SOURCES = {
    "split": (Source(("a",), (3, 4, 6), (2, 0, 1)), A.reshape(3, 4, 6).transpose(2, 0, 1)),
    "joined": (Source(("a",), (72,), (0,)), A.reshape(72)),
    "pick": (
        Source(("a",), (2, 3, 2, 6), (1, 3, 0), pick=(2, 1)),
        A.reshape(2, 3, 2, 6)[:, :, 1].transpose(1, 2, 0),
    ),
    "plus": (Source(("a",), (12, 6), (1, 0), plus=1.0), (A.T + np.float32(1))),
    "stack": (
        Source(("a", "b"), (3, 4, 6), (2, 0, 1), stack=1, plus=1.0),
        np.stack([x.reshape(3, 4, 6).transpose(2, 0, 1) for x in (A, B)], 1) + np.float32(1),
    ),
}


@pytest.mark.parametrize("case", SOURCES)
@settings(max_examples=25)
@given(data=st.data())
def test_source_read_of_any_part(case, data):
    source, whole = SOURCES[case]
    starts = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
    bounds = [
        (a, data.draw(st.integers(a + 1, n))) for a, n in zip(starts, whole.shape, strict=True)
    ]
    index = tuple(slice(*ends) for ends in bounds)
    np.testing.assert_array_equal(source.read(Memory().read, index), whole[index], strict=True)


def test_source_read_casts_before_it_adds():
    source, whole = Source(("a",), (12, 6), (0, 1), plus=1.0), (slice(0, 12), slice(0, 6))
    bits = np.asarray(A, jnp.bfloat16) + np.asarray(1, jnp.bfloat16)
    found = source.read(Memory().read, whole, jnp.bfloat16)
    np.testing.assert_array_equal(found, bits, strict=True)
    assert (found != np.asarray(A + 1, jnp.bfloat16)).any()


def test_checksum_store_is_the_same_in_another_shape():
    store = ChecksumStore(Memory(), {"a": A.shape}, lambda size: None)
    source = Source(("a",), (3, 4, 6), (2, 0, 1))
    for start in range(3):
        source.read(store.add, (slice(0, 6), slice(start, start + 1), slice(0, 4)))
    assert store.compute_checksums() == compute_checksums({"a": A})


# Filling

MESH = pzs.make_mesh({"data": 4, "model": 2})
LAYOUTS = [(), ("data",), (None, "data"), (("data", "model"),), ("model", "data")]
LAYOUTS += [(None, None, "data")]
PIECE = 2**14


# In what is stored whole, as safetensors files are, each number is a chunk.
@pytest.mark.parametrize("chunk", [(1, 1, 1), (64, 2, 8), (8, 8, 8), (16, 4, 16), (64, 8, 32)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_fill_arrays_unpacks_each_chunk_once_in_a_process(monkeypatch, chunk, order):
    monkeypatch.setattr(filling, "PIECE_BYTES", PIECE)
    stored = np.arange(PIECE, dtype="float32").reshape(64, 8, 32)
    memory, whole = Memory({"w": stored}, chunk), stored.transpose(order)
    store = ChecksumStore(memory, {}, lambda size: None)
    for number, layout in enumerate(LAYOUTS, 1):
        sharding = NamedSharding(MESH, jax.P(*layout))
        struct = jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)
        pair = Source(("w",), stored.shape, order), struct
        np.testing.assert_array_equal(fill_arrays({"w": pair}, store)["w"], whole)
        assert (memory.counts == number).all(), layout


def test_restore_params_reads_its_files_once(tmp_path):
    rows, columns = (NamedSharding(MESH, jax.P(*layout)) for layout in LAYOUTS[1:3])
    numbers = np.random.default_rng(0).normal(size=(1024, 1024)).astype("float32")
    path = pzs.save_params(tmp_path / "a", {"w": jax.device_put(numbers, columns)})
    size = sum(file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file())
    for layout in (rows, columns):
        start = read_metric()
        struct = jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=layout)
        pzs.restore_params(path, {"w": struct})
        assert read_metric() - start < 1.1 * size


def read_metric():
    """The bytes that TensorStore has read from files."""
    (found,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return found["values"][0]["value"]
