"""What a collective moves: a parameter, a new parameter, a gradient or an activation.

Found by following values through the program, from the arguments that they come from to the
results that they end in.
"""

import functools
from collections.abc import Mapping

from penzai_shard.compiled_programs import Instruction, ValueFlow
from penzai_shard.compiled_programs.value_flow import EVERY_OPCODE
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.inspection.steps.step_arrays import StepArray

# What optimizers compute element by element. A norm of all gradients is not in it, nor what is
# multiplied by one: that is a number, and comes through a broadcast.
_ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "and",
        "cbrt",
        "clamp",
        "divide",
        "exponential",
        "is-finite",
        "log",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "or",
        "power",
        "rsqrt",
        "select",
        "sign",
        "sqrt",
        "subtract",
        "tanh",
    }
)


class MovedValues:
    """The arrays of a step that the values in its program are, or are for.

    Attributes:
        makers_of: For each operand of an instruction what makes the values in it.
        users_of: For each array that comes out of an instruction what computes something of it.
    """

    def __init__(self, program: StepProgram) -> None:
        self._arguments: Mapping[str, StepArray] = program.step.arguments
        self._results = program.step.results
        flow = ValueFlow(program.module)
        self._updates = ValueFlow(program.module, through=_ELEMENTWISE)
        self._root = program.module.computations[program.module.entry].root
        # By instruction, since one collective may have many operands.
        self.makers_of = functools.cache(flow.makers_of)
        self.users_of = functools.cache(flow.users_of)
        self._ends = functools.cache(flow.results_of)
        self._updated = functools.cache(self._updates.results_of)
        self._argument_updated_to = functools.cache(self._find_argument_updated_to)

    def argument(self, one: Instruction, position: int) -> StepArray | None:
        """The argument of the step that an operand is, or a part of it; None if it is computed."""
        makers = self.makers_of(one)[position]
        names = {maker.op_name for maker in makers if maker.opcode == "parameter"}
        if len(names) != 1 or any(
            maker.opcode not in ("parameter", "constant") for maker in makers
        ):
            return None
        return self._arguments.get(names.pop())

    def result(self, one: Instruction, position: int) -> StepArray | None:
        """The one result of the step that what comes out is, or is a part of."""
        ends = self._ends(one)[position]
        return self._result_at(ends[0]) if len(ends) == 1 else None

    def updated_by(self, one: Instruction, position: int) -> StepArray | None:
        """The one argument of the step of whose update what comes out is a part."""
        updated = {
            array.path: array
            for end in self._updated(one)[position]
            if (array := self._argument_updated_to(end)) is not None
        }
        return next(iter(updated.values())) if len(updated) == 1 else None

    def is_updated(self, array: StepArray) -> bool:
        """Whether a result of the step is a new value of an argument."""
        return array.path in self._updated_paths

    @functools.cached_property
    def _updated_paths(self) -> frozenset[str]:
        arrays = map(self._argument_updated_to, range(len(self._root.results)))
        return frozenset(array.path for array in arrays if array is not None)

    def depends_on_inputs(self, one: Instruction, position: int) -> bool:
        """Whether an operand is computed from what the step is run on, and not from its state."""
        return (one.operand_names[position], ()) in self._from_inputs

    @functools.cached_property
    def _from_inputs(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        inputs = {name for name, array in self._arguments.items() if array.part == "inputs"}
        every = ValueFlow(self._updates.module, through=EVERY_OPCODE)
        return every.reached_from(inputs)

    def _result_at(self, end: int) -> StepArray | None:
        # JAX leaves results out of a program that are arguments as they came in; which, it does
        # not say.
        return self._results[end] if len(self._results) == len(self._root.results) else None

    @functools.cached_property
    def _result_makers(self) -> tuple[tuple[str, ...], ...]:
        """The arguments that each result is computed from element by element."""
        return self._updates.arguments_of(self._root) if self._root.opcode == "tuple" else ()

    def _find_argument_updated_to(self, end: int) -> StepArray | None:
        """The argument that a result is a new value of."""
        result = self._result_at(end)
        if result is None or end >= len(self._result_makers):
            return None
        same = [
            array
            for name in self._result_makers[end]
            if (array := self._arguments.get(name)) is not None
            and (array.shape, array.dtype) == (result.shape, result.dtype)
            and array.part != "optimizer state"
        ]
        return same[0] if len(same) == 1 and result.part != "optimizer state" else None
