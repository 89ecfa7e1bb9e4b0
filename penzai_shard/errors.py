"""The errors that this library raises, and the one form their messages have.

Every error collects all offenders and is raised once. Each offender is one line that names the
path, the logical axis, the sizes, the rule, and a fix that can be pasted. In the message, lines
that differ only in the numbers of their paths, as those of equal blocks do, are one line.
"""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, ParamSpec, TypeVar

from penzai_shard.path_folding import (
    NUMBER,
    folded_path,
    folding_key,
    number_runs,
    varying_numbers,
)

# A message has at most so many lines of problems.
SHOWN_PROBLEMS = 38
SHOWN_DAMAGES = 2
# A line names so many that have the same problem.
NAMED_TOGETHER = 6

# Fewer lines alike than this are easier to read one by one, but not in a message of many lines.
FEWEST_ALIKE = 3
MANY_LINES = 8

# A path in the middle of a message: words with slashes or dots between them.
_PATH = re.compile(r"(?<![\w\]])[\w\[\]]+(?:[./][\w\[\]-]+)+")

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Packages whose frames are not those of the caller.
_PASSED_THROUGH = frozenset({__name__.partition(".")[0], "penzai", "jax", "equinox", "contextlib"})


class ShardingError(ValueError):
    """Base of every error that this library raises about a layout.

    The message shows offenders alike as one line, and at most about 40 lines.

    Attributes:
        problems: One line per offender, all of them, in the order in which they were found.
    """

    problems: tuple[str, ...]
    shown_problems: ClassVar[int] = SHOWN_PROBLEMS

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        lines = self._lines()
        shown = self.shown_problems
        if len(lines) > shown:
            hidden = sum(count for _, count in lines[shown:])
            last = f"and {hidden:,} more; all are in error.problems"
            lines = [*lines[:shown], (last, hidden)]
        super().__init__("\n".join([headline, *(f"  {line}" for line, _ in lines)]))

    def _lines(self) -> list[tuple[str, int]]:
        """The lines of the message, each with how many problems it stands for."""
        return grouped_problems(self.problems)


class RuleTypeError(ShardingError, TypeError):
    """Rules, names or sizes were given in a form that cannot be read as such."""


class MeshError(ShardingError):
    """A mesh cannot be made, or rules name a mesh axis that the mesh does not have."""


class PlanError(ShardingError):
    """Some arrays have no valid layout under the given rules."""


class NothingFitsError(ShardingError):
    """No layout of a training step fits into the memory of the devices."""


class SelectionError(ShardingError, LookupError):
    """A pattern or selector matched nothing, or matched more than it may."""


class CheckpointMismatchError(ShardingError):
    """A checkpoint and the model it should fill differ in names, shapes, dtypes or axes."""


class CheckpointDamagedError(ShardingError):
    """A checkpoint is not as it was saved: bytes changed, or parts are missing.

    One broken file may concern every array, and none of them tells more than the others: the
    message names those with the same problem in one line.
    """

    shown_problems = SHOWN_DAMAGES

    def _lines(self) -> list[tuple[str, int]]:
        alike: dict[str, list[tuple[str, int]]] = {}
        for line, count in grouped_problems(self.problems):
            name, _, problem = line.partition(": ")
            alike.setdefault(problem, []).append((name, count))
        return [_named_together(problem, members) for problem, members in alike.items()]


class CheckpointExistsError(ShardingError, FileExistsError):
    """There is something at the path already, and overwriting it was not asked for."""


class CheckpointNotFoundError(ShardingError, FileNotFoundError):
    """There is nothing at the path, or nothing that Orbax wrote."""


class CheckpointWriteError(ShardingError, OSError):
    """A checkpoint cannot be written; what was at the path is unchanged."""


class LockError(ShardingError):
    """A sharding lock cannot be read, or is not one of this mesh and these devices."""


class TrainingStoppedError(ShardingError):
    """A training loop cannot go on, or cannot start; what is wrong is not the layout.

    Attributes:
        state: The train state after the last step that was done, if there is one.
    """

    def __init__(self, headline: str, problems: Sequence[str] = (), state: object = None) -> None:
        super().__init__(headline, problems)
        self.state = state


class NonFiniteLossError(TrainingStoppedError, FloatingPointError):
    """The loss of a training step is infinite or not a number."""


