"""Grouping the pieces of a traced initialiser that one compiled program can serve."""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core
from jax.sharding import Sharding

from penzai_shard.initializer_splitting import equation_traits
from penzai_shard.initializer_splitting.flattening import (
    Atom,
    FlatTrace,
    build_jaxpr,
    flatten_trace,
)
from penzai_shard.initializer_splitting.pieces import Piece, cut_into_pieces

# What custom derivative rules hold is made anew by each trace and says nothing about the value.
_IRRELEVANT_PARAMS = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun", "jvp_jaxpr_thunk"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "fwd", "bwd", "out_trees"}),
    "jit": frozenset({"name"}),
}


@dataclasses.dataclass(frozen=True)
class Member:
    """One use of a program.

    Attributes:
        inputs: Numbers of the values that are its first arguments.
        integers: Its further arguments, for instance the offset that derives a parameter's key.
        values: Numbers of the values that it gives, if it is run ahead for others.
        positions: Positions of the function's outputs that it gives, if it is not.
    """

    inputs: tuple[int, ...]
    integers: tuple[Any, ...]
    values: tuple[int, ...]
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile once and run for each member.

    Attributes:
        jaxpr: What it computes, a function of the values and integers of a member.
        shardings: Where its results lie, one per result; ``None`` where JAX may choose.
        on_one_device: Whether it must run on one device, and the results be spread afterwards,
            because partial sums over several devices would make values depend on the layout.
        members: The pieces that it serves.
    """

    jaxpr: jex_core.ClosedJaxpr
    shardings: tuple[Sharding | None, ...]
    on_one_device: bool
    members: tuple[Member, ...]


@dataclasses.dataclass(frozen=True)
class SplitInitializer:
    """A traced initialiser as programs to be compiled and run one by one.

    Attributes:
        constants: Arrays that the initialiser closed over, by number.
        ahead: Members to run first, in this order, each with its program.
        programs: All programs.
        available: For positions of outputs that need no program: the constant's or value's
            number, or the literal.
        types: Abstract value of each numbered value.
        wanted: Positions of the outputs that are computed.
        shardings: Where the outputs lie, by position.
    """

    constants: Mapping[int, Any]
    ahead: tuple[tuple[Program, Member], ...]
    programs: tuple[Program, ...]
    available: Mapping[int, Atom]
    types: Sequence[Any]
    wanted: tuple[int, ...]
    shardings: Mapping[int, Sharding | None]


def split_initializer(
    traced: jex_core.ClosedJaxpr,
    shardings: Sequence[Sharding | None],
    wanted: Collection[int] | None = None,
) -> SplitInitializer:
    """Splits a traced initialiser into programs, each of which serves all outputs alike.

    Args:
        traced: What ``jax.make_jaxpr`` gives for an initialiser without arguments.
        shardings: Where each output is to lie; ``None`` where JAX may choose.
        wanted: Positions of the outputs to compute, all by default.

    Returns:
        The programs and how to run them; see ``run_split``.

    >>> import jax
    >>> def initializer():
    ...     keys = jax.random.split(jax.random.key(0), 3)
    ...     return [jax.random.normal(key, (4, 4)) for key in keys]
    >>> split = split_initializer(jax.make_jaxpr(initializer)(), [None] * 3)
    >>> [len(program.members) for program in split.programs]
    [3]
    """
    trace = flatten_trace(traced)
    chosen = tuple(sorted(range(len(trace.outputs)) if wanted is None else wanted))
    by_position = dict(enumerate(shardings))
    pieces = cut_into_pieces(trace, chosen)
    grouper = _Grouper(trace, by_position)
    for piece in (*pieces.ahead, *pieces.final):
        grouper.add(piece)
    program_of: dict[Piece, tuple[Program, Member]] = {}
    programs = []
    for group in grouper.groups.values():
        program = _program_of(trace, group)
        programs.append(program)
        for item, member in zip(group.items, program.members, strict=True):
            program_of[item.piece] = program, member
    return SplitInitializer(
        constants=trace.constants,
        ahead=tuple(program_of[piece] for piece in pieces.ahead),
        programs=tuple(programs),
        available={position: trace.outputs[position] for position in pieces.available},
        types=trace.types,
        wanted=chosen,
        shardings=by_position,
    )


@dataclasses.dataclass
class _Item:
    piece: Piece
    integers: list[Any]
    slots: list[tuple[int, int]]


@dataclasses.dataclass
class _Group:
    shardings: tuple[Sharding | None, ...]
    on_one_device: bool
    items: list[_Item]


class _Grouper:
    """Collects pieces by what they compute.

    Two pieces are alike if they are the same steps between values numbered by first use, with the
    same literals except for single integers, on inputs of the same types, for outputs of the same
    layouts.
    """

    def __init__(self, trace: FlatTrace, shardings: Mapping[int, Sharding | None]) -> None:
        self.trace = trace
        self.shardings = shardings
        self.groups: dict[Hashable, _Group] = {}
        self._params = _ParamKeys()

    def add(self, piece: Piece) -> None:
        steps = [self.trace.steps[index] for index in piece.steps]
        numbering = {number: order for order, number in enumerate(piece.inputs)}
        codes: list[Hashable] = [tuple(_type_key(self.trace.types[n]) for n in piece.inputs)]
        integers: list[Any] = []
        slots: list[tuple[int, int]] = []
        for step_index, step in enumerate(steps):
            operands: list[Hashable] = []
            for operand_index, atom in enumerate(step.inputs):
                if isinstance(atom, int):
                    operands.append(numbering[atom])
                elif _is_integer(atom):
                    integers.append(atom)
                    slots.append((step_index, operand_index))
                    operands.append(_type_key(atom.aval))
                else:
                    operands.append((_type_key(atom.aval), _array_key(atom.val)))
            codes.append(
                (
                    step.equation.primitive,
                    self._params.of_equation(step.equation),
                    tuple(operands),
                )
            )
            for number in step.outputs:
                numbering[number] = len(numbering)
        codes.append(tuple(numbering[number] for number in piece.outputs))
        shardings = tuple(self.shardings[position] for position in piece.positions)
        has_effects = any(step.equation.effects for step in steps)
        on_one_device = not any(
            equation_traits.needs_its_own_mesh(step.equation) for step in steps
        ) and (
            not piece.positions
            # JAX does not divide an empty result over devices; placing one afterwards does.
            or any(0 in self.trace.types[number].shape for number in piece.outputs)
            or has_effects
            or not all(equation_traits.keeps_values_in_any_layout(step.equation) for step in steps)
        )
        key = (tuple(codes), shardings, bool(piece.positions))
        group = self.groups.setdefault(key, _Group(shardings, on_one_device, []))
        group.items.append(_Item(piece, integers, slots))


def _program_of(trace: FlatTrace, group: _Group) -> Program:
    """The program of a group: integers that differ between its pieces become arguments."""
    first = group.items[0]
    differing = [
        slot
        for slot, literal in enumerate(first.integers)
        if any(item.integers[slot].val != literal.val for item in group.items)
    ]
    jaxpr = build_jaxpr(
        steps=[trace.steps[index] for index in first.piece.steps],
        inputs=first.piece.inputs,
        outputs=first.piece.outputs,
        types=trace.types.__getitem__,
        given={first.slots[slot]: argument for argument, slot in enumerate(differing)},
    )
    return Program(
        jaxpr=jaxpr,
        shardings=group.shardings,
        on_one_device=group.on_one_device,
        members=tuple(
            Member(
                inputs=item.piece.inputs,
                integers=tuple(_argument(item.integers[slot]) for slot in differing),
                values=() if item.piece.positions else item.piece.outputs,
                positions=item.piece.positions,
            )
            for item in group.items
        ),
    )


def _is_integer(literal: jex_core.Literal) -> bool:
    aval: Any = literal.aval
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu" and aval.shape == ()


def _argument(literal: jex_core.Literal) -> Any:
    """An integer literal as an argument of exactly its type; Python integers are weakly typed."""
    aval: Any = literal.aval
    return int(literal.val) if aval.weak_type else np.asarray(literal.val, aval.dtype)[()]


def _type_key(aval: Any) -> Hashable:
    return (
        getattr(aval, "shape", None),
        getattr(aval, "dtype", type(aval)),
        getattr(aval, "weak_type", False),
    )


def _array_key(value: Any) -> Hashable:
    array = np.asarray(value)
    return array.shape, array.dtype.str, array.tobytes()


class _ParamKeys:
    """Keys of equations' parameters, equal where the equations do the same.

    Keys of nested programs are replaced by small numbers, so that comparing two keys never reads
    a nested program again. Numbers of programs seen before are found by identity: JAX gives the
    same nested program to every call of one jitted function with arguments of one type.
    """

    def __init__(self) -> None:
        self._number_of_key: dict[Hashable, int] = {}
        self._number_of_jaxpr: dict[int, int] = {}
        self._kept: list[Any] = []

    def of_equation(self, equation: jex_core.JaxprEqn) -> Hashable:
        context = equation.ctx
        metadata = getattr(context, "xla_metadata", None)
        irrelevant = _IRRELEVANT_PARAMS.get(equation.primitive.name, ())
        return (
            tuple(
                (name, self._of(value))
                for name, value in sorted(equation.params.items())
                if name not in irrelevant
            ),
            getattr(context, "compute_type", None),
            getattr(context, "threefry_partitionable", None),
            None if metadata is None else self._of(metadata),
        )

    def _of(self, value: Any) -> Hashable:
        match value:
            case bool() | int() | str() | bytes() | None:
                return value
            case float():
                return value.hex()
            case tuple() | list():
                return tuple(map(self._of, value))
            case dict():
                return tuple(sorted((repr(key), self._of(item)) for key, item in value.items()))
            case jex_core.ClosedJaxpr():
                return self._of_jaxpr(value.jaxpr), tuple(map(self._by_identity, value.consts))
            case jex_core.Jaxpr():
                return self._of_jaxpr(value)
            case np.ndarray() | np.generic():
                return _array_key(value)
        try:
            hash(value)
        except TypeError:
            return self._by_identity(value)
        return value

    def _by_identity(self, value: Any) -> Hashable:
        self._kept.append(value)  # so that no later object gets its id
        return "object", id(value)

    def _of_jaxpr(self, jaxpr: jex_core.Jaxpr) -> Hashable:
        number = self._number_of_jaxpr.get(id(jaxpr))
        if number is None:
            key = self._structure(jaxpr)
            number = self._number_of_key.setdefault(key, len(self._number_of_key))
            self._kept.append(jaxpr)
            self._number_of_jaxpr[id(jaxpr)] = number
        return "jaxpr", number

    def _structure(self, jaxpr: jex_core.Jaxpr) -> Hashable:
        numbering: dict[Any, int] = {}

        def bind(variables: Sequence[Any]) -> Hashable:
            for variable in variables:
                numbering[variable] = len(numbering)
            return tuple(_type_key(variable.aval) for variable in variables)

        def read(atom: Any) -> Hashable:
            if isinstance(atom, jex_core.Literal):
                return _type_key(atom.aval), _array_key(atom.val)
            return numbering[atom]

        head = (bind(jaxpr.constvars), bind(jaxpr.invars))
        body = []
        for equation in jaxpr.eqns:
            operands = tuple(map(read, equation.invars))
            body.append((equation.primitive, self.of_equation(equation), operands))
            bind(equation.outvars)
        return head, tuple(body), tuple(map(read, jaxpr.outvars))
