"""Shardy's propagation run without devices, and its program as one list of operations.

Calls, loops, branches and manual computations are laid open: what they hand on is a FLOW operation.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from penzai_shard.propagation.passes import LAID_OUT, propagate
from penzai_shard.propagation.xla_form import ORDER, main_block, to_xla_form

FLOW = "flow"
_LAST = 1 << 62
_REGIONS = (
    "sdy.named_computation",
    "sdy.manual_computation",
    "stablehlo.while",
    "stablehlo.case",
    "stablehlo.if",
)
_STEP = re.compile(r"step-(\d+) = \[(.*?\})\]\}")
_EDGE = re.compile(r'"([^"]+)"(\S*) = (operand|result)-(\d+) -> \[([^]]*)\]')
_PLACE = re.compile(r"(operand|result)-(\d+)")
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array of a propagated program: spec is None without any layout."""

    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None = None
    is_open: tuple[bool, ...] = ()
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Rule(NamedTuple):
    """Which dimensions of an operation belong together: each dimension's factors, by number."""

    sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduced: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()


class Edge(NamedTuple):
    """A mesh axis that went from one value to others at an operation, and when."""

    step: int
    mesh_axis: str
    source: int
    targets: tuple[int, ...]


class Pin(NamedTuple):
    """A layout that is fixed: by a constraint, at the border of a shard_map, or of a result."""

    kind: str
    origin: str
    spec: Spec


@dataclasses.dataclass
class Operation:
    """One operation; values go by their numbers."""

    number: int
    kind: str
    name: str
    location: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None = None
    edges: tuple[Edge, ...] = ()
    pin: Pin | None = None
    times: int | None = 1
    order: int = 0


@dataclasses.dataclass
class Propagated:
    """A program after propagation."""

    values: list[Value]
    operations: list[Operation]
    arguments: list[int]
    laid_out: frozenset[int]
    results: list[int]
    mesh: dict[str, int]


