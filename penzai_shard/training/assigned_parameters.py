"""Whether a loss assigned to parameters, where only its traced program can tell.

Modules of some libraries are mutable, and transformations such as rematerialisation give every
variable of a module a new value, which is the old one for those that nothing was assigned to.
"""

from collections.abc import Callable
from typing import Any

import jax

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.traced_programs import passed_through


def refuse_assigned(
    params: dict[str, Any], final_values: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Refuses a loss that leaves parameters with other values than it got.

    Args:
        params: The parameters by name.
        final_values: Gives the values after the loss of those that may be others, by name. It is
            traced.

    Raises:
        ShardingError: Some are others: the optimizer alone changes parameters.

    >>> refuse_assigned({"w": 1.0}, lambda params: {"w": jax.jit(lambda x: x)(params["w"])})
    >>> refuse_assigned({"w": 1.0}, lambda params: {"w": params["w"] * 2})
    Traceback (most recent call last):
    penzai_shard.errors.ShardingError: the loss assigned to parameters, which the optimizer alone \
changes:
      w: was assigned. Keep what the loss changes in a variable of another kind.
    """
    leaves, treedef = jax.tree_util.tree_flatten(params)
    program, after = jax.make_jaxpr(
        lambda leaves: final_values(jax.tree_util.tree_unflatten(treedef, leaves)),
        return_shape=True,
    )(leaves)
    numbers = jax.tree_util.tree_unflatten(treedef, range(len(leaves)))
    # None would not count as a leaf.
    origins = [-1 if number is None else number for number in passed_through(program)]
    found = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(after), origins)
    raise_all(
        ShardingError,
        "the loss assigned to parameters, which the optimizer alone changes:",
        [
            f"{name}: was assigned. Keep what the loss changes in a variable of another kind."
            for name, value in found.items()
            if jax.tree_util.tree_leaves(value) != jax.tree_util.tree_leaves(numbers[name])
        ],
    )
