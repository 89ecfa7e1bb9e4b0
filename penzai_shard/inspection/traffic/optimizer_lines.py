"""Which operations of a program an optimizer of optax wrote, by the lines of code they are from.

For steps that users write themselves: a train step of this library writes its own scope.
"""

import functools
import pathlib

from penzai_shard.compiled_programs import Instruction, Module
from penzai_shard.compiled_programs.operation_names import OperationName
from penzai_shard.compiled_programs.stack_frames import Frame, StackFrames

_UPDATES = ("update", "update_fn", "apply_updates")


class OptimizerLines:
    """The lines of optax in the stack frames of a program, which are read when first asked for."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def wrote(self, one: Instruction) -> bool:
        """Whether an operation was written in the course of an update of optax'.

        Of functions that JAX compiles apart this is not known: it keeps the frames of their first
        call, which may have been any.
        """
        scopes = OperationName.of(one.op_name).scopes
        if not scopes or any(scope.startswith(("jit(", "pjit(")) for scope in scopes[1:]):
            return False
        return any(map(_is_update, self._frames.of_instruction(one)))

    @functools.cached_property
    def _frames(self) -> StackFrames:
        return StackFrames.of(self._module)


def _is_update(frame: Frame) -> bool:
    """Whether a frame is a call of an optimizer, and not of a loss or a norm from optax.

    >>> _is_update(Frame("site-packages/optax/transforms/_clipping.py", "clip.<locals>.update_fn"))
    True
    >>> _is_update(Frame("site-packages/optax/losses/_regression.py", "l2_loss"))
    False
    """
    is_of_optax = "optax" in pathlib.PurePath(frame.file).parts
    return is_of_optax and frame.function.rpartition(".")[2] in _UPDATES
