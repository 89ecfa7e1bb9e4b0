"""Checksums of arrays' numbers: the same under every layout, other for every other content.

The oracle computes them in plain integers of Python, one element at a time.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard import verify_checkpoint
from penzai_shard.checkpointing import (
    array_reading,
    read_manifest,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
    value_checksums,
)
from penzai_shard.checkpointing.array_records import checksum_of
from penzai_shard.checkpointing.locations import SEAL
from penzai_shard.checkpointing.orbax_store import PreparedSave
from penzai_shard.checkpointing.value_checksums import checksums_of, sums_of
from penzai_shard.errors import CheckpointDamagedError, ShardingWarning

DTYPES = [
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32"),
    *("uint32", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4", "float8_e4m3", "float8_e8m0fnu"),
    *("bfloat16", "float16", "float32", "complex64"),
]
DTYPES_OF_NUMPY = ["int64", "uint64", "float64", "complex128"]


def checksum(array):
    (found,) = checksums_of({"array": sums_of(array, all_copies=False)})["array"]
    return found


def oracle(array):
    """The definition, in integers of Python."""
    array = np.asarray(array)
    bits = bits_of(array.dtype)
    shape = array.shape
    inner = 0  # How many of the last dimensions have at most 2^32 elements together.
    while inner < len(shape) and math.prod(shape[len(shape) - inner - 1 :]) <= 2**32:
        inner += 1
    lanes = [0, 0]
    for index in itertools.product(*map(range, shape)):
        raw = int.from_bytes(array[index].tobytes(), "little") % 2**bits
        words = [raw >> 32 * i & 0xFFFFFFFF for i in range(max(1, bits // 32))]
        places = [0, 0]
        for dimension, at in enumerate(index):
            word = dimension >= len(shape) - inner
            places[word] = places[word] * shape[dimension] + at
        for lane, (first, mix) in enumerate(((0x9E3779B9, murmur), (0x7F4A7C15, lowbias))):
            mixed = mix((places[1] + first) % 2**32 ^ mix(places[0]))
            for word in words:
                mixed = mix(mixed ^ word)
            lanes[lane] += mixed
    return "".join(f"{lane % 2**32:08x}" for lane in lanes)


def murmur(h):
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def lowbias(h):
    h ^= h >> 16
    h = h * 0x7FEB352D % 2**32
    h ^= h >> 15
    h = h * 0x846CA68B % 2**32
    return h ^ h >> 16


def test_the_finalisers_are_those_published():
    # The values of MurmurHash3_x86_32 for one and no byte, and of hash-prospector's table.
    assert murmur(0) == 0
    assert murmur(1) == 0x514E28B7
    assert lowbias(0) == 0
    assert value_checksums._fmix32(np.array([1], np.uint32))[0] == murmur(1)
    assert value_checksums._lowbias32(np.array([1], np.uint32))[0] == lowbias(1)


def random_bits(dtype, shape, seed=0):
    """An array of any bits, NaNs and negative zeros among them."""
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == jnp.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    if bits_of(dtype) < 8:
        raw &= 2 ** bits_of(dtype) - 1
    return raw.view(dtype).reshape(shape)


def bits_of(dtype):
    """The number in the dtype's name."""
    name = dtype.name.partition("_")[0]
    return int("".join(filter(str.isdigit, name.partition("float")[2] or name)) or 8)


@pytest.mark.parametrize("dtype", [*DTYPES, *DTYPES_OF_NUMPY])
def test_it_is_what_the_oracle_says(dtype):
    for shape in ((), (1,), (3, 5), (2, 1, 3)):
        array = random_bits(dtype, shape)
        assert checksum(array) == oracle(array), shape
        if dtype in DTYPES:
            assert checksum(jnp.asarray(array)) == oracle(array), shape


def test_arrays_without_elements_have_the_sum_zero():
    for shape in ((0,), (3, 0), (0, 2)):
        assert checksum(np.zeros(shape)) == checksum(jnp.zeros(shape)) == "0" * 16


