"""Finding out whether a layer treats the elements of what is split between devices independently.

A layer that reverses, normalises or counts along a split logical axis gives each device a result
of its own part, of the right shape and with wrong values. So its program is read, once as traced
with the whole lengths and once as traced with those of one device's part. Both must do the same
operations on the same values, and each must be known to treat the elements of every split
dimension independently of each other, of their number and of their position. Then what a device
computes is its part of what the whole program computes, operation by operation. Whatever is not
known is refused.
"""

import dataclasses
import pathlib
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from penzai_shard.layers.shard_map_regions.control_flow import CONTROL
from penzai_shard.layers.shard_map_regions.derivatives import (
    LINEAR,
    derivative_of_call,
    partial_axes,
)
from penzai_shard.layers.shard_map_regions.primitive_rules import RULES, drawn_axes
from penzai_shard.layers.shard_map_regions.side_by_side import SideBySide, rank_of
from penzai_shard.layers.shard_map_regions.split_values import (
    UNIFORM,
    Dimension,
    Flow,
    MixesElementsError,
    Operation,
    Shape,
    Split,
    refused_by,
    same_value,
    unsplit,
)
from penzai_shard.traced_programs import (
    called_program,
    equations,
    function_name,
    location_text,
    public_name,
)

DERIVATIVES_FOLLOWED = 2
"""How many times a program with custom derivatives may be differentiated and still be followed."""

_ENTRY = str(pathlib.Path(__file__).with_name("region_call.py"))
"""Where a layer is called; what called the region is not part of where an operation is."""

_COLLECTIVE = (
    *("psum", "pmax", "pmin", "pbroadcast", "ppermute", "pgather", "all_gather", "all_to_all"),
    *("ragged_all_to_all", "reduce_scatter", "unreduced_", "axis_index", "psend", "precv"),
)
_OTHERWISE_AT_LENGTH_ONE = frozenset({"take_along_axis", "solve", "lu_solve", "cho_solve"})
_ONLY_LAYOUT = frozenset({"sharding", "out_sharding", "name", "ctx_mesh"})


