"""What is saved comes back to the bit, on any layout and in any form, or is refused."""

import contextlib
import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints import filling, parameters, storage
from tests.checkpoints.trees import assert_lies, blank, contents
from tests.refusals import problem_paths, problems_of, refused

WIDE, TALL = (pzs.make_mesh({"data": n, "model": 8 // n}) for n in (4, 2))
NUMBERS = np.random.default_rng(0).normal(size=(64, 32, 40)).astype("float32") * 3
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int4", "int32", "uint32", "bool", "complex64"]


@pytest.mark.parametrize("specs", [((), ("data",)), (("model",), (None, "model"))])
def test_restore_params_every_kind_of_array_on_any_layout(tmp_path, specs):
    arrays = {
        # Their checksums are computed on devices, those of the others by NumPy.
        **{f"dtypes/{dtype}": jnp.asarray(NUMBERS).astype(dtype) for dtype in DTYPES},
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), (8, 2)),
        "raw key": jax.random.PRNGKey(2),
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 8)),
        "no keys": jax.random.split(jax.random.key(0), 0),
        "number": 3,
        "numpy": NUMBERS[0],
    }

    def describe(name, spec):
        array = jnp.asarray(arrays[name])
        spec = spec if array.ndim > 1 and array.size else ()
        sharding = NamedSharding(WIDE, jax.P(*spec))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    before, after = ({name: describe(name, spec) for name in arrays} for spec in specs)
    placed = {name: jax.device_put(array, before[name].sharding) for name, array in arrays.items()}
    # Whatever mesh is set, be it one of other devices.
    with jax.set_mesh(pzs.make_mesh({"x": 2}, jax.devices()[:2], explicit=True)):
        path = pzs.save_params(tmp_path / "a", placed)
        restored = pzs.restore_params(path, after)
    assert contents(restored) == contents(arrays)
    for name, array in restored.items():
        # JAX writes the specs of random keys in its own way.
        assert array.sharding.is_equivalent_to(after[name].sharding, array.ndim)


def make_form(axes, dtype="float32"):
    """The same numbers as eight blocks, or as a stack of them, with axes in any order."""
    whole = NUMBERS[:8, :4, :6].astype(dtype)
    if "blocks" in axes:
        order = [("blocks", "a", "b").index(axis) for axis in axes]
        return {"net/blocks/w": pz.nx.wrap(jnp.asarray(whole.transpose(order)), *axes)}
    blocks = whole if axes == ["a", "b"] else whole.swapaxes(1, 2)
    return {f"net/block_{i}/w": pz.nx.wrap(jnp.asarray(x), *axes) for i, x in enumerate(blocks)}


FORMS = st.permutations(["a", "b"]) | st.permutations(["blocks", "a", "b"])
RULES = [{"blocks": "data", "a": "model", "b": None}, {"a": "data", "b": "model"}]
RULES += [{"blocks": ("data", "model"), "a": None, "b": None}]
LAYOUTS = st.tuples(st.sampled_from([WIDE, TALL]), st.sampled_from(RULES))


@settings(max_examples=15)
@given(FORMS, FORMS, LAYOUTS, LAYOUTS, st.sampled_from(["float32", "bfloat16"]))
def test_restore_params_any_form_and_layout(tmp_path_factory, first, second, before, after, dtype):
    path = tmp_path_factory.mktemp("forms") / "a"
    options = {"on_indivisible": "replicate"}
    stored = {path.replace("net/block_", "layers."): x for path, x in make_form(first).items()}
    names = {} if "blocks" in first else {"layers.*.w": "net/block_*/w"}
    pzs.save_params(path, pzs.place(stored, *before, **options))
    wanted, allow = make_form(second, dtype), ("transpose", "cast", "blocks")
    with pytest.MonkeyPatch.context() as patch:
        # So that every array is read in many pieces.
        patch.setattr(filling, "PIECE_BYTES", 100)
        options |= {"names": names, "allow": allow}
        restored = pzs.restore_params(path, blank(wanted), *after, **options)
    assert contents(restored) == contents(wanted)
    assert_lies(restored, *after, on_indivisible="replicate")