def propagate_lowered(
    lowered: jax.stages.Lowered, *, origins: bool = True, edges: bool = True
) -> Propagated:
    """Propagates the layouts of a lowered program, without any device."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        copied = module.operation.clone().operation
        to_xla_form(copied)
        propagate(copied, origins=origins, edges=edges)
        return read(copied)


def read(module: Any) -> Propagated:
    """The operations of a propagated module."""
    return _Reader().read(module)


class _Reader:
    """Reads a module: each value gets a number, attributes are read once."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self._numbers: dict[Any, int] = {}
        self._sources: dict[Any, list[Any]] = {}  # Of what a region takes or gives: what comes in.
        self._pins: dict[Any, Pin] = {}
        self._seen: dict[Any, Any] = {}

    def read(self, module: Any) -> Propagated:
        mesh: dict[str, int] = {}
        for each in module.regions[0].blocks[0].operations:
            if each.operation.name == "sdy.mesh":
                axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(each.operation.attributes["mesh"]).axes)
                mesh |= {axis.name: axis.size for axis in axes}
        block = main_block(module)
        main = block.owner
        given = _dictionaries(main, "arg_attrs", len(block.arguments))
        laid_out = frozenset(n for n, each in enumerate(given) if LAID_OUT in each)
        arguments: list[int] = []
        for value, attributes in zip(
            block.arguments, _dictionaries(main, "arg_attrs", len(block.arguments)), strict=True
        ):
            arguments.append(
                self._add(
                    value,
                    _get(attributes, "sdy.sharding"),
                    _get(attributes, "sdy.sharding_origins"),
                )
            )
        self._block(block)
        self._connect()
        returned = list(list(block.operations)[-1].operation.operands)
        results = []
        for n, (value, attributes) in enumerate(
            zip(returned, _dictionaries(main, "res_attrs", len(returned)), strict=True)
        ):
            results.append(self._result(n, value, attributes))
        return Propagated(self.values, self.operations, arguments, laid_out, results, mesh)

    def _result(self, n: int, value: Any, attributes: Any) -> int:
        """A result of the program: what is returned, in the layout that was asked for."""
        inside = self._numbers[value]
        number = len(self.values)
        sharding = _get(attributes, "sdy.sharding")
        self.values.append(
            self._value(value.type, sharding, _get(attributes, "sdy.sharding_origins"), 0)
        )
        here, handed = self.values[number], self.values[inside]
        edges = []
        for axis in (a for axes in here.spec or () for a in axes):
            if here.origins.get(axis) != "self":
                edges.append(Edge(_LAST, axis, inside, (number,)))
            elif handed.origins.get(axis) == f"output: {n}":
                edges.append(Edge(-1, axis, number, (inside,)))
        self._operation(
            FLOW, "", None, (inside,), (number,), self._same_rule(number, 1), tuple(edges)
        )
        return number

    def _operation(
        self,
        kind: str,
        name: str,
        location: Any,
        operands: Any,
        results: Any,
        rule: Any,
        edges: Any,
        pin: Any = None,
    ) -> None:
        self.operations.append(
            Operation(
                len(self.operations), kind, name, location, operands, results, rule, edges, pin
            )
        )

    def _same_rule(self, value: int, count: int) -> Rule:
        shape = self.values[value].shape
        dims = tuple((i,) for i in range(len(shape)))
        return Rule(shape, (dims,) * count, (dims,))

    def _add(self, value: Any, sharding: Any, origins: Any = None, n: int = 0) -> int:
        self._numbers[value] = len(self.values)
        self.values.append(self._value(value.type, sharding, origins, n))
        return self._numbers[value]

    def _value(self, kind: Any, sharding: Any, origins: Any, n: int) -> Value:
        shape, dtype = self._once(_shape_and_dtype, kind)
        if isinstance(origins, ir.ArrayAttr):
            origins = origins[n]
        said = self._once(_origins, origins) if origins is not None else {}
        if sharding is None:
            return Value(shape, dtype, None, (True,) * len(shape), said)
        spec, is_open = self._once(_spec, sharding)
        missing = len(shape) - len(spec)
        return Value(shape, dtype, (*spec, *[()] * missing), (*is_open, *[False] * missing), said)

    def _once(self, read: Callable[[Any], Any], attribute: Any) -> Any:
        key = (read, attribute)
        if key not in self._seen:
            self._seen[key] = read(attribute)
        return self._seen[key]

    def _block(self, block: Any, around: str = "") -> None:
        for each in block.operations:
            operation = each.operation
            name = "/".join(filter(None, (around, _name(operation.location))))
            kind, attributes = operation.name, operation.attributes
            if kind in ("sdy.return", "func.return", "stablehlo.return"):
                continue
            shardings = _shardings(attributes)
            origins = _get(attributes, "sdy.sharding_origins")
            for n, value in enumerate(operation.results):
                if value not in self._numbers:
                    self._add(value, shardings[n] if n < len(shardings) else None, origins, n)
            if (
                kind == "stablehlo.optimization_barrier"
            ):  # Shardy puts an edge behind each of its results.
                self._sources |= {
                    r: [o] for r, o in zip(operation.results, operation.operands, strict=True)
                }
                continue
            if kind in _REGIONS:
                self._region(
                    operation,
                    name if kind in ("sdy.named_computation", "sdy.manual_computation") else around,
                )
                continue
            if kind == "sdy.data_flow_edge":  # Its operands are known once its region is read.
                (value,) = operation.results
                self._operation(
                    FLOW,
                    name,
                    operation.location,
                    operation.operands[0],
                    (self._numbers[value],),
                    None,
                    self._text_edges(attributes),
                    self._pins.get(operation.operands[0]),
                )
                continue
            operands = tuple(self._numbers[self._root(value)] for value in operation.operands)
            results = tuple(self._numbers[value] for value in operation.results)
            pin = None
            if kind == "sdy.sharding_constraint":
                pin = Pin(
                    "constraint",
                    _text(attributes, "sdy.sharding_origin_name"),
                    self.values[results[0]].spec or (),
                )
            rule = (
                self._once(_rule, attributes["sdy.sharding_rule"])
                if "sdy.sharding_rule" in attributes
                else None
            )
            edges = tuple(_edges(self._text_edges(attributes), operands, results))
            self._operation(kind, name, operation.location, operands, results, rule, edges, pin)

    def _text_edges(self, attributes: Any) -> str:
        return (
            str(attributes["sdy.propagation_edges"])
            if "sdy.propagation_edges" in attributes
            else ""
        )

    def _root(self, value: Any) -> Any:
        """A value that a loop's block only hands on stands for what is behind the loop's edge."""
        while value not in self._numbers:
            value = self._sources[value][0]
        return value

    def _region(self, operation: Any, around: str) -> None:
        """Notes what goes into a region's blocks and comes out of them, and reads these."""
        kind, attributes = operation.name, operation.attributes
        blocks = [block for region in operation.regions for block in region.blocks]
        name = _text(attributes, "sdy.sharding_origin_name")
        for block in blocks:
            for n, value in enumerate(block.arguments):
                source = operation.operands[n]
                if kind == "stablehlo.while":
                    # The loop's edges are behind it, and its own values are what these give.
                    edge = next(
                        (
                            u.owner.operation
                            for u in operation.results[n].uses
                            if u.owner.operation.name == "sdy.data_flow_edge"
                        ),
                        None,
                    )
                    self._sources[value] = [edge.results[0] if edge else operation.results[n]]
                    if edge is not None and edge.results[0] not in self._numbers:
                        self._add(
                            edge.results[0],
                            _get(edge.attributes, "sharding"),
                            _get(edge.attributes, "sdy.sharding_origins"),
                        )
                    self._numbers[value] = self._numbers[self._sources[value][0]]
                    self._sources[operation.results[n]] = [
                        source
                    ]  # Behind it what the body returns: Shardy counts so.
                else:
                    self._sources[value] = [source]
                    self._add(value, None)
                    if kind == "sdy.manual_computation":
                        self._pins[value] = Pin(
                            "region",
                            f"{name}_input: {n}",
                            self._border(attributes, "in_shardings", n),
                        )
        for block in blocks:
            self._block(block, around)
            returned = list(block.operations)[-1].operation
            for n, value in enumerate(operation.results):
                if n < len(returned.operands) and not (
                    kind == "stablehlo.while" and block is blocks[0]
                ):
                    self._sources.setdefault(value, []).append(returned.operands[n])
                    if kind == "sdy.manual_computation":
                        self._pins[value] = Pin(
                            "result of region",
                            f"{name}_output: {n}",
                            self._border(attributes, "out_shardings", n),
                        )

    def _border(self, attributes: Any, which: str, n: int) -> Spec:
        return self._once(_spec, sdy.TensorShardingPerValueAttr(attributes[which]).shardings[n])[0]

    def _connect(self) -> None:
        """Gives FLOW operations the numbers of all that may come in."""
        for each in self.operations:
            if each.kind == FLOW and not isinstance(each.operands, tuple):
                value = each.operands
                sources = [self._root(s) for s in self._sources.get(value, [])] or [value]
                each.operands = tuple(dict.fromkeys(self._numbers[source] for source in sources))
                each.rule = self._same_rule(each.results[0], len(each.operands))
                each.edges = tuple(
                    _edges(each.edges, tuple(self._numbers[s] for s in sources), each.results)
                )


