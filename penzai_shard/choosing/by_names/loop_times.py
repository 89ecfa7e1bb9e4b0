"""How often a step runs the operations that are in its loops."""

import math
import re
from collections.abc import Iterator

from penzai_shard.choosing.dimensions.loop_indices import counter_behind, indexed_dimensions
from penzai_shard.sharding_propagation import PropagatedProgram

_LOOP = re.compile(r"/while/(cond|body)(?=/|$)")


class LoopTimes:
    """How often a step runs each operation.

    JAX names a loop's condition and its body by where the loop is. A loop over the elements of
    arrays, such as ``jax.lax.scan``, takes or writes the element that it counts, so that it runs as
    often as that dimension is long.

    Attributes:
        unknown: The operations of loops that index nothing: while loops of another end.
    """

    def __init__(self, program: PropagatedProgram) -> None:
        self._loops: dict[int, tuple[int, ...]] = {}
        self._lengths: dict[int, set[int]] = {}
        counters = dict(self._read(program))
        for each in program.operations:
            for number, index in indexed_dimensions(program, each):
                loop = counters.get(counter_behind(program, index))
                if loop is not None:
                    self._lengths[loop].add(program.values[each.operands[0]].shape[number])
        self.unknown = frozenset(
            number
            for number, loops in self._loops.items()
            if any(len(self._lengths[loop]) != 1 for loop in loops)
        )

    def __getitem__(self, number: int) -> int:
        """How often the operation of a number is run; once if that is not known."""
        loops = self._loops.get(number, ())
        return math.prod(max(self._lengths[loop], default=1) for loop in loops)

    def _read(self, program: PropagatedProgram) -> Iterator[tuple[int | None, int]]:
        """Finds the loops that operations are in; gives what each loop's condition asks."""
        current: dict[str, int] = {}
        in_condition: dict[str, bool] = {}
        for each in program.operations:
            inside = []
            for found in _LOOP.finditer(each.name):
                place, is_condition = each.name[: found.start()], found[1] == "cond"
                if place not in current or (is_condition and not in_condition[place]):
                    current[place] = len(self._lengths)
                    self._lengths[current[place]] = set()
                in_condition[place] = is_condition
                inside.append(current[place])
                if is_condition:
                    yield from ((value, current[place]) for value in each.operands)
            if inside:
                self._loops[each.number] = tuple(inside)
