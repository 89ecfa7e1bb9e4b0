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
    problems = [
        f"{name}=: is taken by sharded_init and not passed on to {builder.name}, which has a "
        f"parameter {name!r} too. Give it that one first, or leave it at its default so: "
        f"functools.partial({builder.name}, {name}=...)."
        for name in given
        if name in builder.keywords - builder.bound
    ]
    for name in kwargs:
        near = nearest_name(name, OWN_ARGUMENTS)
        if near is not None and name not in builder.keywords:
            text = f"{name}=: is passed on to {builder.name}"
            if builder.takes_any_keyword:
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
        keywords: The parameters that can be given by keyword.
        bound: Those that have a value already, by position or by ``functools.partial``.
        takes_any_keyword: Whether it has a parameter such as ``**kwargs``.
        signature: Its signature.
    """

    name: str
    keywords: frozenset[str]
    bound: frozenset[str]
    takes_any_keyword: bool
    signature: inspect.Signature

    @classmethod
    def of(cls, initializer: Any, args: tuple[Any, ...]) -> "_Builder | None":
        try:
            signature = inspect.signature(initializer)
            bound = {*signature.bind_partial(*args).arguments}
        except (TypeError, ValueError):
            return None  # No signature to look at, or arguments that the call itself will refuse.
        while isinstance(initializer, functools.partial):
            bound |= initializer.keywords.keys()
            initializer = initializer.func
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return cls(
            getattr(initializer, "__qualname__", type(initializer).__name__),
            frozenset(name for name, kind in kinds.items() if kind in by_keyword),
            frozenset(bound),
            inspect.Parameter.VAR_KEYWORD in kinds.values(),
            signature,
        )


@contextlib.contextmanager
def naming_numbers_as_keys(
    initializer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Says it where an initialiser fails because a number was given to it as a random key.

    Raises:
        RuleTypeError: It failed, and one of its keys is a number, or a text is where a number
            belongs.

    >>> with naming_numbers_as_keys(dict, (), {}):
    ...     pass
    """
    try:
        yield
    except TypeError as error:
        builder = _Builder.of(initializer, args)
        if builder is None or isinstance(error, ShardingError):
            raise
        given = builder.signature.bind_partial(*args).arguments | kwargs
        problems = [
            f"{name}={value}: a number is not a random key. Write {name}=jax.random.key({value})."
            for name, value in given.items()
            if name in _KEY_NAMES and isinstance(value, int | np.integer)
        ]
        problems += [
            f"{name}={value!r}: is a text. Write {name}={value}."
            for name, value in given.items()
            if isinstance(value, str) and value.isdecimal()
        ]
        if not problems:
            raise
        headline = f"{builder.name} cannot be called with these arguments:"
        raise RuleTypeError(headline, problems) from error
