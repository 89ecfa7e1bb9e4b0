"""What users give where a tree of arrays belongs, and is none: refused, with what to give."""

import os
from collections.abc import Iterator
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError
from penzai_shard.readers import initializer_of, not_a_tree, refusal


def refuse_builder(called: str, tree: Any, as_model: bool = False) -> None:
    """Refuses a function or a class, a path, or nothing at all, where a tree of arrays belongs.

    Args:
        called: The function that was called, for messages.
        tree: What was given to it. Models are pytrees, whether they can be called or not.
        as_model: Whether its arrays are to be parameters by name.

    Raises:
        RuleTypeError: It is None, or can be called and is not a pytree; or it is the path of a
            file, or an object of another library that is not an array.

    >>> refuse_builder("make_plan", {})
    >>> refuse_builder("make_plan", dict)
    Traceback (most recent call last):
    penzai_shard.errors.RuleTypeError: make_plan takes a model or another tree of arrays, not \
the class dict. ...
    """
    if isinstance(tree, str | os.PathLike):
        raise RuleTypeError(
            f"{called} takes a model or another tree of arrays, not a path, {str(tree)!r}. Load "
            f"what is there: torch.load({str(tree)!r}, map_location='cpu', weights_only=True), or "
            f"safetensors.numpy.load_file({str(tree)!r})."
        )
    if isinstance(tree, Iterator):
        raise RuleTypeError(
            f"{called} takes a model or another tree of arrays, not a {type(tree).__name__}, which "
            "can be read only once. Give a dictionary or a list of what it yields: dict(...)."
        )
    if said := getattr(type(tree), "given_for_arrays", ""):
        raise RuleTypeError(
            f"{called} takes a model or another tree of arrays. This {type(tree).__name__} {said}."
        )
    if tree is None:
        raise RuleTypeError(
            f"{called} takes a model or another tree of arrays, not None. Give a model, or one "
            "without memory: abstract_model(build_model, ...)."
        )
    refuse_module_without_arrays(f"{called} takes a model or another tree of arrays", tree)
    if problem := not_a_tree(tree):
        raise RuleTypeError(f"{called} takes a model or another tree of arrays; {problem}.")
    if problem := refusal(tree, as_model):
        raise RuleTypeError(f"{called} takes a model or another tree of arrays, {problem}.")
    if not (callable(tree) and jax.tree_util.all_leaves([tree])):
        return
    name = getattr(tree, "__name__", "")
    kind = "class" if isinstance(tree, type) else "function"
    given = f"the {kind} {name}" if name else f"a {type(tree).__name__}"
    example = name if name.isidentifier() else "build_model"
    raise RuleTypeError(
        f"{called} takes a model or another tree of arrays, not {given}. Give what it builds: "
        f"abstract_model({example}, ...), without memory, to plan or to restore; "
        f"sharded_init({example}, ..., mesh=mesh, rules=rules) to have it on a mesh."
    )


def refuse_module_without_arrays(takes: str, given: Any) -> None:
    """Refuses a module whose arrays are made by a method of it, and are kept apart from it.

    Args:
        takes: What takes what instead, for messages.
        given: What was given.

    Raises:
        RuleTypeError: It is such a module, or a class of them.

    >>> refuse_module_without_arrays("make_plan takes a tree", {})
    """
    init = initializer_of(given)
    if not init:
        return
    is_class = isinstance(given, type)
    name = f"the class {given.__name__}" if is_class else f"a {type(given).__name__}"
    raise RuleTypeError(
        f"{takes}, not {name}, which holds no arrays: its init makes them. Give that and its "
        f"arguments: abstract_model({init}, key, x), without memory, to plan or to restore; "
        f"sharded_init({init}, key, x, mesh=mesh, rules=rules) to have them on a mesh."
    )
