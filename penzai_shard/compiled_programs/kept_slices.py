"""All-reduces of which each device keeps a slice alone: reduce-scatters in all but name.

XLA's CPU compiler has no other way to write them; those for GPUs and TPUs make a reduce-scatter of
such an all-reduce, which sends half as much.
"""

import math
from collections.abc import Iterator

from penzai_shard.compiled_programs.collective_operations import CollectiveOperation
from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.compiled_programs.value_flow import Place

# They treat elements one by one, or only move them: who keeps a slice of what they give could as
# well have taken it before.
_BY_ELEMENT = frozenset(
    {
        "abs",
        "add",
        "bitcast",
        "convert",
        "copy",
        "divide",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "reshape",
        "select",
        "subtract",
        "transpose",
    }
)
_CALLS = frozenset({"fusion", "call"})


def kept_slice_bytes(module: Module, operation: CollectiveOperation) -> int:
    """How much of an all-reduce's payload each device uses through its own slice alone, in bytes.

    Args:
        module: The program.
        operation: One of its collectives; of another kind than an all-reduce there is none.
    """
    if operation.kind != "all-reduce":
        return 0
    group_size = len(operation.groups[0])
    several = len(operation.results) > 1
    return sum(
        array.bytes
        for i, array in enumerate(operation.results)
        if _is_sliced(module, Place(operation.instruction, (i,) if several else ()), group_size)
    )


def _is_sliced(module: Module, start: Place, group_size: int) -> bool:
    """Whether a value is used, and through slices of that part of it alone."""
    left, seen, slices = [start], {start}, 0
    while left:
        place = left.pop()
        for user, position, following in _uses(module, place):
            if user.opcode == "dynamic-slice" and position == 0:
                whole = place.one.results[0]
                if math.prod(user.results[0].shape) * group_size != math.prod(whole.shape):
                    return False
                slices += 1
            elif following is None:
                return False
            elif following not in seen:
                seen.add(following)
                left.append(following)
    return slices > 0


def _uses(module: Module, place: Place) -> Iterator[tuple[Instruction, int, Place | None]]:
    """The uses of a value: by what, as which operand, and where it goes on; None if it does not.

    A part of a tuple that is not taken out again is not used.
    """
    one, path, callers = place
    if one.is_root:
        going_on = Place(callers[-1], path, callers[:-1]) if callers else None
        yield one, 0, going_on
    siblings = module.computations[one.computation].instructions
    for name in dict.fromkeys(one.user_names):
        user = siblings[name]
        for position in user.positions[one.name]:
            if user.opcode == "get-tuple-element" and path:
                if path[0] == int(user.attributes["index"]):
                    yield user, position, Place(user, path[1:], callers)
            elif user.opcode == "tuple":
                yield user, position, Place(user, (position, *path), callers)
            elif user.opcode == "all-reduce-done" or (user.opcode in _BY_ELEMENT and not path):
                yield user, position, Place(user, path, callers)
            elif user.opcode in _CALLS:
                (called,) = module.called_by(user)
                parameter = module.computations[called].parameters[position]
                yield user, position, Place(parameter, path, (*callers, user))
            else:
                yield user, position, None
