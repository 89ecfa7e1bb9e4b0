"""The functions that build models: whose argument is whose, and what is wrong with them."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from penzai.core.variables import AbstractVariable

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all, warn_caller
from penzai_shard.planning import ShardingPlan
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.tree_arguments import refuse_module_without_arrays

# How the arguments of initialisers are called that are random keys.
_KEY_NAMES = frozenset(
    {"key", "rng", "rng_key", "prng_key", "base_rng", "init_rng", "init_base_rng"}
)
# What sharded_init takes itself, and never passes on.
OWN_ARGUMENTS = ("mesh", "rules", "axis_name_to_mesh_name", "on_indivisible", "on_unnamed", "plan")


def check_builder(
    initializer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[str]
) -> None:
    """Refuses what cannot build a model, and arguments of which it is not clear whose they are.

    Args:
        initializer: What ``sharded_init`` is to call.
        args: Passed on by position.
        kwargs: Passed on by keyword.
        given: Which of ``OWN_ARGUMENTS`` the caller gave.

    Raises:
        RuleTypeError: It cannot be called, or the arguments are unclear.

    >>> check_builder(dict, (), {"a": 1}, ["rules"])
    """
    refuse_module_without_arrays("sharded_init takes the function that builds a model", initializer)
    if not callable(initializer) or is_model(initializer):
        raise RuleTypeError(
            f"sharded_init builds a model and needs the function that does, not a "
            f"{type(initializer).__name__}. Give the function and its arguments: "
            "sharded_init(build_model, seed=0, mesh=mesh, rules=rules). "
            "A model that exists already is placed with place(model, mesh, rules)."
        )
    laid_out = Mesh | AbstractMesh | ShardingPlan
    if "mesh" not in given and "plan" not in given and any(isinstance(a, laid_out) for a in args):
        raise RuleTypeError(
            "sharded_init passes what is given by position on to the function that builds the "
            "model. Name the mesh, the rules or the plan: sharded_init(build_model, ..., "
            "mesh=mesh, rules=rules)."
        )
    builder = _Builder.of(initializer, args)
    if builder is None:
        return
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = {name for name, kind in builder.kinds.items() if kind in by_keyword}
    problems = [
        f"{name}=: is taken by sharded_init and not passed on to {builder.name}, which has a "
        f"parameter {name!r} too. Give it that one first, or leave it at its default so: "
        f"functools.partial({builder.name}, {name}=...)."
        for name in given
        if name in keywords - builder.values.keys()
    ]
    for name in kwargs:
        near = nearest_name(name, OWN_ARGUMENTS)
        if near is not None and name not in keywords:
            text = f"{name}=: is passed on to {builder.name}"
            if inspect.Parameter.VAR_KEYWORD in builder.kinds.values():
                warn_caller([f"{text}. Did you mean {near}=, which sharded_init takes?"])
            else:
                problems.append(f"{text}, which does not take it. Did you mean {near}=?")
    raise_all(
        RuleTypeError, "sharded_init and the function that it calls share arguments:", problems
    )


def is_model(initializer: Any) -> bool:
    """Whether a value is a model that exists already, most of which can be called too.

    >>> is_model({"w": np.ones(2)}), is_model(dict)
    (True, False)
    """
    if isinstance(initializer, jax.tree_util.Partial):
        return False
    leaves = jax.tree_util.tree_leaves(initializer)
    arrays = AbstractVariable | jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return any(isinstance(leaf, arrays) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class _Builder:
    """What is known of the parameters of an initialiser.

    Attributes:
        name: Its name, for messages.
        kinds: The kind of each parameter.
        values: The values that are given by position or by ``functools.partial``.
    """

    name: str
    kinds: dict[str, Any]
    values: dict[str, Any]

    @classmethod
    def of(cls, initializer: Any, args: tuple[Any, ...]) -> "_Builder | None":
        try:
            signature = _signature(initializer)
            values = signature.bind_partial(*args).arguments
        except (TypeError, ValueError):
            return None  # No signature to look at, or arguments that the call itself will refuse.
        while isinstance(initializer, functools.partial):
            values = initializer.keywords | values
            initializer = initializer.func
        name = getattr(initializer, "__qualname__", type(initializer).__name__)
        kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
        return cls(name, kinds, values)


def _unfit_argument(name: str, value: Any) -> str:
    """What an argument probably should have been; empty if it may be as it is.

    >>> _unfit_argument("rngs", 3)
    'rngs=3: Flax NNX takes random streams. Write rngs=nnx.Rngs(3).'
    """
    is_number = isinstance(value, int | np.integer)
    if name in _KEY_NAMES and is_number:
        return (
            f"{name}={value}: a number is not a random key. Write {name}=jax.random.key({value})."
        )
    if name == "rngs" and (is_number or isinstance(value, jax.Array)):
        seed = value if is_number else "key"
        return f"{name}={seed}: Flax NNX takes random streams. Write {name}=nnx.Rngs({seed})."
    if isinstance(value, str) and value.isdecimal():
        return f"{name}={value!r}: is a text. Write {name}={value}."
    return ""


def _signature(initializer: Any) -> inspect.Signature:
    """The signature of an initialiser; of a class that is called in a way of its own, its init."""
    signature = inspect.signature(initializer)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if isinstance(initializer, type) and all(
        parameter.kind in variadic for parameter in signature.parameters.values()
    ):
        init: Any = getattr(initializer, "__init__")  # noqa: B009 (an instance's may differ)
        _, *parameters = inspect.signature(init).parameters.values()
        return inspect.Signature(parameters)
    return signature


@contextlib.contextmanager
def naming_numbers_as_keys(
    initializer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Reports where an initialiser fails because a number was given to it as a random key.

    Raises:
        RuleTypeError: It failed, and one of its keys is a number, or a text is where a number
            belongs.

    >>> with naming_numbers_as_keys(dict, (), {}):
    ...     pass
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        builder = _Builder.of(initializer, args)
        if builder is None or isinstance(error, ShardingError):
            raise
        given = builder.values | kwargs
        problems = [
            problem for name, value in given.items() if (problem := _unfit_argument(name, value))
        ]
        if not problems:
            raise
        headline = f"{builder.name} cannot be called with these arguments:"
        raise RuleTypeError(headline, problems) from error
