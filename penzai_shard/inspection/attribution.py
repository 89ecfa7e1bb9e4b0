"""Whose a collective is: the layers, the loss or the optimizer, in which phase, and what it moves.

What is not certain is left open.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from penzai_shard.compiled_programs.collective_operations import CollectiveOperation
from penzai_shard.compiled_programs.operation_names import OperationName, merged_names
from penzai_shard.inspection.layer_scopes import LayerScopes
from penzai_shard.inspection.programs import CompiledProgram
from penzai_shard.training.gradient_step import OPTIMIZER_SCOPE

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)


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
    """

    layers: tuple[str, ...]
    phase: Phase | None
    moves: tuple[str, ...]
    reason: str


def attribute(
    program: CompiledProgram, operations: Sequence[CollectiveOperation]
) -> list[Attribution]:
    """Whose each of a program's collectives is.

    Args:
        program: The program.
        operations: Its collectives.

    Returns:
        One answer for each, in their order.
    """
    names = OperationOwners(program)
    return [_of(names, operation) for operation in operations]


def _of(names: "OperationOwners", operation: CollectiveOperation) -> Attribution:
    parts = operation.op_names
    layers = _distinct(owner for part in parts if (owner := names.owner(part)) is not None)
    phases = [names.phase(part) for part in parts]
    reason = "by its name" if layers else "nothing tells whose it is"
    return Attribution(layers, _common_phase(operation, phases), (), reason)


class OperationOwners:
    """What the names of a program's operations say."""

    def __init__(self, program: CompiledProgram) -> None:
        self._scopes: LayerScopes = program.step.scopes
        # A program that differentiates nothing is a forward pass.
        self._has_gradients = any(
            OperationName.of(name).is_differentiated
            for name in {one.op_name for one in program.module}
            for name in merged_names(name)
        )
        self.read = functools.lru_cache(maxsize=None)(OperationName.of)

    def owner(self, name: str) -> str | None:
        """The innermost layer, or the part of the step, that an operation's name tells of."""
        if paths := self._scopes.paths_in(name):
            return paths[-1]
        return self._part_of_step(name)

    def phase(self, name: str) -> Phase | None:
        """The phase that an operation's name tells of."""
        if self._part_of_step(name) == OPTIMIZER_SCOPE:
            return "optimizer"
        read = self.read(name)
        if read.is_differentiated:
            return "backward" if read.is_transposed else "forward"
        return None if self._has_gradients else "forward"

    def _part_of_step(self, name: str) -> str | None:
        """The outermost scope that the step wrote itself, and not its loss function."""
        scopes = self.read(name).scopes
        return next((scope for scope in scopes if scope in self._scopes.of_step), None)


def _common_phase(operation: CollectiveOperation, phases: Sequence[Phase | None]) -> Phase | None:
    """The phase of most bytes; None if that cannot be told."""
    if len(set(phases)) == 1:
        return phases[0]
    if len(phases) != len(operation.operands):
        return None
    total: collections.Counter[Phase | None] = collections.Counter()
    for phase, array in zip(phases, operation.operands, strict=True):
        total[phase] += array.bytes
    # Of two with as many bytes, the later one: it does not run before.
    return max(total, key=lambda phase: (total[phase], (*PHASES, None).index(phase)))


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
