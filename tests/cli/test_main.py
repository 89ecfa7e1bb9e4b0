"""What the command line promises: exit codes, one clear line, and a demo that works."""

import functools
import io
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from rich.console import Console

import penzai_shard
import penzai_shard_command
from penzai_shard.cli import demo
from penzai_shard.cli.corpus import Corpus
from penzai_shard.cli.main import main, mesh_shape
from penzai_shard.errors import MeshError
from penzai_shard.meshes import make_mesh
from penzai_shard.placement import abstract_model
from penzai_shard.planning import make_plan


def test_a_mesh_is_read_in_the_order_written():
    assert list(mesh_shape("model=2, data=4").items()) == [("model", 2), ("data", 4)]


@pytest.mark.parametrize("text", ["", "data", "data=", "data=x", "data=0", "data=4,,model=2"])
def test_an_unreadable_mesh_is_refused_with_an_example(text):
    with pytest.raises(MeshError, match=r"cannot read mesh .* data=4,model=2"):
        mesh_shape(text)


def test_the_demo_does_the_whole_job_on_another_mesh_and_names_its_files(tmp_path, monkeypatch):
    # As a terminal of 80 columns sees it, with every state of the progress bar.
    written = io.StringIO()
    terminal = functools.partial(Console, file=written, force_terminal=True, width=80)
    monkeypatch.setattr(demo, "Console", terminal)
    monkeypatch.setattr(demo, "DECODER_BLOCKS", 1)
    monkeypatch.setattr(demo, "SAMPLE_LENGTH", 16)
    out = tmp_path / "made" / "here"
    assert main(["demo", "--steps", "3", "--mesh", "data=2,model=4", "--out", str(out)]) == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue()))
    assert [line for line in lines if len(line.rstrip()) > 80 and str(tmp_path) not in line] == []
    bars = [line for line in lines if line.startswith("step ")]
    assert "compiling" in bars[0]
    assert re.search(r"3/3 .* loss \d\.\d{4}, [\d,]+ tokens/s, [\d.,]+ ms/step", bars[-1])
    assert not any("nan" in bar or "inf" in bar for bar in bars)
    printed = " ".join(" ".join(lines).split())
    assert "on mesh (data=2, model=4) each device holds" in printed
    assert "1 constraints inserted" in printed
    assert "parameters: largest difference 0.0 over 12 arrays" in printed
    for name in ("parameters", "plan.json", "training.json", "sample.txt"):
        assert (out / name).exists()
        assert name in printed
    training = json.loads((out / "training.json").read_text())
    assert len(training["loss"]) == 3
    assert training["parameter_difference"] == 0.0
    plan = json.loads((out / "plan.json").read_text())
    query = next(a for a in plan["arrays"] if a["path"].endswith("block_0/attention/query.weights"))
    assert query["spec"] == ["data", "model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--mesh", "rows=4,columns=2"], "the mesh axes data and model, not rows, columns"),
        (["--mesh", "nonsense"], "cannot read mesh 'nonsense'"),
        (
            ["--mesh", "data=64"],
            "--mesh needs 64 devices, and there are 8. Give a smaller mesh, or simulate them on "
            "the CPU: --simulate-devices 64.",
        ),
        (["--mesh", "data=5,model=2"], "--mesh needs 10 devices, and there are 8."),
        (
            ["--mesh", "model=6"],
            "the demo's model does not fit mesh (data=1, model=6): transformer/embedder.embeddings:"
            " logical axis 'vocabulary' (256) does not divide over mesh axis 'model' (6), asked by "
            "rule 'vocabulary' -> 'model'. Pad it to 258, or map 'vocabulary' to None. "
            'Or store it padded: on_indivisible="pad". '
            "Give --mesh data=6,model=1 or --mesh data=3,model=2.",
        ),
        (["--simulate-devices", "0"], "--simulate-devices must be at least 1, not 0."),
        (
            ["--simulate-devices", "64"],
            "JAX has started with 8 CPU devices, and cannot make more.",
        ),
        (
            ["--simulate-devices", "2", "--mesh", "data=4"],
            "--mesh needs 4 devices, and there are 2.",
        ),
    ],
)
def test_a_failing_demo_exits_with_one_clear_line(arguments, message, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("penzai-shard: ")
    assert error.count("\n") == 1


def test_an_unforeseen_failure_is_one_line_too_and_a_traceback_on_request(
    monkeypatch, tmp_path, capsys
):
    def broken(**_):
        raise OSError("disk\nfull")

    monkeypatch.setattr(demo, "run_demo", broken)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "penzai-shard: OSError: disk full\n"
    with pytest.raises(OSError, match="disk"):
        main(["demo", "--out", str(tmp_path), "--debug"])


def test_ctrl_c_ends_cleanly(monkeypatch, tmp_path, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\npenzai-shard: stopped.\n"


def test_a_missing_extra_names_the_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "penzai_shard.cli.demo", raising=False)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert "pip install 'penzai-shard[cli]'" in capsys.readouterr().err


def unusable_folders(tmp_path):
    """Things that ``--out`` cannot be, each with its message."""
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "taken" / "plan.json").mkdir(parents=True)
    (tmp_path / "mine" / "parameters").mkdir(parents=True)
    (tmp_path / "mine" / "parameters" / "letter.txt").write_text("keep me")
    return {
        "a_file": "cannot write there (File exists). Give another folder.",
        "a_file/below": "cannot write there (Not a directory). Give another folder.",
        "taken": "plan.json is a folder there. Give another folder.",
        "mine": "it exists and is not a checkpoint",
    }


