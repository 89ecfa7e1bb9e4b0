"""What this library uses of Shardy, the part of XLA that propagates layouts, as plain values.

Shardy's passes run on a lowered program without devices. With two options for people who debug it,
they write down where each layout came from and from which neighbour it was taken.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jaxlib
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

try:
    # The passes are there once this is imported.
    from jaxlib.mlir.dialects import sdy
except ImportError:
    sdy = None  # type: ignore[assignment]

from penzai_shard.errors import PropagationError

# jaxlib has no types for these.
MlirObject = Any

_Read = TypeVar("_Read")

# Calls are made parts of the caller, as XLA does before it propagates. The rules, which say what
# dimensions of an operation belong together, are dropped by propagation and so written down again.
_PASSES = (
    "builtin.module(sdy-import-pipeline,sdy-import-func-calls,sdy-user-priority-propagate{"
    "debug-sharding-origins=true debug-propagation-edge-sharding=true},"
    "func.func(sdy-populate-op-sharding-rules))"
)

# What is in other operations' regions, such as how two values are summed, has no layout.
_ENTERED = frozenset(
    {
        "sdy.named_computation",
        "sdy.manual_computation",
        "stablehlo.while",
        "stablehlo.case",
        "stablehlo.if",
    }
)

_STEP = re.compile(r"step-(\d+) = \[(.*?\})\]\}")
_EDGE = re.compile(r'"([^"]+)"(\S*) = (operand|result)-(\d+) -> \[([^]]*)\]')
_PLACE = re.compile(r"(operand|result)-(\d+)")


class PythonFrame(NamedTuple):
    """A place in Python: a call, or where an operation was written."""

    file: str
    function: str
    line: int


@dataclasses.dataclass(frozen=True)
class ShardyValue:
    """What Shardy says of a value.

    Attributes:
        shape: Its shape.
        dtype: Its data type, as programs' texts have it.
        spec: The mesh axes of each dimension; None if it has no layout at all.
        is_open: Whether more mesh axes could have been added to each dimension.
        origins: Where each mesh axis comes from, as Shardy says it: ``self``, ``input: 1``.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...] | None
    is_open: tuple[bool, ...]
    origins: dict[str, str]


@dataclasses.dataclass(frozen=True)
class ShardyEdge:
    """A mesh axis that was taken from one value of an operation to others.

    Attributes:
        step: When, counted over the program.
        mesh_axis: The mesh axis, or a part of one, as ``data:(1)2``.
        source: ``("operand", 0)`` or ``("result", 0)``.
        targets: The same of those that got it.
    """

    step: int
    mesh_axis: str
    source: tuple[str, int]
    targets: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class ShardyRule:
    """Which dimensions of an operation belong together: each dimension's factors, by number.

    Attributes:
        sizes: The length of each factor.
        operands: The factors of each operand's dimensions.
        results: The factors of each result's dimensions.
        reduced: The factors that are summed up, or reduced in another way.
        replicated: The factors that every device needs whole.
        permuted: The factors along which values are shifted.
        blocked: The factors along which nothing is propagated.
    """

    sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduced: frozenset[int]
    replicated: frozenset[int]
    permuted: frozenset[int]
    blocked: frozenset[int]


