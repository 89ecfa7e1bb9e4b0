"""Which dimensions of an operation's operands and results belong together, by factors.

Shardy's rule of an operation numbers factors: ``dot_general`` has one for the rows of its first
operand and of its result, one for what is summed up, and so on. A reshape's dimension may have
several, the slowest first. A mesh axis is propagated along a factor.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penzai_shard.library_apis.shardy_records import ShardyRule, ShardyValue
from penzai_shard.sharding_propagation.mesh_axis_parts import size_of, split
from penzai_shard.sharding_propagation.operations import FLOW, Operation


class FactorAxis(NamedTuple):
    """A mesh axis on a dimension of a value, as an operation sees it.

    Attributes:
        dimension: The dimension.
        factor: The factor of the operation that it splits; None if it is longer than they are.
        mesh_axis: The mesh axis, or a part of one.
    """

    dimension: int
    factor: int | None
    mesh_axis: str


def rule_of(operation: Operation, values: Sequence[ShardyValue]) -> ShardyRule | None:
    """The rule of an operation; one that only hands values on keeps each dimension."""
    if operation.kind != FLOW:
        return operation.rule
    shape = values[operation.results[0]].shape
    dimensions = tuple((i,) for i in range(len(shape)))
    none: frozenset[int] = frozenset()
    return ShardyRule(
        shape, (dimensions,) * len(operation.operands), (dimensions,), none, none, none, none
    )


def factor_axes(
    value: ShardyValue,
    dimensions: Sequence[Sequence[int]],
    sizes: Sequence[int],
    mesh: Mapping[str, int],
) -> list[FactorAxis]:
    """The mesh axes of a value by factors: the slowest factor of a dimension gets them first.

    >>> x = ShardyValue((16,), "f32", (("data",),), (True,), {})
    >>> [(one.factor, one.mesh_axis) for one in factor_axes(x, [(0, 1)], (2, 8), {"data": 8})]
    [(0, 'data:(1)2'), (1, 'data:(2)4')]
    """
    found = []
    for dimension, (factors, mesh_axes) in enumerate(
        zip(dimensions, value.spec or (), strict=False)
    ):
        waiting, left = list(mesh_axes), 0
        for place, factor in enumerate(factors):
            left = sizes[factor]
            is_last = place == len(factors) - 1
            while waiting:
                mesh_axis, size = waiting[0], size_of(waiting[0], mesh)
                fits = math.gcd(left, size)
                if is_last and (fits == size or len(factors) == 1):
                    fits = size
                if fits == 1 < size:
                    break
                waiting.pop(0)
                if fits < size:
                    mesh_axis, rest = split(mesh_axis, fits, mesh)
                    waiting.insert(0, rest)
                left //= fits
                found.append(FactorAxis(dimension, factor, mesh_axis))
            if left > 1:
                # What is behind in a dimension cannot be split before this is.
                break
        found += [FactorAxis(dimension, None, each) for each in waiting]
    return found


def dimensions_with(factor: int, dimensions: Sequence[Sequence[int]]) -> list[int]:
    """The dimensions of a value that have a factor.

    >>> dimensions_with(1, [(0,), (1, 2)])
    [1]
    """
    return [number for number, factors in enumerate(dimensions) if factor in factors]
