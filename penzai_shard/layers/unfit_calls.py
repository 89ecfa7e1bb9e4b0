"""Why a compiled layer cannot be called: in terms of its parameters and inputs, not of JAX's."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from penzai_shard.errors import MeshError, RuleTypeError, ShardingError
from penzai_shard.named_leaves import NamedLeaf, is_array_like, leaves_of


def unfit_call(
    error: Exception, body: Any, argument: Any, side_inputs: dict[str, Any]
) -> ShardingError | None:
    """What is wrong with the arrays of a call that failed; None if it failed for another reason.

    Args:
        error: What JAX, or the layer, said.
        body: The layer.
        argument: Its input.
        side_inputs: Its side inputs.

    Returns:
        ``RuleTypeError`` if a parameter or input is a struct that describes an array, or if an
        input is not an array; ``MeshError`` if not all arrays are on the same devices.
    """
    name = f"Jitted({type(body).__name__})"
    own = leaves_of(body)
    inputs = leaves_of(argument, "argument")
    for key, side_input in side_inputs.items():
        inputs += leaves_of(side_input, key)
    if structs := [leaf for leaf in own if _is_struct(leaf.array)]:
        return RuleTypeError(
            f"{name} was called as an abstract model, whose parameters have no values. Build it "
            "with sharded_init, fill it with restore_params or with_params, or trace it: "
            "jax.eval_shape(model, x).",
            [f"{_title(leaf)}: has a shape and no value." for leaf in structs],
        )
    if problems := [problem for leaf in inputs for problem in _input_problems(leaf)]:
        return RuleTypeError(f"{name} cannot take these inputs:", problems)
    # An array on other devices that the layer does not use is no problem.
    other_devices = "incompatible devices" in str(error)
    if other_devices and (problems := _device_problems(own, inputs)):
        return MeshError(f"{name} was called with arrays on different devices:", problems)
    return None


def _is_struct(array: Any) -> bool:
    return isinstance(array, jax.ShapeDtypeStruct)


def _title(leaf: NamedLeaf) -> str:
    return leaf.path or "the layer itself"


def _input_problems(leaf: NamedLeaf) -> Iterable[str]:
    if _is_struct(leaf.array):
        yield (
            f"{leaf.path}: is a jax.ShapeDtypeStruct, which has a shape and no value. "
            "Give an array, or trace the layer: jax.eval_shape(model, x)."
        )
    elif hasattr(leaf.array, "dtype") and not is_array_like(leaf.array):
        yield (
            f"{leaf.path}: {leaf.array!r} is not an array that a device can hold. Give numbers, "
            "such as token ids."
        )
    elif not is_array_like(leaf.array):
        yield (
            f"{leaf.path}: {leaf.array!r} is not an array. What a layer needs besides arrays is "
            "a field of it, declared with metadata={'pytree_node': False}."
        )


def _device_problems(own: list[NamedLeaf], inputs: list[NamedLeaf]) -> list[str]:
    """One line for every array that is committed to other devices than most of the model."""
    own = [leaf for leaf in own if _is_bound(leaf.array)]
    inputs = [leaf for leaf in inputs if _is_bound(leaf.array)]
    if not own and not inputs:
        return []
    counts = collections.Counter(_devices(leaf) for leaf in own or inputs)
    ((usual, _),) = counts.most_common(1)
    example = next(leaf for leaf in own or inputs if _devices(leaf) == usual)
    most = f"(for instance {_title(example)}) {_where(example.array)}"
    place_input = (
        "shard_batch(x, mesh, rules)"
        if len(usual) > 1
        else f"jax.device_put(x, jax.devices()[{min(device.id for device in usual)}])"
    )
    return [
        f"{_title(leaf)}: is {_where(leaf.array)}, and most of the model {most}. Place the whole "
        "model: place(model, mesh, rules)."
        for leaf in own
        if _devices(leaf) != usual
    ] + [
        f"{leaf.path}: is {_where(leaf.array)}, and {'the model' if own else 'most'} {most}. "
        f"Place it there: {place_input}."
        for leaf in inputs
        if _devices(leaf) != usual
    ]


def _is_bound(array: Any) -> bool:
    """Whether an array is bound to its devices; JAX may move all others."""
    return (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and bool(array.committed)
    )


def _devices(leaf: NamedLeaf) -> frozenset[Any]:
    return frozenset(leaf.array.sharding.device_set)


def _where(array: Any) -> str:
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sizes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"on a mesh {sizes}"
    ids = sorted(device.id for device in sharding.device_set)
    return f"on device {ids[0]}" if len(ids) == 1 else f"on devices {', '.join(map(str, ids))}"
