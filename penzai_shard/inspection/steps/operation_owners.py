"""What the names of a program's operations say: whose each is, and in which phase it runs."""

import re
from typing import Literal, get_args

from penzai_shard.compiled_programs.operation_names import OperationName, merged_names
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.training.gradient_step import LOSS_SCOPE, OPTIMIZER_SCOPE

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Scopes that JAX writes for functions, loops and branches.
_STRUCTURE = re.compile(
    r"(?:p?jit\(.*|while|body|cond|scan|closed_call|checkpoint|rematted_computation|shard_map"
    r"|custom_[jv][jv]p_call|branch_\d+_fun)$"
)


class OperationOwners:
    """What the names of a program's operations say."""

    def __init__(self, program: StepProgram) -> None:
        self._scopes: LayerScopes = program.step.scopes
        self._groups = _groups_of_arrays(program)
        # A program that differentiates nothing is a forward pass.
        differentiated = [
            name
            for op_name in {one.op_name for one in program.module}
            for name in merged_names(op_name)
            if OperationName.of(name).is_differentiated
        ]
        self.has_gradients = bool(differentiated)
        # What is differentiated and has layers in it is a loss, also where a user wrote the step.
        self._has_loss = any(map(self._scopes.paths_in, differentiated))

    @property
    def has_layers(self) -> bool:
        """Whether any layer is known."""
        return bool(self._scopes.paths)

    def owner(self, name: str) -> str | None:
        """The innermost layer, or the part of the step, that an operation's name says."""
        if paths := self._scopes.paths_in(name):
            return paths[-1]
        if part := self._part_of_step(name):
            return part
        if self._has_loss and OperationName.of(name).is_differentiated:
            return LOSS_SCOPE
        return None if self.has_layers else self._group_named(name)

    def _group_named(self, name: str) -> str | None:
        """The group of arrays that goes by the scopes of an operation.

        Modules of Flax write the names under which they keep their arrays, behind the name of the
        outermost one.
        """
        scopes = [each for each in OperationName.of(name).scopes[:-1] if not _STRUCTURE.match(each)]
        for i in range(len(scopes)):
            if i and scopes[i - 1] != scopes[0]:
                break
            tail = "/" + "/".join(scopes[i:])
            found = [path for path in self._groups if path.endswith(tail)]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def phase(self, name: str) -> Phase | None:
        """The phase that an operation's name says."""
        if self._part_of_step(name) == OPTIMIZER_SCOPE:
            return "optimizer"
        read = OperationName.of(name)
        if read.is_differentiated:
            return "backward" if read.is_transposed else "forward"
        return None if self.has_gradients else "forward"

    def _part_of_step(self, name: str) -> str | None:
        """The outermost scope that the step wrote itself, and not its loss function."""
        scopes = OperationName.of(name).scopes
        return next((scope for scope in scopes if scope in self._scopes.of_step), None)


def _groups_of_arrays(program: StepProgram) -> frozenset[str]:
    """The paths that lead to the arrays of a step, without those of what an optimizer keeps."""
    found = set()
    for array in program.step.arguments.values():
        keys = array.path.split("/")
        if array.part != "optimizer state":
            found |= {"/".join(keys[:i]) for i in range(2, len(keys))}
    return frozenset(found)