def _edges(text: str, operands: tuple[int, ...], results: tuple[int, ...]) -> Iterator[Edge]:
    def place(kind: str, number: str) -> int | None:
        values = operands if kind == "operand" else results
        return values[int(number)] if int(number) < len(values) else None

    for step, edges in _STEP.findall(text):
        for mesh_axis, part, kind, number, targets in _EDGE.findall(edges):
            source = place(kind, number)
            into = tuple(t for k, n in _PLACE.findall(targets) if (t := place(k, n)) is not None)
            if source is not None:
                yield Edge(int(step), mesh_axis + part, source, into)


def _get(attributes: Any, name: str) -> Any:
    return attributes[name] if name in attributes else None


def _shardings(attributes: Any) -> list[Any]:
    for name in ("sdy.sharding", "out_shardings"):
        if name in attributes:
            return list(sdy.TensorShardingPerValueAttr(attributes[name]).shardings)
    return [attributes["sharding"]] if "sharding" in attributes else []


def _shape_and_dtype(kind: Any) -> tuple[tuple[int, ...], str]:
    if not isinstance(kind, ir.RankedTensorType):
        return (), str(kind)
    return tuple(kind.shape), str(kind.element_type)


def _spec(sharding: Any) -> tuple[Spec, tuple[bool, ...]]:
    dims = [
        sdy.DimensionShardingAttr(d) for d in sdy.TensorShardingAttr(sharding).dimension_shardings
    ]
    return tuple(tuple(map(_axis, d.axes)) for d in dims), tuple(not d.is_closed for d in dims)


def _axis(axis: Any) -> str:
    axis = sdy.AxisRefAttr(axis)
    if axis.sub_axis_info is None:
        return str(axis.name)
    part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return f"{axis.name}:({part.pre_size}){part.size}"


def _rule(attribute: Any) -> Rule:
    rule = sdy.OpShardingRuleAttr(attribute)

    def mappings(of: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(
                tuple(sdy.DimMappingAttr(d).factor_indices)
                for d in sdy.TensorMappingAttr(m).dim_mappings
            )
            for m in of
        )

    whole = frozenset(rule.need_replication_factors) | frozenset(rule.permutation_factors)
    return Rule(
        tuple(rule.factor_sizes),
        mappings(rule.operand_mappings),
        mappings(rule.result_mappings),
        frozenset(rule.reduction_factors),
        whole,
        frozenset(rule.blocked_propagation_factors),
    )


def _origins(dictionary: Any) -> dict[str, str]:
    keys = [str(dictionary[i].name).strip('"') for i in range(len(dictionary))]
    return {key: ir.StringAttr(dictionary[key]).value for key in keys}


def _dictionaries(operation: Any, name: str, count: int) -> list[Any]:
    if name not in operation.attributes:
        return [{}] * count
    return [ir.DictAttr(each) for each in ir.ArrayAttr(operation.attributes[name])]


def _text(attributes: Any, name: str) -> str:
    return str(ir.StringAttr(attributes[name]).value) if name in attributes else ""


def _name(location: Any) -> str:
    return str(location.name_str) if isinstance(location, ir.NameLoc) else ""
