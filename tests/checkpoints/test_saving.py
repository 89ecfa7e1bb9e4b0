"""What ``begin_save`` writes, ``restore`` gives back: on any layout, converted, ready to donate."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.checkpoints import filling
from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.records import read_manifest
from penzai_shard.checkpoints.restoring import restore
from penzai_shard.checkpoints.saving import begin_save

MESH = pzs.make_mesh({"data": 4, "model": 2})
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int4", "int32", "uint32", "bool", "complex64"]
NUMBERS = np.random.default_rng(0).normal(size=(8, 24, 16)) * 3


def sharding(*spec):
    return NamedSharding(MESH, jax.P(*spec))


def make_arrays():
    return {
        **{f"dtypes/{dtype}": jnp.asarray(NUMBERS[0]).astype(dtype) for dtype in DTYPES},
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), (8, 2)),
        "raw key": jax.random.PRNGKey(2),
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 8)),
        "no keys": jax.random.split(jax.random.key(0), 0),
        "number": 3,
        "numpy": NUMBERS[0],
    }


def save(path, arrays, **options):
    return begin_save(path, leaves_of(arrays), "params", **options).finish()


def restore_as(path, structs, sources=None, **options):
    found = sources or {
        name: Source((name,), struct.shape, tuple(range(struct.ndim)))
        for name, struct in structs.items()
    }
    return restore(path, lambda manifest: (found, structs), **options)


def struct_of(array, *spec):
    array = jnp.asarray(array)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(*spec[: array.ndim]))


def bits(array):
    array = jnp.asarray(array)
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    numbers = np.asarray(jax.random.key_data(array) if is_key else array)
    return array.dtype, array.shape, numbers.tobytes()


def paths_of(caught):
    return {problem.path for problem in caught.value.problems}


@pytest.mark.parametrize("specs", [((), ("data",)), (("model",), (None, "model"))])
def test_restore_gives_every_kind_of_array_on_any_layout(tmp_path, specs):
    arrays = make_arrays()
    placed = {name: jax.device_put(a, struct_of(a).sharding) for name, a in arrays.items()}
    for name in ("dtypes/float32", "keys"):
        placed[name] = jax.device_put(arrays[name], struct_of(arrays[name], *specs[0]).sharding)
    path = save(tmp_path / "a", placed, metadata={"step": 3})
    is_split = {name: 0 not in np.shape(a) and np.ndim(a) > 1 for name, a in arrays.items()}
    structs = {n: struct_of(a, *specs[1] if is_split[n] else ()) for n, a in arrays.items()}
    with jax.set_mesh(pzs.make_mesh({"x": 8}, explicit=True)):
        restored = restore_as(path, structs)
    for name, array in arrays.items():
        assert bits(restored[name]) == bits(array)
        # JAX writes the specs of random keys in its own way.
        assert restored[name].sharding.is_equivalent_to(structs[name].sharding, np.ndim(array))
    manifest = read_manifest(path)
    assert (manifest.kind, manifest.metadata) == ("params", {"step": 3})


def test_orbax_reads_what_is_saved(tmp_path):
    path = save(tmp_path / "a", {"w": jnp.arange(6.0), "b/w": jnp.ones(2)})
    with pytest.warns(UserWarning, match="Sharding info"):
        found = ocp_v1.load(path)
    assert {name: array.tolist() for name, array in found.items()} == {
        "w": [*range(6)],
        "b/w": [1, 1],
    }


@pytest.mark.parametrize("use_ocdbt", [False, True])
@pytest.mark.parametrize("use_zarr3", [False, True])
def test_restore_reads_the_forms_of_orbax(tmp_path, use_ocdbt, use_zarr3):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        tree = {"w": jnp.asarray(NUMBERS[0]), "deep": [jnp.zeros(4), "text", None]}
        checkpointer.save(tmp_path / "plain", tree)
    structs = {"w": struct_of(NUMBERS[0], "data"), "deep/0": struct_of(jnp.zeros(4))}
    restored = restore_as(tmp_path / "plain", structs)
    assert bits(restored["w"]) == bits(NUMBERS[0])
    assert bits(restored["deep/0"]) == bits(jnp.zeros(4))
    assert read_manifest(tmp_path / "plain").kind is None


# Each stored array is (24, 16).
BLOCKS = "b0", "b1", "b2", "b3"
CONVERSIONS = {
    "transposed": (Source(("b0",), (24, 16), (1, 0)), lambda x: x[0].T),
    "stacked": (Source(BLOCKS, (24, 16), (1, 0), stack=1), lambda x: x[:4].transpose(2, 0, 1)),
    "picked": (Source(("all",), (8, 24, 16), (2, 1), pick=(0, 5)), lambda x: x[5].T),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_restore_converts_while_it_reads(tmp_path, monkeypatch, conversion, dtype):
    # So that every array is read in many pieces.
    monkeypatch.setattr(filling, "_PIECE_BYTES", 700)
    numbers = NUMBERS.astype("float32")
    path = save(tmp_path / "a", {"all": numbers, **{f"b{i}": numbers[i] for i in range(4)}})
    source, convert = CONVERSIONS[conversion]
    expected = jnp.asarray(convert(numbers)).astype(dtype)
    for spec in [(), ("model",), (None, "data"), (("model", "data"),)]:
        struct = struct_of(expected, *spec)
        restored = restore_as(path, {"x": struct}, {"x": source})["x"]
        assert bits(restored) == bits(expected)
        assert restored.sharding == struct.sharding


def test_restore_verifies_what_it_reads_only_a_part_of(tmp_path):
    path = save(tmp_path / "a", {"all": NUMBERS.astype("float32")})
    kvstore = {"driver": "ocdbt", "base": f"file://{path}/state/", "path": "all/"}
    stored = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    stored[3, 2, 1].write(0).result()
    structs = {"x": jax.ShapeDtypeStruct((24, 16), "float32")}
    source = Source(("all",), (8, 24, 16), (1, 2), pick=(0, 5))
    with pytest.raises(pzs.CheckpointDamagedError) as caught:
        restore_as(path, structs, {"x": source})
    assert paths_of(caught) == {"all"}
    restored = restore_as(path, structs, {"x": source}, verify=False)
    assert bits(restored["x"]) == bits(NUMBERS[5])


def test_restore_refuses_integers_that_do_not_fit(tmp_path):
    path = save(tmp_path / "a", {"large": jnp.array([300]), "small": jnp.array([-3])})
    structs = {name: jax.ShapeDtypeStruct((1,), "int8") for name in ("large", "small")}
    with pytest.raises(pzs.CheckpointMismatchError) as caught:
        restore_as(path, structs)
    assert paths_of(caught) == {"large"}
    assert restore_as(path, {"small": structs["small"]})["small"].tolist() == [-3]


def test_restored_arrays_are_donated_as_those_of_later_steps(tmp_path):
    arrays = {name: NUMBERS[i].astype("float32") for i, name in enumerate("abc")}
    path = save(tmp_path / "a", {**arrays, "large": np.ones((512, 1024), "float32")})
    specs = {"a": (), "b": ("data",), "c": (None, "model"), "large": ("model", "data")}
    structs = {
        name: struct_of(arrays.get(name, np.ones((512, 1024))), *spec)
        for name, spec in specs.items()
    }
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)

    def buffers(state):
        parts = [part for array in state.values() for part in array.addressable_shards]
        return {part.data.unsafe_buffer_pointer() for part in jax.block_until_ready(parts)}

    state = restore_as(path, structs)
    for _ in range(2):
        before = buffers(state)
        state = step(state)
        assert buffers(state) == before


def test_begin_save_with_copy_saves_what_was_there(tmp_path):
    arrays = {"jax": jnp.asarray(NUMBERS), "numpy": NUMBERS.astype("float32")}
    expected = {name: bits(array) for name, array in arrays.items()}
    begun = begin_save(tmp_path / "a", leaves_of(arrays), "params", copy=True)
    arrays["numpy"][:] = 0
    jax.jit(lambda x: x * 0, donate_argnums=0)(arrays["jax"]).block_until_ready()
    structs = {name: struct_of(NUMBERS) for name in arrays}
    restored = restore_as(begun.finish(), structs)
    assert {name: bits(array) for name, array in restored.items()} == expected


# Refusals


def test_begin_save_refuses_what_cannot_be_saved(tmp_path):
    deleted = jnp.ones(2)
    deleted.delete()
    tree = {"abstract": jax.ShapeDtypeStruct((2,), "float32"), "deleted": deleted}
    odd = {"few bits": jnp.ones(2, "uint4"), "axis": pz.nx.ones({3: 2}), "fine": jnp.ones(2)}
    with pytest.raises(pzs.ShardingError) as caught:
        save(tmp_path / "a", {**tree, **odd})
    assert paths_of(caught) == {*tree, "few bits", "axis"}
    with pytest.raises(pzs.ShardingError) as caught:
        jax.jit(lambda x: save(tmp_path / "a", {"traced": x}))(jnp.ones(2))
    assert paths_of(caught) == {"traced"}
    with pytest.raises(pzs.ShardingError):
        save(tmp_path / "a", {"empty": jnp.zeros((0, 2))})
    assert not list(tmp_path.iterdir())


def test_begin_save_refuses_paths(tmp_path):
    arrays = {"w": jnp.ones(2)}
    path = save(tmp_path / "a", arrays)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for taken, options in [
        (path, {}),
        (tmp_path / "mine", {"overwrite": True}),
        (tmp_path / "mine" / "file", {"overwrite": True}),
        (tmp_path / "mine" / "file" / "b", {}),
    ]:
        with pytest.raises(pzs.CheckpointWriteError) as caught:
            save(taken, arrays, **options)
        assert paths_of(caught) == {str(taken)}
    for path in ("gs://bucket/a", "", None):
        with pytest.raises(pzs.RuleTypeError):
            save(path, arrays)


def test_read_manifest_names_the_nearest_checkpoint(tmp_path):
    path = save(tmp_path / "runs" / "params", {"w": jnp.ones(2)})
    for wrong in ("runs/parms", "rums/params", "runs"):
        with pytest.raises(pzs.CheckpointNotFoundError) as caught:
            read_manifest(tmp_path / wrong)
        (problem,) = caught.value.problems
        assert problem.path == str(tmp_path / wrong)
        assert path in problem.fix
    with pytest.raises(pzs.CheckpointNotFoundError):
        read_manifest(tmp_path / "nothing" / "like" / "it")
