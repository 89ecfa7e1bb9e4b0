"""How often a loop's body runs, read from the loop itself where the compiler does not write it.

Compilers for TPUs do not. A loop over a counter, as ``lax.scan`` and ``lax.fori_loop`` make it,
has it in plain sight: a carried integer that begins with a constant, grows by a constant in the
body, and is compared with a constant in the condition. Any other loop has no known number.
"""

import re

from penzai_shard.compiled_programs.modules import Computation, Instruction
from penzai_shard.compiled_programs.value_flow import Place, ValueFlow

_INTEGER = re.compile(r"-?\d+")
_INTEGER_TYPES = frozenset({"s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"})
# Through these an integer stays the same integer.
_SAME_NUMBER = frozenset(
    {
        "bitcast",
        "call",
        "convert",
        "copy",
        "copy-done",
        "copy-start",
        "fusion",
        "get-tuple-element",
        "optimization-barrier",
        "parameter",
        "reshape",
        "tuple",
        "while",
    }
)
# Mirrored, for a condition that has the counter on its right.
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def trip_count(flow: ValueFlow, loop: Instruction) -> int | None:
    """How often a loop's body runs; None if neither the program nor the loop says so."""
    if loop.trip_count is not None:
        return loop.trip_count
    condition, body = (flow.module.called_as(loop, role) for role in ("condition", "body"))
    found = _counter_and_limit(flow, loop, condition)
    if found is None:
        return None
    index, limit, direction = found
    first = _constant(flow, flow.operand(Place(loop), 0, (index,)))
    step = _step(flow, loop, body, index)
    if first is None or step is None or step <= 0:
        return None
    return max(0, -(-(limit + (direction == "LE") - first) // step))


def _counter_and_limit(
    flow: ValueFlow, loop: Instruction, condition: Computation
) -> tuple[int, int, str] | None:
    """Which carried value is compared with which constant, and how."""
    compare = _origin(flow, Place(condition.root, (), (loop,)), condition)
    if compare is None or compare.one.opcode != "compare":
        return None
    sides = [flow.operand(compare, i) for i in range(2)]
    direction = compare.one.attributes.get("direction", "")
    for counter, limit, way in (
        (sides[0], sides[1], direction),
        (sides[1], sides[0], _MIRRORED.get(direction, "")),
    ):
        origin = _origin(flow, counter, condition)
        number = _constant(flow, limit)
        if (
            origin is not None
            and origin.one.opcode == "parameter"
            and len(origin.path) == 1
            and number is not None
            and way in ("LT", "LE")
        ):
            return origin.path[0], number, way
    return None


def _step(flow: ValueFlow, loop: Instruction, body: Computation, index: int) -> int | None:
    """By how much the body raises a carried value; None if it does something else with it."""
    added = _origin(flow, Place(body.root, (index,), (loop,)), body)
    if added is None or added.one.opcode != "add":
        return None
    sides = [flow.operand(added, i) for i in range(2)]
    for counter, step in (sides, sides[::-1]):
        origin = _origin(flow, counter, body)
        if origin is not None and (origin.one.opcode, origin.path) == ("parameter", (index,)):
            return _constant(flow, step)
    return None


def _origin(flow: ValueFlow, place: Place, within: Computation) -> Place | None:
    """Where an integer comes from, no further back than the parameter of a computation."""
    while place.one.opcode in _SAME_NUMBER:
        if place.one.opcode == "parameter" and place.one.computation == within.name:
            return place
        before = list(flow.before(place))
        if len(before) != 1:
            return None
        (place,) = before
    return place


def _constant(flow: ValueFlow, place: Place) -> int | None:
    """The integer that a value always is; None if it is another or may change."""
    left, seen, found = [place], {place}, set[int]()
    while left:
        one = left.pop()
        if one.one.opcode == "constant":
            (array,) = one.one.results
            if array.dtype not in _INTEGER_TYPES or not _INTEGER.fullmatch(one.one.read.operands):
                return None
            found.add(int(one.one.read.operands))
            continue
        before = list(flow.before(one)) if one.one.opcode in _SAME_NUMBER else []
        if not before:
            return None
        for other in before:
            if other not in seen:
                seen.add(other)
                left.append(other)
    return found.pop() if len(found) == 1 else None