@dataclasses.dataclass(frozen=True)
class ShardyOperation:
    """An operation of a program after propagation; values are numbers in ``ShardyProgram.values``.

    Attributes:
        kind: Such as ``stablehlo.dot_general``.
        name: What JAX called it, relative to the call that it is in.
        frames: Where in Python it was written, the innermost call first.
        operands: What it takes.
        results: What it makes.
        blocks: Its regions' blocks: branches, the body of a loop or of a call.
        rule: Which dimensions belong together; None where Shardy has no rule.
        edges: Which mesh axes were taken from where to where at it.
        constraint: What Shardy calls it in origins, if it pins a layout.
    """

    kind: str
    name: str
    frames: tuple[PythonFrame, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    blocks: tuple["ShardyBlock", ...]
    rule: ShardyRule | None
    edges: tuple[ShardyEdge, ...]
    constraint: str


@dataclasses.dataclass(frozen=True)
class ShardyBlock:
    """Operations in order, and the values that they start with."""

    arguments: tuple[int, ...]
    operations: tuple[ShardyOperation, ...]


@dataclasses.dataclass(frozen=True)
class ShardyProgram:
    """A program after propagation.

    Attributes:
        values: All its values.
        main: Its operations; the last one returns the results.
        argument_names: What JAX calls the arguments.
        result_values: What Shardy says of the results themselves, behind what is returned.
        result_edges: The edges at the results.
        mesh: The mesh axes with their sizes.
    """

    values: tuple[ShardyValue, ...]
    main: ShardyBlock
    argument_names: tuple[str, ...]
    result_values: tuple[ShardyValue, ...]
    result_edges: tuple[tuple[ShardyEdge, ...], ...]
    mesh: dict[str, int]


def propagated(lowered: jax.stages.Lowered) -> ShardyProgram:
    """Propagates the layouts of a lowered program, without any device, and reads what came out.

    Args:
        lowered: What JAX lowered; it stays as it is.

    Raises:
        PropagationError: This jaxlib does not have these passes or options, or they refuse the
            program, or some of its shapes are not known.

    >>> program = propagated(jax.jit(jax.numpy.sin).lower(1.0))
    >>> [operation.kind for operation in program.main.operations]
    ['stablehlo.sine', 'func.return']
    """
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    with module.context:
        copied = module.operation.clone().operation
        passes = _passes()
        # Shardy refuses its own notes on where the layout of a loop's values comes from.
        passes.enable_verifier(False)
        try:
            passes.run(copied)
        except Exception as error:
            raise PropagationError(f"Shardy cannot propagate layouts here: {error}") from error
        return _Reader().program(copied)


def _passes() -> MlirObject:
    problem = "it has no dialect of Shardy"
    if sdy is not None:
        try:
            return PassManager.parse(_PASSES)
        except ValueError as error:
            problem = str(error).strip()
    raise PropagationError(
        f"jaxlib {jaxlib.__version__} does not offer the passes of Shardy that say where layouts "
        f"come from, which 0.10 to 0.12 do: {problem}. Plans, device_memory, collectives and lint "
        "work without."
    )


class _Reader:
    """Reads a module; each value gets a number.

    Attributes in MLIR exist once, however many operations have them, and are read once.
    """

    def __init__(self) -> None:
        self.values: list[ShardyValue] = []
        self._numbers: dict[MlirObject, int] = {}
        self._seen: dict[tuple[object, MlirObject], Any] = {}

    def program(self, module: MlirObject) -> ShardyProgram:
        mesh: dict[str, int] = {}
        main = None
        for each in module.regions[0].blocks[0].operations:
            if each.operation.name == "sdy.mesh":
                axes = sdy.MeshAttr(each.operation.attributes["mesh"]).axes
                mesh |= {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, axes)}
            elif each.operation.name == "func.func" and _text(each, "sym_name") == "main":
                main = each
        assert main is not None
        block = main.regions[0].blocks[0]
        given = _dictionaries(main.operation, "arg_attrs", len(block.arguments))
        for argument, attributes in zip(block.arguments, given, strict=True):
            self._add(argument, attributes, _sharding(attributes))
        returned = list(block.operations[len(block.operations) - 1].operation.operands)
        results = _dictionaries(main.operation, "res_attrs", len(returned))
        return ShardyProgram(
            main=self._block(block),
            values=tuple(self.values),
            argument_names=tuple(_name(argument.location) for argument in block.arguments),
            result_values=tuple(
                self._value(value.type, _sharding(attributes), _origins(attributes))
                for value, attributes in zip(returned, results, strict=True)
            ),
            result_edges=tuple(_edges(attributes) for attributes in results),
            mesh=mesh,
        )

    def _once(self, read: Callable[[MlirObject], _Read], attribute: MlirObject) -> _Read:
        key = (read, attribute)
        if key not in self._seen:
            self._seen[key] = read(attribute)
        return self._seen[key]

    def _add(
        self, value: MlirObject, attributes: MlirObject, sharding: MlirObject, number: int = 0
    ) -> int:
        self._numbers[value] = len(self.values)
        self.values.append(self._value(value.type, sharding, _origins(attributes, number)))
        return self._numbers[value]

    def _block(self, block: MlirObject) -> ShardyBlock:
        arguments = tuple(
            self._numbers[value] if value in self._numbers else self._add(value, {}, None)
            for value in block.arguments
        )
        operations = tuple(self._operation(each.operation) for each in block.operations)
        return ShardyBlock(arguments, operations)

    def _operation(self, operation: MlirObject) -> ShardyOperation:
        attributes = operation.attributes
        kind = operation.name
        # A constraint's layout is its own attribute, and so is that of a value that flows.
        of_results = _shardings_of_results(attributes)
        results = tuple(
            self._add(value, attributes, of_results[number] if of_results else None, number)
            for number, value in enumerate(operation.results)
        )
        location = operation.location
        regions = operation.regions if kind in _ENTERED else ()
        rule = "sdy.sharding_rule"
        return ShardyOperation(
            kind=kind,
            name=_name(location),
            frames=self._frames(location),
            operands=tuple(self._numbers[value] for value in operation.operands),
            results=results,
            blocks=tuple(self._block(block) for region in regions for block in region.blocks),
            rule=self._once(_rule, attributes[rule]) if rule in attributes else None,
            edges=_edges(attributes),
            constraint=_text(operation, "sdy.sharding_origin_name"),
        )

    def _value(
        self, kind: MlirObject, sharding: MlirObject, origins: dict[str, str]
    ) -> ShardyValue:
        shape, dtype = self._once(_shape_and_dtype, kind)
        if sharding is None:
            return ShardyValue(shape, dtype, None, (True,) * len(shape), origins)
        return ShardyValue(shape, dtype, *self._once(_spec, sharding), origins)

    def _frames(self, location: MlirObject) -> tuple[PythonFrame, ...]:
        return self._once(self._read_frames, location.attr)

    def _read_frames(self, attribute: MlirObject) -> tuple[PythonFrame, ...]:
        location = ir.Location.from_attr(attribute)
        if isinstance(location, ir.NameLoc):
            inner = location.child_loc
            if isinstance(inner, ir.FileLineColLoc):
                return (PythonFrame(inner.filename, location.name_str, inner.start_line),)
            return self._frames(inner)
        if isinstance(location, ir.CallSiteLoc):
            return self._frames(location.callee) + self._frames(location.caller)
        if isinstance(location, ir.FusedLoc) and location.locations:
            return self._frames(location.locations[0])
        return ()


