"""Which values of a program are what a layer gives, a parameter's gradient, or a result.

A layer's output is a value of the forward pass that operations of the layer make, that others use,
and that has the shape of what the layer gave when it was traced. So a layer without operations of
its own has none: what it gives is what it got.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator

from penzai_shard.compiled_programs.operation_names import COMPUTED_AGAIN, OperationName
from penzai_shard.inspection.sharding_causes.cause_finding import CauseFinder
from penzai_shard.inspection.sharding_causes.records import RowKind
from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.sharding_propagation import FLOW, Operation, PropagatedProgram
from penzai_shard.training.gradient_step import GRADIENT_SCOPE
from penzai_shard.tree_paths import path_endings

# What a loop keeps of each round for later is written into one large array.
_STORES = frozenset({"stablehlo.dynamic_update_slice"})
_RESHAPES = frozenset({"stablehlo.reshape", "stablehlo.broadcast_in_dim"})


@dataclasses.dataclass(frozen=True)
class FoundArray:
    """An array of the step that a row is about.

    Attributes:
        kind: What it is.
        path: Its path, or that of its layer.
        label: What people call it.
        array: Its shape and its names.
        value: Its number in the program.
    """

    kind: RowKind
    path: str
    label: str
    array: StepArray
    value: int


def found_arrays(
    program: PropagatedProgram, step: LoweredStep, finder: CauseFinder
) -> Iterator[FoundArray]:
    """The outputs of layers, the gradients of parameters, and the results, in this order.

    Of a train step the results are what it gives beside the next state.
    """
    layers = _LayerValues(program, step)
    yield from layers.outputs()
    # In the order of the state, which is always the same.
    order = {array.path: number for number, array in enumerate(step.arguments.values())}
    pinned = sorted(_gradients(program, finder), key=lambda found: order[found.path])
    yield from pinned or layers.gradients(step)
    if len(step.results) == len(program.results):
        for array, value in zip(step.results, program.results, strict=True):
            if array.part == "outputs" or not step.scopes.of_step:
                yield FoundArray("result", array.path, array.path, array, value)


def _gradients(program: PropagatedProgram, finder: CauseFinder) -> Iterator[FoundArray]:
    """Those that a train step brings to their layout."""
    for operation in program.operations:
        if not operation.constraint or f"/{GRADIENT_SCOPE}/" not in operation.name:
            continue
        parameter = finder.parameter_pinned_by(operation)
        if parameter is not None:
            label = parameter.path.removeprefix("params/")
            value = operation.results[0]
            yield FoundArray("gradient", parameter.path, label, parameter, value)


class _LayerValues:
    """Finds what layers give, in both directions, by the marks that their operations have."""

    def __init__(self, program: PropagatedProgram, step: LoweredStep) -> None:
        self._program = program
        self._results = frozenset(program.results)
        self._scopes = step.scopes
        self._layers = functools.cache(step.scopes.paths_in)
        self._is_forward = functools.cache(_is_forward)

    def outputs(self) -> Iterator[FoundArray]:
        """The outputs, in the order in which they are made."""
        found: dict[tuple[str, StepArray], dict[tuple[str, bool], list[FoundArray]]] = {}
        for operation in self._program.operations:
            layers = self._layers(operation.name)
            if not layers or not self._is_forward(operation.name):
                continue
            for value, layer in itertools.product(operation.results, dict.fromkeys(layers)):
                given = self._given(layer, value)
                use = self._use_outside(value, layer, set()) if given else ""
                if given and use:
                    traced, array = given
                    label = self._scopes.label(layer) + (f": {array.path}" if array.path else "")
                    how = (use, array is traced)
                    same = found.setdefault((layer, traced), {}).setdefault(how, [])
                    same.append(FoundArray("output", layer, label, array, value))
        for ways in found.values():
            # What others use rather than what is kept, and as it was traced rather than turned.
            yield from ways[max(ways)]

    def gradients(self, step: LoweredStep) -> Iterator[FoundArray]:
        """The gradients of parameters in a function that a user wrote, as far as they are certain.

        That is, if a layer gives one array of a parameter's shape alone, in the backward pass, that
        no other layer uses.
        """
        holders = self._scopes.holders
        by_shape: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        for operation in self._program.operations:
            layers = self._layers(operation.name)
            if layers and OperationName.of(operation.name).is_transposed:
                for value in operation.results:
                    known = self._program.values[value]
                    if self._use_outside(value, layers[-1], set()) and self._is_final(value):
                        key = (layers[-1], known.shape, known.dtype)
                        by_shape.setdefault(key, []).append(value)
        for array in step.arguments.values():
            if array.part != "parameters":
                continue
            name = next((end for end in path_endings(array.path) if end in holders), None)
            values = [
                value
                for layer in holders.get(name or "", ())
                for value in by_shape.get((layer, array.shape, _dtype_text(array.dtype)), ())
            ]
            if len(values) == 1:
                yield FoundArray("gradient", array.path, array.path, array, values[0])

    def _is_final(self, value: int) -> bool:
        """Whether no layer goes on with a value in the backward pass."""
        return not any(
            self._layers(user.name) and OperationName.of(user.name).is_transposed
            for user in self._program.users.get(value, ())
        )

    def _given(self, layer: str, value: int) -> tuple[StepArray, StepArray] | None:
        """What a layer gave when it was traced that a value may be, and the same as it is now.

        Shardy leaves out two transpositions that cancel each other, of which one is in the layer.
        """
        known = self._program.values[value]
        turned = None
        for array in self._scopes.outputs.of(layer):
            if _dtype_text(array.dtype) not in ("", known.dtype):
                continue
            if array.shape == known.shape:
                return array, array
            if sorted(array.shape) == sorted(known.shape):
                turned = turned or (array, _turned(array, known.shape))
        return turned

    def _use_outside(self, value: int, layer: str, seen: set[int]) -> str:
        """Whether others than a layer use a value, or a loop alone that keeps it for later."""
        found = "used" if value in self._results else ""
        for user in self._program.users.get(value, ()):
            if layer in self._layers(user.name) or user.number in seen:
                continue
            seen.add(user.number)
            use = "used"
            if user.kind == FLOW:
                use = max((self._use_outside(r, layer, seen) for r in user.results), default="")
            elif self._keeps(user):
                use = "kept"
            found = max(found, use)
        return found

    def _keeps(self, user: Operation) -> bool:
        if user.kind in _RESHAPES:
            users = [u for r in user.results for u in self._program.users.get(r, ())]
            return bool(users) and all(u.kind in _STORES for u in users)
        return user.kind in _STORES


def _turned(array: StepArray, shape: tuple[int, ...]) -> StepArray:
    """An array with its dimensions in another order; of those equally long it is not known which.

    >>> _turned(StepArray("", "outputs", (2, 3), None, None, names=("a", "b")), (3, 2)).names
    ('b', 'a')
    """
    names = array.names
    if names is not None:
        by_size = dict(zip(array.shape, names, strict=True))
        alone = {size for size in array.shape if array.shape.count(size) == 1}
        names = tuple(by_size[size] if size in alone else None for size in shape)
    return dataclasses.replace(array, shape=shape, names=names)


def _is_forward(name: str) -> bool:
    read = OperationName.of(name)
    return not read.is_transposed and COMPUTED_AGAIN not in read.scopes


@functools.cache
def _dtype_text(dtype: object) -> str:
    """A dtype as programs' texts have it; empty if that is not known.

    >>> import jax.numpy as jnp
    >>> _dtype_text(jnp.dtype("bfloat16")), _dtype_text(jnp.dtype("uint8"))
    ('bf16', 'ui8')
    """
    name = re.fullmatch(r"(bfloat|float|uint|int)(\d+)", str(dtype))
    if name is None:
        return "i1" if str(dtype) == "bool" else ""
    return {"bfloat": "bf", "float": "f", "uint": "ui", "int": "i"}[name[1]] + name[2]
