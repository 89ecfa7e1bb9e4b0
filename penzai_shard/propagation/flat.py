"""Reads a propagated program as one list of operations on numbered values.

A lowered program is a tree: loops, branches and bodies of ``shard_map`` hold blocks of operations,
and a value has another name on each side of a border. Shardy puts a *data flow edge* on each value
that crosses one, and propagates along it as along an operation that changes nothing. So here it is
one: an operation of the kind ``FLOW``, from all values that may come in to the one that goes on.

- A ``shard_map``: what goes in, and what comes out, is one FLOW each, with the layout that is fixed
  there as its ``pin``. The values inside are parts; their layouts lack the manual mesh axes.
- A loop: a value that it carries is one value, inside and behind it. Its FLOW, behind the loop's
  operations, takes what the loop starts with and what its body returns.
- A branch: the FLOW takes what each branch returns. An optimization barrier is a FLOW too.
- A result of the program is a FLOW from what is returned to the layout that it has outside.

Where collectives are written down (``partition``) there are no edges any more. A loop then has an
operation of its own in front, from what it starts with to what it carries, and a barrier is one.

An ``Edge`` says that at an operation a mesh axis went from one value, operand or result, to others.
Following the earliest edges back from a value leads to where its mesh axes come from.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from penzai_shard.paths import join_paths
from penzai_shard.propagation.passes import (
    ORDER,
    Mlir,
    main_block,
    mesh_axes,
    name_of,
    operations_in,
    propagate,
    to_xla_form,
)

FLOW = "flow"
"""The kind of an operation that only hands a value on, over the border of a region."""
LOOP = "stablehlo.while"
BARRIER = "stablehlo.optimization_barrier"

# One tuple of mesh axes per dimension; parts of a mesh axis are written as "data:(1)2".
Spec = tuple[tuple[str, ...], ...]

ENDS = "arg_attrs", "res_attrs"
"""Where a program keeps the attributes of its arguments, and of its results."""

# Steps of edges at the program's results: before and after all others.
_FIRST, _LAST = -1, 1 << 62
_TERMINATORS = ("func.return", "sdy.return", "stablehlo.return")
_MANUAL = "sdy.manual_computation"
_BRANCHES = ("stablehlo.case", "stablehlo.if")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')
_STEP = re.compile(r"step-(\d+) = \[(.*?\})\]\}")
_EDGE = re.compile(r'"([^"]+)"(\S*) = (operand|result)-(\d+) -> \[([^]]*)\]')
_PLACE = re.compile(r"(operand|result)-(\d+)")


@dataclasses.dataclass(frozen=True)
class Value:
    """An array of a propagated program.

    Attributes:
        spec: Mesh axes of each dimension.
        is_open: For each dimension, whether propagation might have added mesh axes.
        origins: For each mesh axis Shardy's name of what it came from at first; ``"self"`` if that
            is the value's own layout.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    is_open: tuple[bool, ...]
    origins: Mapping[str, str]


