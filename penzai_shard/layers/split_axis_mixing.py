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
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from penzai_shard.layers.partial_sums import LINEAR, partial_axes
from penzai_shard.layers.program_reading import (
    COLLECTIVE,
    ENTRY,
    derivative,
    differentiable,
    same_value,
)
from penzai_shard.layers.split_control_flow import CONTROL
from penzai_shard.layers.split_dimension_rules import RULES, drawn_axes
from penzai_shard.layers.split_dimensions import (
    UNIFORM,
    Dimension,
    Flow,
    MixesElementsError,
    Operation,
    Split,
    whole,
)
from penzai_shard.traced_programs import called_program, function_name, location_text, opened

DERIVATIVES_FOLLOWED = 2
"""How many times a program with custom derivatives may be differentiated and still be followed."""

_SAME_VALUE = ("pvary", "pcast", "reshard")
_OTHERWISE_AT_LENGTH_ONE = frozenset({"take_along_axis", "solve", "lu_solve", "cho_solve"})
_ONLY_LAYOUT = frozenset({"sharding", "out_sharding", "name", "ctx_mesh"})


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
    _inside: list[Any] = dataclasses.field(default_factory=list)

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
        key = (id(whole), id(part), tuple(flows))
        if key not in self._seen:
            self._seen[key] = _Reading(self, whole, part).results(flows)
        return self._seen[key]

    def of_call(self, here: Any, there: Any, flows: Sequence[Flow]) -> tuple[Flow, ...]:
        """What the results of an equation that calls another program are."""
        self._inside.append(here)
        try:
            return self.results(called_program(here), called_program(there), flows)
        finally:
            self._inside.pop()

    def refuse(self, equation: Any, reason: str) -> frozenset[int]:
        """Notes a refused operation, and gives what depends on it its index."""
        chain = [*self._inside, *([] if equation is None else [equation])]
        name = chain[-1].primitive.name if chain else "constant"
        problem = Problem(name, location_text(chain, ENTRY), reason)
        if problem not in self.problems:
            self.problems.append(problem)
        return frozenset({self.problems.index(problem)})

    def checkderivative(self, here: Any, there: Any, flows: Sequence[Flow]) -> None:
        """Follows the derivative of an operation that brings its own."""
        if self.depth >= DERIVATIVES_FOLLOWED:
            return
        backward = here.primitive.name == "custom_vjp_call"
        inner = SplitFlow(
            self.splits,
            self.random_axes,
            self.summed_axes,
            self.vouched,
            self.part_of_one,
            gradient=backward,
            depth=self.depth + 1,
        )
        inputs, results = zip(here.invars, flows, strict=True), self.of_call(here, there, flows)
        moving = [flow for atom, flow in inputs if differentiable(atom)]
        moved = [f for atom, f in zip(here.outvars, results, strict=True) if differentiable(atom)]
        if backward:
            moved = [
                dataclasses.replace(flow, partial=self.summed_axes - flow.mesh_axes)
                for flow in moved
            ]
        given = [*flows, *(moved if backward else moving)]
        try:
            of_whole = derivative(here, backward)
        except Exception as error:
            # It may have one all the same, in a way that is not followed here.
            raise MixesElementsError(f"its derivative cannot be followed: {error}") from error
        try:
            of_part = derivative(there, backward)
        except Exception as error:
            raise MixesElementsError(f"its derivative fails on a part: {error}") from error
        found = inner.results(of_whole, of_part, given)
        refused = frozenset().union(*(flow.refused for flow in found))
        if refused:
            raise MixesElementsError(
                "its derivative mixes elements: "
                + "; ".join(
                    f"{inner.problems[i].where}: {inner.problems[i].reason}"
                    for i in sorted(refused)
                )
            )
        for flow, expected in zip(found, moving if backward else moved, strict=True):
            wanted = self.summed_axes - flow.mesh_axes if backward else frozenset()
            same = all(
                one == other or UNIFORM in (one, other)
                for one, other in zip(flow.dims, expected.dims, strict=True)
            )
            if not same or flow.random or (flow.partial != wanted and not flow.zero):
                raise MixesElementsError("its derivative is not split as what it is derived from")


