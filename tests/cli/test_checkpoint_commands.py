"""``penzai-shard checkpoint`` as a shell sees it: what is printed, and the exit status."""

import json
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.cli.main import main
from penzai_shard.library_apis import orbax_api

PROGRAM = """
import jax
import optax
from penzai import pz
import penzai_shard as pzs

def build(seed, width=4):
    return pz.nn.Linear.from_config("l", jax.random.key(seed), {"in": 8}, {"out": width})

def abstract():
    return pzs.abstract_model(build, 0)

def state():
    return pzs.TrainState.initial_state(build(0), optax.adam(1e-2), jax.random.key(0))

def huge():
    return build(0, 2**50)

def broken():
    raise KeyError("no such thing")

struct = jax.ShapeDtypeStruct((8, 4), "float32")
structs = {"l.weights": pz.nx.NamedArray({"in": 8, "out": 4}, struct)}
"""


def build():
    return pz.nn.Linear.from_config("l", jax.random.key(0), {"in": 8}, {"out": 4})


def damage(path, numbers):
    """Changes one byte of each of two arrays where it is stored."""
    for array in numbers:
        start = array.tobytes()[:64]
        # Files that are stored twice are links to one.
        holding = [file for file in pathlib.Path(path).rglob("d/*") if start in file.read_bytes()]
        for file in {file.stat().st_ino: file for file in holding}.values():
            content = bytearray(file.read_bytes())
            content[content.index(start) + 100] ^= 255
            file.write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("shell")
    pzs.save_params(made / "first", build())
    pzs.save_params(made / "turned", {"l.weights": pz.nx.ones({"out": 4, "in": 8})})
    shutil.copytree(made / "first", made / "copy")
    numbers = np.random.default_rng(0).integers(2**31, size=(2, 16, 32)).astype(np.int32)
    blocks = {f"block_{i}/w": pz.nx.wrap(numbers[i], "in", "out") for i in range(2)}
    damage(pzs.save_params(made / "damaged", {**blocks, "whole": pz.nx.ones({"in": 4})}), numbers)
    (made / "my model.py").write_text(PROGRAM)
    (made / "models_here.py").write_text(PROGRAM)
    (made / "script.py").write_text("import sys\nsys.exit(3)\n")
    return made