class Rule(NamedTuple):
    """Which dimensions of an operation belong together: each dimension's factors, by number.

    Attributes:
        sizes: Length of each factor.
        operands: For each operand, for each of its dimensions, the factors that it is made of.
        results: The same for each result.
        reduced: Factors that are summed or the like, so that no result has them.
        replicated: Factors that devices need whole.
        blocked: Factors along which nothing is propagated.
    """

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
    """A layout that is fixed: ``"constraint"``, ``"region"`` or ``"result of region"``.

    The latter two are what goes into a ``shard_map``, and what comes out. ``origin`` is the name by
    which ``Value.origins`` knows it.
    """

    kind: str
    origin: str
    spec: Spec


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation; values go by their numbers.

    Attributes:
        name: JAX's name, as compiled programs have it.
        location: MLIR's location, with the lines of the user's code if JAX wrote them.
        rule: ``None`` if Shardy propagates nothing through it.
        times: How often it runs: the product of the turns of loops around it, ``None`` if one of
            them is unknown. Of branches each one counts.
        order: Its place in the program that JAX wrote; the list is in XLA's order.
        cuts: Of a slice, what it takes of each dimension: start, end and stride.
        mesh_axes: Of a collective, the mesh axes over which devices exchange.
    """

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
    cuts: tuple[tuple[int, int, int], ...] = ()
    mesh_axes: tuple[str, ...] = ()


@dataclasses.dataclass
class Propagated:
    """A program after propagation.

    Attributes:
        arguments: The values that are the program's arguments, in its order.
        results: The values that are its results, in its order.
        mesh: The size of each mesh axis.
        laid_out: The arguments that had a layout before.
    """

    values: list[Value]
    operations: list[Operation]
    arguments: list[int]
    results: list[int]
    mesh: dict[str, int]
    laid_out: frozenset[int] = frozenset()

    @functools.cached_property
    def makers(self) -> Mapping[int, Operation]:
        """By the number of a value the operation that makes it; arguments have none."""
        return {value: each for each in self.operations for value in each.results}

    @functools.cached_property
    def users(self) -> Mapping[int, Sequence[Operation]]:
        """By the number of a value the operations that take it, each as often as it does."""
        found: dict[int, list[Operation]] = {}
        for each in self.operations:
            for value in each.operands:
                found.setdefault(value, []).append(each)
        return found


def propagate_lowered(lowered: jax.stages.Lowered, *, notes: bool = True) -> Propagated:
    """Propagates the layouts of a lowered program as XLA will, without any device.

    Args:
        lowered: What ``jax.jit(f).lower(...)`` returns; it is left as it is.
        notes: Whether values say what each of their mesh axes came from at first, and operations
            which mesh axes went from where to where.

    Raises:
        PropagationError: See ``to_xla_form`` and ``passes.propagate``.

    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> rows = jax.NamedSharding(mesh, jax.P("data"))
    >>> x = jax.ShapeDtypeStruct((8, 2), "float32", sharding=rows)
    >>> traced = jax.jit(lambda x: x.T).trace(x)
    >>> program = propagate_lowered(traced.lower(lowering_platforms=("cpu",)))
    >>> program.values[program.results[0]].spec
    ((), ('data',))
    """
    module = to_xla_form(lowered)
    with module.context:
        given, _ = read_ends(main_block(module))
        propagate(module, notes=notes)
        program = read(module)
    pairs = zip(program.arguments, given, strict=True)
    program.laid_out = frozenset(number for number, entry in pairs if "sdy.sharding" in entry)
    return program


def read(module: Mlir, cache: dict[Any, Any] | None = None) -> Propagated:
    """Reads a propagated module in the form of XLA; its context has to be in force.

    Args:
        module: The module.
        cache: What was read before of attributes in the same context.
    """
    return _Reader({} if cache is None else cache).read(module)


class _Around(NamedTuple):
    """What a block stands in: the name of the ``shard_map``, and how often the block runs."""

    name: str = ""
    times: int | None = 1


class _Reader:
    """Numbers values as it meets them; reads equal attributes once."""

    def __init__(self, cache: dict[Any, Any]) -> None:
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self._numbers: dict[Mlir, int] = {}
        # What comes in where Shardy puts a data flow edge, in its order, and what is pinned there.
        self._flows: dict[Mlir, tuple[tuple[int, ...], Pin | None]] = {}
        self._cache = cache
        # Of what is read just now: its place in JAX's order, and what its block stands in.
        self._order, self._around = 0, _Around()
        self._has_edges = True

    def read(self, module: Mlir) -> Propagated:
        self._has_edges = bool(operations_in(module, "sdy.data_flow_edge"))
        block = main_block(module)
        given, asked = read_ends(block)
        arguments = [
            self._add(value, entry.get("sdy.sharding"), entry.get("sdy.sharding_origins"))
            for value, entry in zip(block.arguments, given, strict=True)
        ]
        returned = self._read_block(block, self._around)
        ends = returned, block.operations[-1].operands, asked
        results = [*map(self._read_result, itertools.count(), *ends)]
        mesh = dict(mesh_axes(module))
        return Propagated(self.values, self.operations, arguments, results, mesh)

    def _read_result(self, position: int, inside: int, value: Mlir, entry: dict[str, Mlir]) -> int:
        """A result of the program is a value of its own, in the layout that it has outside."""
        sharding, origins = entry.get("sdy.sharding"), entry.get("sdy.sharding_origins")
        number = self._add_typed(value.type, sharding, origins)
        here, handed, edges = self.values[number], self.values[inside], []
        # Edges that Shardy notes at results are of other operations; its origins tell enough.
        kept = {axis for axes in handed.spec for axis in axes}
        for axis in (axis for axes in here.spec for axis in axes if axis in kept):
            if handed.origins.get(axis) == f"output: {position}":
                edges.append(Edge(_FIRST, axis, number, (inside,)))
            elif here.origins.get(axis) != "self":
                edges.append(Edge(_LAST, axis, inside, (number,)))
        self._emit_flow((inside,), number, edges=tuple(edges))
        return number

    # Values

    def _add(self, value: Mlir, sharding: Mlir = None, origins: Mlir = None) -> int:
        self._numbers[value] = self._add_typed(value.type, sharding, origins)
        return self._numbers[value]

    def _add_typed(self, kind: Mlir, sharding: Mlir, origins: Mlir) -> int:
        shape, dtype = self._once(_read_type, kind)
        spec: Spec = ((),) * len(shape)
        is_open = (True,) * len(shape)
        if sharding is not None:
            spec, is_open = self._once(read_spec, sharding)
        names = {} if origins is None else self._once(_read_origins, origins)
        # Shardy leaves the origins of mesh axes that a value did not get in the end.
        kept = {axis: names[axis] for axes in spec for axis in axes if axis in names}
        self.values.append(Value(shape, dtype, spec, is_open, kept))
        return len(self.values) - 1

    def _once(self, read: Callable[[Mlir], Any], attribute: Mlir) -> Any:
        key = (read, attribute)
        if key not in self._cache:
            self._cache[key] = read(attribute)
        return self._cache[key]

    def _read_operands(self, operation: Mlir) -> tuple[int, ...]:
        return tuple(self._numbers[value] for value in operation.operands)

    # Blocks

    def _read_block(self, block: Mlir, around: _Around) -> tuple[int, ...]:
        """Reads all operations of a block; the numbers of what it returns."""
        outside, self._around = self._around, around
        for each in block.operations:
            operation, kind = each.operation, each.operation.name
            if (order := operation.attributes.get(ORDER)) is not None:
                # What Shardy adds counts as what it stands behind.
                self._order = ir.IntegerAttr(order).value
            if kind == "sdy.data_flow_edge":
                self._read_edge(operation)
            elif kind == _MANUAL:
                self._read_manual(operation)
            elif kind == LOOP:
                self._read_loop(operation)
            elif kind in _BRANCHES:
                returned = [self._read_block(r.blocks[0], around) for r in operation.regions]
                self._hand_on(operation.results, zip(*returned, strict=True))
            elif kind == BARRIER and self._has_edges:
                self._hand_on(operation.results, zip(self._read_operands(operation)))
            elif kind not in _TERMINATORS:
                self._read_operation(operation)
        self._around = outside
        return self._read_operands(block.operations[-1].operation)

    def _hand_on(
        self,
        values: Iterable[Mlir],
        sources: Iterable[tuple[int, ...]],
        pins: Iterable[Pin | None] = itertools.repeat(None),
    ) -> None:
        """Notes what comes in at values. An edge is behind each but for tokens and the like."""
        for value, numbers, pin in zip(values, sources, pins, strict=False):
            self._flows[value] = numbers, pin
            self._numbers[value] = numbers[0]

    def _read_manual(self, operation: Mlir) -> None:
        """A ``shard_map``: layouts are fixed at its border, whatever is propagated inside."""
        (block,) = operation.regions[0].blocks
        into = self._read_pins(operation.attributes, "region", "in")
        out = self._read_pins(operation.attributes, "result of region", "out")
        self._hand_on(block.arguments, zip(self._read_operands(operation)), into)
        inside = self._around._replace(name=join_paths(self._around.name, name_of(operation)))
        self._hand_on(operation.results, zip(self._read_block(block, inside)), out)

    def _read_pins(self, attributes: Mapping[str, Mlir], kind: str, side: str) -> list[Pin]:
        """The layouts that are fixed where values go into a ``shard_map``, or come out."""
        name = _read_text(attributes, "sdy.sharding_origin_name")
        shardings = sdy.TensorShardingPerValueAttr(attributes[f"{side}_shardings"]).shardings
        specs = [self._once(read_spec, each)[0] for each in shardings]
        return [Pin(kind, f"{name}_{side}put: {n}", spec) for n, spec in enumerate(specs)]

    def _read_loop(self, loop: Mlir) -> None:
        """What a loop carries is the value of the edge behind it, in its blocks too."""
        blocks, start = [region.blocks[0] for region in loop.regions], self._read_operands(loop)
        carried = [self._read_carried(loop, n, number) for n, number in enumerate(start)]
        if not self._has_edges:
            self._emit(LOOP, loop, operands=start, results=tuple(carried))
        for block in blocks:
            self._numbers.update(zip(block.arguments, carried, strict=True))
        turns, around = _count_turns(loop), self._around
        times = None if turns is None or around.times is None else turns * around.times
        # The condition runs once more than the body, which matters to nobody.
        _, returned = [self._read_block(each, around._replace(times=times)) for each in blocks]
        if self._has_edges:
            self._hand_on(loop.results, zip(start, returned, strict=True))
        else:
            self._numbers.update(zip(loop.results, returned, strict=True))

    def _read_carried(self, loop: Mlir, position: int, start: int) -> int:
        """The number of a value that a loop carries."""
        if not self._has_edges:
            self.values.append(self.values[start])
            return len(self.values) - 1
        users = (use.owner.operation for use in loop.results[position].uses)
        edge = next((each for each in users if each.name == "sdy.data_flow_edge"), None)
        return start if edge is None else self._add_result(edge)

    # Operations

    def _add_result(self, edge: Mlir) -> int:
        attributes = edge.attributes
        return self._add(
            edge.results[0], attributes.get("sharding"), attributes.get("sdy.sharding_origins")
        )

    def _read_edge(self, edge: Mlir) -> None:
        (source,), (result,) = edge.operands, edge.results
        if result not in self._numbers:
            self._add_result(edge)
        (sources, pin), number = self._flows[source], self._numbers[result]
        # Shardy counts each way in, and all that a loop carries as results.
        edges = _read_edges(edge.attributes, sources, (number,))
        self._emit_flow(sources, number, edge, edges=edges, pin=pin)

    def _emit_flow(
        self, sources: tuple[int, ...], result: int, edge: Mlir = None, **fields: Any
    ) -> None:
        operands = tuple(dict.fromkeys(sources))
        shape = self.values[result].shape
        dims = tuple((dim,) for dim in range(len(shape)))
        rule = Rule(shape, (dims,) * len(operands), (dims,))
        self._emit(FLOW, edge, operands=operands, results=(result,), rule=rule, **fields)

    def _read_operation(self, operation: Mlir) -> None:
        kind, attributes = operation.name, operation.attributes
        if "sdy.sharding" in attributes:
            shardings = sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings
        else:  # Operations of Shardy have one result.
            own = attributes.get("out_sharding", attributes.get("sharding"))
            shardings = [own] * len(operation.results)
        origins = attributes.get("sdy.sharding_origins")
        several = origins if isinstance(origins, ir.ArrayAttr) else [origins] * len(shardings)
        operands = self._read_operands(operation)
        results = tuple(map(self._add, operation.results, shardings, several))
        values = (*operands, *results)
        pin, rule = None, attributes.get("sdy.sharding_rule")
        if kind == "sdy.sharding_constraint":
            name = _read_text(attributes, "sdy.sharding_origin_name")
            pin = Pin("constraint", name, self.values[results[0]].spec)
        self._emit(
            kind,
            operation,
            operands=operands,
            results=results,
            rule=None if rule is None else self._once(read_rule, rule),
            edges=_read_edges(attributes, operands, results),
            pin=pin,
            cuts=_read_cuts(attributes) if kind == "stablehlo.slice" else (),
            mesh_axes=self._read_exchange(operation, values) if kind.startswith("sdy.") else (),
        )

    def _read_exchange(self, operation: Mlir, values: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes over which an operation of Shardy exchanges."""
        attributes = operation.attributes
        if operation.name == "sdy.collective_permute":
            axes = [axis for n in values for own in self.values[n].spec for axis in own]
        else:
            # Such as gathering_axes, and params of an all-to-all.
            names = [name for name in attributes if name.endswith("_axes") or name == "params"]
            text = " ".join(str(attributes[name]) for name in names)
            axes = ["".join(each) for each in _AXIS.findall(text)]
        return tuple(dict.fromkeys(axes))

    def _emit(self, kind: str, source: Mlir, **fields: Any) -> None:
        """Adds an operation; ``source`` is what the program has for it, if anything."""
        name, location = self._around.name, None
        if source is not None:
            # An edge at the entry of a shard_map has the name of this again.
            is_entry = kind == FLOW and isinstance(source.operands[0].owner, ir.Block)
            name = join_paths(name, "" if is_entry else name_of(source))
            location = source.location
        fields |= {"times": self._around.times, "order": self._order}
        self.operations.append(Operation(len(self.operations), kind, name, location, **fields))


