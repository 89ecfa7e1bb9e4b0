"""A program with its collectives written down by Shardy, read into plain values."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from penzai_shard.library_apis.shardy_api import (
    MlirObject,
    dictionaries_of,
    main_function,
    name_of,
    shape_and_dtype,
    sharding_of,
    shardings_of_results,
    spec_of,
    text_of,
)
from penzai_shard.library_apis.shardy_records import itemsize_of

Spec = tuple[tuple[str, ...], ...]
"""Per dimension the mesh axes, major first."""

TIMES = "penzai_shard.times"
"""Where it is written on a loop how often it runs."""

_AXES_OF = {
    "sdy.all_gather": "gathering_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.reduce_scatter": "reduce_scatter_axes",
    "sdy.all_slice": "slicing_axes",
    "sdy.all_to_all": "params",
}
COLLECTIVES = frozenset({*_AXES_OF, "sdy.collective_permute"})
_AXIS = re.compile(r'"([^"]+)"')
_CONTRACTED = re.compile(r"rhs_contracting_dimensions = \[([\d, ]*)\]")
_OF_KERNEL = re.compile(r"\]x\[([^\]]*)\]")
LOOP = "stablehlo.while"
"""The start of a loop: it takes what the first turn starts with, and makes what each does."""

# Hand their operands on.
_SAME = frozenset({"sdy.data_flow_edge", "sdy.sharding_barrier"})


@dataclasses.dataclass(frozen=True)
class PlacedValue:
    """A value of a program and its layout.

    Attributes:
        shape: Its global shape.
        itemsize: The bytes of an element.
        spec: Per dimension the mesh axes; parts of mesh axes as ``data:(1)2``.
    """

    shape: tuple[int, ...]
    itemsize: int
    spec: Spec


@dataclasses.dataclass(frozen=True)
class PlacedOperation:
    """An operation; values go by their numbers.

    Attributes:
        kind: Such as ``stablehlo.dot_general`` or ``sdy.all_gather``.
        name: What JAX called it.
        operands: What it takes.
        results: What it makes.
        mesh_axes: Of a collective, the mesh axes that it goes over.
        contracted: Of a matrix product or a convolution, the dimensions of its second operand that
            are summed over.
        times: How often a step runs it.
        starts: Of a slice, where it begins in each dimension.
    """

    kind: str
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    mesh_axes: tuple[str, ...] = ()
    contracted: tuple[int, ...] = ()
    times: int = 1
    starts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlacedProgram:
    """A program in a layout, with its collectives; calls and loops are laid open.

    Attributes:
        values: Its values.
        operations: Its operations, in order.
        arguments: The values that go in.
        argument_names: What JAX calls them.
        results: The values that come out.
    """

    values: tuple[PlacedValue, ...]
    operations: tuple[PlacedOperation, ...]
    arguments: tuple[int, ...]
    argument_names: tuple[str, ...]
    results: tuple[int, ...]


def read_placed(module: MlirObject) -> PlacedProgram:
    """Reads a module with collectives, its loops with how often each runs."""
    return _Reader(module).program()


def functions_of(module: MlirObject) -> list[MlirObject]:
    """The functions of a module."""
    block = module.regions[0].blocks[0]
    return [each.operation for each in block.operations if each.operation.name == "func.func"]


class _Reader:
    """Reads a module with collectives into plain values."""

    def __init__(self, module: MlirObject) -> None:
        self._module = module
        self._functions = {
            text_of(each.attributes, "sym_name"): each for each in functions_of(module)
        }
        self._values: list[PlacedValue] = []
        self._numbers: dict[MlirObject, int] = {}
        self._operations: list[PlacedOperation] = []
        self._known: dict[Any, Any] = {}

    def program(self) -> PlacedProgram:
        main = main_function(self._module)
        block = main.regions[0].blocks[0]
        given = dictionaries_of(main, "arg_attrs", len(block.arguments))
        for argument, attributes in zip(block.arguments, given, strict=True):
            self._add(argument, sharding_of(attributes))
        results = self._block(block, 1)
        return PlacedProgram(
            tuple(self._values),
            tuple(self._operations),
            tuple(self._numbers[each] for each in block.arguments),
            tuple(name_of(each.location) for each in block.arguments),
            results,
        )

    def _add(self, value: MlirObject, sharding: MlirObject) -> int:
        number = self._numbers[value] = len(self._values)
        key = (value.type, sharding)
        if key not in self._known:
            shape, dtype = shape_and_dtype(value.type)
            spec = spec_of(sharding)[0] if sharding is not None and shape else ()
            whole = (*spec, *((),) * (len(shape) - len(spec)))
            self._known[key] = PlacedValue(shape, itemsize_of(dtype), whole)
        self._values.append(self._known[key])
        return number

    def _block(self, block: MlirObject, times: int) -> tuple[int, ...]:
        """Reads the operations of a block; returns what it hands back."""
        operands: tuple[int, ...] = ()
        for one in block.operations:
            operation = one.operation
            operands = tuple(self._numbers[each] for each in operation.operands)
            if operation.results or operation.regions:
                self._operation(operation, operands, times)
        return operands

    def _operation(self, operation: MlirObject, operands: tuple[int, ...], times: int) -> None:
        kind = operation.name
        if kind in _SAME:
            self._same(operation.results, operands)
        elif kind == "func.call":
            called = self._functions[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
            self._same(operation.results, self._enter(called.regions[0], operands, times))
        elif kind == LOOP:
            count = int(text_of(operation.attributes, TIMES))
            handed = self._turn(operation, operands, times, count)
            self._same(operation.results, handed)
        elif kind in ("stablehlo.case", "stablehlo.if"):
            returned = [self._enter(region, (), times) for region in operation.regions]
            self._same(operation.results, returned[0])
        else:
            self._plain(operation, operands, times)

    def _turn(
        self, loop: MlirObject, operands: tuple[int, ...], times: int, count: int
    ) -> tuple[int, ...]:
        """Reads one turn of a loop; what it changes is another value than what it starts with."""
        block = loop.regions[1].blocks[0]
        returned = block.operations[len(block.operations) - 1].operation.operands
        changed = [i for i, value in enumerate(block.arguments) if returned[i] != value]
        taken = list(operands)
        for i in changed:
            taken[i] = len(self._values)
            self._values.append(self._values[operands[i]])
        started = tuple(operands[i] for i in changed), tuple(taken[i] for i in changed)
        self._operations.append(
            PlacedOperation(LOOP, name_of(loop.location), *started, times=times)
        )
        return self._enter(loop.regions[1], taken, times * count)

    def _enter(self, region: MlirObject, operands: Sequence[int], times: int) -> tuple[int, ...]:
        block = region.blocks[0]
        self._same(block.arguments, operands)
        return self._block(block, times)

    def _same(self, values: Sequence[MlirObject], numbers: Sequence[int]) -> None:
        self._numbers.update(zip(values, numbers, strict=True))

    def _plain(self, operation: MlirObject, operands: tuple[int, ...], times: int) -> None:
        kind, attributes = operation.name, operation.attributes
        shardings = (
            [attributes["out_sharding"]]
            if "out_sharding" in attributes
            else shardings_of_results(attributes) or [None] * len(operation.results)
        )
        results = tuple(
            self._add(value, sharding)
            for value, sharding in zip(operation.results, shardings, strict=True)
        )
        contracted: tuple[int, ...] = ()
        if kind == "stablehlo.dot_general":
            contracted = self._once(_contracted, attributes["dot_dimension_numbers"])
        elif kind == "stablehlo.convolution":
            contracted = self._once(_convolved, attributes["dimension_numbers"])
        starts: tuple[int, ...] = ()
        if kind == "stablehlo.slice":
            starts = self._once(_numbers, attributes["start_indices"])
        mesh_axes: tuple[str, ...] = ()
        if kind in _AXES_OF:
            mesh_axes = self._once(_axes, attributes[_AXES_OF[kind]])
        elif kind in COLLECTIVES:
            specs = [self._values[each].spec for each in (*operands, *results)]
            mesh_axes = tuple(dict.fromkeys(a for spec in specs for d in spec for a in d))
        made = kind, name_of(operation.location), operands, results
        self._operations.append(PlacedOperation(*made, mesh_axes, contracted, times, starts))

    def _once(self, read: Any, attribute: MlirObject) -> Any:
        key = (read, attribute)
        if key not in self._known:
            self._known[key] = read(str(attribute))
        return self._known[key]


def _contracted(text: str) -> tuple[int, ...]:
    found = _CONTRACTED.search(text)
    return tuple(int(each) for each in found[1].split(",") if each.strip()) if found else ()


def _convolved(text: str) -> tuple[int, ...]:
    """All dimensions of a kernel but that of the features that come out.

    >>> _convolved("#stablehlo.conv<[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]>")
    (0, 1, 2)
    """
    found = _OF_KERNEL.search(text)
    labels = found[1].split(", ") if found else ()
    return tuple(i for i, label in enumerate(labels) if label != "o")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition(":")[2])))


def _axes(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_AXIS.findall(text)))
