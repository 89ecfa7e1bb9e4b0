"""Two programs walked through in step: one with the whole lengths, one with those of a part.

Both must do the same operations on the same values. What is known of a value is the same question
for both, and is answered operation by operation, by whoever follows the programs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.layers.shard_map_regions.split_values import Flow, same_value, unsplit
from penzai_shard.library_apis.jax_api import Literal, Tracer
from penzai_shard.traced_programs import opened

_SAME_VALUE = ("pvary", "pcast", "reshard")
"""Operations that only change what JAX tracks of a value."""


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of both programs; compared by identity."""

    flow: Flow | str


class SideBySide:
    """One reading of a program, with the whole lengths and with those of a part in step.

    Args:
        step: What the results of an operation are, from it in both programs and from what its
            operands are; a text says why one of them cannot be followed.
        refuse: Notes a refused operation, and gives what depends on it its index.
    """

    def __init__(
        self,
        step: Callable[[Any, Any, Sequence[Flow | str]], list[Flow]],
        refuse: Callable[[Any, str], frozenset[int]],
    ) -> None:
        self._step, self._refuse = step, refuse
        self.known: dict[Any, Any] = {}
        """For each variable of either program its value, which is a literal or a ``_Value``."""

    def results(self, whole: Any, part: Any, flows: Sequence[Flow]) -> tuple[Flow, ...]:
        """What the results of a program are, from what its inputs are."""
        (one, constants), (other, own_constants) = opened(whole), opened(part)
        if len(one.invars) != len(other.invars) or len(one.constvars) != len(other.constvars):
            return self._different(one, None, None)
        self._assign(one.invars, other.invars, flows)
        of_constants = map(_constant_flow, constants, own_constants)
        self._assign(one.constvars, other.constvars, list(of_constants))
        for equation, twin in itertools.zip_longest(self._equations(one), self._equations(other)):
            if equation is None or twin is None or not self._alike(equation, twin):
                return self._different(one, equation, twin)
            operands = list(map(self._flow, equation.invars, twin.invars))
            found = self._step(equation, twin, operands)
            self._assign(equation.outvars, twin.outvars, found)
        if not self._same(one.outvars, other.outvars):
            return self._different(one, None, None)
        return tuple(map(self._output, one.outvars, other.outvars))

    def _assign(self, variables: Sequence[Any], twins: Sequence[Any], flows: Any) -> None:
        for variable, twin, flow in zip(variables, twins, flows, strict=True):
            self.known[variable] = self.known[twin] = _Value(flow)

    def _value(self, atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else self.known[atom]

    def _equations(self, jaxpr: Any) -> Iterator[Any]:
        """The equations of a program but for those that only change what JAX tracks."""
        for equation in jaxpr.eqns:
            values = list(map(self._value, equation.invars))
            if equation.primitive.name in _SAME_VALUE:
                self.known.update(zip(equation.outvars, values, strict=True))
            elif equation.primitive.name == "convert_element_type" and isinstance(
                values[0], Literal
            ):
                # A number of the program: JAX converts it here, or writes it so to begin with.
                aval = equation.outvars[0].aval
                self.known[equation.outvars[0]] = Literal(_number(values[0], aval.dtype), aval)
            else:
                yield equation

    def _alike(self, one: Any, other: Any) -> bool:
        return (
            one.primitive is other.primitive
            and len(one.outvars) == len(other.outvars)
            and self._same(one.invars, other.invars)
            and all(_kind(a) == _kind(b) for a, b in zip(one.outvars, other.outvars, strict=True))
        )

    def _same(self, atoms: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether atoms of both programs are the same values; literals are compared later."""
        pairs = zip(map(self._value, atoms), map(self._value, others), strict=False)
        return len(atoms) == len(others) and all(
            a is b or (isinstance(a, Literal) and isinstance(b, Literal)) for a, b in pairs
        )

    def _flow(self, atom: Any, twin: Any) -> Flow | str:
        value, other = self._value(atom), self._value(twin)
        if not isinstance(value, Literal):
            return value.flow
        return _constant_flow(_number(value), _number(other))

    def _output(self, atom: Any, twin: Any) -> Flow:
        flow = self._flow(atom, twin)
        if isinstance(flow, Flow):
            return flow
        return Flow(unsplit(rank_of(atom)), refused=self._refuse(None, flow))

    def _different(self, jaxpr: Any, one: Any, other: Any) -> tuple[Flow, ...]:
        """All results depend on where the programs differ."""
        names = [e.primitive.name if e is not None else "nothing" for e in (one, other)]
        refused = self._refuse(
            one if one is not None else other,
            "the program depends on the length of a split dimension: "
            + (
                f"it does {names[0]} in the whole where it does {names[1]} in a part"
                if names[0] != names[1]
                else "it computes with other values in the whole than in a part"
            ),
        )
        return tuple(Flow(unsplit(rank_of(atom)), refused=refused) for atom in jaxpr.outvars)


def rank_of(atom: Any) -> int:
    """The number of dimensions of a value of a program."""
    return len(getattr(atom.aval, "shape", ()))


def _kind(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", type(atom.aval)), rank_of(atom)


def _number(literal: Any, dtype: Any = None) -> np.ndarray:
    return np.asarray(np.asarray(literal.val, literal.aval.dtype), dtype)


def _constant_flow(constant: Any, own: Any) -> Flow | str:
    if same_value(constant, own):
        number = np.ndim(constant) == 0 and jax.numpy.issubdtype(
            getattr(constant, "dtype", type(constant)), np.number
        )
        concrete = number and not isinstance(constant, Tracer)
        return Flow(unsplit(len(np.shape(constant))), zero=concrete and float(constant.real) == 0)
    shapes = [np.shape(one) for one in (constant, own)]
    if any(shapes):
        return (
            f"it uses a constant array of shape {shapes[0]} in the whole and {shapes[1]} in a part"
            if shapes[0] != shapes[1]
            else f"it uses a constant array of shape {shapes[0]} with other values in a part"
        )
    return f"it uses the constant {constant} in the whole and {own} in a part"