# Attributes


def _read_edges(
    attributes: Mapping[str, Mlir], operands: Sequence[int], results: Sequence[int]
) -> tuple[Edge, ...]:
    """The edges that Shardy notes at an operation; jaxlib has no other access than their text."""
    noted = attributes.get("sdy.propagation_edges")
    sides, found = {"operand": operands, "result": results}, []
    for step, edges in _STEP.findall("" if noted is None else str(noted)):
        for mesh_axis, part, side, position, targets in _EDGE.findall(edges):
            source = sides[side][int(position)]
            into = tuple(sides[to][int(n)] for to, n in _PLACE.findall(targets))
            found.append(Edge(int(step), mesh_axis + part, source, into))
    return tuple(found)


def _read_cuts(attributes: Mapping[str, Mlir]) -> tuple[tuple[int, int, int], ...]:
    keys = ("start_indices", "limit_indices", "strides")
    return tuple(zip(*(ir.DenseI64ArrayAttr(attributes[key]) for key in keys), strict=True))


def _read_type(kind: Mlir) -> tuple[tuple[int, ...], str]:
    if not isinstance(kind, ir.RankedTensorType):
        return (), str(kind)
    return tuple(kind.shape), str(kind.element_type)


def read_spec(sharding: Mlir) -> tuple[Spec, tuple[bool, ...]]:
    """The mesh axes of each dimension of a layout, and whether it might get more."""
    given = sdy.TensorShardingAttr(sharding).dimension_shardings
    dims = [sdy.DimensionShardingAttr(each) for each in given]
    spec = tuple(tuple(_axis_text(axis) for axis in each.axes) for each in dims)
    return spec, tuple(not each.is_closed for each in dims)


