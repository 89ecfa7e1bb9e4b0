import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.checkpointing import (
    array_reading,
    locations,
    manifest,
    param_dict,
    restore_params,
    restore_train_state,
    save_params,
    save_train_state,
    with_params,
)
from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.comparison import Tolerance
from penzai_shard.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MeshError,
    MissingExtraError,
    PlanError,
    RuleTypeError,
    ShardingWarning,
)
from penzai_shard.meshes import make_mesh
from penzai_shard.planning import make_plan

SQUARE = {"w": pz.nx.wrap(np.arange(64.0, dtype="float32").reshape(8, 8)).tag("a", "b")}


@pytest.fixture
def square(tmp_path):
    return save_params(tmp_path / "square", SQUARE)


@pytest.fixture
def nothing_is_read(monkeypatch):
    def refuse(*_):
        raise AssertionError("arrays were read")

    monkeypatch.setattr("penzai_shard.checkpointing.restoring.load_arrays", refuse)


@pytest.mark.usefixtures("nothing_is_read")
def test_every_difference_is_told_before_anything_is_read(tmp_path, wide):
    path = save_params(
        tmp_path / "params",
        {
            "swapped": pz.nx.ones({"a": 8, "b": 8}),
            "renamed": pz.nx.ones({"a": 8}),
            "larger": pz.nx.ones({"a": 8, "b": 4}),
            "other_axes": pz.nx.ones({"a": 8, "b": 4}),
            "half": pz.nx.ones({"a": 8}).astype(jnp.bfloat16),
            "key": jax.random.key(0),
            "decoder.weights": pz.nx.ones({"a": 8}),
            "same": pz.nx.ones({"a": 8}),
        },
    )
    wanted = {
        "swapped": pz.nx.ones({"b": 8, "a": 8}),
        "renamed": pz.nx.ones({"c": 8}),
        "larger": pz.nx.ones({"b": 4, "a": 16}),
        "other_axes": pz.nx.ones({"b": 8, "c": 4}),
        "half": pz.nx.ones({"a": 8}),
        "key": jax.random.key(0, impl="rbg"),
        "decoder.weight": pz.nx.ones({"a": 8}),
        "same": pz.nx.ones({"a": 8}),
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        restore_params(path, wanted, wide, {})
    headline, *lines = str(caught.value).splitlines()
    assert headline == f"the checkpoint at {path} does not fit the model:"
    assert set(lines) == {
        "  swapped: the checkpoint has (a=8, b=8), and the model wants (b=8, a=8): the same "
        "logical axes in another order. Pass on_axis_mismatch='transpose' to have it reordered.",
        "  renamed: the checkpoint has (a=8), and the model wants (c=8): the logical axes have "
        "other names. If they mean the same, pass rename_axes={'a': 'c'}.",
        "  larger: the checkpoint has (a=8, b=4), and the model wants (b=4, a=16): the sizes "
        "differ. Build the model with the same sizes.",
        "  other_axes: the checkpoint has (a=8, b=4), and the model wants (b=8, c=4): the logical "
        "axes differ. Build the model with the same axes.",
        "  half: the checkpoint has bfloat16, and the model wants float32. Pass "
        "on_dtype_mismatch='cast', or give the model this dtype.",
        "  key: the checkpoint has 'threefry2x32' PRNG keys, and the model wants 'rbg' PRNG keys. "
        "Make the key with jax.random.key(seed, impl=...) of the same kind.",
        "  decoder.weight: the model wants (a=8) float32, and the checkpoint has no such array. "
        "If it is 'decoder.weights' there, pass names={'decoder.weights': 'decoder.weight'}. To "
        "leave the model's own value there, pass others='keep'.",
        "  decoder.weights: the checkpoint has (a=8) float32, and the model has no such array. "
        "Did you mean 'decoder.weight'? Pass on_extra='ignore' to leave it there.",
    }
    assert caught.value.problems == tuple(line.strip() for line in lines)


@pytest.mark.usefixtures("nothing_is_read")
def test_what_transposing_cannot_put_right_stays_refused(square, wide):
    wanted = {"w": pz.nx.ones({"b": 4, "a": 16})}
    with pytest.raises(CheckpointMismatchError, match="the sizes differ"):
        restore_params(square, wanted, wide, {}, on_axis_mismatch="transpose")
    with pytest.raises(CheckpointMismatchError, match="the logical axes have other names"):
        restore_params(
            square, {"w": pz.nx.ones({"a": 8, "c": 8})}, wide, {}, on_axis_mismatch="transpose"
        )
    # Names on one side only.
    with pytest.raises(CheckpointMismatchError, match=r"wants \(8, 8\): the logical axes differ"):
        restore_params(square, {"w": jnp.ones((8, 8))}, wide, {}, on_unnamed="replicate")


def test_renaming_an_axis_that_is_not_there_is_refused(square, wide):
    with pytest.raises(
        CheckpointMismatchError,
        match=r"x: no array in the checkpoint has this logical axis\. It has",
    ):
        restore_params(square, SQUARE, wide, {}, rename_axes={"x": "y"})


@pytest.mark.parametrize(
    ("rename_axes", "fix"),
    [
        ({"clases": "labels"}, " Did you mean 'classes'?"),
        ({"clases": "embedding"}, " Did you mean 'classes'?"),
        (
            {"labels": "classes", "embedding": "features"},
            " Names are given as old: new; write "
            "rename_axes={'classes': 'labels', 'embedding': 'features'}.",
        ),
        (
            {"class": "classes"},
            " Names are given as old: new; write rename_axes={'classes': 'class'}.",
        ),
        ({"x": "y"}, ""),
    ],
)  # fmt: skip
def test_a_typo_or_a_reversal_in_rename_axes_is_reported_with_what_to_write(rename_axes, fix):
    records = {"w": ArrayRecord((2, 3), "float32", ("embedding", "classes"))}
    with pytest.raises(CheckpointMismatchError) as caught:
        Tolerance(rename_axes=rename_axes).renamed(records)
    assert caught.value.problems == (
        f"{next(iter(rename_axes))}: no array in the checkpoint has this logical axis. "
        f"It has 'classes', 'embedding'.{fix}",
    )


def test_unknown_options_are_refused(square, wide):
    with pytest.raises(
        CheckpointMismatchError, match="on_extra='drop': choose one of 'error', 'ignore'"
    ):
        restore_params(square, SQUARE, wide, {}, on_extra="drop")


def test_a_layout_that_cannot_be_is_refused(square, wide):
    with pytest.raises(PlanError, match="no valid layout"):
        restore_params(square, SQUARE, wide, {"a": "data", "b": "data"})
    with pytest.raises(
        MeshError, match="restore_params cannot put arrays on this AbstractMesh: it has no devices"
    ):
        restore_params(square, SQUARE, wide.abstract_mesh, {})


def test_paths_without_checkpoint_are_refused(tmp_path, square, wide):
    with pytest.raises(
        match=rf"there is no checkpoint at .*/squares: the path does not exist\. Did you mean "
        rf"{square}\?",
    ):
        restore_params(tmp_path / "squares", SQUARE, wide, {})
    with pytest.raises(FileNotFoundError, match=r"Orbax does not recognise the directory\. Did"):
        restore_params(square.removesuffix("/square"), SQUARE, wide, {})


def test_an_existing_path_is_refused_and_replaced_when_asked(tmp_path, square, wide):
    with pytest.raises(CheckpointExistsError, match=r"it exists\. Pass overwrite=True"):
        save_params(square, SQUARE)
    doubled = {"w": SQUARE["w"] * 2}
    # What cannot be saved does not cost the checkpoint that is there.
    with pytest.raises(CheckpointMismatchError, match="has a shape and no values"):
        save_params(square, jax.eval_shape(lambda: SQUARE), overwrite=True)
    assert float(restore_params(square, SQUARE, wide, {})["w"].data_array.sum()) == 2016
    save_params(square, doubled, overwrite=True)
    assert float(restore_params(square, SQUARE, wide, {})["w"].data_array.sum()) == 4032
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").write_text("text")
    with pytest.raises(FileExistsError, match="is not a checkpoint, so overwrite=True does not"):
        save_params(tmp_path / "notes", SQUARE, overwrite=True)
    (tmp_path / "empty").mkdir()
    save_params(tmp_path / "empty", SQUARE, overwrite=True)


def test_what_cannot_be_saved_is_told_at_once(tmp_path):
    deleted = jnp.ones(2)
    deleted.delete()
    with pytest.raises(CheckpointMismatchError) as caught:
        save_params(
            tmp_path / "params",
            {"abstract": jax.ShapeDtypeStruct((2,), "int32"), "gone": deleted, "np": np.ones(2)},
        )
    assert [line.split(":")[0] for line in caught.value.problems] == ["abstract", "gone", "np"]
    assert "NumPy's float64 would be restored as float32" in str(caught.value)
    assert "its buffer was donated or deleted" in str(caught.value)
    with pytest.raises(CheckpointMismatchError, match="there is no array with elements to save"):
        save_params(tmp_path / "params", {"w": jnp.ones(0)})
    with pytest.raises(RuleTypeError, match=r"this list has no parameters\. Give a model, or a"):
        save_params(tmp_path / "params", [jnp.ones(2)])
    with pytest.raises(CheckpointMismatchError, match="is being traced"):
        jax.jit(lambda x: save_params(tmp_path / "params", {"w": x}))(jnp.ones(2))
    assert not (tmp_path / "params").exists()


def test_views_with_permuted_positional_dimensions_are_refused(tmp_path):
    view = pz.nx.ones({"a": 2, "b": 2, "c": 2}).untag("b", "a")
    with pytest.raises(CheckpointMismatchError, match=r"Give its data the usual order with .with_"):
        save_params(tmp_path / "params", {"w": view})


def test_a_checkpoint_of_plain_orbax_is_restored_with_a_warning(tmp_path, mlp, wide):
    values = param_dict(mlp)
    flat = {name: value.data_array for name, value in values.items()}
    ocp.save(tmp_path / "flat", flat)
    ocp.save(tmp_path / "named", values)
    nested = {"mlp": {"up": {}, "down": {}}}
    for name, array in flat.items():
        _, layer, leaf = name.split("/")
        nested["mlp"][layer][leaf] = array
    ocp.save(tmp_path / "nested", nested)
    for kind in ("flat", "named", "nested"):
        with pytest.warns(ShardingWarning, match="was written without logical axis names"):
            restored = restore_params(tmp_path / kind, values, wide, {"neurons": "model"})
        for name in values:
            np.testing.assert_array_equal(restored[name].data_array, flat[name])
            assert restored[name].named_axes == values[name].named_axes
        part = {"mlp/up/AddBias.bias": values["mlp/up/AddBias.bias"]}
        with pytest.warns(ShardingWarning):
            restored = restore_params(tmp_path / kind, part, wide, {}, on_extra="ignore")
        assert list(restored) == list(part)
    with pytest.raises(CheckpointMismatchError, match="the sizes differ"):
        restore_params(
            tmp_path / "flat", {"mlp/up/AddBias.bias": jnp.ones(3)}, wide, on_unnamed="replicate"
        )


def test_a_list_in_a_checkpoint_of_plain_orbax_is_read_by_index(tmp_path, wide):
    ocp.save(tmp_path / "list", {"layers": [jnp.ones(2), jnp.arange(3)]})
    part = {"layers": {"1": pz.nx.zeros({"a": 3}, dtype=jnp.int32)}}
    with pytest.warns(ShardingWarning):
        restored = restore_params(tmp_path / "list", part, wide, {}, on_extra="ignore")
    assert restored["layers"]["1"].unwrap("a").tolist() == [0, 1, 2]


def test_a_later_format_is_refused(tmp_path, wide, monkeypatch):
    monkeypatch.setattr(manifest, "_VERSION", 9)
    path = save_params(tmp_path / "params", SQUARE)
    monkeypatch.undo()
    with pytest.raises(CheckpointMismatchError, match="has format 9, and this version of"):
        restore_params(path, SQUARE, wide, {})


def test_large_pieces_raise_the_bound_on_reading(tmp_path, wide, monkeypatch):
    monkeypatch.setattr(array_reading, "_READ_BYTES", 16)
    path = save_params(tmp_path / "params", SQUARE)
    restored = restore_params(path, SQUARE, wide, {"a": "data"})
    np.testing.assert_array_equal(restored["w"].data_array, SQUARE["w"].data_array)


def test_keys_of_different_types_are_refused(tmp_path, wide):
    one = pz.nx.ones({"a": 8})
    mixed = {0: one, "b": one}
    attempts = [
        lambda: save_params(tmp_path / "params", mixed),
        lambda: save_params(tmp_path / "params", {"layer": mixed}),
        lambda: save_train_state(tmp_path / "state", {"params": mixed}),
        lambda: restore_params(tmp_path / "params", mixed, wide, {}),
        lambda: restore_train_state(tmp_path / "state", {"params": mixed}, wide, {}),
        lambda: with_params({"w": one}, mixed),
    ]
    for attempt in attempts:
        with pytest.raises(RuleTypeError, match=r"a dictionary has keys of different types.*Make"):
            attempt()


def test_whole_numbers_as_keys_come_back_as_they_are(tmp_path, wide):
    values = {"layers": {0: SQUARE["w"], 1: SQUARE["w"] * 2}}
    path = save_params(tmp_path / "params", values)
    restored = restore_params(path, values, wide, {"a": "data"})
    assert list(restored["layers"]) == [0, 1]
    np.testing.assert_array_equal(restored["layers"][1].data_array, SQUARE["w"].data_array * 2)
    with pytest.raises(CheckpointMismatchError, match="layers/0: the checkpoint has all names"):
        restore_params(path, {0: SQUARE["w"]}, wide, {})


@pytest.mark.parametrize("path", [3, None, "", b"", {"w": 1}])
def test_what_is_not_a_path_is_refused(wide, path):
    for attempt in (
        lambda: save_params(path, SQUARE),
        lambda: restore_params(path, SQUARE, wide, {}),
        lambda: restore_train_state(path, SQUARE, wide, {}),
    ):
        with pytest.raises(RuleTypeError, match="give the path of a directory, such as 'run/par"):
            attempt()


def test_swapped_arguments_are_told_without_the_whole_model(tmp_path, mlp, wide):
    path = str(tmp_path / "params")
    message = (
        "path is a Sequential: give the path of a directory, such as 'run/params'. It comes first, "
        "before the model or the state."
    )
    for attempt in (
        lambda: save_params(mlp, path),
        lambda: restore_params(mlp, path, wide, {}),
        lambda: save_train_state(mlp, path),
    ):
        with pytest.raises(RuleTypeError, match=f"^{re.escape(message)}$"):
            attempt()


def test_a_state_variable_that_was_donated_is_not_restored_around(tmp_path, wide):
    def model():
        value = jax.device_put(jnp.ones(()), NamedSharding(wide, PartitionSpec()))
        seen = pz.StateVariable(value=value, label="seen")
        return {"w": pz.Parameter(value=SQUARE["w"], label="w"), "seen": seen}

    path = save_params(tmp_path / "params", model())
    donated = model()
    donated["seen"].value.delete()
    with pytest.raises(
        CheckpointMismatchError, match=r"seen: this state variable has no value any"
    ):
        restore_params(path, donated, wide, {})
    assert restore_params(path, model(), wide, {})["seen"].value == 1


def test_an_object_store_that_cannot_be_reached_names_the_package(monkeypatch):
    class Unreachable:
        def exists(self):
            raise ImportError("Please install gcsfs") from ModuleNotFoundError(name="gcsfs")

    monkeypatch.setattr(locations, "path_object", lambda where: Unreachable())
    message = r"cannot reach gs://bucket/x: Please install gcsfs\. .*pip install gcsfs"
    with pytest.raises(MissingExtraError, match=message):
        save_params("gs://bucket/x", SQUARE)
    with pytest.raises(MissingExtraError, match=message):
        restore_params("gs://bucket/x", SQUARE, plan=make_plan(SQUARE, make_mesh({"d": 8}), {}))


def test_a_model_of_hugging_face_is_known_as_such(tmp_path, wide):
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    file = directory / "model.safetensors"
    file.write_bytes((2).to_bytes(8, "little") + b"{}")
    text = "it has weights as safetensors. Load them with load_safetensors(path, mesh, rules)."
    for path in (directory, file):
        for restore in (restore_params, restore_train_state):
            with pytest.raises(CheckpointNotFoundError) as caught:
                restore(path, SQUARE, wide, {})
            assert str(caught.value) == f"there is no checkpoint at {path}: {text}"
    file.rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFoundError, match="without weights as safetensors"):
        restore_params(directory, SQUARE, wide, {})


def test_names_to_rename_must_be_names(square, wide):
    for wrong in (["a"], {"a": 3}, "ab"):
        with pytest.raises(RuleTypeError, match=r"give a dictionary of names, \{'old': 'new'\}"):
            restore_params(square, SQUARE, wide, {}, rename_axes=wrong)