@pytest.fixture
def shell(folder, monkeypatch, capsys):
    """Runs a command in the folder: its exit status and what it prints."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments):
        status = main(["checkpoint", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_show_prints_a_table_or_json(shell):
    status, printed, errors = shell("show", "first")
    assert (status, errors) == (0, "")
    assert "l.weights      1  in=8, out=4" in printed
    status, printed, _ = shell("show", "first", "--json")
    assert [array["name"] for array in json.loads(printed)["arrays"]] == ["l.weights"]


def test_show_lists_the_checkpoints_of_a_run(shell, tmp_path):
    with pzs.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, {"w": jnp.ones(2)}, {"loss": 0.5})
    status, printed, _ = shell("show", str(tmp_path / "run"))
    assert status == 0
    assert printed.startswith("run: 1 checkpoint, in ")
    assert "loss 0.5" in printed


def test_diff_says_by_its_exit_status_whether_anything_differs(shell):
    status, printed, errors = shell("diff", "first", "turned")
    assert (status, errors) == (1, "")
    assert "order of axes" in printed
    assert json.loads(shell("diff", "first", "turned", "--json")[1])["equal"] is False


def test_equal_checkpoints_are_exit_status_0_and_unknown_values_are_2(shell, folder):
    status, printed, _ = shell("diff", "first", "copy")
    assert status == 0
    assert printed.startswith("equal: 1 array, values compared by checksum")
    for name in ("plain", "again"):
        orbax_api.orbax().save(folder / name, {"w": jnp.ones(3)})
    assert shell("diff", "plain", "again")[0] == 2


def test_verify_says_what_is_damaged(shell):
    status, printed, errors = shell("verify", "first")
    assert (status, errors) == (0, "")
    assert printed == "as it was saved: 1 array, 128 B, in first\n"
    status, printed, errors = shell("verify", "damaged")
    assert (status, errors) == (1, "")
    assert printed.startswith("DAMAGED: 2 of 3 arrays, 4.0 KiB, in damaged\n")
    assert "block_*/w      2  (in=16, out=32) int32  are not those that were saved" in printed
    assert "block_1/w" in shell("verify", "damaged", "--all")[1]
    found = json.loads(shell("verify", "damaged", "--json")[1])
    assert found["damaged"] == ["block_0/w", "block_1/w"]
    assert not found["ok"]


def test_verify_takes_damaged_metadata_for_damage(shell, folder):
    shutil.copytree(folder / "first", folder / "torn")
    (folder / "torn" / "penzai_shard.json").write_text("{}")
    status, printed, _ = shell("verify", "torn")
    assert status == 1
    assert "penzai_shard.json: is not as it was written" in printed
    assert json.loads(shell("verify", "torn", "--json")[1])["ok"] is False
    # To show it is an error, as nothing in it can be believed.
    assert shell("show", "torn")[0] == 2


def test_what_has_no_checksums_is_said_not_to_be_checked(shell, folder):
    orbax_api.orbax().save(folder / "without", {"w": jnp.ones(3)})
    status, printed, _ = shell("verify", "without")
    assert status == 2
    assert printed.startswith("not checked, as no checksums were kept: 1 of 1 array")


MODELS = {
    "my model.py:build(0)": 0,
    "my model.py:build(seed=3)": 0,
    "my model.py:build(0, width=5)": 1,
    "my model.py:abstract": 0,
    "my model.py:structs": 0,
    "my model.py:huge": 1,
    "models_here:build(0)": 0,
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_built_without_memory_and_compared(model, shell):
    status, printed, errors = shell("diff", "first", model)
    assert (status, errors) == (MODELS[model], "")
    assert ("can be restored" in printed) == (status == 0)


def test_a_train_state_is_compared_with_a_checkpoint_of_one(shell, folder):
    status, printed, _ = shell("diff", "first", "my model.py:state")
    assert status == 1
    assert "holds parameters alone" in " ".join(printed.split())


MISTAKES = {
    ("show", "frist"): "the path does not exist. Did you mean",
    ("show", "first/state"): "it is a part of one. Restore the whole",
    ("show", "my model.py"): "it is a file",
    ("show", "gs://bucket/run"): "cannot reach gs://bucket/run: ",
    ("verify", "frist"): "the path does not exist. Did you mean",
    ("diff", "first", "second"): "the path does not exist",
    ("diff", "first", "my model.py:biuld"): "has no 'biuld'. Did you mean my model.py:build?",
    ("diff", "first", "my model.py:build"): "Give its arguments too: my model.py:build(seed=0).",
    ("diff", "first", "my model.py:build(x)"): "arguments are literals",
    ("diff", "first", "my model.py:broken"): "it fails with KeyError: 'no such thing'",
    ("diff", "first", "your_model.py:build"): "there is no file your_model.py",
    ("diff", "first", "no_such_module:build"): "cannot import no_such_module: ModuleNotFoundError",
    ("diff", "first", "script.py:build"): "script.py ends the program when it is imported",
    ("diff", "first", "no/such:place"): "the path does not exist",
    ("diff", "my model.py:build(0)", "first"): "the checkpoint comes first",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, shell):
    status, printed, errors = shell(*arguments)
    assert (status, printed) == (2, "")
    assert MISTAKES[arguments] in errors
    assert errors.startswith("penzai-shard: ")
    assert errors.count("\n") == 1


def test_colours_are_for_terminals_that_want_them(folder, monkeypatch, capsys):
    def printed():
        assert main(["checkpoint", "show", str(folder / "first")]) == 0
        return capsys.readouterr().out

    assert "\x1b" not in printed()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed()


def test_a_reader_that_leaves_early_gets_no_complaint(folder, monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(["checkpoint", "show", str(folder / "first")]) == 141
    assert capsys.readouterr().err == ""


def test_help_has_an_example(capsys):
    for action in ("show", "diff", "verify"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", action, "--help"])
        assert ended.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"For example: penzai-shard checkpoint {action} run/" in shown


def test_arrays_of_one_dtype_more_are_counted_by_dtype(folder, shell, tmp_path):
    pzs.save_params(tmp_path / "mixed", {"a": jnp.ones(2), "b": jnp.ones(3, jnp.int8)})
    _, printed, _ = shell("show", str(tmp_path / "mixed"))
    assert "by dtype: float32 8 B (1 array), int8 3 B (1 array)" in printed
