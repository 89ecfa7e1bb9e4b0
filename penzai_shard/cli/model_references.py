"""A model by what the shell can say of it: ``file.py:function`` or ``module:function(seed=0)``."""

import dataclasses
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError, ShardingError, extra_for
from penzai_shard.layouts.rule_expressions import read_call
from penzai_shard.placement import abstract_model
from penzai_shard.placement.builders import is_model
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.surgery.tree_nodes import is_layer
from penzai_shard.training import TrainState

_FORM = re.compile(
    r"(?P<place>[^:]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)\s*(?P<call>\(.*\))?", re.DOTALL
)
_EXAMPLE = "Write for instance model.py:build_model, or my_package.models:build(seed=0)."


class _StepGivenError(Exception):
    """Ends the trace of a function that gives more than a model, which belongs outside of it."""


def is_step(made: Any) -> bool:
    """Whether a value is a step with what it is called with: ``(step, args)``, or with keywords.

    >>> is_step((len, ("text",))), is_step((1, 2)), is_step({"w": 1})
    (True, False, False)
    """
    return isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])


# What a function has to give that is to say all of a training step, and not a model alone.
_OF_A_PROBLEM = frozenset({"model", "loss_fn", "optimizer", "batch"})


def is_problem(made: Any) -> bool:
    """Whether a value is what ``choose_layout`` is called with, by keyword.

    >>> is_problem({"model": {}, "loss_fn": len, "optimizer": None, "batch": {}})
    True
    """
    return isinstance(made, dict) and made.keys() >= _OF_A_PROBLEM


