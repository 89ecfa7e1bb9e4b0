"""Arrays that a computation holds beside a tree while it runs, such as the gradients of a step.

They are no part of the tree, so nothing is placed, saved or restored by their plans; but devices
need room for them, and a plan shows them.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from penzai_shard.planning.plan import LeafPlan

AS_ITS_PARAMETER = "while a step runs, laid out as its parameter"


@functools.singledispatch
def parts_with_gradients(tree: Any) -> Mapping[str, Any]:
    """The parts of a tree that have gradients while a step runs, by the name of their field.

    Types of train states are registered: ``@parts_with_gradients.register``. It is also called
    with a tree like the state that has numbers in place of arrays.

    >>> parts_with_gradients({"w": 1.0})
    {}
    """
    return {}


def is_train_state(tree: Any) -> bool:
    """Whether a tree is of a type that is registered as a train state.

    >>> is_train_state({})
    False
    """
    return parts_with_gradients.dispatch(type(tree)) is not parts_with_gradients.dispatch(object)


def gradient_plans(numbers: Any, leaves: Sequence[LeafPlan]) -> tuple[LeafPlan, ...]:
    """The plans of gradients: like those of their parameters, in shape, dtype and layout.

    Args:
        numbers: The planned tree with the number of its plan in place of each array.
        leaves: The plans.

    >>> gradient_plans({"w": 0}, ())
    ()
    """
    plans = []
    for field, part in parts_with_gradients(numbers).items():
        for number in dict.fromkeys(jax.tree_util.tree_leaves(part)):
            if number >= 0:
                path = leaves[number].path.removeprefix(f"{field}/")
                plan = dataclasses.replace(
                    leaves[number], path=f"gradients/{path}", reason=AS_ITS_PARAMETER
                )
                plans.append(plan)
    return tuple(plans)