SPECS = [
    PartitionSpec(),
    PartitionSpec("data"),
    PartitionSpec(None, "data"),
    PartitionSpec("model", "data"),
    PartitionSpec(("data", "model")),
    PartitionSpec(None, ("model", "data")),
]


@pytest.fixture
def on_devices(monkeypatch):
    """Devices add up arrays of any size."""
    monkeypatch.setattr(value_checksums, "_HOST_BYTES", 0)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_layout_and_every_copy_has_the_same(spec, wide, on_devices):
    array = random_bits("bfloat16", (8, 16))
    placed = jax.device_put(array, NamedSharding(wide, spec))
    copies = checksums_of({"array": sums_of(placed)})["array"]
    assert set(copies) == {oracle(array)}
    assert len(copies) * len({str(s.index) for s in placed.addressable_shards}) == 8
    with jax.set_mesh(wide):
        assert checksum(placed) == oracle(array)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), max_size=4),
    dtype=st.sampled_from([*DTYPES, *DTYPES_OF_NUMPY]),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_any_cut_into_pieces_has_the_same_sum_and_any_change_another(shape, dtype, seed, data):
    array = random_bits(dtype, shape, seed)
    whole = checksum(array)
    assert whole == oracle(array)
    pieces = [((0,) * len(shape), array)]
    for dimension, size in enumerate(shape):
        cut = data.draw(st.integers(0, size))
        pieces = [
            (tuple(at + first * (i == dimension) for i, at in enumerate(start)), part)
            for start, piece in pieces
            for first, part in zip((0, cut), np.split(piece, [cut], dimension), strict=True)
        ]
    sums = [value_checksums.sums_of_piece(part, start, shape) for start, part in pieces]
    assert value_checksums._text(value_checksums._added(sums)) == whole
    changed = array.copy().reshape(-1)
    at = data.draw(st.integers(0, changed.size - 1))
    others = random_bits(dtype, (64,), seed + 1)
    different = [x for x in others if x.tobytes() != changed[at].tobytes()]
    changed[at] = data.draw(st.sampled_from(different))
    found = checksum(changed.reshape(shape))
    # Each sum for itself finds any change of a single element.
    assert found[:8] != whole[:8]
    assert found[8:] != whole[8:]


def test_what_changes_places_has_another_sum():
    array = np.arange(96, dtype="float32").reshape(4, 4, 6) % 7
    others = {
        "two elements": array.reshape(-1)[[1, 0, *range(2, 96)]].reshape(array.shape),
        "rows": array[[1, 0, 2, 3]],
        "columns": array[..., ::-1],
        "chunks": np.concatenate([array[2:], array[:2]]),
        "chunks across": np.concatenate([array[..., 3:], array[..., :3]], 2),
        "dimensions": array.swapaxes(0, 1),
        "another shape": array.reshape(4, 24).copy().reshape(4, 6, 4),
        "byte order": array.byteswap(),
        "a row twice": array[[0, 0, 2, 3]],
        "zeros": np.zeros_like(array),
        "negative zeros": -np.zeros_like(array),
    }
    sums = {checksum(other) for other in (array, *others.values())}
    # The same numbers in the same row-major order are told apart by their shapes.
    assert len(sums) == len(others)
    assert checksum(others["another shape"]) == checksum(array)


def test_not_a_number_counts_as_its_bits():
    bits = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0, 0x80000000], np.uint32)
    for one, other in itertools.combinations(bits, 2):
        pair = [np.full(3, value, np.uint32).view(np.float32) for value in (one, other)]
        assert checksum(pair[0]) != checksum(pair[1])
        assert checksum(jnp.asarray(pair[0])) == checksum(pair[0])


