"""The fixture ``assert_sharding_lock``, in runs of pytest of its own where nothing is compiled."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import penzai_shard as pzs

pytest_plugins = "pytester"

# Imported here: pytester takes modules away that a test imports, and JAX cannot be imported twice.
LOCK = pzs.ShardingLock
ROOT = pathlib.Path(pzs.__file__).parents[1]
PLUGIN = "penzai_shard.inspection.pytest_plugin"
UPDATE = "--update-sharding-locks"
# What a test file writes in the place of compiling: the step is the bytes that it sends.
STUB = """
from penzai_shard.inspection.locks import LockRow, ShardingLock
row = lambda step: LockRow("mlp", "all-gather over data", times=1, sent=step)
ShardingLock.of = staticmethod(lambda step: ShardingLock({"device": "cpu"}, (row(step),)))
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setattr(LOCK, "of", LOCK.of)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*options, ini="", **files):
        for name, body in files.items():
            pytester.makepyfile(**{name: STUB + body})
        pytester.makeini(f"[pytest]\n{ini}")
        plugins = [PLUGIN, "no:cacheprovider", "no:unraisableexception"]
        return pytester.runpytest_inprocess(*(f"-p{name}" for name in plugins), *options)

    return run


def a_test(name="train", step="1000", test="test_layout"):
    return f"\ndef {test}(assert_sharding_lock):\n    assert_sharding_lock('{name}', {step})\n"


def test_assert_sharding_lock_is_written_by_the_option_and_by_nothing_else(run, pytester):
    file, command = pytester.path / "sharding_locks/train.json", f"*pytest test_a.py::* {UPDATE}"
    result = run(test_a=a_test())
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*sharding_locks/train.json*", command])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*the above exception*")
    assert not file.exists()

    result = run(UPDATE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["written: sharding_locks/train.json"])
    written = file.read_text()
    for options in ([], [UPDATE]):
        result = run(*options)
        result.assert_outcomes(passed=1)
        result.stdout.no_fnmatch_line("written: *")

    result = run(test_a=a_test(step="3000"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*mlp*all-gather over data*sent*1000 B*2.9 KiB*", command])
    assert file.read_text() == written

    # With another compiler only layouts are compared, and a test that passes says so.
    file.write_text(written.replace('"cpu"', '"TPU v4"'))
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["sharding_locks/train.json: only layouts *"])


def test_assert_sharding_lock_settings_and_tolerance_of_a_call(run, pytester):
    run(UPDATE, ini="sharding_locks_folder = locks/cpu", test_a=a_test())
    assert (pytester.path / "locks/cpu/train.json").exists()
    run(UPDATE)
    for step, ini, passed in [
        ("1100", "", False),
        ("1100", "sharding_locks_tolerance = 0.2", True),
        ("1100, tolerance=0.2", "", True),
        ("1100, tolerance=0.0", "sharding_locks_tolerance = 0.2", False),
        ("500", "", False),
        ("500", "sharding_locks_improvements = pass", True),
    ]:
        result = run(ini=ini, test_a=a_test(step=step))
        result.assert_outcomes(passed=int(passed), failed=int(not passed))
    for ini in ("sharding_locks_tolerance = 5%", "sharding_locks_improvements = warn"):
        assert run(ini=ini).ret == pytest.ExitCode.USAGE_ERROR


def test_assert_sharding_lock_is_of_one_test(run):
    tests = [a_test(name, test=f"test_{i}") for i, name in enumerate(("train", "a[2]", "train"))]
    result = run(UPDATE, test_a="".join(tests))
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*train.json is the lock of *::test_0 too.*"])


def test_assert_sharding_lock_without_a_test_is_reported(run):
    run(UPDATE, test_a=a_test() + a_test("old", test="test_old"), test_b=a_test("other"))
    result = run(test_a=a_test() + "\ndef test_plain():\n    pass\n")
    result.stdout.fnmatch_lines(["no test has it: rm sharding_locks/old.json"])
    # Where tests were left out or stopped, nobody can say it.
    for options in (["test_a.py"], ["-k", "layout"], ["--ignore", "test_b.py"]):
        run(*options).stdout.no_fnmatch_line("*no test has it*")
    result = run(test_a=a_test() + "\ndef test_plain():\n    raise ValueError\n")
    result.stdout.no_fnmatch_line("*no test has it*")


def test_assert_sharding_lock_processes_of_xdist_share_what_they_know(tmp_path):
    body = """
import sys
import types
import pytest

stub = types.SimpleNamespace(to_json=str, save=lambda path: path.touch())
lock = types.SimpleNamespace(of=lambda step: stub)
sys.modules["penzai_shard.inspection.locks"] = types.SimpleNamespace(ShardingLock=lock)

@pytest.mark.parametrize("i", range(4))
def test_layout(assert_sharding_lock, i):
    assert_sharding_lock(f"step_{i}", 7)
    # The plugin itself imports neither JAX nor what imports it.
    assert {"jax", "jaxlib", "numpy"}.isdisjoint(sys.modules)
"""
    (tmp_path / "sharding_locks").mkdir()
    (tmp_path / "sharding_locks" / "old.json").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a.py").write_text(body)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-pxdist", f"-p{PLUGIN}", "-n2", UPDATE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^written: sharding_locks/step_\d\.json$", done.stdout, re.M)) == 4
    assert re.findall("no test has it: rm (.*)", done.stdout) == ["sharding_locks/old.json"]
