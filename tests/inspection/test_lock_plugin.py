"""The fixture ``assert_sharding_lock``, in runs of pytest of its own on steps that are stubs."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import penzai_shard
from penzai_shard.inspection.locks.lock_content import (
    CollectiveCount,
    CollectiveGroup,
    LockContent,
    LockedArray,
)

pytest_plugins = "pytester"

PLUGIN = pathlib.Path(penzai_shard.__file__).parent.parent / "penzai_shard_pytest.py"
UPDATE = "--update-sharding-locks"
GATHERS = CollectiveGroup(("block_0/attention",), "backward", "all-gather", "data")


def lock_of(step, gathers=2, device_kind="cpu", temporaries=1000):
    """The lock of a stub of a step, which is compiled to what the arguments say."""
    array = LockedArray("parameters", ("data",), (8,), "float32")
    collectives = {GATHERS: CollectiveCount(gathers, 65536)} if gathers else {}
    memory = {"temporaries": temporaries}
    arrays = {"params/w": array}
    content = LockContent((("data", 4),), device_kind, {}, arrays, collectives, {}, memory)
    return penzai_shard.ShardingLock(content)


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest on test files in this process, where nothing is compiled."""
    monkeypatch.setattr(penzai_shard.ShardingLock, "of", staticmethod(lock_of))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # Neither those of others nor a collection of garbage at the end of each run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*options, ini="", **files):
        for name, body in files.items():
            pytester.makepyfile(**{name: body})
        pytester.makeini(f"[pytest]\n{ini}")
        plugins = ["penzai_shard_pytest", "no:cacheprovider", "no:unraisableexception"]
        return pytester.runpytest_inprocess(*(f"-p{name}" for name in plugins), *options)

    return run


def a_test(name="train", *arguments, test="test_layout"):
    call = ", ".join([f'"{name}"', '"step"', *arguments])
    return f"""
def {test}(assert_sharding_lock):
    assert_sharding_lock({call})
"""


def locks_in(pytester, folder="sharding_locks"):
    return sorted(path.name for path in pytester.path.rglob(f"{folder}/*"))


def test_a_missing_lock_fails_with_the_command_that_writes_it_and_nothing_is_written(run, pytester):
    result = run(test_a=a_test())
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*there is no sharding lock sharding_locks/train.json yet. Write it:",
            f"*  pytest test_a.py::test_layout {UPDATE}",
        ]
    )
    assert locks_in(pytester) == []


def test_a_lock_that_was_written_passes_and_is_written_once(run, pytester):
    result = run(UPDATE, test_a=a_test())
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["written: sharding_locks/train.json"])
    assert locks_in(pytester) == ["train.json"]
    result = run()
    result.assert_outcomes(passed=1)
    assert "sharding locks" not in result.stdout.str()
    result = run(UPDATE)
    assert "written: " not in result.stdout.str()


def test_a_gather_more_fails_with_what_differs_and_the_command_that_accepts_it(run, pytester):
    run(UPDATE, test_a=a_test())
    before = (pytester.path / "sharding_locks/train.json").read_text()
    result = run(test_a=a_test("train", "gathers=3, temporaries=2000"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            '>*assert_sharding_lock("train", "step", gathers=3, temporaries=2000)',
            "E *Failed: sharding lock 'train': not as locked: 2 worse",
            "E *block_0/attention *2 all-gathers over 'data' (64.0 KiB) in the backward pass "
            "became 3 (64.0 KiB) *worse",
            "E *temporaries *1000 B → 2.0 KiB (+100%, tolerance 5%)*worse",
            "E *If this is meant, accept it, and show the file in the pull request:",
            f"E *pytest test_a.py::test_layout {UPDATE}",
        ]
    )
    assert (pytester.path / "sharding_locks/train.json").read_text() == before
    run(UPDATE, "test_a.py::test_layout").assert_outcomes(passed=1)
    run().assert_outcomes(passed=1)
    assert (pytester.path / "sharding_locks/train.json").read_text() != before


