"""Gives pytest the fixture ``assert_sharding_lock``.

pytest loads plugins before any ``conftest.py``, where the platform and the devices of JAX are
chosen. So JAX, and what imports it, is imported when the fixture is called.
"""

import itertools
import os
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

_UPDATE = "--update-sharding-locks"
_FOLDER, _TOLERANCE = "sharding_locks_folder", "sharding_locks_tolerance"
_IMPROVEMENTS = "sharding_locks_improvements"
# With these options tests are left out, and nobody can say which locks have no test.
_PARTIAL = ("keyword", "markexpr", "deselect", "lf", "ignore", "ignore_glob", "collectonly")
# Which test of this process has a lock, by the path of its file.
_TESTS = pytest.StashKey[dict[str, str]]()
# What a test says of itself to the end, also of pytest-xdist: its locks, and lines.
_LOCK, _LINE = "sharding_lock", "sharding_lock_line"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option and the settings."""
    group = parser.getgroup("sharding locks")
    group.addoption(_UPDATE, action="store_true", help="write the locks of the steps as they are")
    parser.addini(_FOLDER, "folder of the locks, beside the test's file", default="sharding_locks")
    parser.addini(_TOLERANCE, "by which fraction bytes may differ", default="0.05")
    parser.addini(_IMPROVEMENTS, "fail or pass: a step better than its lock", default="fail")


def pytest_configure(config: pytest.Config) -> None:
    """Reads the settings."""
    tolerance, improvements = config.getini(_TOLERANCE), config.getini(_IMPROVEMENTS)
    if not re.fullmatch(r"\d*\.?\d+", tolerance):
        raise pytest.UsageError(f"{_TOLERANCE} is {tolerance!r}. Write a fraction such as 0.05.")
    if improvements not in ("fail", "pass"):
        raise pytest.UsageError(f"{_IMPROVEMENTS} is {improvements!r}. Write fail or pass.")


@pytest.fixture
def assert_sharding_lock(request: pytest.FixtureRequest) -> Callable[..., None]:
    """assert_sharding_lock(name, step, /, *args, tolerance=None, **kwargs) fails if the layouts,
    collectives or memory of the step are not those of sharding_locks/<name>.json beside the test.

    The step is compiled and not run. With --update-sharding-locks the lock is written instead."""
    config, test = request.config, str(request.node.nodeid)
    properties = request.node.user_properties

    def assert_lock(
        name: str, step: Any, /, *args: Any, tolerance: float | None = None, **kwargs: Any
    ) -> None:
        __tracebackhide__ = True
        path = request.path.parent / config.getini(_FOLDER) / f"{name}.json"
        shown = os.path.relpath(path, config.invocation_params.dir)
        other = config.stash.setdefault(_TESTS, {}).setdefault(shown, test)
        if other != test:
            pytest.fail(f"{shown} is the lock of {other} too. Give each test a name of its own.")
        properties.append((_LOCK, shown))

        # Not before: by now conftest.py has done to JAX what it does.
        from penzai_shard.errors import LockError
        from penzai_shard.inspection.locks import ShardingLock

        if config.getoption(_UPDATE):
            lock = ShardingLock.of(step, *args, **kwargs)
            if not path.exists() or path.read_text(encoding="utf-8") != lock.to_json():
                lock.save(path)
                properties.append((_LINE, f"written: {shown}"))
            return
        place = shlex.quote(str(config.cwd_relative_nodeid(request.node.nodeid)))
        accept = f"To accept the step as it is:\n  pytest {place} {_UPDATE}"
        if tolerance is None:
            tolerance = float(config.getini(_TOLERANCE))
        options: Any = {"tolerance": tolerance, "improvements": config.getini(_IMPROVEMENTS)}
        try:
            report = ShardingLock.load(path).check(step, *args, **options, **kwargs)
            problem = "" if report else f"{shown}: {report}"
        except LockError as error:
            problem = str(error)
        # Out of the clause, so that pytest shows no traceback of an error that was caught.
        if problem:
            pytest.fail(f"{problem}\n{accept}")
        # Where not all is compared, a test that passes says so.
        properties.extend((_LINE, f"{shown}: {note}") for note in report.notes)

    return assert_lock


# The locks as a whole


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says which locks were written, which were compared in part, and which have no test."""
    reports = itertools.chain.from_iterable(terminalreporter.stats.values())
    said = [x for one in reports if getattr(one, "when", "") == "call" for x in one.user_properties]
    lines = [line for name, line in said if name == _LINE]
    ran_all = not any(config.getoption(option, None) for option in _PARTIAL)
    if ran_all and set(terminalreporter.stats) <= {"", "passed", "warnings"}:
        known = {path for name, path in said if name == _LOCK}
        lines += [f"no test has it: rm {shlex.quote(path)}" for path in _unused(config, known)]
    if lines:
        terminalreporter.section("sharding locks")
    for line in lines:
        terminalreporter.write_line(line)


def _unused(config: pytest.Config, known: set[str]) -> list[str]:
    """The locks that no test has, in folders that pytest was called for as a whole."""
    here = config.invocation_params.dir
    roots = [(here / arg).resolve() for arg in config.args]
    folders = sorted({os.path.dirname(path) for path in known})
    whole = [f for f in folders if any((here / f).resolve().is_relative_to(r) for r in roots)]
    files = (os.path.join(f, file.name) for f in whole for file in (here / f).glob("*.json"))
    return sorted(file for file in files if file not in known)
