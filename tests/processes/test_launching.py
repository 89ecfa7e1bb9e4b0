"""Jobs that are started here: that all processes end together, and what is said."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from penzai_shard.cli.main import main
from penzai_shard.errors import RuleTypeError
from penzai_shard.processes import several_processes
from penzai_shard.processes.launching import run_processes

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
SCRIPT = str(HERE / "ending_script.py")


def command(*arguments):
    return [sys.executable, "-m", "penzai_shard", *map(str, arguments)]


def run(*arguments, seconds=120):
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


def run_script(how, victim):
    start = time.monotonic()
    done = run("run", "--processes", 2, "--simulate-devices", 4, SCRIPT, how, victim)
    return done, time.monotonic() - start


def test_a_script_runs_in_all_processes_and_the_first_one_is_shown():
    done, _ = run_script("well", 0)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines == ["done 0 2 2"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_by_name(victim):
    done, seconds = run_script("killed", victim)
    assert done.returncode == 128 + signal.SIGKILL
    assert f"process {victim} of 2 was ended by SIGKILL. Ending the others." in done.stderr
    if victim:
        assert re.search(r"what process 1 printed last:\n  about to end\n", done.stderr)
    assert seconds < 60


def test_an_error_in_one_process_is_said_in_the_others():
    done, seconds = run_script("error", 1)
    assert done.returncode == 1
    said = "process 1 failed: ValueError: this cannot go on. Process 0 of 2 ends too."
    assert said in done.stderr
    assert "process 1 of 2 failed with exit status 1" in done.stderr
    assert 'raise ValueError("this cannot go on")' in done.stderr
    assert seconds < 60


def test_the_process_that_failed_first_gives_the_exit_status():
    done, _ = run_script("exit", 0)
    assert done.returncode == 7
    assert "process 0 of 2 failed with exit status 7" in done.stderr


def test_signals_reach_every_process_once(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    open(os.path.join(sys.argv[1], f'{os.getpid()}.{time.monotonic()}'), 'w').close()\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open(os.path.join(sys.argv[1], 'ready' + os.environ['PENZAI_SHARD_PROCESS_ID']), 'w')\n"
        "time.sleep(60)\n"
    )
    starter = (
        "import sys\n"
        "from penzai_shard.processes.launching import run_processes\n"
        "sys.exit(run_processes([sys.executable, *sys.argv[1:]], 3))\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter, "-c", code, str(tmp_path)]) as process:
        ends = time.monotonic() + 60
        while len(list(tmp_path.glob("ready*"))) < 3 and time.monotonic() < ends:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 5
    assert len(list(tmp_path.iterdir())) == 6


def test_what_a_process_printed_is_shown_if_it_fails(capfd):
    code = "import os; print('I am', os.environ['PENZAI_SHARD_PROCESS_ID']); raise SystemExit({})"
    fails_in_1 = code.format("3 * (os.environ['PENZAI_SHARD_PROCESS_ID'] == '1')")
    assert run_processes([sys.executable, "-c", fails_in_1], 2) == 3
    assert "process 1 printed last:\n  I am 1\n" in capfd.readouterr().err


def test_mistakes_are_refused_before_anything_starts(capsys, monkeypatch):
    assert main(["demo", "--processes", "3"]) == 1
    assert "8 simulated devices cannot be divided among 3 processes" in capsys.readouterr().err
    assert main(["run", "--processes", "0", "--simulate-devices", "8", "x.py"]) == 1
    assert "--processes must be at least 1, not 0" in capsys.readouterr().err
    assert main(["demo", "--processes", "2", "--coordinator", "127.0.0.1:1"]) == 1
    assert "--coordinator and --process-id belong together" in capsys.readouterr().err
    assert main(["run", "--processes", "2", "no_such_program"]) == 1
    assert "no_such_program" in capsys.readouterr().err
    with (
        pytest.raises(RuleTypeError, match=r"penzai-shard run --processes 2 script\.py"),
        several_processes(),
    ):
        pass