def test_tolerance_and_improvements_are_options_of_the_call_and_settings(run):
    run(UPDATE, test_a=a_test())
    better, larger = "gathers=0", "temporaries=1100"
    assert "lock it anew" in run(test_a=a_test("train", better)).stdout.str()
    run(ini="sharding_locks_improvements = pass").assert_outcomes(passed=1)
    run(test_a=a_test("train", better, "improvements='pass'")).assert_outcomes(passed=1)
    run(test_a=a_test("train", larger)).assert_outcomes(failed=1)
    run(ini="sharding_locks_tolerance = 0.2").assert_outcomes(passed=1)
    run(test_a=a_test("train", larger, "tolerance=0.2")).assert_outcomes(passed=1)
    run(
        ini="sharding_locks_tolerance = 0.2",
        test_a=a_test("train", larger, "tolerance=0"),
    ).assert_outcomes(failed=1)


WRONG_SETTINGS = {
    "sharding_locks_folder = ../locks": "../locks is not a folder inside that of the test file",
    "sharding_locks_folder = /locks": "/locks is not a folder inside that of the test file",
    "sharding_locks_folder =": ". is not a folder inside that of the test file",
    "sharding_locks_tolerance = 5%%": "'5%' is not a share such as 0.05",
    "sharding_locks_tolerance = -1": "'-1' is not a share such as 0.05",
    "sharding_locks_improvements = warn": "'warn' is not fail or pass",
}


def test_settings_that_mean_nothing_are_refused(run):
    for ini, message in WRONG_SETTINGS.items():
        result = run(ini=ini.replace("%%", "%"), test_a=a_test())
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert message in result.stderr.str(), ini


def test_locks_are_in_the_folder_that_is_set_beside_the_test_file(run, pytester):
    pytester.mkpydir("deep")
    run(UPDATE, ini="sharding_locks_folder = locks/cpu", **{"deep/test_a": a_test()})
    assert locks_in(pytester, "deep/locks/cpu") == ["train.json"]


@pytest.mark.parametrize(
    "name", ["a/b", "../a", "a\\\\b", "", ".hidden", "a\\n", "a:b", "a.", "a ", "x" * 151, "a*"]
)
def test_names_that_are_no_file_names_everywhere_are_refused(run, pytester, name):
    result = run(UPDATE, test_a=a_test(name))
    result.assert_outcomes(failed=1)
    assert "cannot be the name of a sharding lock, which is that of its file" in result.stdout.str()
    assert locks_in(pytester) == []


def test_names_of_parametrised_tests_are_file_names(run, pytester):
    body = """
import pytest

@pytest.mark.parametrize("layout", ["fsdp", "tensor_parallel"])
def test_layout(assert_sharding_lock, layout, request):
    assert_sharding_lock(request.node.name, "step")
"""
    run(UPDATE, test_a=body).assert_outcomes(passed=2)
    assert locks_in(pytester) == ["test_layout[fsdp].json", "test_layout[tensor_parallel].json"]
    run(test_a=body).assert_outcomes(passed=2)


