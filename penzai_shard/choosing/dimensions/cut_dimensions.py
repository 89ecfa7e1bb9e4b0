"""Dimensions that are cut into parts, and put together from parts, by slices and concatenations."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from penzai_shard.choosing.dimensions.splittable_classes import SplittableClasses
from penzai_shard.choosing.dimensions.tied_dimensions import Elements
from penzai_shard.sharding_propagation import FLOW, Operation, PropagatedProgram, walk

_Place: TypeAlias = tuple[int, int, int]
"""Where a part starts in a dimension, where it ends, and its stride."""

# What may take an element from another place, and keep the shape all the same.
_MOVES = frozenset(
    {
        "stablehlo.convolution",
        "stablehlo.dot_general",
        "stablehlo.gather",
        "stablehlo.reshape",
        "stablehlo.scatter",
        "stablehlo.transpose",
    }
)


@dataclasses.dataclass(frozen=True)
class _Parted:
    """A dimension with parts of it: those that it is cut into, or put together from.

    Attributes:
        whole: The element of the dimension.
        parts: The element of each part by its place.
        is_joined: Whether it is put together from them.
        came_from: Of what is put together: the dimensions as long as it is that it comes from.
    """

    whole: int
    parts: Mapping[_Place, int]
    is_joined: bool
    came_from: tuple[int, ...] = ()


def tie_cuts(program: PropagatedProgram, classes: SplittableClasses, elements: Elements) -> None:
    """Ties what parts of dimensions say of one another, until they say nothing more.

    Args:
        program: The program.
        classes: Where all else has been tied.
        elements: The elements in it of the dimensions of each value.
    """
    parted = [*_cut(program, elements), *_joined(program, elements)]
    while True:
        before = classes.ties
        _tie_same_places(parted, classes)
        _tie_runs_of_products(parted, classes)
        _tie_put_together_again(parted, classes)
        _split_strided(parted, classes)
        if classes.ties == before:
            _split_equal_parts(program, parted, classes, elements)
        if classes.ties == before:
            return


def _cut(program: PropagatedProgram, elements: Elements) -> Iterator[_Parted]:
    """The dimensions that slices cut, each with all that is cut out of it."""
    found: dict[int, dict[_Place, int]] = collections.defaultdict(dict)
    for operation in program.operations:
        if not operation.cuts:
            continue
        source, result = _handed_on(program, operation.operands[0]), operation.results[0]
        for number, place in enumerate(operation.cuts):
            length = program.values[result].shape[number]
            if length < program.values[source].shape[number]:
                found[elements[source][number]][place] = elements[result][number]
    for whole, parts in found.items():
        yield _Parted(whole, parts, is_joined=False)


def _handed_on(program: PropagatedProgram, value: int) -> int:
    """The value that calls hand on as another: what several of them cut is one."""
    while (maker := program.makers.get(value)) and maker.kind == FLOW and len(maker.operands) == 1:
        value = maker.operands[0]
    return value


def _joined(program: PropagatedProgram, elements: Elements) -> Iterator[_Parted]:
    """The dimensions that concatenations put together."""
    for operation in program.operations:
        if operation.kind != "stablehlo.concatenate":
            continue
        number = _joined_dimension(program, operation)
        if number is None:
            continue
        lengths = [program.values[operand].shape[number] for operand in operation.operands]
        ends = itertools.accumulate(lengths)
        parts = {
            (end - length, end, 1): elements[operand][number]
            for operand, length, end in zip(operation.operands, lengths, ends, strict=True)
        }
        came_from = tuple(dict.fromkeys(_came_from(program, operation, number, elements)))
        yield _Parted(elements[operation.results[0]][number], parts, True, came_from)


def _joined_dimension(program: PropagatedProgram, operation: Operation) -> int | None:
    """The dimension along which an operation puts its operands together."""
    result = program.values[operation.results[0]].shape
    first = program.values[operation.operands[0]].shape
    differing = [i for i, (a, b) in enumerate(zip(first, result, strict=True)) if a != b]
    return differing[0] if differing else None


def _came_from(
    program: PropagatedProgram, operation: Operation, number: int, elements: Elements
) -> Iterator[int]:
    """The nearest dimensions, as long as what an operation puts together, that it comes from.

    By way of slices and concatenations along that dimension, and of operations on each element.
    """
    values = program.values
    length = values[operation.results[0]].shape[number]

    def sources(value: int) -> Iterator[int]:
        shape, maker = values[value].shape, program.makers.get(value)
        if shape[number] == length or maker is None:
            return
        if maker.rule is None and len(maker.operands) != 1:
            return
        along = maker.cuts or maker.kind == "stablehlo.concatenate"
        for operand in maker.operands:
            before = values[operand].shape
            if along:
                follows = _but_one(before, number) == _but_one(shape, number)
            else:
                follows = before == shape and maker.kind not in _MOVES
            if follows:
                yield operand

    for value in walk(operation.operands, sources):
        if values[value].shape[number] == length:
            yield elements[_handed_on(program, value)][number]


def _but_one(shape: tuple[int, ...], number: int) -> tuple[int, ...]:
    return shape[:number] + shape[number + 1 :]


def _tie_same_places(parted: Sequence[_Parted], classes: SplittableClasses) -> None:
    """Parts at the same place of one dimension are one."""
    first: dict[tuple[tuple[int, ...], _Place], int] = {}
    for each in parted:
        whole = tuple(classes.parts(each.whole))
        for place, part in each.parts.items():
            classes.unify([first.setdefault((whole, place), part)], [part])


def _tie_runs_of_products(parted: Sequence[_Parted], classes: SplittableClasses) -> None:
    """What is cut out at one place of the slower parts of a product is the faster ones.

    So it is with queries, keys and values that stand one after the other, each with all heads.
    """
    for each in parted:
        if each.is_joined:
            continue
        faster = classes.of_all([each.whole])[1:]
        while faster:
            length = math.prod(classes.sizes[part] for part in faster)
            for (start, end, stride), part in each.parts.items():
                if end - start == length and start % length == 0 and stride == 1:
                    classes.unify([part], faster)
            faster = faster[1:]


def _tie_put_together_again(parted: Sequence[_Parted], classes: SplittableClasses) -> None:
    """What is put together of the parts that a dimension was cut into is that dimension.

    In whatever order: rotary embeddings change the halves of a projection for one another.
    """
    cut = {each.whole: each for each in parted if not each.is_joined and _covers(each, classes)}
    for each in parted:
        source = cut.get(each.came_from[0]) if len(each.came_from) == 1 else None
        if source is not None and _in_any_order(each, classes) == _in_any_order(source, classes):
            classes.unify([source.whole], [each.whole])


def _split_equal_parts(
    program: PropagatedProgram,
    parted: Sequence[_Parted],
    classes: SplittableClasses,
    elements: Elements,
) -> None:
    """What is cut into equal parts that mean the same is a product, the parts being its faster one.

    They mean the same if what is slowest in them is one class, or if they are queries, keys and
    values: all that is left open is whether the values of attention have the length of its keys for
    a reason. And they must be an axis of their own: of an argument, or one that is split further.
    Halves that are put together again are not.
    """
    of_arguments = {
        part
        for value in program.arguments.values()
        for element in elements[value]
        for part in classes.parts(element)
    }
    again = {tuple(classes.parts(each.whole)) for each in parted if each.is_joined}
    for each in parted:
        parts = list(each.parts.values())
        if each.is_joined or len(classes.parts(each.whole)) > 1 or len(parts) < 2:
            continue
        if tuple(classes.parts(each.whole)) in again or not _are_equal_runs(each, classes):
            continue
        of_parts = [classes.parts(part) for part in parts]
        kinds = [part[0] for part in of_parts]
        if len(set(kinds)) > 1 and not _are_attended(program, classes, elements, kinds):
            continue
        if not any(len(part) > 1 or part[0] in of_arguments for part in of_parts):
            continue
        for part in parts[1:]:
            classes.unify(parts[:1], [part])
        classes.unify([each.whole], [classes.new(len(parts)), parts[0]])


def _are_attended(
    program: PropagatedProgram, classes: SplittableClasses, elements: Elements, kinds: list[int]
) -> bool:
    """Whether three parts are queries and keys, which are contracted, and the values.

    What a product makes of the contraction is multiplied with the values, and has their class.
    """
    twice = [kind for kind in kinds if kinds.count(kind) == 2]
    if len(kinds) != 3 or not twice:
        return False
    (value,) = set(kinds) - set(twice)

    def has(number: int, kind: int) -> bool:
        return any(kind in classes.parts(element) for element in elements[number])

    products = [each for each in program.operations if each.kind == "stablehlo.dot_general"]
    made = {
        each.results[0]
        for each in products
        if all(has(operand, twice[0]) for operand in each.operands)
        and not has(each.results[0], twice[0])
    }
    for operation in program.operations:
        if made.isdisjoint(operation.operands):
            continue
        if operation.kind != "stablehlo.dot_general":
            made.update(operation.results)
        elif any(has(operand, value) for operand in operation.operands):
            return has(operation.results[0], value)
    return False


def _split_strided(parted: Sequence[_Parted], classes: SplittableClasses) -> None:
    """What every n-th element is taken of, n times, is a product of what that is, and of n."""
    for each in parted:
        strides = {stride for *_, stride in each.parts}
        same = {tuple(classes.parts(part)) for part in each.parts.values()}
        if each.is_joined or len(same) > 1 or strides != {len(each.parts)} or strides == {1}:
            continue
        if len(classes.parts(each.whole)) == 1 and _covers(each, classes):
            first = next(iter(each.parts.values()))
            classes.unify([each.whole], [first, classes.new(len(each.parts))])


def _are_equal_runs(each: _Parted, classes: SplittableClasses) -> bool:
    """Whether parts of equal length, without gaps and none of them twice, cover a dimension."""
    lengths = {end - start for start, end, _ in each.parts}
    return _covers(each, classes) and len(lengths) == 1 and {s for *_, s in each.parts} == {1}


def _covers(each: _Parted, classes: SplittableClasses) -> bool:
    """Whether every element of a dimension is in just one of its parts."""
    length = classes.sizes[each.whole]
    places = [index for place in each.parts for index in range(*place)]
    return len(places) == length and len(set(places)) == length


def _in_any_order(each: _Parted, classes: SplittableClasses) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(classes.of_all([part])) for part in each.parts.values()))
