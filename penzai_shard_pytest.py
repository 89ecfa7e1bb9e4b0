"""What pytest gets from penzai_shard: the fixture ``assert_sharding_lock``.

A module of its own beside the package, because pytest loads plugins at every start, before any
``conftest.py``, where JAX' platform and devices are chosen. So ``penzai_shard``, and JAX with it,
is imported only when the fixture is called.
"""

import dataclasses
import fnmatch
import os
import pathlib
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

OPTION = "--update-sharding-locks"
FOLDER, TOLERANCE, IMPROVEMENTS = (
    "sharding_locks_folder",
    "sharding_locks_tolerance",
    "sharding_locks_improvements",
)
# What a worker of pytest-xdist tells the process that started it.
_OUTPUT = "penzai_shard_locks"
_NAME = re.compile(r"\w[\w.,=+@\[\]() -]{0,149}")
_SESSION = pytest.StashKey["_LocksOfSession"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option and the settings."""
    group = parser.getgroup("sharding locks")
    group.addoption(
        OPTION, action="store_true", help="write the locks of assert_sharding_lock as steps are now"
    )
    parser.addini(FOLDER, "folder of locks, seen from the test file's", default="sharding_locks")
    parser.addini(TOLERANCE, "how far bytes may be from a lock's, as a share", default="0.05")
    parser.addini(IMPROVEMENTS, "fail or pass: what became better than its lock", default="fail")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to keep what the session does with locks."""
    folder, tolerance = pathlib.Path(config.getini(FOLDER)), config.getini(TOLERANCE)
    # Seen from another place, nobody could say whose a lock is.
    if folder.is_absolute() or ".." in folder.parts or folder == pathlib.Path():
        raise pytest.UsageError(f"{FOLDER} = {folder} is not a folder inside that of the test file")
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", tolerance):
        raise pytest.UsageError(f"{TOLERANCE} = {tolerance!r} is not a share such as 0.05")
    if (improvements := config.getini(IMPROVEMENTS)) not in ("fail", "pass"):
        raise pytest.UsageError(f"{IMPROVEMENTS} = {improvements!r} is not fail or pass")
    session = _LocksOfSession(config)
    config.stash[_SESSION] = session
    config.pluginmanager.register(session, "penzai_shard_locks_of_session")


@pytest.fixture
def assert_sharding_lock(request: pytest.FixtureRequest) -> "AssertShardingLock":
    """assert_sharding_lock("train_step", step, state, tokens=tokens) fails if the step's layouts,
    collectives or memory are not those of sharding_locks/train_step.json beside the test."""
    return AssertShardingLock(request)


class AssertShardingLock:
    """Compares steps with the locks of one test; see ``__call__``."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._config = request.config
        self._session = request.config.stash[_SESSION]
        self._nodeid = request.node.nodeid
        self._folder = request.path.parent / request.config.getini(FOLDER)
        self._names: set[str] = set()

    def __call__(
        self,
        name: str,
        step: Any,
        /,
        *args: Any,
        tolerance: float | None = None,
        improvements: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Fails the test if a step is not as its lock says. The step is compiled and not run.

        With ``--update-sharding-locks`` it writes the lock instead; nothing else does.

        Args:
            name: The name of the lock, which no other test has: that of its file.
            step: A train step, a function under ``jax.jit``, or a layer.
            *args: What it is called with, concrete or abstract.
            tolerance: How far bytes may be from the lock's, as a share of them; by default the
                setting ``sharding_locks_tolerance``, which is 0.05.
            improvements: ``"pass"`` to accept what became better, ``"fail"`` to ask for a new lock;
                by default the setting ``sharding_locks_improvements``, which is ``"fail"``.
            **kwargs: What the step is called with by keyword.
        """
        __tracebackhide__ = True
        path = self._claimed(name)
        # Not before: what a conftest.py does to JAX has been done now.
        import penzai_shard

        lock: Any = None
        if path.exists() or not self._session.updates:
            lock = self._loaded(path, penzai_shard)
        now = penzai_shard.ShardingLock.of(step, *args, **kwargs)
        if self._session.updates:
            self._write(path, lock, now)
            return
        try:
            report = lock.check_lock(
                now,
                tolerance=float(self._config.getini(TOLERANCE)) if tolerance is None else tolerance,
                improvements=improvements or self._config.getini(IMPROVEMENTS),
            )
        except penzai_shard.errors.LockError as error:
            pytest.fail(f"sharding lock {name!r}: {error}")
        if not report:
            pytest.fail(
                f"sharding lock {name!r}: {report}\n"
                f"If this is meant, accept it, and show the file in the pull request:\n"
                f"  {self._command()}"
            )

    def _claimed(self, name: str) -> pathlib.Path:
        """The file of a lock, which belongs to this test from now on."""
        __tracebackhide__ = True
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith((" ", ".")):
            pytest.fail(
                f"{name!r} cannot be the name of a sharding lock, which is that of its file: up to "
                "150 letters, digits and -_.,=+@[]() without slashes, a letter or digit first."
            )
        if name.casefold() in self._names:
            pytest.fail(
                f"this test compares two steps with the sharding lock {name!r}. "
                "Give each a name of its own."
            )
        self._names.add(name.casefold())
        path = self._folder / f"{name}.json"
        if (other := self._session.claim(path, self._nodeid)) is not None:
            pytest.fail(_two_tests(self._session.shown(path), [other, self._nodeid]))
        return path

    def _loaded(self, path: pathlib.Path, penzai_shard: Any) -> Any:
        __tracebackhide__ = True
        shown = self._session.shown(path)
        if not path.exists():
            pytest.fail(f"there is no sharding lock {shown} yet. Write it:\n  {self._command()}")
        try:
            return penzai_shard.ShardingLock.load(path)
        except penzai_shard.errors.LockError as error:
            if self._session.updates:
                return None
            pytest.fail(f"{error}\nWrite it anew:\n  {self._command()}")

    def _write(self, path: pathlib.Path, lock: Any, now: Any) -> None:
        __tracebackhide__ = True
        if lock is not None and lock.content.device_kind != now.content.device_kind:
            pytest.fail(
                f"{self._session.shown(path)} is of {lock.content.device_kind!r}, and this step of "
                f"{now.content.device_kind!r}: it is not written over. Give each kind of device a "
                "name of its own, or delete the file first."
            )
        if lock is None or lock.to_json() != now.to_json():
            now.save(path)
            self._session.written.append(str(path))

    def _command(self) -> str:
        nodeid = self._config.cwd_relative_nodeid(self._nodeid)
        return f"pytest {shlex.quote(str(nodeid))} {OPTION}"


@dataclasses.dataclass(eq=False)
class _LocksOfSession:
    """Which test has which lock, in one process or in those of pytest-xdist.

    Attributes:
        config: pytest's.
        users: For each lock that was asked for, by its path without regard to case, the path and
            the tests that asked for it.
        written: The locks that were written.
        tests: The tests of each folder that has locks.
        passed: The tests that passed.
        all_ran: Whether no test was left out or lost, as far as is known.
    """

    config: pytest.Config
    users: dict[str, tuple[str, list[str]]] = dataclasses.field(default_factory=dict)
    written: list[str] = dataclasses.field(default_factory=list)
    tests: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    passed: set[str] = dataclasses.field(default_factory=set)
    all_ran: bool = True

    @property
    def updates(self) -> bool:
        """Whether locks are written."""
        return bool(self.config.getoption(OPTION))

    def claim(self, path: pathlib.Path, nodeid: str) -> str | None:
        """Says that a test has a lock; gives the test that has it already, if there is another."""
        _, users = self.users.setdefault(str(path).casefold(), (str(path), []))
        if nodeid not in users:
            users.append(nodeid)
        return users[0] if users[0] != nodeid else None

    def shown(self, path: str | os.PathLike[str]) -> str:
        """A path as one would type it where pytest was called."""
        try:
            return os.path.relpath(path, self.config.invocation_params.dir)
        except ValueError:  # On another drive.
            return os.fspath(path)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Tests were left out."""
        self.all_ran = self.all_ran and not list(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keeps the tests of folders that have locks."""
        for item in session.items:
            folder = item.path.parent / self.config.getini(FOLDER)
            if str(folder) in self.tests or folder.is_dir():
                self.tests.setdefault(str(folder), []).append((str(item.path), item.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps which tests passed; of pytest-xdist, the first process gets this too."""
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Takes what a worker of pytest-xdist has kept."""
        output = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if error or output is None:
            self.all_ran = False
            return
        for path, nodeids in output["users"]:
            for nodeid in nodeids:
                self.claim(pathlib.Path(path), nodeid)
        self.written += output["written"]
        self.tests |= output["tests"]
        self.all_ran = self.all_ran and output["all_ran"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tells the first process; there, fails the run if tests of two processes have a lock."""
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output[_OUTPUT] = {
                "users": list(self.users.values()),
                "written": self.written,
                "tests": self.tests,
                "all_ran": self.all_ran,
            }
        elif list(self._shared()) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what was written, and what is wrong with the locks as a whole."""
        lines = [f"written: {self.shown(path)}" for path in sorted(set(self.written))]
        lines += [_two_tests(self.shown(path), users) for path, users in self._shared()]
        if unused := list(self._unused()):
            lines.append("no test has these locks; if they are not needed any more:")
            lines += [f"  rm {shlex.quote(self.shown(path))}" for path in unused]
        if lines:
            terminalreporter.section("sharding locks")
            for line in lines:
                terminalreporter.write_line(line)

    def _shared(self) -> Iterator[tuple[str, list[str]]]:
        """The locks that several tests have, with these tests."""
        return ((path, users) for path, users in self.users.values() if len(users) > 1)

    def _unused(self) -> Iterator[str]:
        """The locks that no test has, of folders all of whose tests passed."""
        if not self.all_ran or any("::" in arg for arg in self.config.args):
            return
        for folder, tests in self.tests.items():
            ran = {path for path, _ in tests}
            might = set(self._files_with_locks(next(iter(ran))))
            if might <= ran and all(nodeid in self.passed for _, nodeid in tests):
                for file in sorted(pathlib.Path(folder).glob("*.json")):
                    if str(file).casefold() not in self.users:
                        yield str(file)

    def _files_with_locks(self, beside: str) -> Iterator[str]:
        """The files of tests in the folder of one of them that speak of locks."""
        patterns = self.config.getini("python_files")
        for file in pathlib.Path(beside).parent.glob("*.py"):
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns) and (
                "assert_sharding_lock" in file.read_text(encoding="utf-8", errors="replace")
            ):
                yield str(file)


def _two_tests(path: str, nodeids: Iterable[str]) -> str:
    return f"several tests have the sharding lock {path}. Give each a name of its own: " + (
        ", ".join(sorted(nodeids))
    )