def step_arguments(rest: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a step is called with, by what a function gives after it.

    >>> step_arguments([(1, 2)]), step_arguments([1]), step_arguments([(), {"x": 1}])
    (((1, 2), {}), ((1,), {}), ((), {'x': 1}))
    """
    if len(rest) == 1 and not isinstance(rest[0], tuple | list):
        rest = [(rest[0],)]  # One argument, which is not in a tuple of its own.
    args, kwargs = (*rest, {})[:2]
    return tuple(args), dict(kwargs)


@dataclasses.dataclass(frozen=True)
class ModelReference:
    """A function that builds a model, by name, with the arguments to call it with.

    Attributes:
        text: As it was written.
        place: A Python file, or a module.
        name: The function's qualified name in there.
        arguments: Positional arguments.
        keywords: Arguments by name.
    """

    text: str
    place: str
    name: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "ModelReference | None":
        """Reads a reference; None if the text is not one, and so the path of a checkpoint.

        Raises:
            RuleTypeError: The arguments are not literals.

        >>> ModelReference.read("model.py:build(2, width=8)").keywords
        {'width': 8}
        >>> ModelReference.read("gs://bucket/run"), ModelReference.read("run/params")
        (None, None)
        """
        match = _FORM.fullmatch(text)
        if match is None or os.path.exists(text):
            return None
        arguments, keywords = read_literals(text, match["call"], _EXAMPLE)
        return cls(text, match["place"], match["name"], arguments, keywords)

    def model(self) -> Any:
        """The model that the function builds, with structs in place of arrays.

        Of what ``choose_layout`` is called with it is the model. Only the function's program is
        looked at, unless it calls ``abstract_model`` itself: then it is called. What is not a
        function, such as a model, is taken as it is.

        Raises:
            RuleTypeError: There is no such file, module or function, or it fails, or gives a step.
        """
        built = self.built()
        if is_step(built):
            raise RuleTypeError(
                f"{self.text}: it gives a step with its arguments, and a model is needed. "
                "penzai-shard price takes both."
            )
        return built["model"] if is_problem(built) else built

    def problem(self) -> tuple[Any, dict[str, Any] | None]:
        """The model, and all that ``choose_layout`` is called with, None of a model alone.

        Raises:
            RuleTypeError: As ``model`` does.
        """
        made = self.built()
        if is_problem(made):
            return made["model"], made
        given = set(made) & _OF_A_PROBLEM if isinstance(made, dict) else set()
        if "model" in given and len(given) > 1:
            missing = ", ".join(map(repr, sorted(_OF_A_PROBLEM - given)))
            raise RuleTypeError(
                f"{self.text}: it gives {', '.join(map(repr, made))}, and {missing} of what "
                "choose_layout is called with is missing. Return {'model': ..., 'loss_fn': ..., "
                "'optimizer': ..., 'batch': {'x': ...}}."
            )
        if is_step(made):
            raise RuleTypeError(
                f"{self.text}: it gives a step with its arguments, which lies as it does already. "
                "Return what choose_layout is called with: {'model': ..., 'loss_fn': ..., "
                "'optimizer': ..., 'batch': {'x': ...}}."
            )
        return made, None

    def called_model(self) -> tuple[Any, Any]:
        """The model, and what it is called with: of a function that gives both, or one of them.

        Returns:
            The model; and a tuple of its inputs, the last a dictionary of side inputs, or None if
            the function gives the model alone.

        Raises:
            RuleTypeError: As ``model`` does; or what is called is not a layer.
        """
        made = self.built()
        if not is_step(made):
            return (made["model"] if is_problem(made) else made), None
        model, *rest = made
        if not is_layer(model):
            raise RuleTypeError(
                f"{self.text}: it gives a step with its arguments, and a model is needed, alone or "
                "with what it is called with: return (model, args), or (model, args, kwargs)."
            )
        args, kwargs = step_arguments(rest)
        return model, (*args, kwargs)

    def built(self) -> Any:
        """What ``model`` gives; or a step with its arguments, or what ``choose_layout`` takes."""
        built = self._named()
        if not callable(built) or is_model(built):
            if jax.tree_util.all_leaves([built]) and not hasattr(built, "shape"):
                raise RuleTypeError(
                    f"{self.text}: {self.name} is of type {type(built).__name__}, not a model "
                    f"or a function that builds one. {_EXAMPLE}"
                )
            return built
        returned: list[Any] = []

        def calling() -> Any:
            return built(*self.arguments, **self.keywords)

        def building() -> Any:
            made = calling()
            is_more = is_step(made) or is_problem(made)
            returned.append(tuple if is_more else type(made))
            if is_more:
                raise _StepGivenError
            return made

        try:
            return abstract_model(building)
        except ShardingError:
            if returned and issubclass(returned[0], TrainState):
                return jax.eval_shape(calling)
            if returned:
                raise
            # It may have called abstract_model itself, which works outside of a trace alone.
            return calling()
        except _StepGivenError:
            return calling()
        except Exception as error:
            raise RuleTypeError(
                f"{self.text}: it fails with {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0].rstrip('.')}. {self._fix(error)}".rstrip()
            ) from error

    def _fix(self, error: Exception) -> str:
        if isinstance(error, TypeError) and "argument" in str(error):
            name = next(iter(re.findall(r"missing.*?'(\w+)'", str(error))), "seed")
            return f"Give its arguments too: {self.place}:{self.name}({name}=0)."
        return extra_for(error)

    def _named(self) -> Any:
        found = self._module()
        for name in self.name.split("."):
            if not hasattr(found, name):
                near = nearest_name(name, [each for each in vars(found) if each[0] != "_"])
                meant = f"Did you mean {self.place}:{near}?" if near else _EXAMPLE
                raise RuleTypeError(f"{self.text}: {self.place} has no {name!r}. {meant}")
            found = getattr(found, name)
        return found

    def _module(self) -> Any:
        is_file = self.place.endswith(".py")
        # What the file or the module imports is looked for as if it were run from here.
        folder = os.path.dirname(os.path.abspath(self.place)) if is_file else os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if is_file and not os.path.isfile(self.place):
            raise RuleTypeError(f"{self.text}: there is no file {self.place}. {_EXAMPLE}")
        try:
            if not is_file:
                return importlib.import_module(self.place)
            name = os.path.basename(self.place).removesuffix(".py")
            spec = importlib.util.spec_from_file_location(name, self.place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # Dataclasses and pickles look their module up.
            sys.modules.setdefault(name, module)
            spec.loader.exec_module(module)
            return module
        except SystemExit as error:
            raise RuleTypeError(
                f"{self.text}: {self.place} ends the program when it is imported. Put what it does "
                "as a script under: if __name__ == '__main__':"
            ) from error
        except Exception as error:
            raise RuleTypeError(
                f"{self.text}: cannot import {self.place}: {type(error).__name__}: {error} "
                f"{extra_for(error)}".rstrip()
            ) from error


def read_literals(
    text: str, call: str | None, example: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, which are literals of Python.

    Args:
        text: The whole text, for messages.
        call: The call's brackets with what is in them; None for none.
        example: A sentence with an example.

    Raises:
        RuleTypeError: They are something else.

    >>> read_literals("build(2, width=8)", "(2, width=8)", "")
    ((2,), {'width': 8})
    """

    def given(*arguments: Any, **keywords: Any) -> Any:
        return arguments, keywords

    arguments, keywords = read_call(f"given{call or '()'}", text, {"given": given}, example)
    return arguments, keywords