class _Reading:
    """One reading of a program, side by side with the whole lengths and with those of a part."""

    def __init__(self, analysis: SplitFlow, whole: Any, part: Any) -> None:
        self.analysis = analysis
        self.whole, self.part = whole, part
        self.twins: dict[Any, Any] = {}
        self.flows: dict[Any, Flow | str] = {}
        self.same: dict[Any, Any] = {}

    def results(self, flows: Sequence[Flow]) -> tuple[Flow, ...]:
        (here, constants), (there, own_constants) = opened(self.whole), opened(self.part)
        if len(here.invars) != len(there.invars) or len(here.constvars) != len(there.constvars):
            return self._different(here, None, None)
        for one, other, flow in zip(here.invars, there.invars, flows, strict=True):
            self.twins[one], self.flows[one] = other, flow
        closed_over = zip(here.constvars, there.constvars, constants, own_constants, strict=True)
        for one, other, constant, own in closed_over:
            self.twins[one] = other
            self.flows[one] = _constant_flow(constant, own)
        ours, theirs = list(self._equations(here)), list(self._equations(there))
        for one, other in zip(ours, theirs, strict=False):
            if not self._alike(one, other):
                return self._different(here, one, other)
            for variable, twin, flow in zip(
                one.outvars, other.outvars, self._step(one, other), strict=True
            ):
                self.twins[variable], self.flows[variable] = twin, flow
        if len(ours) != len(theirs):
            rest = (ours[len(theirs) :] or [None])[0], (theirs[len(ours) :] or [None])[0]
            return self._different(here, *rest)
        if not all(self._twins(a, b) for a, b in zip(here.outvars, there.outvars, strict=True)):
            return self._different(here, None, None)
        pairs = zip(here.outvars, there.outvars, strict=True)
        return tuple(self._output(atom, twin) for atom, twin in pairs)

    def _equations(self, jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if equation.primitive.name in _SAME_VALUE:
                for variable, atom in zip(equation.outvars, equation.invars, strict=True):
                    self.same[variable] = self._resolved(atom)
            else:
                yield equation

    def _resolved(self, atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else self.same.get(atom, atom)

    def _twins(self, atom: Any, other: Any) -> bool:
        atom, other = self._resolved(atom), self._resolved(other)
        if isinstance(atom, core.Literal):
            return isinstance(other, core.Literal)
        return self.twins.get(atom) is other

    def _alike(self, one: Any, other: Any) -> bool:
        return (
            one.primitive is other.primitive
            and len(one.invars) == len(other.invars)
            and len(one.outvars) == len(other.outvars)
            and all(self._twins(a, b) for a, b in zip(one.invars, other.invars, strict=True))
            and all(_kind(a) == _kind(b) for a, b in zip(one.outvars, other.outvars, strict=True))
        )

    def _different(self, jaxpr: Any, one: Any, other: Any) -> tuple[Flow, ...]:
        names = [e.primitive.name if e is not None else "nothing" for e in (one, other)]
        found = one if one is not None else other
        refused = self.analysis.refuse(
            found,
            "the program depends on the length of a split dimension: "
            + (
                f"it does {names[0]} in the whole where it does {names[1]} in a part"
                if names[0] != names[1]
                else "it computes with other values in the whole than in a part"
            ),
        )
        return tuple(Flow(whole(_rank(atom)), refused=refused) for atom in jaxpr.outvars)

    def _output(self, atom: Any, twin: Any) -> Flow:
        flow = self._flow(atom, twin)
        if isinstance(flow, str):
            refused = self.analysis.refuse(None, flow)
            return Flow(whole(_rank(atom)), refused=refused)
        return flow

    def _flow(self, atom: Any, twin: Any) -> Flow | str:
        atom, twin = self._resolved(atom), self._resolved(twin)
        if isinstance(atom, core.Literal):
            return _constant_flow(atom.val, twin.val)
        return self.flows[atom]

    def _step(self, here: Any, there: Any) -> list[Flow]:
        flows = [self._flow(a, b) for a, b in zip(here.invars, there.invars, strict=True)]
        for index in _clamped_to_zero(here, there):
            flows[index] = Flow(())
        given = [flow for flow in flows if isinstance(flow, Flow)]
        refused = frozenset().union(*(flow.refused for flow in given))
        try:
            names = {here.primitive.name, function_name(here)}
            if names & self.analysis.vouched or (
                self.analysis.part_of_one and names & _OTHERWISE_AT_LENGTH_ONE and _is_of_jax(here)
            ):
                return self._vouched(here, there, given)
            if refused:
                return [Flow(whole(_rank(atom)), refused=refused) for atom in here.outvars]
            for flow in flows:
                if isinstance(flow, str):
                    raise MixesElementsError(flow)
            found = list(_apply(self.analysis, here, there, given))
            _check_lengths(here, there, found)
            return found
        except MixesElementsError as error:
            refused = self.analysis.refuse(here, str(error))
            return [Flow(whole(_rank(atom)), refused=refused) for atom in here.outvars]

    def _vouched(self, here: Any, there: Any, flows: Sequence[Flow]) -> list[Flow]:
        found = []
        refused = frozenset().union(*(flow.refused for flow in flows))
        partial = frozenset().union(*(flow.partial for flow in flows))
        for atom, twin in zip(here.outvars, there.outvars, strict=True):
            dims: list[Dimension] = []
            for index, (one, other) in enumerate(zip(*_shapes(atom, twin), strict=True)):
                if one == other:
                    dims.append(None)
                    continue
                splits = [s for s in self.analysis.splits if s.parts * other == one]
                here_too = {f.dims[index] for f in flows if index < len(f.dims)} & set(splits)
                if len(fitting := list(here_too) or splits) != 1:
                    raise MixesElementsError(
                        f"it is vouched for, but dimension {index} of its result, of length {one} "
                        f"in the whole and {other} in a part, is split in no way that can be told"
                    )
                dims.append(fitting[0])
            found.append(Flow(tuple(dims), partial=partial, refused=refused))
        return found


def _clamped_to_zero(here: Any, there: Any) -> list[int]:
    """The operands of an operation that say where in a whole dimension a slice of it starts.

    Such a slice starts at zero, whatever they say; and ``x[:, i]`` computes them from the length.
    """
    taken = {"dynamic_slice": 0, "dynamic_update_slice": 1}.get(here.primitive.name)
    if taken is None:
        return []
    sizes = [
        equation.outvars[0].aval.shape if taken == 0 else equation.invars[taken].aval.shape
        for equation in (here, there)
    ]
    full = zip(*sizes, *_shapes(here.invars[0], there.invars[0]), strict=True)
    return [
        taken + 1 + dimension
        for dimension, (size, own, length, own_length) in enumerate(full)
        if size == length and own == own_length
    ]


def _apply(analysis: SplitFlow, here: Any, there: Any, flows: Sequence[Flow]) -> Sequence[Flow]:
    name = here.primitive.name
    if any(flow.partial & flow.mesh_axes for flow in flows):
        raise MixesElementsError("it multiplies a sum over a part with that part")
    if called_program(here) is not None:
        found = analysis.of_call(here, there, flows)
        if name.startswith("custom_"):
            analysis.checkderivative(here, there, flows)
        return found
    if name in CONTROL:
        return CONTROL[name](analysis, here, there, flows)
    return _simple(analysis, here, there, flows)


def _simple(analysis: SplitFlow, here: Any, there: Any, flows: Sequence[Flow]) -> Sequence[Flow]:
    name = here.primitive.name
    rule = RULES.get(name)
    outputs = tuple(_shapes(a, b) for a, b in zip(here.outvars, there.outvars, strict=True))
    whole_everywhere = all(f.plain for f in flows) and all(one == other for one, other in outputs)
    if rule is None and (name.startswith(COLLECTIVE) or not whole_everywhere):
        raise MixesElementsError(
            "it is not known to treat the elements of a split dimension independently"
        )
    shapes = () if rule is None else rule.shapes
    if shapes is not None:
        for key in sorted({*here.params, *there.params} - _ONLY_LAYOUT - set(shapes)):
            if not same_value(here.params.get(key), there.params.get(key)):
                raise MixesElementsError(
                    f"its {key} is {here.params.get(key)} in the whole and {there.params.get(key)}"
                    " in a part"
                )
    if rule is None:
        return [Flow(whole(len(shape))) for shape, _ in outputs]
    op = Operation(
        name,
        dict(here.params),
        dict(there.params),
        tuple(flows),
        tuple(_shapes(a, b) for a, b in zip(here.invars, there.invars, strict=True)),
        outputs,
        analysis.splits,
        analysis.gradient,
    )
    dims = rule.apply(op)
    partial = partial_axes(op)
    random = any(flow.random for flow in flows)
    draws = random and name in ("random_bits", "random_split")
    if draws and analysis.random_axes == drawn_axes(op):
        random = False
    elif random and name == "random_bits":
        raise MixesElementsError(
            "it draws numbers that all parts should share from a pz.RandomStream, of which every "
            "device has its own"
        )
    zero = name in LINEAR and bool(flows) and all(flow.zero for flow in flows)
    return [Flow(tuple(d), random=random, partial=partial, zero=zero) for d in dims]


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _kind(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", type(atom.aval)), _rank(atom)


def _shapes(atom: Any, twin: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    one, other = (tuple(getattr(a.aval, "shape", ())) for a in (atom, twin))
    return one, other


def _check_lengths(here: Any, there: Any, flows: Sequence[Flow]) -> None:
    for atom, twin, flow in zip(here.outvars, there.outvars, flows, strict=True):
        if flow.refused:
            continue
        for dim, one, other in zip(flow.dims, *_shapes(atom, twin), strict=True):
            parts = dim.parts if isinstance(dim, Split) else 1
            if dim != UNIFORM and one != other * parts:
                raise MixesElementsError(
                    f"its result has length {one} in the whole and {other} in a part, where "
                    + (f"{parts} parts make the whole" if dim else "nothing is split")
                )


def _constant_flow(constant: Any, own: Any) -> Flow | str:
    if same_value(constant, own):
        number = np.ndim(constant) == 0 and jax.numpy.issubdtype(
            getattr(constant, "dtype", type(constant)), np.number
        )
        concrete = number and not isinstance(constant, jax.core.Tracer)
        return Flow(whole(len(np.shape(constant))), zero=concrete and float(constant.real) == 0)
    shapes = [np.shape(one) for one in (constant, own)]
    if any(shapes):
        return (
            f"it uses a constant array of shape {shapes[0]} in the whole and {shapes[1]} in a part"
            if shapes[0] != shapes[1]
            else f"it uses a constant array of shape {shapes[0]} with other values in a part"
        )
    return f"it uses the constant {constant} in the whole and {own} in a part"


def _is_of_jax(equation: Any) -> bool:
    source = str(equation.params["jaxpr"].jaxpr.debug_info.func_src_info)
    return str(pathlib.Path(jax.__file__).parent) in source
