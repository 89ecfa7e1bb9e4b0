"""The errors that this library raises, and the one form their messages have.

Every error collects all offenders and is raised once. Each offender is one line that names the
path, the logical axis, the sizes, the rule, and a fix that can be pasted.
"""

import importlib
import types
from collections.abc import Sequence


class ShardingError(ValueError):
    """Base of every error that this library raises about a layout.

    Attributes:
        problems: One line per offender, in the order in which they were found.
    """

    problems: tuple[str, ...]

    def __init__(self, headline: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([headline, *(f"  {problem}" for problem in self.problems)]))


class RuleTypeError(ShardingError, TypeError):
    """Rules, names or sizes were given in a form that cannot be read as such."""


class MeshError(ShardingError):
    """A mesh cannot be made, or rules name a mesh axis that the mesh does not have."""


class PlanError(ShardingError):
    """Some arrays have no valid layout under the given rules."""


class SelectionError(ShardingError, LookupError):
    """A pattern or selector matched nothing, or matched more than it may."""


class CheckpointMismatchError(ShardingError):
    """A checkpoint and the model it should fill differ in names, shapes, dtypes or axes."""


class MissingExtraError(ImportError):
    """An optional dependency is absent; the message says which extra installs it."""


class ShardingWarning(UserWarning):
    """Something is allowed but looks like a mistake, such as a rule one letter off a name."""


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
        raise MissingExtraError(
            f"this needs {module!r}, which is not installed. "
            f"Install it with: pip install 'penzai-shard[{extra}]'"
        ) from error
