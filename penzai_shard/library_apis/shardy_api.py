"""What this library uses of Shardy, the part of XLA that propagates layouts, as plain values.

Shardy's passes run on a lowered program without devices. With two options for people who debug it,
they write down where each layout came from and from which neighbour it was taken.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jaxlib
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

try:
    # The passes are there once this is imported.
    from jaxlib.mlir.dialects import sdy
except ImportError:
    sdy = None  # type: ignore[assignment]

from penzai_shard.errors import PropagationError, raise_all
from penzai_shard.library_apis.shardy_forms import bring_to_form_of_xla
from penzai_shard.library_apis.shardy_records import (
    PythonFrame,
    ShardyBlock,
    ShardyBoundary,
    ShardyEdge,
    ShardyOperation,
    ShardyProgram,
    ShardyRule,
    ShardyValue,
)

# jaxlib has no types for these.
MlirObject = Any

_Read = TypeVar("_Read")

# What XLA runs, up to where layouts are propagated; these are the passes behind it that change the
# layouts of what goes in and comes out.
_PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_PROPAGATION = re.compile(r".*sdy-user-priority-propagate\{[^{}]*\}", re.DOTALL)
_AT_THE_ENDS = (
    "sdy-update-non-divisible-input-output-shardings",
    "sdy-remove-sub-axes-in-input-output-shardings",
)
# For people who debug XLA, and not known by its own name.
WRITES_FILES = re.compile(r"sdy-save-module(\{[^{}]*\})?,")
_NOTES = ("debug-sharding-origins", "debug-propagation-edge-sharding", "keep-sharding-rules")

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
_ORIGIN = "sdy.sharding_origin_name"
_EDGE = re.compile(r'"([^"]+)"(\S*) = (operand|result)-(\d+) -> \[([^]]*)\]')
_PLACE = re.compile(r"(operand|result)-(\d+)")


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
        passes = passes_from(_with_notes)
        bring_to_form_of_xla(copied)
        main = main_function(copied)
        arguments = main.regions[0].blocks[0].arguments
        _refuse_unknown_shapes(arguments)
        given = dictionaries_of(main, "arg_attrs", len(arguments))
        laid_out = tuple(sharding_of(attributes) is not None for attributes in given)
        # Shardy refuses its own notes on where the layout of a loop's values comes from.
        passes.enable_verifier(False)
        try:
            passes.run(copied)
        except Exception as error:
            raise PropagationError(f"Shardy cannot propagate layouts here: {error}") from error
        return _Reader().program(copied, laid_out)


def _refuse_unknown_shapes(arguments: Iterable[MlirObject]) -> None:
    problems = [
        f"{name_of(argument.location)}: is a {argument.type}. Lower the step for a "
        "shape of numbers."
        for argument in arguments
        if isinstance(argument.type, ir.RankedTensorType) and not argument.type.has_static_shape
    ]
    raise_all(PropagationError, "Shardy propagates layouts of known shapes alone:", problems)


def main_function(module: MlirObject) -> MlirObject:
    """The function of a module that is run."""
    functions = (each.operation for each in module.regions[0].blocks[0].operations)
    return next(each for each in functions if text_of(each.attributes, "sym_name") == "main")


def passes_from(change: Callable[[str], str]) -> MlirObject:
    """The passes that XLA runs to propagate layouts, changed.

    Args:
        change: Takes the text of a pipeline and gives another, or raises ``ValueError``.

    Raises:
        PropagationError: This jaxlib does not offer them.
    """
    problem = "it has no dialect of Shardy"
    if sdy is not None:
        try:
            return PassManager.parse(change(str(PassManager.parse(_PIPELINE))))
        except ValueError as error:
            problem = str(error).partition("\n")[0]
    raise PropagationError(
        f"jaxlib {jaxlib.__version__} does not offer the passes of Shardy that say where layouts "
        f"come from, which 0.10 to 0.12 do: {problem}. Plans, device_memory, collectives and lint "
        "work without."
    )


def _with_notes(pipeline: str) -> str:
    found = _PROPAGATION.match(pipeline)
    if found is None:
        raise ValueError("'sdy-user-priority-propagate' is not among them")
    propagation = found[0]
    for option in _NOTES:
        if option not in propagation:
            raise ValueError(f"'sdy-user-priority-propagate' has no option '{option}'")
        propagation = propagation.replace(f"{option}=false", f"{option}=true")
    return WRITES_FILES.sub("", ",".join([propagation, *_AT_THE_ENDS]) + ")")


class _Reader:
    """Reads a module; each value gets a number.

    Attributes in MLIR exist once, however many operations have them, and are read once.
    """

    def __init__(self) -> None:
        self.values: list[ShardyValue] = []
        self._numbers: dict[MlirObject, int] = {}
        self._seen: dict[tuple[object, MlirObject], Any] = {}

    def program(self, module: MlirObject, laid_out: tuple[bool, ...]) -> ShardyProgram:
        mesh: dict[str, int] = {}
        for each in module.regions[0].blocks[0].operations:
            if each.operation.name == "sdy.mesh":
                axes = sdy.MeshAttr(each.operation.attributes["mesh"]).axes
                mesh |= {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, axes)}
        main = main_function(module)
        block = main.regions[0].blocks[0]
        given = dictionaries_of(main, "arg_attrs", len(block.arguments))
        for argument, attributes in zip(block.arguments, given, strict=True):
            self._add(argument, attributes, sharding_of(attributes))
        returned = list(block.operations[len(block.operations) - 1].operation.operands)
        results = dictionaries_of(main, "res_attrs", len(returned))
        return ShardyProgram(
            main=self._block(block),
            values=tuple(self.values),
            argument_names=tuple(name_of(argument.location) for argument in block.arguments),
            laid_out=laid_out,
            result_values=tuple(
                self._value(value.type, sharding_of(attributes), self._origins(attributes))
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
        origins = self._origins(attributes, number)
        self.values.append(self._value(value.type, sharding, origins))
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
        of_results = shardings_of_results(attributes)
        results = tuple(
            self._add(value, attributes, of_results[number] if of_results else None, number)
            for number, value in enumerate(operation.results)
        )
        location = operation.location
        regions = operation.regions if kind in _ENTERED else ()
        rule = "sdy.sharding_rule"
        return ShardyOperation(
            kind=kind,
            name=name_of(location),
            frames=self._frames(location),
            operands=tuple(self._numbers[value] for value in operation.operands),
            results=results,
            blocks=tuple(self._block(block) for region in regions for block in region.blocks),
            rule=self._once(_rule, attributes[rule]) if rule in attributes else None,
            edges=_edges(attributes),
            constraint=text_of(attributes, _ORIGIN),
            taken=self._boundaries(attributes, "in_shardings"),
            given=self._boundaries(attributes, "out_shardings"),
            cuts=_cuts(attributes) if kind == "stablehlo.slice" else (),
        )

    def _boundaries(self, attributes: MlirObject, name: str) -> tuple[ShardyBoundary, ...]:
        if "manual_axes" not in attributes:
            return ()
        manual: MlirObject = sdy.ManualAxesAttr(attributes["manual_axes"])
        axes = frozenset(manual)
        shardings = sdy.TensorShardingPerValueAttr(attributes[name]).shardings
        goes_in = name == "in_shardings"
        origin = text_of(attributes, _ORIGIN) + ("_input" if goes_in else "_output")
        return tuple(
            ShardyBoundary(axes, *self._once(spec_of, sharding), goes_in, f"{origin}: {number}")
            for number, sharding in enumerate(shardings)
        )

    def _value(
        self, kind: MlirObject, sharding: MlirObject, origins: dict[str, str]
    ) -> ShardyValue:
        shape, dtype = self._once(shape_and_dtype, kind)
        if sharding is None:
            return ShardyValue(shape, dtype, None, (True,) * len(shape), origins)
        spec, is_open = self._once(spec_of, sharding)
        # What is on one device alone, as for a call to Python, has no dimensions in its layout.
        missing = len(shape) - len(spec)
        spec, is_open = (*spec, *[()] * missing), (*is_open, *[False] * missing)
        return ShardyValue(shape, dtype, spec, is_open, origins)

    def _origins(self, attributes: MlirObject, number: int = 0) -> dict[str, str]:
        if "sdy.sharding_origins" not in attributes:
            return {}
        origins = attributes["sdy.sharding_origins"]
        if isinstance(origins, ir.ArrayAttr):
            origins = origins[number]
        return self._once(_origins, origins)

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


def shardings_of_results(attributes: MlirObject) -> Sequence[MlirObject]:
    """The layouts of an operation's results; empty if none has one."""
    if "sdy.sharding" in attributes:
        return list(sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings)
    if "sharding" in attributes:
        return [attributes["sharding"]]
    if "out_shardings" in attributes:
        return list(sdy.TensorShardingPerValueAttr(attributes["out_shardings"]).shardings)
    return []


