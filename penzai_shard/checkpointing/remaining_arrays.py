"""Values for the arrays of a model that a checkpoint does not fill."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from penzai_shard.array_kinds import is_abstract, is_deleted, is_traced
from penzai_shard.checkpointing.array_records import record_of
from penzai_shard.checkpointing.arrays_by_name import ArraysByName
from penzai_shard.checkpointing.comparison import INITIALISING, Tolerance, compare
from penzai_shard.checkpointing.parameter_dict import param_dict
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.placement import is_model, partly_initialized, put

Others: TypeAlias = Literal["error", "keep"] | Callable[[], Any]
Supply: TypeAlias = Callable[[Sequence[str]], dict[str, jax.Array]]


def supply_of(
    others: Others, leaves: Mapping[str, NamedLeaf], shardings: Mapping[str, Any], mesh: Any
) -> Supply | None:
    """Reads the option ``others``.

    Args:
        others: ``"error"``, ``"keep"`` or a function that builds the model.
        leaves: The arrays of the model by name.
        shardings: By name, how each is to be laid out.
        mesh: The mesh that they are for.

    Returns:
        A function that gives the values of some arrays by name, each in its layout, or refuses them
        all by name; None if there are no values.

    Raises:
        RuleTypeError: It is something else.

    >>> supply_of("error", {}, {}, None)
    """
    if isinstance(others, str) and others == "error":
        return None
    if isinstance(others, str) and others == "keep":
        return functools.partial(_kept, leaves=leaves, shardings=shardings)
    if not callable(others) or is_model(others):
        given = repr(others) if isinstance(others, str) else f"a {type(others).__name__}"
        raise RuleTypeError(
            f"others is 'error', 'keep' or the function that builds the model, not {given}. Write "
            "others=functools.partial(build_model, seed=0)."
        )
    try:
        inspect.signature(others).bind()
    except TypeError as error:
        raise RuleTypeError(
            f"others is called without arguments: {error}. Write "
            "others=functools.partial(build_model, seed=0)."
        ) from None
    except ValueError:
        pass  # Some builtins have no signature that Python knows.
    return functools.partial(
        _drawn, leaves=leaves, shardings=shardings, initializer=others, mesh=mesh
    )


def _kept(
    names: Sequence[str], leaves: Mapping[str, NamedLeaf], shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """The model's own values.

    Raises:
        CheckpointMismatchError: With one line per array that has none.
    """
    kept = {name: leaves[name] for name in names}
    refuse_without_values(
        kept,
        "cannot keep the model's own values of what is not restored:",
        "Give the function that builds the model, others=build_model, or a model with values.",
    )
    return kept_values(kept, shardings, "restore_params")


def refuse_without_values(leaves: Mapping[str, NamedLeaf], headline: str, fix: str) -> None:
    """Refuses arrays of a model that have no values to be kept.

    Raises:
        CheckpointMismatchError: With one line per array.
    """
    raise_all(
        CheckpointMismatchError,
        headline,
        [
            f"{name}: has {lack}. {fix}"
            for name, leaf in leaves.items()
            if (lack := _lack_of(leaf.array))
        ],
    )


def kept_values(
    leaves: Mapping[str, NamedLeaf], shardings: Mapping[str, Any], called: str
) -> dict[str, jax.Array]:
    """A model's own values of some arrays, put where they are to be.

    Args:
        leaves: The arrays by name.
        shardings: By name, how each is to be laid out.
        called: The function that was called, for messages.
    """
    values = {name: leaf.without_padding().array for name, leaf in leaves.items()}
    placed: dict[str, jax.Array] = put(values, {name: shardings[name] for name in values}, called)
    return placed


def _lack_of(array: Any) -> str:
    if is_abstract(array):
        return "a shape and no value"
    if is_deleted(array):
        return "no value any more, since it was donated or deleted"
    return "no value yet, as it is being traced" if is_traced(array) else ""


def _drawn(
    names: Sequence[str],
    leaves: Mapping[str, NamedLeaf],
    shardings: Mapping[str, Any],
    initializer: Callable[[], Any],
    mesh: Any,
) -> dict[str, jax.Array]:
    """What an initialiser gives for some arrays, of which it computes these alone.

    Raises:
        CheckpointMismatchError: The model that it builds has other arrays.
    """

    def layouts_of(model: Any) -> dict[int, Any]:
        built = ArraysByName(param_dict(model)).leaves
        compare(
            {name: record_of(leaf) for name, leaf in built.items()},
            {name: record_of(leaves[name]) for name in names},
            headline="cannot initialise what is not restored:",
            wording=INITIALISING,
            tolerance=Tolerance(on_extra="ignore"),
        )
        return {id(built[name].array): shardings[name] for name in names}

    model = partly_initialized(initializer, layouts_of, mesh)
    built = ArraysByName(param_dict(model)).leaves
    return {name: built[name].array for name in names}
