"""Which dimensions of the values of a traced program are one logical axis."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penzai_shard.choosing.dimensions.cut_dimensions import tie_cuts
from penzai_shard.choosing.dimensions.loop_indices import tie_what_loops_index
from penzai_shard.choosing.dimensions.splittable_classes import SplittableClasses
from penzai_shard.choosing.dimensions.tied_dimensions import Conflict, tie_operations
from penzai_shard.sharding_propagation import Operation, PropagatedProgram

# How JAX calls what goes back over an operation; its own ``transpose`` has no bracket.
_TRANSPOSED = "transpose("


@dataclasses.dataclass(frozen=True, order=True)
class DimensionClass:
    """A logical axis of a program; equal ones are one, and the first in it comes first.

    Attributes:
        number: Its place, as the program's arguments and operations come to it.
        size: Its length.
    """

    number: int
    size: int


def length_of(parts: Iterable[DimensionClass]) -> int:
    """The length of a dimension that is a product of some classes.

    >>> length_of([DimensionClass(0, 2), DimensionClass(1, 4)])
    8
    """
    return math.prod(part.size for part in parts)


class CutDimension(NamedTuple):
    """A dimension that a slice cuts, or leaves whole.

    Attributes:
        operation: The slice.
        before: The parts of the dimension of what is cut.
        after: The parts of that of the result.
        place: Where it starts, where it ends, and its stride.
    """

    operation: Operation
    before: tuple[DimensionClass, ...]
    after: tuple[DimensionClass, ...]
    place: tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramDimensions:
    """Which dimensions of the values of a program are one logical axis.

    Operations tie dimensions, by Shardy's rules of them: equal lengths alone never do. A dimension
    is a product of parts, the slowest first: a reshape that splits one splits it wherever it goes.
    Nothing is tied by being broadcast from length 1, nor by being cut to another length. Calls are
    laid open by ``PropagatedProgram``, so that each has values, and classes, of its own; loops and
    branches tie what they hand on, and what a loop takes or writes one by one at its own index is
    one logical axis, such as the one along which the weights of blocks are stacked.

    Parts that are cut out of a dimension at the same places are one, and so is what is put together
    from parts with what they were cut from, as in rotary embeddings. What is cut into equal parts
    that mean the same is a product, the number of parts being the slower one: ``qkv``, for one.

    Attributes:
        program: The program.
        forward: The program without the operations that go back over others for a gradient: there
            parts are put together that are cut apart before, and products mean something else.
        conflicts: Where lengths did not allow to tie what an operation ties.
        stepped: What loops take or write one by one.

    >>> import jax
    >>> from jax import ShapeDtypeStruct as Struct
    >>> def heads(x, kernel):
    ...     return (x @ kernel).reshape(5, 2, 4)
    >>> arguments = Struct((5, 6), "float32"), Struct((6, 8), "float32")
    >>> lowered = jax.jit(heads).trace(*arguments).lower(lowering_platforms=("cpu",))
    >>> program = PropagatedProgram.of(lowered)
    >>> dimensions = ProgramDimensions.of(program)
    >>> x, kernel = (program.arguments[name] for name in ("x", "kernel"))
    >>> [[part.size for part in parts] for parts in dimensions.of_value(kernel)]
    [[6], [2, 4]]
    >>> dimensions.parts(x, 1) == dimensions.parts(kernel, 0)
    True
    """

    program: PropagatedProgram
    forward: PropagatedProgram
    conflicts: tuple[Conflict, ...]
    stepped: frozenset[DimensionClass]
    _of_values: Sequence[tuple[tuple[DimensionClass, ...], ...]]

    @classmethod
    def of(cls, program: PropagatedProgram) -> "ProgramDimensions":
        """Finds the classes of a program's dimensions; layouts do not matter."""
        classes = SplittableClasses()
        elements = [tuple(map(classes.new, value.shape)) for value in program.values]
        conflicts = tie_operations(program, classes, elements)
        stepped = tie_what_loops_index(program, classes, elements)
        kept = tuple(each for each in program.operations if _TRANSPOSED not in each.name)
        forward = dataclasses.replace(program, operations=kept)
        tie_cuts(forward, classes, elements)
        numbered = _Numbered(classes)
        of_values = [tuple(map(numbered.dimension, dimensions)) for dimensions in elements]
        steps = {part for each in stepped for part in numbered.dimension(each)}
        return cls(program, forward, tuple(conflicts), frozenset(steps), of_values)

    def parts(self, value: int, dimension: int) -> tuple[DimensionClass, ...]:
        """The parts of a dimension, the slowest first.

        Args:
            value: The number of the value in the program.
            dimension: Which of its dimensions.

        Returns:
            One class, or several whose sizes multiply to the dimension's length. One of length 1
            is a class by itself, which no operation ties.
        """
        return self._of_values[value][dimension]

    def of_value(self, value: int) -> tuple[tuple[DimensionClass, ...], ...]:
        """The parts of each dimension of a value."""
        return self._of_values[value]

    @functools.cached_property
    def cuts(self) -> tuple[CutDimension, ...]:
        """The dimensions that slices cut, in the program's order."""
        return tuple(
            CutDimension(each, *of_dimension)
            for each in self.forward.operations
            if each.cuts
            for of_dimension in zip(
                self.of_value(each.operands[0]),
                self.of_value(each.results[0]),
                each.cuts,
                strict=True,
            )
        )


class _Numbered:
    """Classes, numbered by their first place."""

    def __init__(self, classes: SplittableClasses) -> None:
        self._classes = classes
        self._found: dict[int, DimensionClass] = {}

    def dimension(self, element: int) -> tuple[DimensionClass, ...]:
        parts = self._classes.parts(element)
        return tuple(map(self._of, self._classes.of_all(parts) or parts[:1]))

    def _of(self, part: int) -> DimensionClass:
        if part not in self._found:
            self._found[part] = DimensionClass(len(self._found), self._classes.sizes[part])
        return self._found[part]