def shape_and_dtype(kind: MlirObject) -> tuple[tuple[int, ...], str]:
    """The shape of a value and the type of its elements; no dimensions if it is not an array."""
    if not isinstance(kind, ir.RankedTensorType):
        return (), str(kind)
    return tuple(kind.shape), str(kind.element_type)


def spec_of(sharding: MlirObject) -> tuple[tuple[tuple[str, ...], ...], tuple[bool, ...]]:
    """Per dimension the mesh axes of a layout, and whether propagation may add to them."""
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


def _cuts(attributes: MlirObject) -> tuple[tuple[int, int, int], ...]:
    numbers = (
        map(int, ir.DenseI64ArrayAttr(attributes[name]))
        for name in ("start_indices", "limit_indices", "strides")
    )
    return tuple(zip(*numbers, strict=True))


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


def _origins(attribute: MlirObject) -> dict[str, str]:
    return {name: ir.StringAttr(attribute[name]).value for name in _keys(attribute)}


def _keys(dictionary: MlirObject) -> list[str]:
    # A key with a part of a mesh axis is not an identifier, and is quoted.
    return [str(each.name).strip('"') for each in (dictionary[i] for i in range(len(dictionary)))]


def sharding_of(attributes: MlirObject) -> MlirObject:
    """The layout among the attributes of an argument or a result; None if it has none."""
    if "sdy.sharding" not in attributes:
        return None
    return attributes["sdy.sharding"]


def dictionaries_of(operation: MlirObject, name: str, count: int) -> list[MlirObject]:
    """The attributes of each argument or result of a function."""
    if name not in operation.attributes:
        return [{}] * count
    return [ir.DictAttr(each) for each in ir.ArrayAttr(operation.attributes[name])]


def text_of(attributes: MlirObject, name: str) -> str:
    """A text among some attributes; empty if it is not there."""
    return str(ir.StringAttr(attributes[name]).value) if name in attributes else ""


def name_of(location: MlirObject) -> str:
    """What JAX called an operation or an argument."""
    return str(location.name_str) if isinstance(location, ir.NameLoc) else ""