def _axis_text(axis: Mlir) -> str:
    reference = sdy.AxisRefAttr(axis)
    if reference.sub_axis_info is None:
        return str(reference.name)
    part = sdy.SubAxisInfoAttr(reference.sub_axis_info)
    return f"{reference.name}:({part.pre_size}){part.size}"


def read_rule(attribute: Mlir) -> Rule:
    """Which dimensions of an operation belong together, as Shardy writes it."""
    rule = sdy.OpShardingRuleAttr(attribute)
    return Rule(
        sizes=tuple(rule.factor_sizes),
        operands=tuple(map(_read_factors, rule.operand_mappings)),
        results=tuple(map(_read_factors, rule.result_mappings)),
        reduced=frozenset(rule.reduction_factors),
        replicated=frozenset([*rule.need_replication_factors, *rule.permutation_factors]),
        blocked=frozenset(rule.blocked_propagation_factors),
    )


def _read_factors(mapping: Mlir) -> tuple[tuple[int, ...], ...]:
    dims = map(sdy.DimMappingAttr, sdy.TensorMappingAttr(mapping).dim_mappings)
    return tuple(tuple(dim.factor_indices) for dim in dims)


def _read_origins(entries: Mlir) -> dict[str, str]:
    return {each.name: ir.StringAttr(each.attr).value for each in entries}


