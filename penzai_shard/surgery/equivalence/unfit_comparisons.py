"""Why two models cannot be compared: in terms of the models and inputs, not of JAX's."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.array_kinds import is_abstract
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.layers.unfit_calls import refusal_of_deleted
from penzai_shard.named_leaves import NamedLeaf, leaves_of
from penzai_shard.surgery.edits import Edit
from penzai_shard.surgery.recipe import Recipe

_ROLES = ("original", "edited")


def refuse_unfit(
    models: tuple[Any, Any], args: tuple[Any, ...], side_inputs: Mapping[str, Any]
) -> None:
    """Raises if two models cannot be run on these inputs, before anything touches a device.

    Raises:
        RuleTypeError: A model is something else, such as a recipe; the inputs are not those of a
            call; an input has a shape and no values; or an array was donated.
    """
    problems = [
        f"{role}: {problem}"
        for role, model in zip(_ROLES, models, strict=True)
        if (problem := _model_problem(model) or _call_problem(model, args, side_inputs))
    ]
    inputs = _input_leaves(args, side_inputs)
    problems += [
        f"{leaf.path}: has a shape and no values. Give an array of numbers."
        for leaf in inputs
        if is_abstract(leaf.array)
    ]
    raise_all(
        RuleTypeError,
        "these cannot be compared: check_equivalent(original, edited, *inputs, **side_inputs) runs "
        "two models on the inputs.",
        problems,
    )
    leaves = [
        dataclasses.replace(leaf, path=f"{role} {leaf.path or 'model'}")
        for role, model in zip(_ROLES, models, strict=True)
        for leaf in leaves_of(model)
    ]
    if refusal := refusal_of_deleted("check_equivalent", [*leaves, *inputs]):
        raise refusal


def explain_nameless_inputs(
    error: AttributeError, args: tuple[Any, ...], side_inputs: Mapping[str, Any]
) -> None:
    """Raises which inputs have no names, if a model asked an array for what named arrays have.

    Raises:
        RuleTypeError: Some inputs are arrays without names.
    """
    asked_for = re.search(r"attribute '?(\w+)'?", str(error))
    if not asked_for or not hasattr(pz.nx.NamedArray, asked_for[1]):
        return
    problems = [
        f"{leaf.path}: {leaf.dtype}[{', '.join(map(str, leaf.shape))}]. Name its logical axes, "
        "for instance pz.nx.wrap(x, "
        f"{', '.join(map(repr, ('batch', 'seq', 'embedding')[: len(leaf.shape)]))}"
        f"{', ...' if len(leaf.shape) > 3 else ''})."
        for leaf in _input_leaves(args, side_inputs)
        if leaf.names is None and isinstance(leaf.array, jax.Array | np.ndarray)
    ]
    if problems:
        raise RuleTypeError(
            "the models take arrays with logical axes, and these inputs have none:", problems
        ) from None


def _input_leaves(args: tuple[Any, ...], side_inputs: Mapping[str, Any]) -> list[NamedLeaf]:
    inputs = {**{f"input {number}": arg for number, arg in enumerate(args, 1)}, **side_inputs}
    return [leaf for name, value in inputs.items() for leaf in leaves_of(value, name)]


def _model_problem(model: Any) -> str:
    """Why something cannot be run as a model; empty if it can."""
    kind = type(model).__name__
    if isinstance(model, Recipe):
        return "is a Recipe, not a model. Give what it makes: recipe.apply(model)."
    if isinstance(model, Edit):
        return "is an Edit, not a model. Give what it makes: Recipe(edit).apply(model)."
    if callable(model):
        return ""
    return f"is of type {kind}, which cannot be called. " + (
        "Give its model: x.model." if hasattr(model, "model") else "Give a model."
    )


def _call_problem(model: Any, args: tuple[Any, ...], side_inputs: Mapping[str, Any]) -> str:
    """Why inputs are not those of a model's call; empty if they are, or nobody can tell."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **side_inputs)
    except TypeError as error:
        problem = f"{type(model).__name__} takes other inputs: {error}."
        if args or side_inputs:
            return problem
        fix = "Give the inputs after the models: check_equivalent(original, edited, inputs)."
        return f"{problem} {fix}"
    return ""
