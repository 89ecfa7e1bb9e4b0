"""The demo over processes: started by the command, and the same numbers as in one process."""

import json
import sys

import pytest

from penzai_shard.cli import processes as cli_processes
from penzai_shard.cli.main import main
from tests.processes import jobs


def test_two_processes_train_save_restore_and_sample_and_the_first_one_speaks(tmp_path):
    first, second = jobs.run("demonstration", [str(tmp_path)])
    assert first["status"] == second["status"] == 0
    assert "parameters: largest difference 0.0" in first["printed"]
    assert second["printed"] == ""
    training = json.loads((tmp_path / "training.json").read_text())
    assert len(training["loss"]) == 2
    assert training["trained_loss"] == pytest.approx(training["restored_loss"], abs=1e-4)
    assert (tmp_path / "sample.txt").exists()


def test_the_command_starts_itself_in_every_process_with_its_share_of_the_devices(monkeypatch):
    started = []
    monkeypatch.setattr(
        cli_processes, "run_processes", lambda *arguments: started.append(arguments) or 3
    )
    assert main(["demo", "--processes", "2", "--steps", "5"]) == 3
    assert main(["demo", "--processes", "3", "--mesh", "data=3,model=2"]) == 3
    assert main(["run", "--processes", "2", "train.py", "--steps", "5"]) == 3
    (command, count, environment), (_, _, of_six), (script, _, unchanged) = started
    options = ["--processes", "2", "--steps", "5"]
    assert command == [sys.executable, "-m", "penzai_shard", "demo", *options]
    assert count == 2
    assert "--xla_force_host_platform_device_count=4" in environment["XLA_FLAGS"]
    assert "--xla_force_host_platform_device_count=8" not in environment["XLA_FLAGS"]
    assert "--xla_force_host_platform_device_count=2" in of_six["XLA_FLAGS"]
    assert script == [sys.executable, "train.py", "--steps", "5"]
    assert unchanged == {}