def read_ends(main: Mlir) -> list[list[dict[str, Mlir]]]:
    """The attributes of each argument of a program, by ``main_block``, and of each result."""
    counts, ends = (len(main.arguments), len(main.operations[-1].operands)), []
    for key, count in zip(ENDS, counts, strict=True):
        found = main.owner.attributes.get(key, [()] * count)
        ends.append([{each.name: each.attr for each in entry} for entry in found])
    return ends


def _read_text(attributes: Mapping[str, Mlir], name: str) -> str:
    found = attributes.get(name)
    return "" if found is None else str(ir.StringAttr(found).value)


# Loops


def _count_turns(loop: Mlir) -> int | None:
    """How often a loop's body runs, if its counter goes from a constant to another one.

    The counter has to be compared by ``<``, and each turn to add a constant: JAX writes ``scan``
    and ``fori_loop`` so.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    compare = condition.operations[-1].operands[0].owner
    if _kind(compare) != "stablehlo.compare":
        return None
    (counter, limit), direction = compare.operands, compare.attributes["comparison_direction"]
    if "LT" not in str(direction) or not isinstance(counter.owner, ir.Block):
        return None
    position = ir.BlockArgument(counter).arg_number
    add = body.operations[-1].operands[position].owner
    if _kind(add) != "stablehlo.add" or add.operands[0] != body.arguments[position]:
        return None
    first, last, step = map(_constant, (loop.operands[position], limit, add.operands[1]))
    if first is None or last is None or step is None or step < 1:
        return None
    return max(0, -(-(last - first) // step))


def _kind(owner: Mlir) -> str:
    """The kind of an operation, empty for a block."""
    return "" if isinstance(owner, ir.Block) else str(owner.name)


def _constant(value: Mlir) -> int | None:
    """The integer that a value is, if it is written into the program."""
    owner = value.owner
    if not _kind(owner).endswith(".constant"):
        return None
    numbers = owner.attributes["value"]
    return int(numbers[0]) if isinstance(numbers, ir.DenseIntElementsAttr) else None
