"""A program in a layout, with what its values are: whose, in which phase, in how many parts."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.library_apis.shardy_placed import (
    PlacedOperation,
    PlacedProgram,
    PlacedValue,
)
from penzai_shard.training.gradient_step import OPTIMIZER_SCOPE

# What comes out is what went in, in another form or type.
OF_FORM = frozenset(
    {"stablehlo.convert", "stablehlo.reshape", "stablehlo.transpose", "sdy.reshard"}
)
# Hands its operands on, so that what is behind it is not taken for what is in front of it.
BARRIER = "stablehlo.optimization_barrier"
# Made where it is used, like constants.
BROADCAST = "stablehlo.broadcast_in_dim"
_PART = re.compile(r"\((\d+)\)(\d+)")


class PlacedStep:
    """A program in a layout, with what its values are.

    Attributes:
        program: The program.
        mesh_shape: The size of each mesh axis.
        makers: The operation that makes each value.
        users: The operations that take each value.
        arguments: What goes in, by the numbers of values.
        parameters: One parameter of each set of lengths.

    Args:
        program: The program in a layout.
        step: The step as it was lowered.
        mesh_shape: The size of each mesh axis.
    """

    def __init__(
        self, program: PlacedProgram, step: LoweredStep, mesh_shape: Mapping[str, int]
    ) -> None:
        self.program = program
        self.mesh_shape = mesh_shape
        self._step = step
        self.makers = {value: each for each in program.operations for value in each.results}
        self.users: dict[int, list[PlacedOperation]] = defaultdict(list)
        for each in program.operations:
            for value in each.operands:
                self.users[value].append(each)
        self.arguments: dict[int, StepArray] = {
            value: step.arguments[name]
            for value, name in zip(program.arguments, program.argument_names, strict=True)
            if name in step.arguments
        }
        self.parameters = {
            tuple(sorted(array.shape)): array
            for array in self.arguments.values()
            if array.part == "parameters"
        }
        self._bytes = functools.cache(self._local_bytes)
        # What one operation of JAX becomes, all has its name.
        self.label = functools.cache(self._label_of)

    def origin(self, value: int) -> int:
        """What a value is another form of."""
        while (maker := self.makers.get(value)) is not None and maker.kind in OF_FORM:
            value = maker.operands[0]
        return value

    def is_same_in_loops(self, each: PlacedOperation) -> bool:
        """Whether it gathers what the step is called with, which compilers take out of loops."""
        return each.kind == "sdy.all_gather" and self.origin(each.operands[0]) in self.arguments

    def parts(self, mesh_axes: Iterable[str]) -> int:
        """In how many parts mesh axes, or parts of them, split something."""
        count = 1
        for axis in mesh_axes:
            part = _PART.search(axis)
            count *= int(part[2]) if part else self.mesh_shape[axis]
        return count

    def part(self, length: int, mesh_axes: Iterable[str]) -> int:
        """The length of the largest part of a dimension that mesh axes split."""
        return -(-length // self.parts(mesh_axes))

    def value_bytes(self, number: int) -> float:
        """The bytes of a value on one device."""
        return self._bytes(self.program.values[number])

    def _local_bytes(self, value: PlacedValue) -> float:
        return math.prod(map(self.part, value.shape, value.spec)) * value.itemsize

    def phase(self, name: str) -> str:
        """In which phase of a step an operation is, by its name."""
        if OPTIMIZER_SCOPE in name.split("/"):
            return "optimizer"
        return "backward" if "transpose(" in name else "forward"

    def _label_of(self, name: str) -> str:
        """The layer or the part of the step that an operation is of."""
        scopes = self._step.scopes
        paths = scopes.paths_in(name)
        if paths:
            return scopes.label(paths[-1])
        return next((scope for scope in scopes.of_step if scope in name.split("/")), "")


def same_place(maker: PlacedOperation, value: int) -> int:
    """The operand that a result is another form of."""
    return maker.operands[maker.results.index(value)]
