"""The script of CI ends at the first check that fails, and lets nothing costly come before it."""

import fnmatch
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Stands for every program of a virtual environment; the one that FAILS fits is the last.
PROGRAM = """#!{bash}
echo "${{0##*/}} $*" >> "$LOG"
case "${{0##*/}} $*" in $FAILS) exit 7 ;; esac
"""
# Makes an environment of such programs.
PYTHON = """#!{bash}
if [ "$1" = -c ]; then exit; fi
mkdir -p "$3/bin"
for name in python pip ruff mypy lint-imports; do cp "$PROGRAM" "$3/bin/$name"; done
"""
# In their order.
CHECKS = [
    "pip install --quiet -c constraints.txt -e .[[]all[]]",
    "ruff check .",
    "ruff format --check .",
    "mypy ",
    "lint-imports ",
    "python -m pytest --collect-only *",
    "python -m pytest --quiet tests/test_library_apis.py *",
    "python -m pytest",
    "python -m pytest tests/inspection/test_absent_tpus.py *",
    "python -m pytest tests/readers/test_torch_tensors.py *",
]


@pytest.fixture
def run(tmp_path):
    """Runs the script where every program only says that it was called, but for one that fails."""
    programs = tmp_path / "programs"
    programs.mkdir()
    bash = shutil.which("bash")
    for name in ("bash", "env", "dirname", "grep", "mkdir", "cp"):
        (programs / name).symlink_to(shutil.which(name))
    for path, text in (
        (tmp_path / "program", PROGRAM),
        *((programs / name, PYTHON) for name in ("python3", "python3.13")),
    ):
        path.write_text(text.format(bash=bash))
        path.chmod(0o755)
    shutil.copytree(ROOT / ".ci", tmp_path / "checkout" / ".ci")
    shutil.copy(ROOT / "constraints.txt", tmp_path / "checkout")

    def call(fails):
        log = tmp_path / "log"
        log.write_text("")
        given = {"PATH": programs, "HOME": tmp_path, "PROGRAM": tmp_path / "program"}
        given |= {"LOG": log, "FAILS": fails, "PENZAI_SHARD_CHROMIUM": "chromium"}
        done = subprocess.run(
            [tmp_path / "checkout" / ".ci" / "run"],
            env={name: os.fspath(value) for name, value in given.items()},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, log.read_text().splitlines()

    return call


@pytest.mark.parametrize("check", CHECKS)
def test_the_script_ends_with_the_check_that_fails(run, check):
    done, called = run(check)
    assert done.returncode != 0, done.stderr
    assert fnmatch.fnmatchcase(called[-1], check)


def test_all_that_takes_seconds_comes_before_the_suite(run):
    done, called = run("nothing")
    assert (done.returncode, done.stderr) == (0, "")
    steps = [[fnmatch.fnmatchcase(line, check) for line in called].index(True) for check in CHECKS]
    assert steps == sorted(steps)