class CompilationError(ShardingError, RuntimeError):
    """A program was not compiled; what the compiler said is in the message."""


class PropagationError(ShardingError, RuntimeError):
    """The propagation of layouts cannot be had: not from this jaxlib, or not of this program."""


class ProgramError(ShardingError):
    """A compiled program says what moves between devices in a form that is not known."""


class MissingExtraError(ImportError):
    """An optional dependency is absent; the message says which extra installs it."""


class ShardingWarning(UserWarning):
    """Something is allowed but looks like a mistake, such as a rule one letter off a name."""


def grouped_problems(problems: Sequence[str]) -> list[tuple[str, int]]:
    """Problems for people: those that differ only in the numbers of their paths are one line.

    Args:
        problems: Lines of the form ``path: what is wrong``.

    Returns:
        Lines, each with how many problems it stands for, in the order of the first of each.
        Three or more alike are one line, in which a number that differs is written ``*``; where
        there would be many lines all the same, so are two in which only one number differs.

    >>> grouped_problems([f"block_{i}/up: does not divide." for i in (0, 1, 2, 5)] + ["b: no."])
    [('block_*/up (4 times, * = 0-2, 5): does not divide.', 4), ('b: no.', 1)]
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        groups.setdefault(_alike(problem), []).append(problem)
    few = [len(members) for members in groups.values() if len(members) < FEWEST_ALIKE]
    are_many = len(groups) - len(few) + sum(few) > MANY_LINES
    lines: list[tuple[str, int]] = []
    for members in groups.values():
        if len(members) < FEWEST_ALIKE and not (are_many and _differ_in_one_number(members)):
            lines += [(member, 1) for member in members]
        else:
            lines.append((_group_line(members), len(members)))
    return lines


def _named_together(problem: str, members: list[tuple[str, int]]) -> tuple[str, int]:
    names = [name for name, _ in members[:NAMED_TOGETHER]]
    if len(members) > NAMED_TOGETHER:
        names.append(f"and {sum(count for _, count in members[NAMED_TOGETHER:]):,} more")
    text = ", ".join(names) + (f": {problem}" if problem else "")
    return text, sum(count for _, count in members)


def _alike(problem: str) -> tuple[str, str]:
    """What problems of one group have in common: the path without numbers, and the rest."""
    path, found, rest = problem.partition(": ")
    if not found:
        return problem, ""
    # What a message repeats of its path, such as a name nearly the same, is folded with it.
    numbers = set(NUMBER.findall(path))
    for said in _numbered_paths(rest):
        folded = NUMBER.sub(lambda n: "*" if n.group() in numbers else n.group(), said)
        rest = rest.replace(said, folded)
    return folding_key(path), rest


@functools.lru_cache(maxsize=256)
def _numbered_paths(message: str) -> tuple[str, ...]:
    """The paths with numbers that a message mentions; figures such as ``1.5`` are none."""
    paths = dict.fromkeys(_PATH.findall(message))
    return tuple(
        p for p in paths if NUMBER.search(p) and any(map(str.isidentifier, re.split("[./]", p)))
    )


def _group_line(members: Sequence[str]) -> str:
    if ": " not in members[0]:
        return f"{members[0]} ({len(members)} times)"
    paths = [member.partition(": ")[0] for member in members]
    count = f"{len(members)} times"
    varying = _varying(members)
    if len(varying) == 1:
        count += (
            f", * = {_ranges(sorted({number for column in varying for number in column or ()}))}"
        )
    return f"{folded_path(paths)} ({count}): {_message_of_all(members[0], paths)}"


def _message_of_all(member: str, paths: Sequence[str]) -> str:
    """The message of one problem with the paths in it as those of all members of its group.

    A number in which the members do not differ stays, so that what a fix says of these paths
    matches no others.
    """
    path, _, rest = member.partition(": ")
    varies = [column is not None for column in varying_numbers(paths)]
    numbers = NUMBER.findall(path)
    differing = {number for number, is_one in zip(numbers, varies, strict=True) if is_one}
    for said in _numbered_paths(rest):
        said_numbers = NUMBER.findall(said)
        folds = [number in differing for number in said_numbers]
        if path.endswith(said):
            folds = varies[len(numbers) - len(said_numbers) :]
        written = ["*" if fold else n for n, fold in zip(said_numbers, folds, strict=True)]
        between = NUMBER.split(said)
        parts = itertools.zip_longest(between, written, fillvalue="")
        rest = rest.replace(said, "".join(itertools.chain.from_iterable(parts)))
    return rest


def _varying(members: Sequence[str]) -> set[tuple[int, ...] | None]:
    """The series of numbers in which the paths of some problems differ."""
    return set(varying_numbers([member.partition(": ")[0] for member in members])) - {None}


def _differ_in_one_number(members: Sequence[str]) -> bool:
    return ": " in members[0] and len(_varying(members)) == 1


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2, 5`` for 0, 1, 2, 5; only the ends where there are many gaps."""
    runs = number_runs(numbers)
    if len(runs) > 6:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def raise_all(error: type[ShardingError], headline: str, problems: Sequence[str]) -> None:
    """Raises ``error`` with every problem in it, or returns when there is none.

    Args:
        error: The class to raise.
        headline: First line of the message; says what was being done.
        problems: One line per offender.

    Raises:
        ShardingError: ``error``, if there is at least one problem.

    >>> raise_all(PlanError, "no valid layout:", [])
    >>> raise_all(PlanError, "no valid layout:", ["w: too long.", "b: unnamed."])
    Traceback (most recent call last):
    penzai_shard.errors.PlanError: no valid layout:
      w: too long.
      b: unnamed.
    """
    if problems:
        raise error(headline, problems)


