"""Says causes and losses in a step's own words: its parameters, layers, rules and lines.

A rule is written as its user wrote it, wherever it stands: that logical axis 'neurons' of a
parameter lies on mesh axis 'model' is the rule 'neurons' -> 'model'.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import penzai

from penzai_shard import specs
from penzai_shard.causes.ways import Cause, Loss, Ways, base
from penzai_shard.inspection.layer_marks import MarkedLayer
from penzai_shard.inspection.lowering import LoweredStep
from penzai_shard.inspection.step_arrays import StepArray
from penzai_shard.jax_internals.compiler import kept_arguments
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.paths import fold_key
from penzai_shard.programs import GRADIENT, OPTIMIZER
from penzai_shard.propagation.flat import FLOW, Operation

_KINDS = {"parameters": "parameter", "inputs": "input", "outputs": "declared result"}
_OPERATIONS = {
    "add_any": "a sum of gradients",
    "dot_general": "a matrix product",
    FLOW: "the end of the step",  # Other borders have names.
    "gather": "a look-up",
    "reduce_sum": "a sum over dimensions",
    "sharding_constraint": "a constraint",
}
_REASONS = {
    "pinned": "another layout of {dim} is fixed there",
    "used": "{rival} splits another dimension there",
    "conflict": "{rival} comes in on {dim} too, and only one can stay",
    "whole": "the operation needs {dim} whole",
    "cut": "{dim} is cut or joined there, and the parts do not fit",
    "absent": "what comes out has no {dim}",
    "uneven": "what a step returns is split evenly, and {dim} does not divide",
    "unruled": "the compiler does not know how to split the operation",
    "undecided": "the compiler does not hand it on",
}
# What hands on one array, at most in another form.
_SAME_ARRAY = re.compile(
    r"flow|sdy\.sharding_constraint|stablehlo\.(convert|(dynamic_)?slice|reshape|transpose)"
)
_LAYERS = "penzai_shard.layers."
_FRAME = re.compile(r'\("([^"]+)":(\d+):')
_PATHS = re.compile(r"[\w.]+[/_][\w./]*")
_OURS = pathlib.Path(__file__).parents[1]
_LIBRARIES = (*jax.__path__, *penzai.__path__, str(_OURS))
# Need not be installed: their functions that pin layouts are called by a user's model.
_OTHERS = re.compile(r"/site-packages/(flax|haliax|equinox)/")


@dataclasses.dataclass(frozen=True)
class WhyCause:
    """Where a mesh axis of a layout comes from.

    Attributes:
        mesh_axis: The mesh axis, or a part of it, as ``data:(1)2``.
        kind: What it comes from: ``"parameter"``, ``"input"``, ``"optimizer state"``, ``"state
            variables"``, ``"constants"``, ``"constraint layer"``, ``"constraint"`` (of a user),
            ``"train step"``, ``"declared result"``, ``"shard_map"``, ``"unknown"``.
        path: Which: a path, the label of a layer, the line of a user.
        logical_axis: The logical axis there that is on the mesh axis; None without a name.
    """

    mesh_axis: str
    kind: str
    path: str
    logical_axis: Any = None

    @property
    def rule(self) -> str:
        """The rule that puts the mesh axis there; empty where the axis has no name."""
        return "" if self.logical_axis is None else rule_text(self.logical_axis, self.mesh_axis)

    @property
    def source(self) -> str:
        """What it comes from, with the logical axis in brackets."""
        path = self.path.removeprefix("params/").removeprefix("inputs/")
        name = "" if self.logical_axis is None else f" ({self.logical_axis})"
        return f"{self.kind} {path}".strip() + name

    def __str__(self) -> str:
        return f"{self.mesh_axis} from {self.source}"


@dataclasses.dataclass(frozen=True)
class WhyLoss:
    """Where a mesh axis got lost.

    Attributes:
        reason: Why, in one word, as ``penzai_shard.causes.ways.Loss`` has it; ``"asked"`` of what
            a ``jax.shard_map`` asks for itself.
        cause: Where the mesh axis came from.
        place: The operation, with its layer.
        layer: The label of the layer, ``"loss"`` or ``"optimizer"``; empty if that is not known.
        text: All of it in a sentence, without the layer.
        bytes: What a device receives if it is to have the array whole over the mesh axis, in all
            runs of the operation: more than is sent where the compiler finds a better way.
        gathered: The parameter that is only gathered for use there, which is no loss.
    """

    reason: str
    cause: WhyCause
    place: str
    layer: str
    text: str
    bytes: int = 0
    gathered: str = ""

    def __str__(self) -> str:
        return f"{self.layer}: {self.text}" if self.layer else self.text


class StepWords:
    """The words of a step.

    Args:
        ways: The ways of mesh axes through its program.
        step: The step.

    Attributes:
        arguments: By the number of a value which argument it is.
        results: By the number of a value which result it is.
        gradients: By the path of a parameter the number of its gradient, in train steps.
    """

    def __init__(self, ways: Ways, step: LoweredStep) -> None:
        self.ways, self.step, program = ways, step, ways.program
        # Tokens of programs with side effects come first; what is not used is left out.
        used = sorted(kept_arguments(step.lowered))
        arguments = program.arguments[len(program.arguments) - len(used) :]
        results = program.results[len(program.results) - len(step.results) :]
        self.arguments = {v: step.arguments[i] for v, i in zip(arguments, used, strict=True)}
        self.results = dict(zip(results, step.results, strict=True))
        self.cause = functools.cache(self._say_cause)
        pinned = [(one, self._find_gradient(one)) for one in program.operations if one.pin]
        self.gradients = {x.path: one.results[0] for one, x in pinned if x is not None}

    # Causes

    def causes(self, value: int) -> tuple[WhyCause, ...]:
        """The causes of all mesh axes of a value."""
        spec = self.ways.values[value].spec
        return tuple(self.cause(value, axis) for axes in spec for axis in axes)

    def _say_cause(self, value: int, mesh_axis: str) -> WhyCause:
        found = self.ways.cause(value, mesh_axis)
        kind, path, names = self._find_source(found)
        name = names[found.dimension] if names and found.dimension < len(names) else None
        return WhyCause(mesh_axis, kind, path, name)

    def _find_source(self, cause: Cause) -> tuple[str, str, Any]:
        """Kind and path of a cause, and the logical axes of what it lays out."""
        operation = cause.operation
        array = self.arguments.get(cause.value) or self.results.get(cause.value)
        if array is not None and cause.kind in ("argument", "result"):
            return _KINDS.get(array.part, array.part), array.path, array.names
        if operation is None or operation.pin is None:
            return "unknown", self.place(operation) if operation else "", None
        pinned = self.ways.values[operation.results[0]]
        if layer := self.find_constraint_layer(operation):
            arrays = [self.find_argument(operation.operands[0]), *layer.outputs, *layer.inputs]
            # Of a stack of parameters one layer is pinned at a time.
            rank = len(pinned.shape)
            fitting = (x for x in arrays if x and x.shape[len(x.shape) - rank :] == pinned.shape)
            names = next((x.names for x in fitting), None)
            return "constraint layer", layer.label, names and names[len(names) - rank :]
        array = self._find_gradient(operation)
        if OPTIMIZER in operation.name.split("/"):
            array = self.find_argument(operation.operands[0])
        if array is not None:
            is_own = array.spec == specs.canonical(pinned.spec)
            return "parameter" if is_own else "train step", array.path, array.names
        return cause.kind, _find_line(operation) or self._owner(operation), None

    def find_constraint_layer(self, operation: Operation) -> MarkedLayer | None:
        """The layer of this package whose constraint an operation is."""
        marks = self.step.layers.find_marks(operation.name) if operation.pin else []
        layer = self.step.layers.marked[marks[-1]] if marks else None
        return layer if layer and type(layer.layer).__module__.startswith(_LAYERS) else None

    def _find_gradient(self, operation: Operation) -> StepArray | None:
        """The parameter whose gradient a train step pins by an operation."""
        scopes = operation.name.split("/")
        if GRADIENT not in scopes:
            return None
        # What splits unevenly is pinned in a function of its own.
        behind = scopes[scopes.index(GRADIENT) + 1 : -1]
        path = "/".join(["params", *(scope for scope in behind if not scope.startswith("jit("))])
        return next((array for array in self.step.arguments if array.path == path), None)

    def find_argument(self, value: int) -> StepArray | None:
        """The argument that a value is, whole or one layer of a stack of it."""
        seen = set[int]()
        while value not in self.arguments and value not in seen:
            seen.add(value)
            maker = self.ways.makers.get(value)
            if maker and maker.operands and _SAME_ARRAY.fullmatch(maker.kind):
                value = maker.operands[0]
        return self.arguments.get(value)

    # Losses

    def loss(self, loss: Loss, is_sum: bool = False) -> WhyLoss:
        """Where a mesh axis got lost, and why.

        Args:
            loss: The loss.
            is_sum: Whether all that counts is that devices sum over the mesh axis.
        """
        operation = loss.pinned_by or loss.operation
        cause, at = self.cause(loss.operand, loss.mesh_axis), self._do(operation)
        where = cause, self.place(operation), self._owner(operation)
        of = f"{loss.mesh_axis!r} of {cause.source}"
        if is_sum or loss.reason == "reduced":
            return WhyLoss("reduced", *where, f"devices sum over {of} at {at}")
        # What else is split over the mesh axis wins, and the parameter is there for its use alone.
        holder, lost = self.find_constraint_layer(operation), self._count_bytes(loss)
        is_for_use = holder is not None and isinstance(holder.layer, GatherParameters)
        if loss.reason == "used" and loss.rival is not None:
            is_for_use = loss.rival[0] in operation.results
        moved = self.find_argument(loss.operand) if is_for_use else None
        if moved is not None and moved.part == "parameters":
            path = moved.path.removeprefix("params/")
            text = f"{path} is gathered over {loss.mesh_axis!r} for {at}"
            return WhyLoss(loss.reason, *where, text, lost, path)
        name, size = cause.logical_axis, self.ways.values[loss.operand].shape[loss.dimension]
        dim = f"dimension {loss.dimension} ({size})" if name is None else f"{str(name)!r} ({size})"
        rival = self.cause(*loss.rival) if loss.rival else cause
        against = f"{rival.mesh_axis!r} of {rival.source}"
        what = _REASONS[loss.reason].format(dim=dim, rival=against)
        return WhyLoss(loss.reason, *where, f"{of} is lost at {at}: {what}", lost)

    def _count_bytes(self, loss: Loss) -> int:
        value, sizes = self.ways.values[loss.operand], self.ways.program.mesh
        parts = math.prod(sizes[base(axis)] for axes in value.spec for axis in axes)
        bits = re.search(r"\d+", value.dtype)
        held = math.prod(value.shape) * max(int(bits[0]) // 8 if bits else 1, 1) / parts
        return int(held * (sizes[base(loss.mesh_axis)] - 1) * (loss.operation.times or 1))

    def place(self, operation: Operation) -> str:
        """What an operation does, and its layer."""
        layer = self._owner(operation)
        return f"{self._do(operation)} in {layer}" if layer else self._do(operation)

    def _do(self, operation: Operation) -> str:
        """What an operation does; where there are no words, JAX's name for it."""
        name = operation.name.rpartition("/")[2] or operation.kind.rpartition(".")[2]
        return _OPERATIONS.get(name, name)

    def _owner(self, operation: Operation) -> str:
        return self.step.layers.owner(operation.name) or ""


