"""The arrays of a step, and which rules of a layout say where they are."""

import enum
from typing import NamedTuple

from penzai_shard.choosing.by_names.placements import Tensor


class Table(enum.Enum):
    """Which rules of a layout say where an array is."""

    STORED = "parameters as they are stored"
    IN_BLOCKS = "parameters as blocks use them"
    IN_VOCABULARY = "parameters as lookups and logits use them"
    UPDATE = "gradients as they are kept, and updates"
    INSIDE = "activations in attention and feed-forward"
    LOGITS = "activations where tokens are looked up, where logits are made, and behind"
    BETWEEN = "activations between layers"


class ParameterUse(NamedTuple):
    """A parameter that is used in another layout than it is stored in.

    Attributes:
        parameter: Its number.
        tensor: The parameter as it is used.
        table: The rules that it is used by.
        is_backward: Whether that is in the backward pass.
        where: The path of the parameter.
        first: The number of the first operation that uses it so.
        last: The number of the last one.
        times: How often it is brought there: in a loop over layers, the part of each layer.
    """

    parameter: int
    tensor: Tensor
    table: Table
    is_backward: bool
    where: str
    first: int
    last: int
    times: int = 1


class Life(NamedTuple):
    """How long an array is in memory.

    Attributes:
        tensor: The array.
        table: The rules that it is laid out by.
        first: The number of the operation that makes it.
        last: The number of the last operation that uses it.
    """

    tensor: Tensor
    table: Table
    first: int
    last: int
