"""Whose a collective is: the layers, the loss or the optimizer, in which phase, and what it moves.

The names of operations say most of it. Where the compiler left them out, or wrote only one of
several, the ways of the values say the rest. What is not certain is left open.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from penzai_shard.compiled_programs import CollectiveOperation, Instruction
from penzai_shard.compiled_programs.operation_names import merged_names
from penzai_shard.inspection.steps.operation_owners import PHASES, OperationOwners, Phase
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.inspection.traffic.moved_values import MovedValues
from penzai_shard.inspection.traffic.optimizer_lines import OptimizerLines
from penzai_shard.training.gradient_step import OPTIMIZER_SCOPE
from penzai_shard.tree_paths import is_inside, path_endings

BY_NAME = "by its name"
BY_MAKER = "by what computes it"
BY_USER = "by what uses it"
BY_LINES = "by the lines of optax that it is from"
BY_PARAMETER = "by the parameter that it moves"
UNKNOWN = "nothing tells whose it is"
NEW_VALUE_OF = "new value of "
GRADIENT_OF = "gradient of "
# These make a sum of what each device has computed: they belong to what computed it. All others
# bring something to where it is used.
_REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class AttributedPart:
    """What is known of one array that a collective moves.

    Attributes:
        owners: Whose it is.
        phase: When it is moved.
        moves: What it is; empty if that is not known.
        reason: How this was found out.
    """

    owners: tuple[str, ...] = ()
    phase: Phase | None = None
    moves: str = ""
    reason: str = UNKNOWN


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Whose a collective is.

    Attributes:
        layers: The innermost layers that own it, by their paths in the model; several if the
            compiler merged several collectives into one. ``"loss"`` and ``"optimizer"`` stand for
            these parts of a step. Empty if nothing certain is known.
        phase: When it runs; of a merged one, that of most of its bytes. None if it is not known.
        moves: The parameters, gradients and activations that it moves, as far as they are known.
        reason: How this was found out.
        parts: The same for each of its operands; where names and operands are not as many, for
            each of its names.
    """

    layers: tuple[str, ...]
    phase: Phase | None
    moves: tuple[str, ...]
    reason: str
    parts: tuple[AttributedPart, ...]


def attribute(program: StepProgram, operations: Sequence[CollectiveOperation]) -> list[Attribution]:
    """Whose each of a program's collectives is.

    Args:
        program: The program.
        operations: Its collectives.

    Returns:
        One answer for each, in their order.
    """
    parts = _Parts(program)
    return [_of(operation, list(parts.of(operation))) for operation in operations]


def _of(operation: CollectiveOperation, parts: Sequence[AttributedPart]) -> Attribution:
    known = [part for part in parts if part.owners]
    reasons = _distinct(part.reason for part in known) or (UNKNOWN,)
    if 0 < len(known) < len(parts):
        reasons += (f"of {len(parts) - len(known)} of its {len(parts)} arrays {UNKNOWN}",)
    return Attribution(
        layers=_distinct(owner for part in parts for owner in part.owners),
        phase=_phase_of_most_bytes(operation, parts),
        moves=_distinct(part.moves for part in parts if part.moves),
        reason="; ".join(reasons),
        parts=tuple(parts),
    )


