"""Operations of a program in plain words: what each does, of which layer, and where in Python."""

import os
from collections.abc import Sequence

import jax
import penzai

from penzai_shard.compiled_programs.operation_names import OperationName
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from penzai_shard.library_apis.shardy_api import PythonFrame
from penzai_shard.sharding_propagation import FLOW, Operation
from penzai_shard.training.gradient_step import GRADIENT_SCOPE

_WORDS = {
    "dot_general": "a matrix product",
    "conv_general_dilated": "a convolution",
    "add_any": "a sum of gradients",
    "reduce_sum": "a sum over dimensions",
    "reduce_max": "a maximum over dimensions",
    "reduce_min": "a minimum over dimensions",
    "argmax": "an argmax",
    "argmin": "an argmin",
    "gather": "a look-up (gather)",
    "scatter": "a scatter",
    "scatter-add": "a scatter-add",
    "sharding_constraint": "a constraint",
    "while": "a loop",
    "scan": "a loop",
    "cond": "a branch",
    "broadcast_in_dim": "a broadcast",
    "convert_element_type": "a conversion of dtype",
    "select_n": "a choice by a mask (select)",
}


def operation_text(operation: Operation) -> str:
    """What an operation does, in plain words; what has no words goes by JAX's name for it."""
    if operation.kind == FLOW:
        return "a loop, a branch or a call"
    primitive = operation.name.rpartition("/")[2] or operation.kind.rpartition(".")[2]
    # Calls back to Python end in a colon.
    return _WORDS.get(primitive, primitive.removesuffix(":"))


def layer_of(operation: Operation, scopes: LayerScopes) -> str:
    """The innermost layer of an operation as plans call it, or the part of the step."""
    if paths := scopes.paths_in(operation.name):
        return scopes.label(paths[-1])
    parts = OperationName.of(operation.name).scopes
    return next((part for part in parts if part in (*scopes.of_step, GRADIENT_SCOPE)), "")


def _folder(file: str | None, *parts: str) -> str:
    return os.path.join(os.path.dirname(file or ""), *parts, "")


# This library's own frames, and those of what calls layers, say nothing of where a layer or a user
# wrote an operation.
_OURS = os.path.join(os.path.normpath(_folder(__file__, "..", "..")), "")
_START = os.path.join(_OURS, "inspection", "")
_MARKS = os.path.join(_START, "layer_scopes.py")
_PASSED = (_folder(jax.__file__), _folder(penzai.__file__, "core"), _OURS)
_PASSED_OF_USERS = (*_PASSED, _folder(penzai.__file__))


def source_line(frames: Sequence[PythonFrame], by_user: bool = False) -> str:
    """Where an operation was written, as ``file.py:12``; empty if only libraries wrote it.

    Args:
        frames: The calls, the innermost first.
        by_user: Whether a layer of Penzai is not what is looked for.
    """
    passed = _PASSED_OF_USERS if by_user else _PASSED
    for frame in frames:
        # Behind a layer's mark is what calls it, behind what traces the step what asks for that.
        if frame.file.startswith(_START) and not (by_user and frame.file == _MARKS):
            break
        if not frame.file.startswith(passed):
            return f"{_short(frame.file)}:{frame.line}"
    return ""


def _short(file: str) -> str:
    """A file's name without what people do not need to find it."""
    for folder in ("site-packages/", os.path.join(os.getcwd(), "")):
        if folder in file:
            return file.rpartition(folder)[2]
    return file
