"""What is wrong when a compiled step refuses its arguments, in the words of the train state.

A step does not look at every array before every call. JAX does, and names what it refuses by
positions in the program; these functions say the same by paths.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from penzai_shard.array_kinds import is_abstract, is_array_like, is_deleted
from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.training.flat_state import FlatState, StateForm
from penzai_shard.training.loss_contract import not_arrays
from penzai_shard.training.state_layout import deleted, sharding_text
from penzai_shard.training.train_state import donation_text, from_flat
from penzai_shard.tree_paths import paths_and_leaves

FIX_INPUT = (
    "Pass arrays; give anything else to the loss function itself, for instance with "
    "functools.partial."
)
_POSITION = re.compile(r"\b(rest|step)(?:\[(\d+)\])?(?= of )")


def refuse_inputs(inputs: Mapping[str, Any]) -> None:
    """Raises for inputs that are not arrays, if there are any."""
    problems = not_arrays(dict(inputs), "", FIX_INPUT)
    if problems:
        raise ShardingError("the inputs of a step must be arrays:", problems)


def refuse_positional(positional: tuple[Any, ...], called: str = "step(state, ") -> None:
    """Raises for inputs by position, if there are any."""
    if not positional:
        return
    many = len(positional) > 1 or not isinstance(positional[0], Mapping)
    raise RuleTypeError(
        f"a step takes its inputs by keyword, and got {len(positional)} by position. "
        f"Write {called}{'x=x, y=y' if many else '**batch'})."
    )


def refuse_donated(flat: FlatState) -> None:
    """Raises if a state was donated to an earlier step."""
    if deleted(flat.changing):
        raise ShardingError(donation_text(from_flat(flat)))
    if deleted(flat.constant):
        raise ShardingError(
            "arrays of this train state were deleted or donated elsewhere:",
            [
                f"{path}: its memory is gone. Make the state from a copy."
                for path, leaf in zip(flat.form.paths(), flat.leaves(), strict=True)
                if is_deleted(leaf)
            ],
        )


def refuse_other_leaves(form: StateForm, leaves: list[Any]) -> None:
    """Raises for leaves of a state that are not arrays, as one filled in by hand may have."""
    if all(map(is_array_like, leaves)):
        return
    raise_all(
        ShardingError,
        "a train state must be made of arrays:",
        [
            f"{path}: is of type {type(leaf).__name__}. Fill it with an array."
            for path, leaf in zip(form.paths(), leaves, strict=True)
            if not is_array_like(leaf)
        ],
    )


def explained(error: Exception, flat: FlatState, inputs: Mapping[str, Any]) -> ShardingError | None:
    """What to say instead of an error of JAX about the arguments of a step.

    Args:
        error: The error.
        flat: The state that the step was called with.
        inputs: Its inputs.

    Returns:
        An error of this library; None if the error is about something else.
    """
    if isinstance(error, ShardingError):
        return None
    # A step that fails while it runs has taken the state too, and that is not why it failed.
    if "deleted" in str(error):
        try:
            refuse_donated(flat)
        except ShardingError as donated:
            return donated
    named = paths_and_leaves(dict(inputs))
    problems = [
        f"{path}: its memory is gone, as it was donated or deleted. Make the batch anew."
        for path, leaf in named
        if is_deleted(leaf)
    ]
    problems += [
        f"{path}: it is abstract, a {type(leaf).__name__}. Pass an array."
        for path, leaf in named
        if is_abstract(leaf)
    ]
    if problems:
        return ShardingError("some inputs hold no values:", problems)
    if "ncompatible devices" not in str(error):
        return None
    state = next(leaf for leaf in flat.changing if isinstance(leaf, jax.Array))
    devices = _devices(state)
    problems = [
        f"input {path}: is on {_place(leaf)}, the train state on {_place(state)}. Place it with "
        "the state: shard_batch(batch, mesh, rules), with the state's mesh."
        for path, leaf in named
        if isinstance(leaf, jax.Array) and leaf.committed and _devices(leaf) != devices
    ]
    if problems:
        return ShardingError("the inputs are on other devices than the train state:", problems)
    return ShardingError(
        "the loss function uses arrays or constraints on other devices than the train state, which "
        f"is on {_place(state)}. Make its constraint layers and its closures for the same mesh. "
        f"JAX says: {_with_paths(str(error), flat)}"
    )


def _devices(array: jax.Array) -> Any:
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        # Of two meshes with the same devices the order counts too.
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _place(array: jax.Array) -> str:
    text = sharding_text(array.sharding)
    ids = [device.id for device in _devices(array)]
    return f"{text} (devices {', '.join(map(str, ids))})" if 1 < len(ids) <= 16 else text


def _with_paths(text: str, flat: FlatState) -> str:
    """JAX's message with paths of the train state in place of positions."""
    paths, _ = flat.form.parted(flat.form.paths())

    def path_of(match: re.Match[str]) -> str:
        if match[1] == "step" or match[2] is None:
            return "step"
        return paths[1 + int(match[2])]

    return _POSITION.sub(path_of, text)
