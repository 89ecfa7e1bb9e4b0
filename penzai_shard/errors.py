"""Collects what is wrong, and raises it once.

A problem is a record: a path, one sentence of fact, one fix that can be pasted, and a kind on which
code may branch. Nothing reads a message.
"""

import dataclasses
import importlib
import reprlib
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penzai_shard.paths import paths_text

# Lines of a message, and paths that one of its lines names.
_MOST_LINES = 38
_MOST_PATHS = 6
# Frames of these packages are not the caller's.
_PASSED_THROUGH = frozenset({"penzai_shard", "penzai", "jax", "equinox", "contextlib"})


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: Where: the path of an array or a layer, ``""`` for the whole.
        what: One sentence of fact, without the path and without a full stop.
        fix: One sentence that says what to write instead, with its full stop.
        kind: What code may branch on, for instance ``"indivisible"``.

    >>> print(Problem("mlp/up", "rule 'embed' -> 'data' fits no array", "Map 'embedding'."))
    mlp/up: rule 'embed' -> 'data' fits no array. Map 'embedding'.
    """

    path: str
    what: str
    fix: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return _line(self.path, self.what, self.fix)


class ShardingError(ValueError):
    """Base of every error that this library raises.

    Attributes:
        problems: All offenders, in the order in which they were found. The message shows those
            with the same fact and fix as one line.
    """

    def __init__(self, headline: str, problems: Iterable[Problem] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(headline, self.problems)

    def __str__(self) -> str:
        alike: dict[tuple[str, str], list[str]] = {}
        for problem in self.problems:
            alike.setdefault((problem.what, problem.fix), []).append(problem.path)
        fixes = [*{fix for _, fix in alike}]
        # One fix for several facts is said once, below them.
        shared = fixes if len(fixes) == 1 < len(alike) and fixes[0] else []
        lines = [
            _line(paths_text(paths, _MOST_PATHS), what, "" if shared else fix)
            for (what, fix), paths in alike.items()
        ]
        if len(lines) > _MOST_LINES:
            hidden = len(lines) - _MOST_LINES
            lines = [*lines[:_MOST_LINES], f"and {hidden:,} more; all are in error.problems"]
        is_of_whole = len(lines) == 1 and not self.problems[0].path
        return (" " if is_of_whole else "\n  ").join([self.args[0], *lines, *shared])


class RuleTypeError(ShardingError, TypeError):
    """An argument cannot be read, or is of the wrong kind."""


class MeshError(ShardingError):
    """A mesh cannot be made, or rules name a mesh axis that it does not have."""


class PlanError(ShardingError):
    """Some arrays have no valid layout, or a plan is one of another tree."""


class NothingFitsError(PlanError):
    """No layout of a step fits into the memory of its devices."""


class SelectionError(ShardingError, LookupError):
    """A pattern fits nothing, or too much."""


class LayerStackError(ShardingError):
    """A layer cannot be repeated in a loop, as its layers do not treat their input alike."""


class ManualRegionError(ShardingError):
    """A layer cannot run on one device's part: it mixes elements of what is split."""


class TrainingStoppedError(ShardingError):
    """A training run ended before its last step.

    Attributes:
        state: The train state after the last step that was made.
    """

    def __init__(self, headline: str, problems: Iterable[Problem] = (), state: Any = None) -> None:
        super().__init__(headline, problems)
        self.state = state


class NonFiniteLossError(TrainingStoppedError):
    """The loss of a training run is infinite, or not a number."""


class CheckpointNotFoundError(ShardingError, FileNotFoundError):
    """There is no checkpoint at a path."""


class CheckpointMismatchError(ShardingError):
    """What is stored does not fit what is wanted: names, axes, sizes or dtypes differ."""


class CheckpointDamagedError(ShardingError):
    """Files of a checkpoint are missing, or are not as they were saved."""


class CheckpointWriteError(ShardingError):
    """A checkpoint cannot be written: the path is taken, or the disk is full, for instance."""


class CompilationError(ShardingError):
    """A step cannot be compiled for the devices that were asked for."""


class ProgramError(ShardingError):
    """A compiled program is written in a form that is not known."""


class PropagationError(ShardingError):
    """Layouts of a program cannot be propagated without devices."""


class LockError(ShardingError):
    """A lock is missing, cannot be read, or is of another step."""


class MissingExtraError(ImportError):
    """An optional library is absent; the message says which extra installs it."""


class ShardingWarning(UserWarning):
    """Something is allowed but looks like a mistake, such as a rule one letter off a name."""


class Problems:
    """The problems that one call has found, collected to be raised together.

    >>> problems = Problems("no valid layout:")
    >>> problems.add("w", "'mlp' (6) does not divide over mesh axis 'model' (4)")
    >>> problems.raise_if_any(PlanError)
    Traceback (most recent call last):
    penzai_shard.errors.PlanError: no valid layout:
      w: 'mlp' (6) does not divide over mesh axis 'model' (4).
    """

    def __init__(self, headline: str) -> None:
        self.headline = headline
        self._found: list[Problem] = []

    def add(self, path: str, what: str, fix: str = "", kind: str = "") -> None:
        """Adds a problem; see ``Problem`` for the arguments."""
        self._found.append(Problem(path, what, fix, kind))

    def compare(
        self, own: Mapping[str, Any], other: Mapping[str, Any], what: str, fix: str, kind: str = ""
    ) -> None:
        """Adds a problem for each path at which two sides differ.

        Args:
            own: What one side has, by path.
            other: What the other side has.
            what: The sentence of fact, with ``{}`` in the places of the first and of the second.
            fix: What to write instead.
            kind: The kind of the problems.
        """
        for path in {**own, **other}:
            sides = own.get(path, "nothing"), other.get(path, "nothing")
            if sides[0] != sides[1]:
                self.add(path, what.format(*sides), fix, kind)

    def extend(self, problems: Iterable[Problem]) -> None:
        """Adds problems that others have found."""
        self._found += problems

    def raise_if_any(self, error: type[ShardingError]) -> None:
        """Raises one error with all problems, if there are any."""
        if self._found:
            raise error(self.headline, self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def check_arguments(called: str, checks: Mapping[str, tuple[Any, bool, str]]) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        called: The function that was called.
        checks: By name the value of an argument, whether it is right, and what to write.

    Raises:
        RuleTypeError: Some are wrong; all of them are in it.
    """
    problems = Problems(f"{called}:")
    for name, (value, is_right, fix) in checks.items():
        if not is_right:
            problems.add(name, f"it cannot be {reprlib.repr(value)}", f"Write {fix}.")
    problems.raise_if_any(RuleTypeError)


def warn_caller(messages: Iterable[str]) -> None:
    """Warns with the line of whoever called into this library, also by way of a Penzai layer."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_THROUGH:
        level, frame = level + 1, frame.f_back
    for message in messages:
        warnings.warn(message, ShardingWarning, stacklevel=level)


def require(module: str, extra: str) -> types.ModuleType:
    """Imports an optional library.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{module} is not installed. Install it with: pip install 'penzai_shard[{extra}]'"
        ) from error


def _line(path: str, what: str, fix: str) -> str:
    return f"{path + ': ' if path else ''}{what}.{' ' if fix else ''}{fix}"