class _Parts:
    """What names and the ways of values say of each array that a collective moves."""

    def __init__(self, program: StepProgram) -> None:
        self._names = OperationOwners(program)
        self._moved = MovedValues(program)
        self._optimizer = OptimizerLines(program.module)
        self._holders = _holders_by_array(program)
        self._label = program.step.scopes.label

    def of(self, operation: CollectiveOperation) -> Iterator[AttributedPart]:
        """One answer for each operand."""
        names: Sequence[str] = operation.op_names or ("",)
        if len(names) == 1:
            # An all-to-all of one array may be written as one of its pieces. Some compilers name
            # what they merged by one of the operations alone.
            is_of_one = len(operation.operands) == 1 or operation.kind == "all-to-all"
            names = (names[0] if is_of_one else "",) * len(operation.operands)
        # What goes to other slices is sent with a token behind it.
        is_sent = operation.instruction.opcode == "send"
        arrays = 1 if is_sent else len(operation.instruction.operand_names)
        if not len(names) == len(operation.operands) == arrays:
            for name in names:
                yield self._by_name(name)
            return
        for position, name in enumerate(names):
            yield self._of_array(operation, position, name)

    def _by_name(self, name: str) -> AttributedPart:
        owner = self._names.owner(name)
        phase = self._names.phase(name)
        return (
            AttributedPart((owner,), phase, reason=BY_NAME)
            if owner
            else AttributedPart(phase=phase)
        )

    def _of_array(self, operation: CollectiveOperation, position: int, name: str) -> AttributedPart:
        array = self._array_moved(operation, position)
        holders = () if array is None else self._holders_of(array)
        part = self._by_name(name)
        if not part.owners:
            part = self._by_neighbours(operation, position, part, holders)
        if not part.owners and part.phase is None and self._is_optimizers(operation, position):
            part = AttributedPart((OPTIMIZER_SCOPE,), "optimizer", reason=BY_LINES)
        moves = self._moves(operation, position, array, part)
        if part.phase is None and moves.startswith(NEW_VALUE_OF):
            part = dataclasses.replace(part, phase="optimizer")
        if len(holders) > 1 and part.owners and moves == getattr(array, "path", None):
            # What the name of one says, others that hold the same may need as well.
            others = self._holders_that_use(operation, position, holders)
            part = dataclasses.replace(part, owners=_distinct((*part.owners, *others)))
        inner = tuple(
            path for path in holders if len(part.owners) == 1 and is_inside(path, part.owners[0])
        )
        if holders and (inner or not part.owners):
            part = dataclasses.replace(part, owners=inner or holders, reason=BY_PARAMETER)
        return dataclasses.replace(part, moves=moves)

    def _holders_of(self, array: StepArray) -> tuple[str, ...]:
        """The layers that hold an array; where there are no layers, the group that it is in."""
        group = array.path.rpartition("/")[0]
        # Of a function that trains nothing, what is in a tree of arrays may be parameters.
        may_be_held = self._moved.is_updated(array) or group not in ("", "inputs")
        if self._names.has_layers or not may_be_held:
            return self._holders.get(array.path, ())
        return (group if "/" in group else array.path,)

    def _is_optimizers(self, operation: CollectiveOperation, position: int) -> bool:
        """Whether an optimizer's lines wrote it, or, if it is merged, all that it sums."""
        if len(operation.operands) == 1:
            return self._optimizer.wrote(operation.instruction)
        makers = self._makers(operation, position)
        computed = [one for one in makers if one.opcode != "constant"]
        return bool(computed) and all(map(self._optimizer.wrote, computed))

    def _array_moved(self, operation: CollectiveOperation, position: int) -> StepArray | None:
        """The array of the step that a collective moves, or for whose update it moves something."""
        one = operation.instruction
        return self._moved.argument(one, position) or self._moved.updated_by(
            one, _out(operation, position)
        )

    def _moves(
        self,
        operation: CollectiveOperation,
        position: int,
        array: StepArray | None,
        part: AttributedPart,
    ) -> str:
        """What of an array it moves, or which activation."""
        one = operation.instruction
        if array is not None:
            if self._moved.argument(one, position) is not None:
                return array.path
            if part.phase == "backward":
                return f"{GRADIENT_OF}{array.path}"
            is_new_value = self._moved.result(one, _out(operation, position)) is not None
            return (
                f"{NEW_VALUE_OF}{array.path}" if is_new_value and self._names.has_gradients else ""
            )
        if len(part.owners) != 1 or not self._moved.depends_on_inputs(one, position):
            return ""
        sides = (operation.operands[position], operation.results[_out(operation, position)])
        larger = max(sides, key=lambda side: side.bytes)
        activation = f"activation {larger} of {self._label(part.owners[0])}"
        if part.phase == "forward":
            return activation
        is_passed_on = part.phase == "backward" and self._is_used_elsewhere(
            operation, position, part
        )
        return f"{GRADIENT_OF}{activation}" if is_passed_on else ""

    def _makers(self, operation: CollectiveOperation, position: int) -> tuple[Instruction, ...]:
        """What computes the values in an operand."""
        return self._moved.makers_of(operation.instruction)[position]

    def _users(self, operation: CollectiveOperation, position: int) -> tuple[Instruction, ...]:
        """What uses what comes out for an operand."""
        return self._moved.users_of(operation.instruction)[_out(operation, position)]

    def _named(self, instructions: Iterable[Instruction]) -> list[AttributedPart]:
        """What the names of some operations say."""
        return [self._by_name(name) for one in instructions for name in merged_names(one.op_name)]

    def _is_used_elsewhere(
        self, operation: CollectiveOperation, position: int, part: AttributedPart
    ) -> bool:
        """Whether a layer apart from its owner goes on with it, as with no gradient of weights."""
        (owner,) = part.owners
        return any(
            user.phase == "backward"
            and user.owners
            and not any(
                name == other or is_inside(name, other)
                for name, other in ((user.owners[0], owner), (owner, user.owners[0]))
            )
            for user in self._named(self._users(operation, position))
        )

    def _holders_that_use(
        self, operation: CollectiveOperation, position: int, holders: Sequence[str]
    ) -> list[str]:
        """The layers that hold a parameter, of those that use what comes out."""
        users = self._named(self._users(operation, position))
        owners = {owner for user in users for owner in user.owners}
        return [path for path in holders if path in owners]

    def _by_neighbours(
        self,
        operation: CollectiveOperation,
        position: int,
        part: AttributedPart,
        holders: Sequence[str],
    ) -> AttributedPart:
        """By what makes a value that is summed, or what uses one that is gathered.

        All of it must say the same. What has no name is left out if the others name a layer that
        holds the parameter at hand.
        """
        if operation.kind in _REDUCTIONS:
            found, reason = self._makers(operation, position), BY_MAKER
        else:
            found, reason = self._users(operation, position), BY_USER
        named = self._named(one for one in found if one.opcode != "constant")
        if holders and any(other.owners == (path,) for other in named for path in holders):
            named = [other for other in named if other.owners]
        if part.phase is None and named:
            phases = [other.phase for other in named]
            if operation.kind not in _REDUCTIONS and None not in phases:
                # It runs before the first that uses it.
                phases = [min(phases, key=(*PHASES, None).index)]
            if len(set(phases)) == 1:
                part = dataclasses.replace(part, phase=phases[0])
        if len({other.owners for other in named}) != 1 or not named[0].owners:
            return part
        return dataclasses.replace(part, owners=named[0].owners, reason=reason)