def rule_text(logical_axis: Any, mesh_axis: str) -> str:
    """A rule as rules print.

    >>> rule_text("batch", "data:(1)2")
    "'batch' -> 'data'"
    """
    return f"{str(logical_axis)!r} -> {base(mesh_axis)!r}"


def fold_blocks(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same rows; where rows of equal blocks are one but for numbers in texts, these are ``*``.

    Args:
        rows: A path, something that must be equal, any more values, and a text.

    >>> fold_blocks([("block_3/mlp", "loss", "at block_3/up"), ("block_4/mlp", "loss", "at x")])
    [('block_3/mlp', 'loss', 'at block_3/up'), ('block_4/mlp', 'loss', 'at x')]
    """
    keys = [(fold_key(x[0]), x[1], _PATHS.sub(lambda y: fold_key(y[0]), x[-1])) for x in rows]
    counts, pairs = collections.Counter(keys), zip(rows, keys, strict=True)
    return [(*row[:-1], key[-1] if counts[key] > 1 else row[-1]) for row, key in pairs]


def _find_line(operation: Operation) -> str:
    """Where a user wrote an operation, as ``file.py:12``; empty if libraries alone did."""
    for file, line in _FRAME.findall(str(operation.location)):
        if file.startswith(str(_OURS / "inspection")):
            break  # Behind it is who asks, not who wrote the operation.
        if not file.startswith(_LIBRARIES) and not _OTHERS.search(file):
            return f"{pathlib.Path(file).name}:{line}"
    return ""