def test_places_of_large_arrays_differ():
    # Of arrays that are too large to be made, only where single elements are.
    for shape in ((2**16, 2**16, 3), (5, 2**20, 2**20), (3, 2**31, 2), (2**32,)):
        starts = set(itertools.product(*({0, 1, min(size, 3) - 1, size - 1} for size in shape)))
        one = np.ones((1,) * len(shape), np.float32)
        found = {tuple(value_checksums.sums_of_piece(one, at, shape)) for at in starts}
        assert len(found) == len(starts), shape


def test_large_arrays_of_numpy_are_added_up_in_blocks(monkeypatch, on_devices):
    array = random_bits("float64", (7, 5, 6))
    monkeypatch.setattr(value_checksums, "_BLOCK_BYTES", 100)
    assert checksum(array) == oracle(array)
    assert len(list(value_checksums._blocks(array, (0, 0, 0)))) > 20


def values(seed=0):
    def normal(*shape):
        return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)

    return {
        "up": pz.nx.wrap(normal(8, 16)).tag("a", "b"),
        "down": pz.nx.wrap(normal(16, 8).reshape(8, 16)).tag("a", "b"),
        "bias": pz.nx.wrap(jnp.asarray(normal(16), jnp.bfloat16)).tag("b"),
        "key": jax.random.key(seed),
        "empty": pz.nx.zeros({"a": 0}),
    }


VALUES = values()