def _shardings_of_results(attributes: MlirObject) -> Sequence[MlirObject]:
    if "sdy.sharding" in attributes:
        return list(sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings)
    if "sharding" in attributes:
        return [attributes["sharding"]]
    if "out_shardings" in attributes:
        return list(sdy.TensorShardingPerValueAttr(attributes["out_shardings"]).shardings)
    return []


def _shape_and_dtype(kind: MlirObject) -> tuple[tuple[int, ...], str]:
    if not isinstance(kind, ir.RankedTensorType):
        return (), str(kind)
    shape = tuple(kind.shape)
    if not kind.has_static_shape:
        raise PropagationError(
            f"Shardy's propagation is read for known shapes alone, and there is a {kind}: lower "
            "the step for arguments whose shapes are numbers."
        )
    return shape, str(kind.element_type)


def _spec(sharding: MlirObject) -> tuple[tuple[tuple[str, ...], ...], tuple[bool, ...]]:
    dimensions = [
        sdy.DimensionShardingAttr(each)
        for each in sdy.TensorShardingAttr(sharding).dimension_shardings
    ]
    return (
        tuple(tuple(map(_axis_text, dimension.axes)) for dimension in dimensions),
        tuple(not dimension.is_closed for dimension in dimensions),
    )


def _axis_text(axis: MlirObject) -> str:
    axis = sdy.AxisRefAttr(axis)
    part = axis.sub_axis_info
    if part is None:
        return str(axis.name)
    part = sdy.SubAxisInfoAttr(part)
    return f"{axis.name}:({part.pre_size}){part.size}"


def _rule(attribute: MlirObject) -> ShardyRule:
    rule = sdy.OpShardingRuleAttr(attribute)
    return ShardyRule(
        tuple(rule.factor_sizes),
        _mappings(rule.operand_mappings),
        _mappings(rule.result_mappings),
        *(
            frozenset(factors)
            for factors in (
                rule.reduction_factors,
                rule.need_replication_factors,
                rule.permutation_factors,
                rule.blocked_propagation_factors,
            )
        ),
    )


def _mappings(mappings: Iterable[MlirObject]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(
        tuple(
            tuple(sdy.DimMappingAttr(dimension).factor_indices)
            for dimension in sdy.TensorMappingAttr(mapping).dim_mappings
        )
        for mapping in mappings
    )


def _edges(attributes: MlirObject) -> tuple[ShardyEdge, ...]:
    if "sdy.propagation_edges" not in attributes:
        return ()
    return tuple(_read_edges(str(attributes["sdy.propagation_edges"])))


def _read_edges(text: str) -> Iterator[ShardyEdge]:
    # jaxlib has no class for these.
    for step, edges in _STEP.findall(text):
        for mesh_axis, part, kind, number, targets in _EDGE.findall(edges):
            yield ShardyEdge(
                int(step),
                mesh_axis + part,
                (kind, int(number)),
                tuple((kind, int(number)) for kind, number in _PLACE.findall(targets)),
            )


def _origins(attributes: MlirObject, number: int = 0) -> dict[str, str]:
    if "sdy.sharding_origins" not in attributes:
        return {}
    origins = attributes["sdy.sharding_origins"]
    if isinstance(origins, ir.ArrayAttr):
        origins = origins[number]
    return {name: ir.StringAttr(origins[name]).value for name in _keys(origins)}


def _keys(dictionary: MlirObject) -> list[str]:
    # A key with a part of a mesh axis is not an identifier, and is quoted.
    return [str(each.name).strip('"') for each in (dictionary[i] for i in range(len(dictionary)))]


def _sharding(attributes: MlirObject) -> MlirObject:
    if "sdy.sharding" not in attributes:
        return None
    return attributes["sdy.sharding"]


def _dictionaries(operation: MlirObject, name: str, count: int) -> list[MlirObject]:
    if name not in operation.attributes:
        return [{}] * count
    return [ir.DictAttr(each) for each in ir.ArrayAttr(operation.attributes[name])]


def _text(operation: MlirObject, name: str) -> str:
    attributes = operation.attributes
    return str(ir.StringAttr(attributes[name]).value) if name in attributes else ""


def _name(location: MlirObject) -> str:
    return str(location.name_str) if isinstance(location, ir.NameLoc) else ""
