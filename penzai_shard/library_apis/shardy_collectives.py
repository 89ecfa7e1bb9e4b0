"""What Shardy has devices send each other, for a program whose layouts are put in afterwards.

A program is lowered once with a mesh axis of size 1 for everything that a layout may be about. It
is a mark: it says of a dimension what it is, and splits nothing. Any layout is then put in place of
the marks. Shardy's own passes propagate it and write down every collective, which takes the time of
these passes alone.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxlib.mlir import ir

from penzai_shard.errors import PropagationError
from penzai_shard.library_apis.shardy_api import (
    WRITES_FILES,
    MlirObject,
    dictionaries_of,
    main_function,
    name_of,
    passes_from,
    shape_and_dtype,
    sharding_of,
    shardings_of_results,
    spec_of,
    text_of,
)
from penzai_shard.library_apis.shardy_forms import bring_to_form_of_xla
from penzai_shard.library_apis.shardy_products import lay_out_products_as_xla, sharding_text
from penzai_shard.library_apis.shardy_records import itemsize_of

Spec = tuple[tuple[str, ...], ...]
"""Per dimension the mesh axes, major first."""

# Behind the propagation: what two operations have otherwise is brought over by collectives.
_RESHARDS = "func.func(sdy-insert-explicit-reshards"
# Arguments and results that do not divide are stored padded, and keep their layouts.
_WHOLE_IF_UNEVEN = ",sdy-update-non-divisible-input-output-shardings"
_TO_COLLECTIVES = (
    f"builtin.module({_RESHARDS}{{enable-full-version=true}},sdy-reshard-to-collectives),cse)"
)
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
_CONSTANT = re.compile(r"dense<(\d+)>")
# Hand their operands on.
_SAME = frozenset({"sdy.data_flow_edge", "sdy.sharding_barrier"})


@dataclasses.dataclass(frozen=True)
class Mark:
    """A layout by marks: the shape of a value, and the marks of each of its dimensions."""

    shape: tuple[int, ...]
    dimensions: Spec


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


class MarkedProgram:
    """A lowered program whose mesh axes are marks.

    Attributes:
        marks: The different layouts in it.

    Raises:
        PropagationError: This jaxlib does not offer the passes, or the program has layouts in a
            form that cannot be replaced, such as those of ``jax.shard_map``.

    >>> mesh = jax.sharding.AbstractMesh((1, 2), ("rows", "rest"))
    >>> x = jax.ShapeDtypeStruct((4, 4), "float32", sharding=jax.NamedSharding(mesh, jax.P("rows")))
    >>> lowered = jax.jit(lambda x: x.sum(0)).trace(x).lower(lowering_platforms=("cpu",))
    >>> program = MarkedProgram(lowered)
    >>> [mark for mark in program.marks if any(mark.dimensions)]
    [Mark(shape=(4, 4), dimensions=(('rows',), ()))]
    >>> split = {("rows",): ("data",), (): ()}
    >>> specs = [tuple(split[axes] for axes in mark.dimensions) for mark in program.marks]
    >>> placed = program.placed({"data": 4}, specs)
    >>> [each.kind for each in placed.operations if each.mesh_axes]
    ['sdy.all_reduce']
    """

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        module = lowered.compiler_ir("stablehlo")
        assert module is not None
        self._marks: dict[Mark, int] = {}
        self._lowered = lowered
        with module.context:
            self._module = module.operation.clone().operation
            bring_to_form_of_xla(self._module)
            self._propagation = passes_from(_down_to_reshards)
            self._collectives = passes_from(lambda pipeline: _TO_COLLECTIVES)
            for passes in (self._propagation, self._collectives):
                passes.enable_verifier(False)
            # By the order in which operations are walked.
            self._of_operations = list(self._read_operations())
            self._of_functions = list(self._read_functions())
            for each in _walked(self._module):
                if each.name == _WHILE:
                    each.attributes[_TIMES] = ir.StringAttr.get(str(_trip_count(each)))
        self.marks = tuple(self._marks)

    def placed(self, mesh_shape: Mapping[str, int], specs: Sequence[Spec | None]) -> PlacedProgram:
        """The program in a layout.

        Args:
            mesh_shape: The size of each mesh axis.
            specs: In place of each of ``marks``, the mesh axes of each dimension; None takes out
                the constraints that have the mark, which no argument or result may have.

        Raises:
            PropagationError: Shardy's passes refuse the layout.
        """
        with self._module.context:
            module = self._module.clone().operation
            attributes = [
                None if spec is None else ir.Attribute.parse(sharding_text(spec)) for spec in specs
            ]
            self._put_in(module, mesh_shape, attributes)
            try:
                self._propagation.run(module)
                lay_out_products_as_xla(module)
                self._collectives.run(module)
            except Exception as error:
                raise PropagationError(f"Shardy cannot lay out this program: {error}") from error
            return _Reader(module).program()

    def _mark(self, value: MlirObject, sharding: MlirObject) -> int:
        shape = shape_and_dtype(value.type)[0]
        spec = spec_of(sharding)[0] if shape else ()
        mark = Mark(shape, (*spec, *((),) * (len(shape) - len(spec))))
        return self._marks.setdefault(mark, len(self._marks))

    def _read_operations(self) -> Iterator[int | None]:
        for each in _walked(self._module):
            attributes = each.attributes
            if "sharding" in attributes:
                yield self._mark(each.results[0], attributes["sharding"])
                continue
            if "in_shardings" in attributes or ("sdy.sharding" in attributes and each.results):
                raise PropagationError(
                    f"{each.name}: its layout is written in a form that cannot be replaced. "
                    "Layouts by jax.shard_map are not priced by propagation."
                )
            yield None

    def _read_functions(self) -> Iterator[tuple[list[int | None], list[int | None]]]:
        for each in _functions(self._module):
            block = each.regions[0].blocks[0]
            returned = block.operations[len(block.operations) - 1].operation.operands
            found = []
            for name, values in (("arg_attrs", block.arguments), ("res_attrs", returned)):
                given = dictionaries_of(each, name, len(values))
                found.append(
                    [
                        None if (sharding := sharding_of(one)) is None else self._mark(v, sharding)
                        for v, one in zip(values, given, strict=True)
                    ]
                )
            yield found[0], found[1]

    def _put_in(
        self, module: MlirObject, mesh_shape: Mapping[str, int], attributes: Sequence[MlirObject]
    ) -> None:
        axes = ", ".join(f'"{name}"={size}' for name, size in mesh_shape.items())
        marks = iter(self._of_operations)
        left_out: list[MlirObject] = []

        def put(operation: MlirObject) -> ir.WalkResult:
            mark = next(marks)
            if mark is not None and attributes[mark] is None:
                left_out.append(operation)
            elif mark is not None:
                operation.attributes["sharding"] = attributes[mark]
            if operation.name == "sdy.mesh":
                operation.attributes["mesh"] = ir.Attribute.parse(f"#sdy.mesh<[{axes}]>")
            return ir.WalkResult.ADVANCE

        module.walk(put)
        for constraint in left_out:
            constraint.results[0].replace_all_uses_with(constraint.operands[0])
            constraint.erase()
        for function, found in zip(_functions(module), self._of_functions, strict=True):
            for name, marked in zip(("arg_attrs", "res_attrs"), found, strict=True):
                if any(mark is not None for mark in marked):
                    given = dictionaries_of(function, name, len(marked))
                    changed = [
                        one if mark is None else _with_sharding(one, attributes[mark])
                        for one, mark in zip(given, marked, strict=True)
                    ]
                    function.attributes[name] = ir.ArrayAttr.get(changed)


_WHILE = "stablehlo.while"
_TIMES = "penzai_shard.times"


def _down_to_reshards(pipeline: str) -> str:
    propagation, _, _ = pipeline.partition(_RESHARDS)
    for part in (_RESHARDS, _WHOLE_IF_UNEVEN):
        if part not in pipeline:
            raise ValueError(f"{part!r} is not among them")
    propagation = propagation.replace(_WHOLE_IF_UNEVEN, "")
    return WRITES_FILES.sub("", propagation).rstrip(",") + ")"


def _walked(module: MlirObject) -> list[MlirObject]:
    found: list[MlirObject] = []

    def add(operation: MlirObject) -> ir.WalkResult:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(add)
    return found


def _functions(module: MlirObject) -> list[MlirObject]:
    block = module.regions[0].blocks[0]
    return [each.operation for each in block.operations if each.operation.name == "func.func"]


def _with_sharding(attributes: MlirObject, sharding: MlirObject) -> MlirObject:
    named = (attributes[number] for number in range(len(attributes)))
    return ir.DictAttr.get({each.name: each.attr for each in named} | {"sdy.sharding": sharding})


def _trip_count(loop: MlirObject) -> int:
    """How often a loop of ``jax.lax.scan`` runs: what its counter is compared with."""
    condition = loop.regions[0].blocks[0]
    for each in condition.operations:
        if each.operation.name == "stablehlo.compare":
            limit = each.operation.operands[1].owner
            if not isinstance(limit, ir.Block) and limit.name.endswith(".constant"):
                found = _CONSTANT.search(str(limit.attributes["value"]))
                if found is not None:
                    return int(found[1])
    raise PropagationError(
        "a loop runs an unknown number of times, so that what it sends is not known. Loops of "
        "jax.lax.scan run a known number of times."
    )


class _Reader:
    """Reads a module with collectives into plain values."""

    def __init__(self, module: MlirObject) -> None:
        self._module = module
        self._functions = {
            text_of(each.attributes, "sym_name"): each for each in _functions(module)
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
        elif kind == _WHILE:
            count = int(text_of(operation.attributes, _TIMES))
            handed = self._enter(operation.regions[1], operands, times * count)
            self._same(operation.results, handed)
        elif kind in ("stablehlo.case", "stablehlo.if"):
            returned = [self._enter(region, (), times) for region in operation.regions]
            self._same(operation.results, returned[0])
        else:
            self._plain(operation, operands, times)

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
