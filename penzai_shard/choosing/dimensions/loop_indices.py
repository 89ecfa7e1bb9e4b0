"""What loops take and write one by one: stacked dimensions."""

from collections.abc import Iterator

from penzai_shard.choosing.dimensions.splittable_classes import SplittableClasses
from penzai_shard.choosing.dimensions.tied_dimensions import Elements
from penzai_shard.sharding_propagation import FLOW, Operation, PropagatedProgram

_TAKEN, _WRITTEN = "stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"


def tie_what_loops_index(
    program: PropagatedProgram, classes: SplittableClasses, elements: Elements
) -> list[int]:
    """Ties the dimensions that one loop goes through, an element in each round.

    That is what ``jax.lax.scan`` does to what it scans, and to what it stacks. They are as long as
    the loop, which takes element after element of each at its own index.

    Returns:
        The elements of these dimensions.
    """
    first: dict[tuple[int, int], int] = {}
    for operation in program.operations:
        for number, index in indexed_dimensions(program, operation):
            counter = counter_behind(program, index)
            if counter is not None:
                element = elements[operation.operands[0]][number]
                length = classes.sizes[element]
                classes.unify([first.setdefault((counter, length), element)], [element])
    return list(first.values())


def indexed_dimensions(
    program: PropagatedProgram, operation: Operation
) -> Iterator[tuple[int, int]]:
    """The dimensions of its first operand of which an operation takes or writes one element.

    Each with the value that is the index.
    """
    if operation.kind == _TAKEN:
        part, indices = operation.results[0], operation.operands[1:]
    elif operation.kind == _WRITTEN:
        part, indices = operation.operands[1], operation.operands[2:]
    else:
        return
    whole, taken = (program.values[value].shape for value in (operation.operands[0], part))
    for number, (length, size, index) in enumerate(zip(whole, taken, indices, strict=True)):
        if size == 1 < length:
            yield number, index


def counter_behind(program: PropagatedProgram, index: int) -> int | None:
    """The number that a loop counts, which an index is computed from; None if it is not just one.

    It is handed on from outside of the loop and from its last round, so that it has two sources.
    """
    waiting, seen, counters = [index], {index}, set()
    while waiting:
        value = waiting.pop()
        maker = program.makers.get(value)
        if maker is None or program.values[value].shape:
            return None
        if maker.kind == FLOW and len({*maker.operands} - {value}) > 1:
            counters.add(value)
            continue
        for operand in maker.operands:
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return counters.pop() if len(counters) == 1 else None
