"""The step that is priced: a model's train state and what is done with it, all abstract."""

import difflib
import re
from typing import Any

import jax

from penzai_shard.cli.model_references import read_literals
from penzai_shard.errors import RuleTypeError, require_extra
from penzai_shard.layouts import Layout
from penzai_shard.training import TrainState

_OPTIMIZER = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?P<call>\(.*\))?", re.DOTALL)
_OPTIMIZER_EXAMPLE = "Write for instance adamw, or 'adamw(1e-3, weight_decay=0.1)'."
_LEARNING_RATE = 1e-3


def optimizer_of(text: str) -> Any:
    """An optimizer of optax.

    Args:
        text: Its name, with arguments in brackets or without.

    Raises:
        RuleTypeError: There is no such optimizer, or it does not take the arguments.
    """
    optax = require_extra("optax", "train")
    match = _OPTIMIZER.fullmatch(text.strip())
    if match is None:
        raise RuleTypeError(f"cannot read the optimizer {text!r}. {_OPTIMIZER_EXAMPLE}")
    name = match["name"]
    # Aliases are the functions that optax has one module of.
    known = [each for each in vars(optax) if _is_alias(getattr(optax, each))]
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, 1, 0.5)
        meant = f"Did you mean {near[0]}?" if near else _OPTIMIZER_EXAMPLE
        raise RuleTypeError(f"optax has no optimizer {name!r}. {meant}")
    args, kwargs = read_literals(text, match["call"] or "()", _OPTIMIZER_EXAMPLE)
    if match["call"] is None:
        # What it is does not change what a step needs or moves.
        args = (_LEARNING_RATE,)
    try:
        return getattr(optax, name)(*args, **kwargs)
    except TypeError as error:
        raise RuleTypeError(f"{text}: {error}. {_OPTIMIZER_EXAMPLE}") from error


def _is_alias(value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == "optax._src.alias"


def abstract_state(model: Any, optimizer: str, layout: Layout) -> TrainState:
    """A model's train state, without values.

    Args:
        model: The model, with structs in place of arrays; or its train state.
        optimizer: The optimizer's name, as for ``optimizer_of``.
        layout: What lays out its state.
    """
    if isinstance(model, TrainState):
        return model
    return TrainState.initial_state(
        model, optimizer_of(optimizer), jax.random.key(0), optimizer_rules=layout.optimizer
    )