def collectives(program: Any) -> list[tuple[str, str]]:
    """The operations of a program that move data between devices, or ask which device it is.

    Returns:
        For each of them its name in ``jax.lax``, and where it is, without repetition.
    """
    found = {
        (public_name(equation), location_text([equation], _ENTRY)): None
        for equation in equations(program)
        if equation.primitive.name.startswith(_COLLECTIVE)
    }
    return list(found)


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operation that is refused.

    Attributes:
        operation: The name to vouch for it by.
        where: Which operation, in which layer, on which source line.
        reason: Why.
    """

    operation: str
    where: str
    reason: str


@dataclasses.dataclass
class SplitFlow:
    """Follows split dimensions through a program.

    Attributes:
        splits: The splits of the program's inputs.
        random_axes: The mesh axes along which random streams differ.
        summed_axes: The mesh axes over which JAX adds up the gradient of what devices hold whole.
        vouched: Operations that are taken to be independent.
        part_of_one: Whether parts have the length 1, and the program was followed with longer
            ones. Functions of JAX that trace to other operations at length 1 are then trusted to
            compute the same.
        gradient: Whether sums over split dimensions are allowed, because they are added up over
            the devices afterwards.
        depth: How many custom derivatives this program is inside of.
        problems: What was refused.
    """

    splits: frozenset[Split]
    random_axes: frozenset[str] = frozenset()
    summed_axes: frozenset[str] = frozenset()
    vouched: frozenset[str] = frozenset()
    part_of_one: bool = False
    gradient: bool = False
    depth: int = 0
    problems: list[Problem] = dataclasses.field(default_factory=list)
    _seen: dict[Hashable, tuple[Flow, ...]] = dataclasses.field(default_factory=dict)
    _calls: list[Any] = dataclasses.field(default_factory=list)

    def results(self, whole: Any, part: Any, flows: Sequence[Flow]) -> tuple[Flow, ...]:
        """What the results of a program are.

        Args:
            whole: The closed program with the whole lengths.
            part: The same program with the lengths of one device's part.
            flows: What its inputs are.

        Returns:
            One for each result. Those that depend on refused operations say so, by their
            indices in ``problems``.

        >>> data = Split(("data",), 4, "batch")
        >>> def results(function):
        ...     traced = [jax.make_jaxpr(function)(jax.numpy.ones(n)) for n in (8, 2)]
        ...     analysis = SplitFlow(frozenset({data}))
        ...     return analysis, analysis.results(*traced, [Flow((data,))])
        >>> results(jax.numpy.sin)[1][0].dims == (data,)
        True
        >>> results(lambda x: x / len(x))[0].problems[0].reason
        'it uses the constant 8.0 in the whole and 2.0 in a part'
        """
        # JAX gives one inner program to all calls of a function, which are then followed once.
        key = (id(whole), id(part), tuple(flows))
        if key not in self._seen:
            self._seen[key] = SideBySide(self.step, self.refuse).results(whole, part, flows)
        return self._seen[key]

    def refuse(self, equation: Any, reason: str) -> frozenset[int]:
        """Notes a refused operation, and gives what depends on it its index."""
        chain = [*self._calls, *([] if equation is None else [equation])]
        name = chain[-1].primitive.name if chain else "constant"
        problem = Problem(name, location_text(chain, _ENTRY), reason)
        if problem not in self.problems:
            self.problems.append(problem)
        return frozenset({self.problems.index(problem)})

    def step(self, whole: Any, part: Any, flows: Sequence[Flow | str]) -> list[Flow]:
        """What the results of one operation are.

        Args:
            whole: The operation with the whole lengths.
            part: The operation with the lengths of a part.
            flows: What its operands are; a text says why one of them cannot be followed.
        """
        flows = list(flows)
        for index in _clamped_to_zero(whole, part):
            flows[index] = Flow(())
        given = [flow for flow in flows if isinstance(flow, Flow)]
        names = {whole.primitive.name, function_name(whole)}
        try:
            if names & self.vouched or (
                self.part_of_one and names & _OTHERWISE_AT_LENGTH_ONE and _is_of_jax(whole)
            ):
                return self._vouched(whole, part, given)
            if refused := refused_by(given):
                return [Flow(unsplit(rank_of(atom)), refused=refused) for atom in whole.outvars]
            for flow in flows:
                if isinstance(flow, str):
                    raise MixesElementsError(flow)
            found = self._apply(whole, part, given)
            _check_lengths(whole, part, found)
            return list(found)
        except MixesElementsError as error:
            refused = self.refuse(whole, str(error))
            return [Flow(unsplit(rank_of(atom)), refused=refused) for atom in whole.outvars]

    def _apply(self, whole: Any, part: Any, flows: Sequence[Flow]) -> Sequence[Flow]:
        name = whole.primitive.name
        if any(flow.partial & flow.mesh_axes for flow in flows):
            raise MixesElementsError("it multiplies a sum over a part with that part")
        if called_program(whole) is not None:
            return self._call(whole, part, flows)
        if name in CONTROL:
            return CONTROL[name](self, whole, part, flows)
        return self._primitive(whole, part, flows)

    def _call(self, whole: Any, part: Any, flows: Sequence[Flow]) -> Sequence[Flow]:
        """A call of another program, and the derivative that it brings along."""
        self._calls.append(whole)
        try:
            found = self.results(called_program(whole), called_program(part), flows)
        finally:
            self._calls.pop()
        if whole.primitive.name.startswith("custom_") and self.depth < DERIVATIVES_FOLLOWED:
            self._check_derivative(whole, part, flows, found)
        return found

    def _check_derivative(
        self, whole: Any, part: Any, flows: Sequence[Flow], results: Sequence[Flow]
    ) -> None:
        derivative = derivative_of_call(whole, part, flows, results, self.summed_axes)
        inner = dataclasses.replace(
            self,
            gradient=derivative.backward,
            depth=self.depth + 1,
            problems=[],
            _seen={},
            _calls=[],
        )
        found = inner.results(derivative.whole, derivative.part, derivative.flows)
        if refused := refused_by(found):
            problems = [inner.problems[index] for index in sorted(refused)]
            raise MixesElementsError(
                "its derivative mixes elements: "
                + "; ".join(f"{problem.where}: {problem.reason}" for problem in problems)
            )
        derivative.check_results(found)

    def _primitive(self, whole: Any, part: Any, flows: Sequence[Flow]) -> list[Flow]:
        """An operation that runs no other program, by its rule."""
        name = whole.primitive.name
        rule = RULES.get(name)
        outputs = _shape_pairs(whole.outvars, part.outvars)
        same_everywhere = all(f.plain for f in flows) and all(one == own for one, own in outputs)
        if rule is None and (name.startswith(_COLLECTIVE) or not same_everywhere):
            raise MixesElementsError(
                "it is not known to treat the elements of a split dimension independently"
            )
        shapes = () if rule is None else rule.shapes
        if shapes is not None:
            for key in sorted({*whole.params, *part.params} - _ONLY_LAYOUT - set(shapes)):
                of_whole, of_part = whole.params.get(key), part.params.get(key)
                if not same_value(of_whole, of_part):
                    raise MixesElementsError(
                        f"its {key} is {of_whole} in the whole and {of_part} in a part"
                    )
        if rule is None:
            return [Flow(unsplit(len(shape))) for shape, _ in outputs]
        op = Operation(
            name,
            dict(whole.params),
            dict(part.params),
            tuple(flows),
            _shape_pairs(whole.invars, part.invars),
            outputs,
            self.splits,
            self.gradient,
        )
        dims, partial = rule.apply(op), partial_axes(op)
        random = self._is_random(op)
        zero = name in LINEAR and bool(flows) and all(flow.zero for flow in flows)
        return [Flow(tuple(d), random=random, partial=partial, zero=zero) for d in dims]

    def _is_random(self, op: Operation) -> bool:
        """Whether results come from numbers that differ between devices, not along a split."""
        random = any(flow.random for flow in op.flows)
        if not random or op.name not in ("random_bits", "random_split"):
            return random
        if self.random_axes == drawn_axes(op):
            return False
        if op.name == "random_bits":
            raise MixesElementsError(
                "it draws numbers that all parts should share from a pz.RandomStream, of which "
                "every device has its own"
            )
        return True

    def _vouched(self, whole: Any, part: Any, flows: Sequence[Flow]) -> list[Flow]:
        """An operation that somebody vouches for: its result is split where its length says so."""
        found = []
        partial = frozenset().union(*(flow.partial for flow in flows))
        for shapes in _shape_pairs(whole.outvars, part.outvars):
            dims: list[Dimension] = []
            for index, (length, own) in enumerate(zip(*shapes, strict=True)):
                if length == own:
                    dims.append(None)
                    continue
                splits = [split for split in self.splits if split.parts * own == length]
                of_operands = {f.dims[index] for f in flows if index < len(f.dims)} & set(splits)
                if len(fitting := list(of_operands) or splits) != 1:
                    raise MixesElementsError(
                        f"it is vouched for, but dimension {index} of its result, of length "
                        f"{length} in the whole and {own} in a part, is not split in one "
                        "known way"
                    )
                dims.append(fitting[0])
            found.append(Flow(tuple(dims), partial=partial, refused=refused_by(flows)))
        return found


def _clamped_to_zero(whole: Any, part: Any) -> list[int]:
    """The operands of an operation that say where in a whole dimension a slice of it starts.

    Such a slice starts at zero, whatever they say; and ``x[:, i]`` computes them from the length.
    """
    taken = {"dynamic_slice": 0, "dynamic_update_slice": 1}.get(whole.primitive.name)
    if taken is None:
        return []
    sizes = [
        equation.outvars[0].aval.shape if taken == 0 else equation.invars[taken].aval.shape
        for equation in (whole, part)
    ]
    (lengths,) = _shape_pairs(whole.invars[:1], part.invars[:1])
    full = zip(*sizes, *lengths, strict=True)
    return [
        taken + 1 + dimension
        for dimension, (size, own, length, own_length) in enumerate(full)
        if size == length and own == own_length
    ]


def _shape_pairs(atoms: Sequence[Any], twins: Sequence[Any]) -> tuple[tuple[Shape, Shape], ...]:
    """The shapes of values in the whole and in a part."""
    shapes = ([tuple(getattr(atom.aval, "shape", ())) for atom in of] for of in (atoms, twins))
    return tuple(zip(*shapes, strict=True))


def _check_lengths(whole: Any, part: Any, flows: Sequence[Flow]) -> None:
    pairs = _shape_pairs(whole.outvars, part.outvars)
    for shapes, flow in zip(pairs, flows, strict=True):
        if flow.refused:
            continue
        for dim, length, own in zip(flow.dims, *shapes, strict=True):
            parts = dim.parts if isinstance(dim, Split) else 1
            if dim != UNIFORM and length != own * parts:
                raise MixesElementsError(
                    f"its result has length {length} in the whole and {own} in a part, where "
                    + (f"{parts} parts make the whole" if dim else "nothing is split")
                )


def _is_of_jax(equation: Any) -> bool:
    source = str(equation.params["jaxpr"].jaxpr.debug_info.func_src_info)
    return str(pathlib.Path(jax.__file__).parent) in source
