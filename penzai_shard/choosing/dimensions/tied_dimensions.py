"""What each operation of a program ties, by Shardy's rule of it."""

import dataclasses
import math
from collections.abc import Sequence, Set

from penzai_shard.choosing.dimensions.splittable_classes import SplittableClasses
from penzai_shard.library_apis.shardy_records import ShardyRule
from penzai_shard.sharding_propagation import Operation, PropagatedProgram
from penzai_shard.sharding_propagation.factors import rule_of

# Their results have another logical axis where each place depends on all: ranks, frequencies.
_REORDERED = frozenset({"stablehlo.fft", "stablehlo.sort"})

Elements = Sequence[tuple[int, ...]]
"""The elements of the dimensions of each value."""


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Lengths at an operation that cannot be parts of one another, so that it ties nothing there.

    Attributes:
        operation: Its number in the program.
        lengths: The lengths that were to be one.
    """

    operation: int
    lengths: tuple[tuple[int, ...], tuple[int, ...]]


def tie_operations(
    program: PropagatedProgram, classes: SplittableClasses, elements: Elements
) -> list[Conflict]:
    """Ties the dimensions of all values as the operations do.

    Args:
        program: The program.
        classes: Where they are tied.
        elements: The elements in it of the dimensions of each value.

    Returns:
        Where lengths did not allow it.
    """
    conflicts = []
    for operation in program.operations:
        for first, second in _tied(program, operation, classes, elements):
            if not classes.unify(first, second):
                before, after = ([classes.sizes[each] for each in e] for e in (first, second))
                conflicts.append(Conflict(operation.number, (tuple(before), tuple(after))))
    return conflicts


def _tied(
    program: PropagatedProgram,
    operation: Operation,
    classes: SplittableClasses,
    elements: Elements,
) -> list[tuple[list[int], list[int]]]:
    """The products that an operation ties."""
    values = (*operation.operands, *operation.results)
    if operation.kind == "stablehlo.reshape":
        source, target = (list(elements[value]) for value in values)
        return _equal_products(source, target, classes.sizes)
    rule = rule_of(operation, program.values)
    if rule is None:
        return []
    if operation.kind not in _REORDERED:
        return _by_factors(rule, values, rule.operands + rule.results, classes, elements)
    kept = _without(rule.results, rule.replicated)
    pairs = _by_factors(rule, values, rule.operands + kept, classes, elements)
    return pairs + _by_factors(rule, operation.results, rule.results, classes, elements)


def _without(
    dimensions: Sequence[Sequence[Sequence[int]]], left_out: Set[int]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The factors of the dimensions of some values, but for some factors."""
    return tuple(
        tuple(tuple(f for f in factors if f not in left_out) for factors in of_value)
        for of_value in dimensions
    )


def _by_factors(
    rule: ShardyRule,
    values: Sequence[int],
    factors: Sequence[Sequence[Sequence[int]]],
    classes: SplittableClasses,
    elements: Elements,
) -> list[tuple[list[int], list[int]]]:
    """The products that an operation ties: each dimension with its factors.

    A dimension that is not as long as its factors is changed in length, and tied to nothing.
    """
    sizes = rule.sizes
    of_factor: dict[int, int] = {}
    pairs: list[tuple[list[int], list[int]]] = []
    split: list[tuple[int, Sequence[int]]] = []
    for value, of_dimensions in zip(values, factors, strict=False):
        for element, of_dimension in zip(elements[value], of_dimensions, strict=False):
            length = classes.sizes[element]
            if length == 1 or math.prod(sizes[factor] for factor in of_dimension) != length:
                continue
            if len(of_dimension) == 1:
                first = of_factor.setdefault(of_dimension[0], element)
                if first != element:
                    pairs.append(([first], [element]))
            else:
                split.append((element, of_dimension))
    for element, of_dimension in split:
        parts = []
        for factor in of_dimension:
            if factor not in of_factor:
                of_factor[factor] = classes.new(sizes[factor])
            parts.append(of_factor[factor])
        pairs.append(([element], parts))
    return pairs


def _equal_products(
    source: list[int], target: list[int], sizes: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """The dimensions that a reshape makes of which: the fewest of both with equal products."""
    if math.prod(sizes[each] for each in source) == 0:
        return []
    groups = []
    while source or target:
        first, second = source[-1:], target[-1:]
        del source[-1:], target[-1:]
        while (left := math.prod(sizes[each] for each in first)) != (
            right := math.prod(sizes[each] for each in second)
        ):
            if left < right:
                first.insert(0, source.pop())
            else:
                second.insert(0, target.pop())
        groups.append((first, second))
    return groups
