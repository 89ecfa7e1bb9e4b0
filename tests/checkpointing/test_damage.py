"""What happens to a checkpoint of which something is not as it was saved.

The oracle is the array itself: a restore gives exactly the values saved under exactly these names,
or it is refused by this library.
"""

import gc
import json
import os
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from penzai import pz

from penzai_shard.checkpointing import (
    manifest,
    read_manifest,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
)
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ShardingError,
)

VALUES = {
    "square": pz.nx.wrap(np.arange(64.0, dtype="float32").reshape(8, 8)).tag("a", "b"),
    "mlp/bias": pz.nx.wrap(np.arange(8, dtype="int32")).tag("a"),
    "empty": pz.nx.zeros({"a": 0, "b": 3}),
    "key": jax.random.key(7),
}
METADATA = "_CHECKPOINT_METADATA"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return pathlib.Path(save_params(tmp_path_factory.mktemp("whole") / "params", VALUES))


@pytest.fixture(scope="module", autouse=True)
def quick_collections(whole):
    """What exists already is left out of the collections that follow Orbax' failures."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def copy(whole, tmp_path):
    return pathlib.Path(shutil.copytree(whole, tmp_path / "copy"))


def is_refused(path, wide, like=VALUES):
    """Whether restoring is refused; anything but that must give exactly what was saved."""
    try:
        restored = restore_params(path, like, wide, {"a": "data"}, on_extra="ignore")
    except ShardingError:
        return True
    for name, value in restored.items():
        wanted = VALUES[name]
        if name == "key":
            assert value == wanted
        else:
            assert value.named_shape == wanted.named_shape
            np.testing.assert_array_equal(value.data_array, wanted.data_array)
    return False


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def is_metadata(path):
    return not any(part == "d" or part.startswith("ocdbt.") for part in path.parts)


def edit_json(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_section(path, edit):
    edit_json(path / METADATA, lambda content: edit(content["custom_metadata"]["penzai_shard"]))


def test_a_byte_changed_in_any_metadata_is_refused(copy, wide):
    changes = 0
    for file in filter(is_metadata, files_of(copy)):
        whole = file.read_bytes()
        for position in range(0, len(whole), 61):
            changed = bytearray(whole)
            changed[position] ^= 1 + position % 255
            file.write_bytes(changed)
            assert is_refused(copy, wide), (file.name, position)
            changes += 1
        file.write_bytes(whole)
    assert not is_refused(copy, wide)
    assert changes > 50


def swap(first, second):
    def edit(section):
        arrays = section["arrays"]
        arrays[first], arrays[second] = arrays[second], arrays[first]

    return edit


DAMAGES = {
    "key of the axes": lambda s: s["arrays"]["square"].update(
        axfs=s["arrays"]["square"].pop("axes")
    ),
    "axes null": lambda s: s["arrays"]["square"].update(axes=None),
    "axes swapped": lambda s: s["arrays"]["square"]["axes"].reverse(),
    "axis renamed": lambda s: s["arrays"]["square"].update(axes=["a", "c"]),
    "axes a text": lambda s: s["arrays"]["square"].update(axes="ab"),
    "axes of numbers": lambda s: s["arrays"]["square"].update(axes=[1, 2]),
    "one axis dropped": lambda s: s["arrays"]["square"]["axes"].pop(),
    "entry dropped": lambda s: s["arrays"].pop("square"),
    "entry null": lambda s: s["arrays"].update(square=None),
    "entry a list": lambda s: s["arrays"].update(square=[]),
    "entry without checksum": lambda s: s["arrays"]["square"].pop("checksum"),
    "entry renamed": lambda s: s["arrays"].update(sqvare=s["arrays"].pop("square")),
    "entries exchanged": swap("square", "mlp/bias"),
    "shape changed": lambda s: s["arrays"]["square"].update(shape=[8, 4]),
    "shape empty": lambda s: s["arrays"]["square"].update(shape=[0, 8]),
    "dtype changed": lambda s: s["arrays"]["square"].update(dtype="int32"),
    "empty one is full": lambda s: s["arrays"]["empty"].update(shape=[2, 3]),
    "another kind of key": lambda s: s["arrays"]["key"].update(key_impl="rbg"),
    "no kind of key": lambda s: s["arrays"]["key"].update(key_impl=None),
}
OTHERS = {
    "no arrays": lambda s: s.update(arrays={}),
    "arrays null": lambda s: s.update(arrays=None),
    "arrays a list": lambda s: s.update(arrays=[]),
    "arrays missing": lambda s: s.pop("arrays"),
    "kind missing": lambda s: s.pop("kind"),
    "kind unknown": lambda s: s.update(kind="parrams"),
    "another version": lambda s: s.update(version=1),
    "version a text": lambda s: s.update(version="2"),
    "all gone": lambda s: s.clear(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_refused_and_names_its_array(copy, wide, name):
    edit_section(copy, DAMAGES[name])
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(copy, VALUES, wide, {})
    named = {problem.split(":")[0] for problem in caught.value.problems}
    assert named & {"square", "empty", "key"}
    assert named <= {"square", "sqvare", "mlp/bias", "empty", "key"}
    assert len(named) <= 2


@pytest.mark.parametrize("name", OTHERS)
def test_damaged_metadata_is_refused(copy, wide, name):
    edit_section(copy, OTHERS[name])
    with pytest.raises(CheckpointDamagedError, match=r"is not as it was saved\. Restore another"):
        restore_params(copy, VALUES, wide, {})


def test_the_messages_of_damage(copy, wide):
    edit_section(copy, DAMAGES["axes null"])
    headline = f"the checkpoint at {copy} is not as it was saved. Restore another copy of it:"
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(copy, VALUES, wide, {})
    assert str(caught.value) == f"{headline}\n  square: its entry is not as it was written."
    (copy / METADATA).write_bytes((copy / METADATA).read_bytes()[:-1])
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(copy, VALUES, wide, {})
    assert caught.value.problems == (f"{METADATA}: is not as it was written.",)
    (copy / manifest.SEAL).write_text("{}")
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(copy, VALUES, wide, {})
    assert caught.value.problems == (f"{manifest.SEAL}: is not as it was written.",)


SAME_SAYING = {
    "a space at the end": lambda text: text + b" ",
    "two spaces after a colon": lambda text: text.replace(b'": ', b'":  ', 1),
    "other ends of lines": lambda text: text.replace(b"\n", b"\r\n"),
    "a letter as an escape": lambda text: text.replace(b"square", b"\\u0073quare"),
    "a value twice": lambda text: text.replace(b"{", b'{\n "version": 2,', 1),
    "other order": lambda text: json.dumps(
        dict(sorted(json.loads(text).items())), indent=1
    ).encode(),
}


@pytest.mark.parametrize("name", SAME_SAYING)
def test_a_seal_that_says_the_same_in_other_bytes_is_refused(copy, wide, name):
    seal = copy / manifest.SEAL
    written = seal.read_bytes()
    seal.write_bytes(SAME_SAYING[name](written))
    assert seal.read_bytes() != written
    with pytest.raises(CheckpointDamagedError) as caught:
        restore_params(copy, VALUES, wide, {})
    assert caught.value.problems == (f"{manifest.SEAL}: is not as it was written.",)


def test_either_place_says_that_a_checkpoint_is_ours(copy, wide):
    (copy / manifest.SEAL).unlink()
    with pytest.raises(CheckpointDamagedError, match=f"{manifest.SEAL}: is missing"):
        restore_params(copy, VALUES, wide, {})


def test_both_places_gone_is_still_no_plain_checkpoint(copy, wide):
    (copy / manifest.SEAL).unlink()
    (copy / METADATA).unlink()
    with pytest.raises(CheckpointDamagedError, match=f"{METADATA}: is missing"):
        restore_params(copy, VALUES, wide, {})


@pytest.mark.parametrize("part", ["state", "state/d", "state/_METADATA", manifest.SEAL])
def test_a_part_of_a_checkpoint_is_not_one(copy, wide, part):
    with pytest.raises(CheckpointNotFoundError) as caught:
        restore_params(copy / part, VALUES, wide, {})
    assert str(caught.value) == (
        f"there is no checkpoint at {copy}/{part}: it is a part of one. Restore the whole: {copy}"
    )


def test_files_of_another_checkpoint_are_refused(copy, whole, wide, tmp_path):
    other = {**VALUES, "square": VALUES["square"].order_as("b", "a")}
    other = pathlib.Path(save_params(tmp_path / "other", other))
    for file in filter(is_metadata, files_of(copy)):
        theirs = other / file.relative_to(copy)
        if theirs.read_bytes() != file.read_bytes():
            shutil.copy(theirs, file)
            assert is_refused(copy, wide), file.name
            shutil.copy(whole / file.relative_to(copy), file)
    assert not is_refused(copy, wide)


def test_damage_of_a_train_state_is_refused(tmp_path, wide):
    state = {"step": jnp.int32(3), "params": VALUES}
    path = pathlib.Path(save_train_state(tmp_path / "state", state))
    edit_section(path, lambda s: s["arrays"]["params/square"]["axes"].reverse())
    for restore in (restore_train_state, restore_params):
        like = state if restore is restore_train_state else VALUES
        with pytest.raises(CheckpointDamagedError, match="params/square: its entry is not as it"):
            restore(path, like, wide, {})


def in_place(path):
    """Things done to a copy that do not harm it, by name."""

    def foreign_files():
        for name in ("notes.txt", ".DS_Store", "state/.nfs0001", "state/d/.snapshot"):
            (path / name).write_text("text")
        (path / "logs").mkdir()
        (path / "logs" / "events.json").write_bytes(b"\xff{")

    def foreign_things():
        os.mkfifo(path / "pipe")
        os.mkfifo(path / "state" / "d" / "pipe")
        (path / "loop").symlink_to(".")
        (path / "state" / "loop").symlink_to("..")
        (path / "nowhere").symlink_to("missing")
        (path / "lost+found").mkdir(mode=0)

    def link_files_elsewhere():
        store = path.parent / "blobs"
        for number, file in enumerate(files_of(path)):
            store.mkdir(exist_ok=True)
            file.rename(store / f"{number}")
            file.symlink_to(store / f"{number}")

    def link_directory_elsewhere():
        (path / "state").rename(path.parent / "state elsewhere")
        (path / "state").symlink_to(path.parent / "state elsewhere")

    def make_read_only():
        for entry in (*path.rglob("*"), path):
            entry.chmod(0o555 if entry.is_dir() else 0o444)

    def touch():
        for entry in path.rglob("*"):
            os.utime(entry, (0, 0))

    return [
        foreign_files,
        foreign_things,
        link_files_elsewhere,
        link_directory_elsewhere,
        make_read_only,
        touch,
    ]


def twenty_harmless_things(path, tmp_path, monkeypatch):
    """Places at which the checkpoint is after something was done that does not harm it."""
    yield path
    yield f"{path}/"
    yield f"{path.parent}/../{path.parent.name}/./{path.name}"
    monkeypatch.chdir(path.parent)
    yield path.name
    monkeypatch.setenv("HOME", str(path.parent))
    yield f"~/{path.name}"
    for name in ("copied", "with.dots and spaces", "deep/er/params", "100%20#1?", "é\n'\"$(x)"):
        yield shutil.copytree(path, tmp_path / name)
    moved = shutil.copytree(path, tmp_path / "to_move")
    yield moved.rename(tmp_path / "moved")
    for number in range(len(in_place(path))):
        folder = tmp_path / f"done{number}"
        copy = shutil.copytree(path, folder / "copy")
        in_place(copy)[number]()
        yield copy
    (tmp_path / "link").symlink_to(path)
    yield tmp_path / "link"
    (tmp_path / "folder").symlink_to(path.parent)
    yield tmp_path / "folder" / path.name
    archive = shutil.make_archive(tmp_path / "archive", "gztar", path)
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    yield tmp_path / "unpacked"
    yield shutil.copytree(path, tmp_path / "times", copy_function=shutil.copyfile)
    yield shutil.copytree(path, tmp_path / "hard_links", copy_function=os.link)
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as other:
        yield shutil.copytree(path, f"{other}/params")


def test_what_does_no_harm_is_not_refused(whole, tmp_path, wide, tall, monkeypatch):
    places = 0
    for path in twenty_harmless_things(whole, tmp_path, monkeypatch):
        assert not is_refused(path, wide), path
        places += 1
    assert places > 20
    assert not is_refused(whole, tall)
    assert not is_refused(whole, jax.make_mesh((8,), ("data",)))
    assert not is_refused(whole, jax.make_mesh((1,), ("data",)))
    for name in VALUES:
        assert not is_refused(whole, wide, {name: VALUES[name]})
    cast = {"mlp/bias": VALUES["mlp/bias"].astype("float32")}
    restored = restore_params(whole, cast, wide, {}, on_extra="ignore", on_dtype_mismatch="cast")
    np.testing.assert_array_equal(restored["mlp/bias"].data_array, np.arange(8.0))
    other = {"square": VALUES["square"].order_as("b", "a")}
    restored = restore_params(
        whole, other, wide, {}, on_extra="ignore", on_axis_mismatch="transpose"
    )
    np.testing.assert_array_equal(restored["square"].data_array, other["square"].data_array)
    assert read_manifest(whole).records.keys() == VALUES.keys()


def test_plain_orbax_reads_our_checkpoints(whole, wide):
    everywhere = jax.sharding.NamedSharding(wide, jax.sharding.PartitionSpec())
    wanted = jax.ShapeDtypeStruct((8, 8), "float32", sharding=everywhere)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp.load(whole, {"square": wanted})
    np.testing.assert_array_equal(loaded["square"], VALUES["square"].data_array)


@pytest.fixture
def first_format(tmp_path):
    """A checkpoint as it was written before the first release: no seal, no checksums."""
    arrays = {"square": VALUES["square"].data_array, "key": jax.random.key_data(VALUES["key"])}
    entries = {
        "square": {"axes": ["a", "b"]},
        "key": {"axes": [], "key_impl": "threefry2x32"},
        "empty": {"axes": ["a", "b"], "empty": {"shape": [0, 3], "dtype": "float32"}},
    }
    section = {"version": 1, "kind": "params", "arrays": entries}
    ocp.save(tmp_path / "first", arrays, custom_metadata={"penzai_shard": section})
    return tmp_path / "first"


UNRELEASED = "has format 1, which was written before the first release"


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_first_format_is_refused_and_can_be_saved_anew(first_format, wide, tmp_path):
    with pytest.raises(CheckpointMismatchError, match=UNRELEASED) as caught:
        restore_params(first_format, VALUES, wide, {})
    assert f"arrays = orbax.checkpoint.experimental.v1.load('{first_format}')" in str(caught.value)
    arrays = ocp.load(str(first_format))
    path = save_params(tmp_path / "anew", {"square": pz.nx.wrap(arrays["square"]).tag("a", "b")})
    assert not is_refused(path, wide, {"square": VALUES["square"]})


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s["arrays"]["square"].update(axfs=s["arrays"]["square"].pop("axes")),
        lambda s: s["arrays"]["square"].update(axes=None),
        lambda s: s["arrays"]["square"].update(axes=["a"]),
        lambda s: s["arrays"].pop("square"),
        lambda s: s.update(arrays={}),
        lambda s: s["arrays"]["empty"]["empty"].update(shape=[2, 3]),
        lambda s: s["arrays"]["empty"].pop("empty"),
        lambda s: s["arrays"]["square"].update(empty={"shape": [0, 8], "dtype": "float32"}),
        lambda s: s["arrays"]["key"].update(key_impl="frx"),
        lambda s: s["arrays"]["key"].pop("key_impl"),
    ],
)
def test_a_damaged_first_format_is_refused_too(first_format, wide, edit):
    edit_section(first_format, edit)
    like = {name: VALUES[name] for name in ("square", "key", "empty")}
    with pytest.raises(CheckpointMismatchError, match=UNRELEASED):
        restore_params(first_format, like, wide, {})


def test_a_wrong_version_of_a_sealed_checkpoint_is_refused(copy, wide):
    edit_section(copy, lambda s: s.update(version=9))
    with pytest.raises(CheckpointMismatchError, match="has format 9"):
        restore_params(copy, VALUES, wide, {})
