"""Layers run one after the other as a loop, keeping for the backward pass what a policy says."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from penzai_shard.layers.remat_policies import (
    HOST_MEMORY,
    CheckpointPolicy,
    LayerStackPolicy,
    Saved,
)

RunLayer = Callable[[Any, Any], tuple[Any, Any]]


def run_in_turn(
    run_layer: RunLayer,
    carried: Any,
    sliced: Any,
    *,
    length: int,
    unroll: int = 1,
    policy: LayerStackPolicy | None = None,
    name: str = "layers",
) -> tuple[Any, Any]:
    """What ``jax.lax.scan`` computes, with a policy for what is kept for the backward pass.

    Args:
        run_layer: One layer: what is carried and its slices, to what is carried on and its results.
        carried: What goes into the first layer.
        sliced: Arrays of which each layer takes the slice at its own place in the first dimension.
        length: How many layers there are.
        unroll: How many layers one turn of the innermost loop runs.
        policy: What is kept; None for everything.
        name: Told apart by it are loops in one another.

    Returns:
        What the last layer carries on, and the results of all layers along a new first dimension.

    >>> add = lambda total, x: (total + x, total)
    >>> total, before = run_in_turn(
    ...     add, 0.0, jnp.arange(5.0), length=5, policy=LayerStackPolicy(group_size=2)
    ... )
    >>> float(total), before.tolist()
    (10.0, [0.0, 0.0, 1.0, 3.0, 6.0])
    """

    def turns(carried: Any, sliced: Any, count: int, carries: Saved) -> Any:
        body = run_layer
        if policy is not None:
            body = _checkpointed(
                run_layer,
                {f"carry of {name}": carries, f"inputs of {name}": policy.save_inputs},
                policy.internals,
                in_a_loop=count > unroll,
            )
        return jax.lax.scan(body, carried, sliced, length=count, unroll=min(unroll, count) or 1)

    size = length if policy is None else policy.layers_per_group(length)
    if policy is None or size in (1, length) or length == 0:
        carries = True if policy is None else policy.save_carries
        return turns(carried, sliced, length, carries)

    def group(carried: Any, sliced: Any, count: int, in_a_loop: bool) -> Any:
        run = _checkpointed(
            lambda carried, sliced: turns(carried, sliced, count, True),
            {f"carry of {name}": policy.save_carries, f"inputs of {name}": False},
            jax.checkpoint_policies.nothing_saveable,
            in_a_loop=in_a_loop,
        )
        return run(carried, sliced)

    groups, rest = divmod(length, size)
    whole = jax.tree_util.tree_map(
        lambda x: x[: groups * size].reshape(groups, size, *x.shape[1:]), sliced
    )
    carried, results = jax.lax.scan(
        lambda carried, sliced: group(carried, sliced, size, groups > 1),
        carried,
        whole,
        length=groups,
    )
    results = jax.tree_util.tree_map(lambda x: x.reshape(groups * size, *x.shape[2:]), results)
    if rest:
        last = jax.tree_util.tree_map(lambda x: x[groups * size :], sliced)
        carried, more = group(carried, last, rest, False)
        results = jax.tree_util.tree_map(lambda a, b: jnp.concatenate([a, b]), results, more)
    return carried, results


def _checkpointed(
    run: RunLayer, saved: dict[str, Saved], internals: CheckpointPolicy, *, in_a_loop: bool
) -> RunLayer:
    """A layer, or a group of them, computed again in the backward pass.

    Args:
        run: The layer.
        saved: How what is carried, and what is sliced, are kept, by the names to give them.
        internals: What of the rest is kept.
        in_a_loop: Whether it is the body of a loop, in which the compiler cannot find the
            computation of the forward pass again and use its results.
    """
    offloaded = [name for name, kept in saved.items() if kept == "offload"]
    # What is carried is kept in any case: a loop cannot run backward without it.
    kept_here = [name for name, kept in list(saved.items())[1:] if kept is True]
    carry_name, inputs_name = saved

    def named(tree: Any, name: str) -> Any:
        if name not in (*offloaded, *kept_here):
            return tree
        return jax.tree_util.tree_map(
            lambda x: checkpoint_name(x, name) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def run_named(carried: Any, sliced: Any) -> Any:
        return run(named(carried, carry_name), named(sliced, inputs_name))

    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept_here,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )

    def keeps(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        if parameters.get("name") in saved:
            return by_name(primitive, *arguments, **parameters)
        return internals(primitive, *arguments, **parameters)

    policy = keeps if offloaded or kept_here else internals
    return jax.checkpoint(run_named, policy=policy, prevent_cse=not in_a_loop)
