"""Jobs that are started here: that all processes end together, and what is said."""

import functools
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

from penzai_shard.cli.main import main
from penzai_shard.errors import ShardingError
from penzai_shard.processes import several_processes
from penzai_shard.processes.launching import run_processes
from tests.processes.jobs import SECONDS_PER_JOB

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
SCRIPT = str(HERE / "ending_script.py")


def command(*arguments):
    return [sys.executable, "-m", "penzai_shard", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_PER_JOB,
    )


def test_an_error_in_one_process_is_said_in_the_others():
    done = run("run", "--processes", 2, "--simulate-devices", 4, SCRIPT, 1)
    assert done.returncode == 1
    said = "process 1 failed: ValueError: this cannot go on. Process 0 of 2 ends too."
    assert said in done.stderr
    assert "process 1 of 2 failed with exit status 1" in done.stderr
    assert 'raise ValueError("this cannot go on")' in done.stderr


def test_a_process_that_is_killed_ends_the_others_and_gives_the_status_of_a_shell(capfd):
    code = (
        "import os, signal, time\n"
        "if os.environ['PENZAI_SHARD_PROCESS_ID'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    assert run_processes([sys.executable, "-c", code], 2) == 128 + signal.SIGKILL
    said = "process 0 of 2 was ended by SIGKILL. Ending the others."
    assert said in capfd.readouterr().err


def test_signals_reach_every_process_once(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    open(os.path.join(sys.argv[1], f'{os.getpid()}.{time.monotonic()}'), 'w').close()\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open(os.path.join(sys.argv[1], 'ready' + os.environ['PENZAI_SHARD_PROCESS_ID']), 'w')\n"
        "time.sleep(600)\n"
    )
    starter = (
        "import sys\n"
        "from penzai_shard.processes.launching import run_processes\n"
        "sys.exit(run_processes([sys.executable, *sys.argv[1:]], 3))\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter, "-c", code, str(tmp_path)]) as process:
        while len(list(tmp_path.glob("ready*"))) < 3 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_PER_JOB) == 5
    assert len(list(tmp_path.iterdir())) == 6


def test_a_signal_before_all_processes_are_started_ends_all_of_them(monkeypatch):
    started, start = [], subprocess.Popen

    def start_and_signal(*arguments, **options):
        started.append(start(*arguments, **options))
        if len(started) == 1:
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run_processes(command, 3) == 128 + signal.SIGTERM
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 3


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


def test_a_process_that_cannot_join_says_why(monkeypatch):
    jax.devices()
    with pytest.raises(ShardingError, match="comes too late: JAX has its devices already"):
        several_processes("127.0.0.1:1", 2, 0).__enter__()
    for error, message in (
        (ValueError("coordinator_address should be defined."), r"processes 2 script\.py; or say"),
        (RuntimeError("UNKNOWN: Failed to start RPC server"), "the port may be in use"),
        (RuntimeError("DEADLINE_EXCEEDED"), r"process 1 cannot reach process 0 at 10\.0\.0\.1:1"),
    ):
        monkeypatch.setattr(jax.distributed, "initialize", functools.partial(_fail, error))
        with pytest.raises(ShardingError, match=message):
            several_processes("10.0.0.1:1", 2, 1).__enter__()


def _fail(error, *_, **__):
    raise error