@pytest.mark.parametrize("name", ["a_file", "a_file/below", "taken", "mine"])
def test_an_unusable_folder_is_refused_before_any_work(name, monkeypatch, tmp_path, capsys):
    def work(*_, **__):
        raise AssertionError("this is work")

    message = unusable_folders(tmp_path)[name]
    for step in ("_devices", "abstract_model", "sharded_init"):
        monkeypatch.setattr(demo, step, work)
    monkeypatch.setattr(Corpus, "help_pages", work)
    assert main(["demo", "--out", str(tmp_path / name)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "mine" / "plan.json").exists()


def test_a_mesh_takes_no_more_devices_than_it_needs_and_an_axis_left_out_is_1():
    assert len(demo._devices(None, 4)) == 4
    assert len(demo._devices(None, None)) == 8
    assert demo.Layouts.for_shape({"model": 4}).train_shape == {"data": 1, "model": 4}


@pytest.mark.parametrize("data", range(1, 9))
def test_every_mesh_to_train_on_has_one_to_restore_onto(data):
    model = abstract_model(demo.build_model, 0)
    layouts = demo.Layouts.for_shape({"data": data})
    for shape, rules in (
        (layouts.train_shape, layouts.train_rules),
        (layouts.restore_shape, layouts.restore_rules),
    ):
        mesh = make_mesh(shape, jax.devices()[:data])
        assert make_plan(model, mesh, rules, on_unnamed="replicate").leaves
        assert layouts.batch_size % shape["data"] == 0


def run_in_a_new_process(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_python_m_runs_the_command_line_and_simulates_no_devices_for_a_large_mesh_unasked(tmp_path):
    refused = run_in_a_new_process(
        "-m", "penzai_shard", "demo", "--mesh", "data=64", "--out", str(tmp_path)
    )
    assert refused.returncode == 1
    assert "there are 8" in refused.stderr
    assert "--simulate-devices 64" in refused.stderr


def test_devices_are_simulated_when_there_is_one_cpu_and_as_many_as_asked_for():
    code = (
        "from jax.extend.backend import clear_backends\n"
        "from penzai_shard.cli.demo import _devices\n"
        "print(len(_devices(None, None)))\n"
        "clear_backends()\n"
        "print(len(_devices(12, 10)))\n"
    )
    assert run_in_a_new_process("-c", code).stdout.split() == ["8", "10"]


def test_the_version_is_given_by_the_command_and_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"penzai-shard {penzai_shard.__version__}\n"


def test_the_command_line_says_its_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--steps", "--mesh", "--simulate-devices", "--out", "--seed"):
        assert option in shown


def test_the_corpus_is_split_and_its_entropy_is_that_of_single_bytes():
    corpus = Corpus.help_pages()
    assert len(corpus.held_out) > 10_000
    assert 3.0 < corpus.unigram_entropy() < 3.5
    one, again = (next(corpus.batches(7, 4, 16)) for _ in range(2))
    assert dict(one.named_shape) == {"batch": 4, "seq": 16}
    assert (one.data_array == again.data_array).all()


def test_an_interrupt_while_the_command_is_imported_is_one_line_and_exit_status_130(
    monkeypatch, capsys
):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "penzai_shard.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "penzai_shard.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert penzai_shard_command.main() == 130
    assert capsys.readouterr().err == "\npenzai-shard: stopped.\n"