def test_restore_params_verifies_what_it_reads_only_a_part_of(tmp_path):
    path = pzs.save_params(tmp_path / "a", make_form(["blocks", "a", "b"]))
    (name, block), *_ = make_form(["a", "b"]).items()
    wanted, options = {name: block}, {"allow": ("blocks", "extra")}
    assert contents(pzs.restore_params(path, wanted, **options)) == contents(wanted)
    kvstore = {"driver": "ocdbt", "base": f"file://{path}/state/", "path": "net/blocks/w/"}
    stored = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    stored[3, 2, 1].write(0).result()
    problems = refused(pzs.CheckpointDamagedError, pzs.restore_params, path, wanted, **options)
    assert problems.keys() == {"net/blocks/w"}
    restored = pzs.restore_params(path, wanted, verify=False, **options)
    assert contents(restored) == contents(wanted)


@pytest.mark.parametrize("number", [300, 2.5, -129])
def test_restore_params_refuses_numbers_that_do_not_fit(tmp_path, number):
    path = pzs.save_params(tmp_path / "a", {"other": jnp.array([number]), "fits": jnp.array([-3])})
    like = {"other": jnp.zeros(1, "int8"), "fits": jnp.zeros(1, "int8")}
    problems = refused(pzs.CheckpointMismatchError, pzs.restore_params, path, like, allow="cast")
    assert problems.keys() == {"other"}


def test_save_params_64_bits_where_jax_has_32(tmp_path):
    with jax.enable_x64(True):
        wide = {"w": jnp.asarray(np.pi + np.arange(20_000.0))}
    path = pzs.save_params(tmp_path / "a", wide)
    refused(pzs.CheckpointMismatchError, pzs.restore_params, path, wide)
    with jax.enable_x64(True):
        assert contents(pzs.restore_params(path, wide)) == contents(wide)


def test_restore_params_by_url(tmp_path):
    """``file://`` stands for the object stores that TensorStore opens alike."""
    arrays, path = {"w": jnp.asarray(NUMBERS)}, tmp_path / "run" / "params"
    url = f"file://{path}"
    assert pzs.save_params(url, pzs.place(arrays, WIDE, {}, on_unnamed="replicate")) == url
    for options in ({}, {"overwrite": True}):
        call = pzs.save_train_state, url, arrays
        assert problem_paths(pzs.CheckpointWriteError, *call, **options) == [url]
    # What is there is what a disk would have.
    assert contents(pzs.restore_params(path, blank(arrays))) == contents(arrays)
    restored = pzs.restore_params(url, blank(arrays), WIDE, {}, on_unnamed="replicate")
    assert contents(restored) == contents(arrays)
    assert pzs.verify_checkpoint(url + "/").ok
    assert pzs.compare_checkpoints(url, arrays).ok
    refused(pzs.RuleTypeError, pzs.CheckpointManager, url)
    for file in (path / "state").rglob("*ocdbt"):
        file.unlink()
    refused(pzs.CheckpointDamagedError, pzs.restore_params, url, arrays)
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    refused(pzs.CheckpointDamagedError, pzs.restore_params, url, arrays)
    (path / "penzai_shard").unlink()
    problems = refused(pzs.CheckpointNotFoundError, pzs.restore_params, url, arrays)
    assert "nothing is there" in problems[url].what
    refused(pzs.CheckpointNotFoundError, pzs.restore_params, "nothing://bucket/a", arrays)
    refused(pzs.CheckpointWriteError, pzs.save_params, "nothing://bucket/a", arrays)


def test_save_params_by_url_that_fails_leaves_no_checkpoint(tmp_path, monkeypatch):
    url, sent, write = f"file://{tmp_path}/run/params", [], ts.KvStore.write

    class Full:
        """An object store that has room for two files."""

        def __init__(self, store):
            self.list = store.list
            self._store = store

        def write(self, name, value):
            sent.append(name)
            if len(sent) == 3:
                raise OSError("quota exceeded")
            return write(self._store, name, value)

    open_objects = storage._open_objects

    @contextlib.contextmanager
    def open_full(*args):
        with open_objects(*args) as objects:
            yield Full(objects)

    monkeypatch.setattr(storage, "_open_objects", open_full)
    with pytest.raises(pzs.CheckpointWriteError, match="quota"):
        pzs.save_params(url, {"w": NUMBERS})
    refused(pzs.CheckpointWriteError, pzs.save_params, url, {"w": NUMBERS})
    pzs.save_params(url + "2", {"w": NUMBERS})
    assert sent[-1] == "penzai_shard"
    monkeypatch.undo()
    refused(pzs.CheckpointNotFoundError, pzs.restore_params, url, {"w": NUMBERS})