def test_a_lock_belongs_to_one_test_and_one_step(run):
    two = a_test() + a_test("TRAIN", test="test_other")
    result = run(UPDATE, test_a=two)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*several tests have the sharding lock sharding_locks/*.json. Give each a name of its "
            "own: test_a.py::test_layout, test_a.py::test_other"
        ]
    )
    result = run(test_a=a_test(), test_b=a_test())
    result.assert_outcomes(passed=1, failed=1)
    twice = a_test() + '    assert_sharding_lock("train", "step")\n'
    result = run(test_a=twice, test_b="")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*this test compares two steps with the sharding lock 'train'.*"])


def test_a_damaged_lock_fails_with_its_place_and_can_be_written_anew(run, pytester):
    run(UPDATE, test_a=a_test())
    file = pytester.path / "sharding_locks/train.json"
    file.write_text(file.read_text().replace('"count": 2', '"count": 9'))
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*sharding_locks/train.json: this sharding lock cannot be read:",
            "*collectives: changed after they were written.*",
            f"*pytest test_a.py::test_layout {UPDATE}",
        ]
    )
    run(UPDATE).assert_outcomes(passed=1)
    run().assert_outcomes(passed=1)


def test_a_lock_of_another_kind_of_device_is_not_compared_and_not_written_over(run, pytester):
    run(UPDATE, test_a=a_test())
    before = (pytester.path / "sharding_locks/train.json").read_text()
    result = run(test_a=a_test("train", "device_kind='TPU v4'"))
    result.assert_outcomes(failed=1)
    assert "device kind: the lock is of 'cpu', the step of 'TPU v4'." in result.stdout.str()
    result = run(UPDATE)
    result.assert_outcomes(failed=1)
    assert "it is not written over. Give each kind of device a name of" in result.stdout.str()
    assert (pytester.path / "sharding_locks/train.json").read_text() == before


UNUSED = "no test has these locks"


def test_a_lock_that_no_test_has_is_reported_where_all_tests_beside_it_ran(run, pytester):
    run(UPDATE, test_a=a_test() + a_test("old", test="test_old"), test_b=a_test("other"))
    assert UNUSED not in run().stdout.str()
    result = run(test_a=a_test() + "\ndef test_plain():\n    pass\n")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines([f"{UNUSED}*", "  rm sharding_locks/old.json"])
    assert locks_in(pytester) == ["old.json", "other.json", "train.json"]
    incomplete = [
        ["test_a.py"],  # The lock may be of the other file.
        ["-k", "layout"],
        ["test_a.py::test_layout", "test_a.py::test_plain", "test_b.py"],
        ["--deselect", "test_a.py::test_plain"],
        ["--collect-only"],
        ["--ignore", "test_b.py"],
    ]
    for options in incomplete:
        assert UNUSED not in run(*options).stdout.str(), options
    for stopped in ("raise ValueError", "pytest.skip()", "pytest.xfail()"):
        result = run(test_a=f"import pytest\ndef test_plain():\n    {stopped}\n{a_test()}")
        assert UNUSED not in result.stdout.str(), stopped


STUB = '''
"""In the place of penzai_shard, which would take two seconds in each process."""
import dataclasses, json, pathlib, types

class LockError(ValueError):
    pass

errors = types.SimpleNamespace(LockError=LockError)

class Report(list):
    def __bool__(self):
        return not len(self)

@dataclasses.dataclass
class ShardingLock:
    content: object

    @classmethod
    def of(cls, value):
        return cls(types.SimpleNamespace(device_kind="cpu", value=value))

    @classmethod
    def load(cls, path):
        return cls.of(json.loads(path.read_text()))

    def to_json(self):
        return json.dumps(self.content.value)

    def save(self, path):
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.to_json())

    def check_lock(self, other, **options):
        return Report(["differs"] if self.content != other.content else [])
'''


def test_processes_of_xdist_share_locks_as_one_does(tmp_path):
    """In processes of their own, with a stub in the place of the library."""
    shutil.copy(PLUGIN, tmp_path)
    (tmp_path / "penzai_shard.py").write_text(STUB)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    body = (
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(6))\n"
        "def test_layout(assert_sharding_lock, i):\n"
        "    assert_sharding_lock(NAME, 7)\n"
    )
    file = tmp_path / "test_a.py"

    def run(*options):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        environment |= {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-pxdist", "-ppenzai_shard_pytest", "-n2"]
        command += options
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    file.write_text(body.replace("NAME", "f'step_{i}'"))
    done = run(UPDATE)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^written: sharding_locks/step_\d\.json$", done.stdout, re.M)) == 6
    # The first two tests go to one process, the next two to the other.
    file.write_text(body.replace("NAME", "f'step_{i or 2}'"))
    done = run()
    assert done.returncode == 1, done.stdout
    assert "6 passed" in done.stdout
    assert "rm sharding_locks/step_0.json" in done.stdout
    assert (
        "several tests have the sharding lock sharding_locks/step_2.json. Give each a name of its "
        "own: test_a.py::test_layout[0], test_a.py::test_layout[2]" in done.stdout
    )


def test_loading_the_plugin_imports_neither_jax_nor_this_library(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import sys\n"
        "def test_nothing():\n"
        "    assert 'penzai_shard_pytest' in sys.modules\n"
        "    loaded = {'jax', 'jaxlib', 'penzai_shard', 'penzai', 'numpy'} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "penzai_shard_pytest", "-q"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PLUGIN.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_folders_with_a_conftest_of_their_own_run_beside_others(run, pytester):
    for folder in ("one", "other"):
        (pytester.mkdir(folder) / f"test_{folder}.py").write_text(a_test(folder))
    (pytester.path / "one" / "conftest.py").write_text("")
    run(UPDATE).assert_outcomes(passed=2)
    run().assert_outcomes(passed=2)
