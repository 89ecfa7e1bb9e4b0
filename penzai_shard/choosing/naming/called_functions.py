"""What is no function of weights and inputs is refused, with the call to write."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.equinox_modules import are_arrays, is_equinox_module
from penzai_shard.errors import RuleTypeError
from penzai_shard.readers import initializer_of

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_OF_MODULE = "Write infer_names(lambda model, *inputs: model(*inputs), model, ...)."
_OF_EXAMPLES = (
    "Write infer_names(lambda model, *inputs: model(*inputs), model, ...), and where it takes one "
    "example, as modules of Equinox do, lambda model, batch: jax.vmap(model)(batch)."
)


def refuse_module(function: Any) -> None:
    """Refuses a module, or its class, in the place of a function, and what is no function at all.

    Raises:
        RuleTypeError: It cannot be called, or it is a class of models, or a model that holds its
            arrays itself or has them made.

    >>> refuse_module(lambda weights, tokens: weights[tokens])
    """
    if not callable(function):
        raise RuleTypeError(
            f"infer_names takes a function of weights and inputs, not a {type(function).__name__}. "
            "Write infer_names(function, params, *inputs)."
        )
    is_class = isinstance(function, type)
    if init := initializer_of(function):
        given = f"the class {function.__name__}" if is_class else f"a {type(function).__name__}"
        apply = f"{init.removesuffix('init')}apply"
        raise RuleTypeError(
            f"infer_names takes a function of weights and inputs, not {given}, whose method "
            f"apply is one. Write infer_names({apply}, variables, *inputs), "
            f"variables being what {init}(key, *inputs) returns."
        )
    if is_class:
        # Every class can be called; instances of some can.
        if any("__call__" in vars(base) for base in function.__mro__):
            raise RuleTypeError(
                f"infer_names takes a function of weights and inputs, not the class "
                f"{function.__name__}. {_OF_MODULE}"
            )
    elif not jax.tree_util.all_leaves([function]) and any(
        are_arrays(pz.freeze_variables(function))
    ):
        name = getattr(function, "__name__", type(function).__name__)
        raise RuleTypeError(
            f"infer_names names the arrays of its second argument, and this {name} holds its own. "
            f"{_OF_EXAMPLES if is_equinox_module(function) else _OF_MODULE}"
        )


def call_problem(name: str, function: Callable[..., Any], input_count: int) -> str:
    """Why a function cannot be called with weights and so many inputs, with the call to write.

    Empty if it can, or if it does not say what it takes.

    >>> call_problem("loss", lambda model, rng, x: x, 1)
    'infer_names calls loss(params, *inputs), here with 1 input, and it takes (model, rng, x). \
Write infer_names(lambda model, x: loss(model, rng=..., x=x), params, x), and what it needs in \
the place of "...".'
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""  # functions of extension modules do not all have one
    try:
        signature.bind(*range(input_count + 1))
    except TypeError:
        pass
    else:
        return ""
    inputs = f"{input_count} input{'' if input_count == 1 else 's'}"
    said = (
        f"infer_names calls {name}(params, *inputs), here with {inputs}, and it takes {signature}"
    )
    return f"{said}. {_proposed_call(name, list(signature.parameters.values()), input_count)}"


def _proposed_call(name: str, taken: Sequence[inspect.Parameter], input_count: int) -> str:
    required = [each for each in taken if each.default is each.empty and each.kind not in _MANY]
    if any(each.kind is each.POSITIONAL_ONLY for each in required[1:]) or not required:
        return "Give a function of the weights and the inputs."
    model, *others = (each.name for each in required)
    called = name if name.isidentifier() else "function"
    # What is passed on best is what comes last, as batches do.
    inputs = others[len(others) - input_count :] if input_count < len(others) else others
    listed = ", ".join([model, *inputs])
    if not others:
        return f"Leave the inputs out: infer_names({called}, params, input_names=[])."
    given = ", ".join([model, *(f"{each}={each if each in inputs else '...'}" for each in others)])
    given_inputs = ", ".join(["params", *inputs])
    todo = ', and what it needs in the place of "..."' if len(inputs) < len(others) else ""
    return f"Write infer_names(lambda {listed}: {called}({given}), {given_inputs}){todo}."