# Refusals


def test_save_params_refuses_arrays_without_values(tmp_path):
    deleted = jnp.ones(2)
    deleted.delete()
    tree = {"abstract": jax.ShapeDtypeStruct((2,), "float32"), "deleted": deleted}
    call = pzs.save_params, tmp_path / "a", {**tree, "fine": jnp.ones(2)}
    assert refused(pzs.ShardingError, *call).keys() == tree.keys()
    # What Orbax cannot store.
    refused(pzs.CheckpointWriteError, pzs.save_params, tmp_path / "a", {"w": jnp.ones(2, "uint4")})
    assert not list(tmp_path.iterdir())


def test_save_params_and_restore_params_refuse_to_be_traced(tmp_path):
    model, path = {"w": jnp.ones(2)}, tmp_path / "a"
    pzs.save_params(path, model)
    for act in (pzs.save_params, pzs.restore_params, lambda *_: pzs.restore_params(path, model)):
        with pytest.raises(pzs.ShardingError):
            jax.jit(lambda x: act(path, x))(model)  # noqa: B023


def test_save_params_and_restore_params_refuse_paths(tmp_path):
    arrays = {"w": jnp.ones(2)}
    path = pzs.save_params(tmp_path / "runs" / "params", arrays)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    # A folder of the marker's name, as in a clone of this repository.
    (tmp_path / "clone" / "penzai_shard").mkdir(parents=True)
    over = {"overwrite": True}
    for taken, options in [(path, {}), ("mine", over), ("mine/file", over), ("mine/file/b", {})]:
        call = pzs.save_params, tmp_path / taken, arrays
        paths = problem_paths(pzs.CheckpointWriteError, *call, **options)
        assert paths == [str(tmp_path / taken)]
    # The nearest checkpoint is named.
    for wrong in ("runs/parms", "runs", "clone"):
        call = pzs.restore_params, tmp_path / wrong, arrays
        (problem,) = problems_of(pzs.CheckpointNotFoundError, *call)
        assert problem.path == str(tmp_path / wrong)
        assert (path in problem.fix) == (wrong != "clone")
    for act in (pzs.restore_params, pzs.save_params, pzs.save_train_state):
        with pytest.raises(pzs.RuleTypeError, match="this str"):
            act(arrays, str(tmp_path))
    for wrong in ("", None, arrays):
        with pytest.raises(pzs.RuleTypeError) as caught:
            pzs.save_params(wrong, arrays)
        assert "Array" not in str(caught.value)


def test_save_params_replaces_nothing_where_directories_cannot_be_exchanged(tmp_path, monkeypatch):
    arrays = {"w": jnp.ones(2)}
    path = pzs.save_params(tmp_path / "a", arrays)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda _: object())
        call = pzs.save_params, path, {"w": jnp.zeros(2)}
        (problem,) = problems_of(pzs.CheckpointWriteError, *call, overwrite=True)
    assert (problem.path, bool(problem.fix)) == (path, True)
    assert contents(pzs.restore_params(path, blank(arrays))) == contents(arrays)
    assert [*tmp_path.iterdir()] == [tmp_path / "a"]


@pytest.mark.parametrize("verify", [True, False])
def test_restore_params_refuses_what_is_replaced_meanwhile(tmp_path, monkeypatch, verify):
    path, read_arrays = tmp_path / "may", parameters.read_arrays

    def save(value):
        pzs.save_params(path, {"v": jnp.ones(8) * value, "w": NUMBERS[value]}, overwrite=True)

    def replace_and_read(*args):
        save(2)
        return read_arrays(*args)

    save(1)
    with monkeypatch.context() as patch:
        patch.setattr(parameters, "read_arrays", replace_and_read)
        call = pzs.restore_params, path, {"v": jnp.ones(8), "w": NUMBERS[0]}
        problems = refused(pzs.CheckpointDamagedError, *call, verify=verify)
    assert problems.keys() == ({"v", "w"} if verify else {""})
