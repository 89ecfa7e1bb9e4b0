"""What the command line promises: exit codes, one clear line, and a demo that works."""

import json
import os
import subprocess
import sys

import pytest

from penzai_shard.cli import demo
from penzai_shard.cli.corpus import Corpus
from penzai_shard.cli.main import main, mesh_shape
from penzai_shard.errors import MeshError


def test_a_mesh_is_read_in_the_order_written():
    assert list(mesh_shape("model=2, data=4").items()) == [("model", 2), ("data", 4)]


@pytest.mark.parametrize("text", ["", "data", "data=", "data=x", "data=0", "data=4,,model=2"])
def test_an_unreadable_mesh_is_refused_with_an_example(text):
    with pytest.raises(MeshError, match=r"cannot read mesh .* data=4,model=2"):
        mesh_shape(text)


def test_the_demo_does_the_whole_job_on_another_mesh_and_names_its_files(tmp_path, capsys):
    out = tmp_path / "made" / "here"
    assert main(["demo", "--steps", "3", "--mesh", "data=2,model=4", "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "on mesh (data=2, model=4) each device holds" in printed
    assert "2 constraints inserted" in printed
    assert "parameters: largest difference 0.0 over 21 arrays" in printed
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
    ("arguments", "told"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--mesh", "rows=4,columns=2"], "the mesh axes data and model, not rows, columns"),
        (["--mesh", "data=5,model=2"], "it needs 10 devices, and there are 8"),
        (["--mesh", "nonsense"], "cannot read mesh 'nonsense'"),
    ],
)
def test_a_failing_demo_exits_with_one_clear_line(arguments, told, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert told in error
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


def test_python_m_runs_the_command_line_and_simulates_devices_when_there_is_one_cpu(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    code = "from penzai_shard.cli.demo import _devices; print(len(_devices(8)))"
    counted = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert counted.stdout.strip() == "8"
    shown = subprocess.run(
        [sys.executable, "-m", "penzai_shard", "demo", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for option in ("--steps", "--mesh", "--out", "--seed"):
        assert option in shown.stdout


def test_the_corpus_is_split_and_its_entropy_is_that_of_single_bytes():
    corpus = Corpus.help_pages()
    assert len(corpus.held_out) > 10_000
    assert 3.0 < corpus.unigram_entropy() < 3.5
    one, again = (next(corpus.batches(7, 4, 16)) for _ in range(2))
    assert dict(one.named_shape) == {"batch": 4, "seq": 16}
    assert (one.data_array == again.data_array).all()