def _holders_by_array(program: StepProgram) -> dict[str, tuple[str, ...]]:
    """The layers that hold each argument, by its path.

    Arguments have the path of the model in front of the name that a layer knows. A name that could
    be that of several arguments is of none.
    """
    holders = program.step.scopes.holders
    by_name: dict[str, list[str]] = {}
    for array in program.step.arguments.values():
        name = next((end for end in path_endings(array.path) if end in holders), None)
        if name is not None and array.part != "optimizer state":
            by_name.setdefault(name, []).append(array.path)
    return {
        paths[0]: tuple(holders[name]) for name, paths in by_name.items() if len(set(paths)) == 1
    }


def _out(operation: CollectiveOperation, position: int) -> int:
    """Which of the arrays that come out belongs to an operand."""
    return position if len(operation.results) == len(operation.operands) else 0


def _phase_of_most_bytes(
    operation: CollectiveOperation, parts: Sequence[AttributedPart]
) -> Phase | None:
    """The phase of most bytes; None if that is not known."""
    phases = {part.phase for part in parts}
    if len(phases) == 1:
        return phases.pop()
    if len(parts) != len(operation.operands):
        return None
    total: collections.Counter[Phase | None] = collections.Counter()
    for part, array in zip(parts, operation.operands, strict=True):
        total[part.phase] += array.bytes
    # Of two with as many bytes, the later one: it does not run before.
    return max(total, key=lambda phase: (total[phase], (*PHASES, None).index(phase)))


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