def raised_by_the_call(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose errors of this library show the caller's line and the message alone.

    What is wrong with a file is in the message. The lines of this library that read the file, and
    the errors of other libraries that it met there, which fill pages, are in ``__context__``.

    >>> @raised_by_the_call
    ... def read(file):
    ...     raise CheckpointDamagedError(f"{file}: is not as it was saved.")
    >>> read("params")
    Traceback (most recent call last):
    penzai_shard.errors.CheckpointDamagedError: params: is not as it was saved.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except ShardingError as error:
            raise error.with_traceback(None) from None

    return call


def warn_caller(messages: Iterable[str]) -> None:
    """Warns with the line of whoever called into this library, also by way of a Penzai layer.

    >>> warn_caller([])
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_THROUGH:
        level, frame = level + 1, frame.f_back
    for message in messages:
        warnings.warn(message, ShardingWarning, stacklevel=level)


# Libraries that are not needed by this one, and the extra that installs each.
_EXTRAS = {
    "equinox": "equinox",
    "flax": "flax",
    "grain": "notebook",
    "haliax": "haliax",
    "libtpu": "tpu",
    "matplotlib": "notebook",
    "optax": "train",
    "orbax": "checkpoint",
    "rich": "train",
    "safetensors": "safetensors",
    "torch": "torch",
}


def extra_for(error: BaseException) -> str:
    """How to install a module that was not found, if one of our extras brings it; or nothing.

    Args:
        error: Any error.

    >>> extra_for(ModuleNotFoundError("No module named 'flax'", name="flax.linen"))
    "Install it with: pip install 'penzai-shard[flax]'"
    >>> extra_for(ValueError("flax"))
    ''
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    extra = _EXTRAS.get((name or "").partition(".")[0])
    return f"Install it with: pip install 'penzai-shard[{extra}]'" if extra else ""


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """A block that runs somebody else's code, which may import what is not installed.

    Raises:
        ModuleNotFoundError: As in the block, with a note of the extra that installs the module.

    >>> with naming_extras():
    ...     pass
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if fix := extra_for(error):
            error.add_note(fix)
        raise


def require_installed(module: str, extra: str) -> None:
    """Refuses an optional dependency that is absent, without importing one that is there.

    Args:
        module: Name of the module.
        extra: Name of the extra of ``penzai-shard`` that brings it.

    Raises:
        MissingExtraError: The module is not installed.

    >>> require_installed("json", "train")
    """
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra)


def require_extra(module: str, extra: str) -> types.ModuleType:
    """Imports an optional dependency, or says which extra installs it.

    Args:
        module: Name of the module to import.
        extra: Name of the extra of ``penzai-shard`` that brings it.

    Returns:
        The module.

    Raises:
        MissingExtraError: The module is not installed.

    >>> require_extra("json", "train").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(module, extra) from error


def _missing(module: str, extra: str) -> MissingExtraError:
    return MissingExtraError(
        f"this needs {module!r}, which is not installed. "
        f"Install it with: pip install 'penzai-shard[{extra}]'"
    )