def saved(path, stored=lambda stored: stored, save=save_params, given=VALUES):
    """A checkpoint that says one thing of the numbers, and holds others."""
    written = PreparedSave.write

    def write(self):
        return written(dataclasses.replace(self, stored=stored(dict(self.stored))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedSave, "write", write)
        return save(path, given)


def rows_exchanged(stored):
    return {**stored, "up": stored["up"][np.array([1, 0, *range(2, 8)])]}


def one_bit_of_one_element(stored):
    bits = np.array(stored["up"]).view(np.uint32)
    bits[3, 4] ^= 1
    return {**stored, "up": bits.view(np.float32)}


DAMAGES = {
    "one bit": (one_bit_of_one_element, ["up"]),
    "rows": (rows_exchanged, ["up"]),
    "parameters": (lambda s: {**s, "up": s["down"], "down": s["up"]}, ["up", "down"]),
    "key": (lambda s: {**s, "key": s["key"] + 1}, ["key"]),
    "another save": (
        lambda s: (
            {n: getattr(a, "data_array", a) for n, a in values(1).items() if n in s}
            | {"key": jax.random.key_data(jax.random.key(1))}
        ),
        ["up", "down", "bias", "key"],
    ),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    directory = tmp_path_factory.mktemp("damaged")
    return {name: saved(directory / name, damage) for name, (damage, _) in DAMAGES.items()}


@pytest.mark.parametrize("name", DAMAGES)
def test_other_numbers_are_refused_and_named(damaged, wide, name):
    wrong = DAMAGES[name][1]
    headline = (
        f"the checkpoint at {damaged[name]} is not as it was saved. Restore another copy of it:"
    )
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(damaged[name], VALUES, wide, {"b": "data"})
    assert str(caught.value).splitlines()[0] == headline
    assert sorted(caught.value.problems) == sorted(
        f"{array}: its numbers are not those that were saved." for array in wrong
    )
    assert sorted(verify_checkpoint(damaged[name]).damaged) == sorted(wrong)


def test_unverified_numbers_are_said_to_be(damaged, wide):
    match = "the numbers of the checkpoint at .* were not compared with their checksums"
    with pytest.warns(ShardingWarning, match=match) as caught:
        restored = restore_params(damaged["parameters"], VALUES, wide, {}, verify=False)
    assert len(caught) == 1
    np.testing.assert_array_equal(restored["up"].data_array, VALUES["down"].data_array)


def test_numbers_are_verified_before_they_are_cast_or_reordered(damaged, wide, tmp_path):
    like = {
        "up": pz.nx.zeros({"b": 16, "a": 8}, dtype=jnp.bfloat16),
        "down": pz.nx.zeros({"a": 8, "b": 16}, dtype=jnp.bfloat16),
        "bias": pz.nx.zeros({"b": 16}),
    }
    options = {"on_extra": "ignore", "on_dtype_mismatch": "cast", "on_axis_mismatch": "transpose"}
    with pytest.raises(CheckpointDamagedError, match="up: its numbers are not those"):
        restore_params(damaged["one bit"], like, wide, {"a": "data"}, **options)
    whole = saved(tmp_path / "whole")
    restored = restore_params(whole, like, wide, {"a": "data", "b": "model"}, **options)
    np.testing.assert_array_equal(
        restored["up"].data_array, VALUES["up"].data_array.T.astype(jnp.bfloat16)
    )
    assert restored["up"].data_array.sharding.spec == PartitionSpec("model", "data")
    assert restored["bias"].data_array.dtype == jnp.float32


def test_a_train_state_is_verified(tmp_path, wide):
    state = {"step": jnp.int32(3), "params": {"w": VALUES["up"]}}
    path = saved(
        tmp_path / "state", lambda s: {**s, "step": s["step"] + 1}, save_train_state, state
    )
    with pytest.raises(CheckpointDamagedError, match=r"step: its numbers are not those that were"):
        restore_train_state(path, state, wide, {})
    with pytest.warns(ShardingWarning, match="verify=False"):
        assert int(restore_train_state(path, state, wide, {}, verify=False)["step"]) == 4


def test_the_checksum_is_bound_to_the_save(tmp_path, wide):
    one, other = (pathlib.Path(saved(tmp_path / name)) for name in ("one", "other"))
    records = [read_manifest(path).records for path in (one, other)]
    assert records[0] == records[1]
    sections = [json.loads((path / "_CHECKPOINT_METADATA").read_text()) for path in (one, other)]
    entries = [s["custom_metadata"]["penzai_shard"] for s in sections]
    assert entries[0]["save"] != entries[1]["save"]
    sections[0]["custom_metadata"]["penzai_shard"]["arrays"]["up"] = entries[1]["arrays"]["up"]
    (one / "_CHECKPOINT_METADATA").write_text(json.dumps(sections[0]))
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(one, VALUES, wide, {})
    assert caught.value.problems == ("up: its entry is not as it was written.",)


def test_copies_that_differ_are_damage_wherever_they_are(tmp_path, wide, monkeypatch):
    path = saved(tmp_path / "params")
    loaded = array_reading._loaded

    def one_copy_wrong(manifest, structs):
        arrays = loaded(manifest, structs)
        pieces = [np.array(shard.data) for shard in arrays["up"].addressable_shards]
        pieces[5][0, 0] += 1
        devices = [shard.device for shard in arrays["up"].addressable_shards]
        placed = [
            jax.device_put(piece, device) for piece, device in zip(pieces, devices, strict=True)
        ]
        arrays["up"] = jax.make_array_from_single_device_arrays(
            (8, 16), arrays["up"].sharding, placed
        )
        return arrays

    monkeypatch.setattr(array_reading, "_loaded", one_copy_wrong)
    with pytest.raises(CheckpointDamagedError, match="up: its numbers"):
        restore_params(path, VALUES, wide, {})


@pytest.fixture
def second_format(tmp_path):
    """A checkpoint as it was written before there were checksums of the numbers."""
    path = pathlib.Path(saved(tmp_path / "second"))
    file = path / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    section = content["custom_metadata"]["penzai_shard"]
    section["version"] = 2
    del section["save"]
    for name, entry in section["arrays"].items():
        del entry["values"], entry["checksum"]
        entry["checksum"] = checksum_of([name, dict(entry)])
    file.write_text(json.dumps(content))
    seal = json.loads((path / SEAL).read_text())
    del seal["checksum"], seal["save"]
    seal["version"] = 2
    seal["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    seal["checksum"] = checksum_of(seal)
    (path / SEAL).write_text(json.dumps(seal, indent=1))
    return path


def test_the_second_format_is_read_with_a_warning(second_format, wide):
    with pytest.warns(ShardingWarning, match="has format 2, which keeps no checksums of the") as w:
        restored = restore_params(second_format, VALUES, wide, {"a": "data"})
    assert len(w) == 1
    np.testing.assert_array_equal(restored["up"].data_array, VALUES["up"].data_array)
    found = verify_checkpoint(second_format)
    assert found.damaged == ()
    assert {array.finding for array in found.arrays} == {"unchecked"}
    assert "has format 2" in found.caveat


def test_this_format_does_not_pass_for_the_second(second_format, wide, tmp_path):
    third = pathlib.Path(saved(tmp_path / "third"))
    for name in (SEAL, "_CHECKPOINT_METADATA"):
        whole = (third / name).read_bytes()
        shutil.copy(second_format / name, third / name)
        with pytest.raises(CheckpointDamagedError):
            restore_params(third, VALUES, wide, {})
        (third / name).write_bytes(whole)


def test_verifying_reports_each_array(tmp_path, wide):
    # Random bits are not compressed, and small arrays are a part of the index, which has
    # checksums of its own: these are as they are in some file, after a header.
    incompressible = {
        name: pz.nx.wrap(random_bits("int32", (16, 32), seed)).tag("a", "b")
        for seed, name in enumerate(("up", "down"))
    }
    given = {**VALUES, **incompressible}
    path = pathlib.Path(saved(tmp_path / "params", given=given))
    seen = []
    found = verify_checkpoint(path, on_array=seen.append)
    assert found.arrays == tuple(seen)
    assert {(a.name, a.finding, a.record.axes) for a in seen} == {
        (name, "ok", record.axes) for name, record in read_manifest(path).records.items()
    }
    for name, damage in (("up", 100), ("down", -4)):
        numbers = np.asarray(given[name].data_array).tobytes()[:64]
        holding = [file for file in path.rglob("d/*") if numbers in file.read_bytes()]
        for file in {file.stat().st_ino: file for file in holding}.values():
            content = bytearray(file.read_bytes())
            content[content.index(numbers) + damage] ^= 255
            file.write_bytes(content)
    found = verify_checkpoint(path)
    findings = {array.name: array.finding for array in found.arrays if array.finding != "ok"}
    assert findings == {"up": "damaged", "down": "unreadable"}
    assert all(bool(a.reason) == (a.finding == "unreadable") for a in found.arrays)
    assert set(found.damaged) == set(findings)
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(path, given, wide, {})
    texts = {problem.split(": ")[0]: problem for problem in caught.value.problems}
    assert texts.keys() == set(findings)
    assert texts["down"].startswith("down: its numbers cannot be read: ")


def test_numbers_saved_with_x64_are_verified_without_it(tmp_path, wide):
    with jax.enable_x64(True):
        wide_numbers = {"w": pz.nx.wrap(jnp.arange(8.0) / 3).tag("a")}
        paths = [
            saved(tmp_path / "x64", given=wide_numbers),
            saved(tmp_path / "damaged", lambda s: {"w": -s["w"]}, given=wide_numbers),
        ]
    like = {"w": pz.nx.zeros({"a": 8})}
    options = {"on_dtype_mismatch": "cast"}
    restored = restore_params(paths[0], like, wide, {"a": "data"}, **options)
    np.testing.assert_array_equal(restored["w"].data_array, (np.arange(8.0) / 3).astype("float32"))
    assert restored["w"].data_array.sharding.spec == PartitionSpec("data")
    with pytest.raises(CheckpointDamagedError, match="w: its numbers"):
        restore_params(paths[1], like, wide, {"a": "data"}, **options)
    assert [verify_checkpoint(path).damaged for path in paths] == [(), ("w",)]


def test_copies_that_differ_between_devices_are_not_saved_by_several_processes():
    sums = {"w": value_checksums.ValueSums((((1, 2),), ((1, 3),)), True)}
    assert len(set(checksums_of(sums)["w"])) == 2
