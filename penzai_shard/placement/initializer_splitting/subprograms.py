"""Splitting a flat program into subprograms that can be compiled and run one by one."""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from penzai_shard.library_apis.jax_api import ClosedJaxpr, JaxprEqn, Literal, Var
from penzai_shard.placement.initializer_splitting import equation_traits
from penzai_shard.traced_programs import program_of

# A value that several outputs need and so few cheap equations give is computed again by each.
_REPEATED_EQUATIONS = 4
# One with at most so many elements is computed once, before, and handed to those that read it.
_SMALL_RESULT = 2**16

# What JAX calls the programs in its messages.
_NAME = "initialize"

Result = Var | int
"""What a subprogram gives: a value that others read, or the output at a position."""


@dataclasses.dataclass(frozen=True)
class Subprogram:
    """Some equations of a program that are compiled and run together.

    Attributes:
        traced: The equations, as a program. Its arguments are the variables of the whole program
            that it reads.
        results: What its results are in the whole program: either variables that other subprograms
            read, or positions of outputs.
        is_shared: Whether others read its results.
    """

    traced: ClosedJaxpr
    results: tuple[Result, ...]
    is_shared: bool = False


def split_by_output(
    program: ClosedJaxpr, wanted: Collection[int]
) -> tuple[list[Subprogram], dict[int, Var]]:
    """Splits a flat program so that each output is computed with as few others as sharing allows.

    * Outputs that share expensive work with a large result stay together in one subprogram.
    * Expensive work with a small result, and long derivations of keys, are done once, before.
    * Cheap short derivations are repeated in every subprogram that needs them.
    * Equations with effects (``jax.debug.print``) stay together, in order, in one subprogram, with
      the outputs that depend on them.

    Args:
        program: The flat program, without arguments.
        wanted: Positions of the outputs that are wanted.

    Returns:
        The subprograms in the order in which they are to be run; and, by position, the variables of
        outputs that none of them gives, because they are constants or results for others.

    >>> import jax
    >>> from penzai_shard.placement.initializer_splitting.flat_programs import flat_program
    >>> def initializer():
    ...     return [jax.random.normal(key) for key in jax.random.split(jax.random.key(0))]
    >>> subprograms, _ = split_by_output(flat_program(jax.make_jaxpr(initializer)()), [0, 1])
    >>> [subprogram.results for subprogram in subprograms]
    [(0,), (1,)]
    """
    return _Splitter(program, wanted).split()


class _Splitter:
    """Works with *targets*: the wanted outputs that have to be computed and, last, all effects.

    A set of targets, or of groups of them, is the bits of an integer: its mask.
    """

    def __init__(self, program: ClosedJaxpr, wanted: Collection[int]) -> None:
        self.equations = program.eqns
        self.constants = frozenset(program.jaxpr.constvars)
        outputs = {position: program.jaxpr.outvars[position] for position in sorted(wanted)}
        self.literals = {p: atom for p, atom in outputs.items() if isinstance(atom, Literal)}
        self.outputs = {p: atom for p, atom in outputs.items() if isinstance(atom, Var)}
        self.targets = [p for p, variable in self.outputs.items() if variable not in self.constants]
        self.producer = {
            variable: index
            for index, equation in enumerate(self.equations)
            for variable in equation.outvars
        }

    def split(self) -> tuple[list[Subprogram], dict[int, Var]]:
        groups = self._groups()
        shared = self._shared_values(self._needed_by(groups))
        known = self.constants.union(*shared.values())
        members: dict[int, list[int]] = {}
        if any(equation.effects for equation in self.equations):
            members[groups[-1]] = []
        for position, group in zip(self.targets, groups[:-1], strict=True):
            if self.outputs[position] not in known:
                members.setdefault(group, []).append(position)
        final = []
        for group, positions in members.items():
            outputs = [self.outputs[position] for position in positions]
            has_effects = group == groups[-1]
            final.append(self._subprogram(outputs, positions, known, with_effects=has_effects))
        if self.literals:
            program = program_of([], [], [*self.literals.values()], _NAME)
            final.append(Subprogram(program, tuple(self.literals)))
        # The largest first, so that their temporaries are gone before the rest of a model is made.
        final.sort(key=lambda one: equation_traits.byte_count(one.traced.out_avals), reverse=True)
        first = [
            self._subprogram(values, values, known, is_shared=True) for values in shared.values()
        ]
        available = {p: variable for p, variable in self.outputs.items() if variable in known}
        return [*first, *final], available

    def _groups(self) -> list[int]:
        """The group of each target, as a number; targets of one group are computed together."""
        count = len(self.targets) + 1
        masks = zip(self._needed_by(range(count)), self.equations, strict=True)
        groups = list(range(count))
        for mask in {mask for mask, eqn in masks if _is_shared(mask) and _keeps_together(eqn)}:
            joined = {group for target, group in enumerate(groups) if mask >> target & 1}
            groups = [min(joined) if group in joined else group for group in groups]
        return groups

    def _needed_by(self, groups: Sequence[int]) -> list[int]:
        """For each equation the mask of the groups that need it; 0 if it is not needed at all."""
        needed: dict[Var, int] = collections.defaultdict(int)
        for position, group in zip(self.targets, groups[:-1], strict=True):
            needed[self.outputs[position]] |= 1 << group
        masks = []
        for equation in reversed(self.equations):
            mask = 1 << groups[-1] if equation.effects else 0
            for variable in equation.outvars:
                mask |= needed[variable]
            masks.append(mask)
            for variable in _read_by(equation):
                needed[variable] |= mask
        return masks[::-1]

    def _shared_values(self, masks: list[int]) -> dict[int, list[Var]]:
        """Values that are computed once, before what reads them, by the equation's index."""
        readers: dict[Var, list[int]] = collections.defaultdict(list)
        for index, equation in enumerate(self.equations):
            for variable in _read_by(equation):
                readers[variable].append(index)
        outputs = set(self.outputs.values())

        def has_one_small_reader(variable: Var, mask: int) -> bool:
            """Whether one small equation alone reads it, for the same groups: that one is last."""
            if variable in outputs or len(readers[variable]) != 1:
                return False
            (reader,) = readers[variable]
            equation = self.equations[reader]
            return not equation.effects and _is_small(equation) and masks[reader] == mask

        derivations: dict[Var, frozenset[int]] = dict.fromkeys(self.constants, frozenset())
        shared: dict[int, list[Var]] = {}
        for index, (equation, mask) in enumerate(zip(self.equations, masks, strict=True)):
            derivation = self._short_derivation(index, derivations)
            if derivation is not None:
                derivations.update(dict.fromkeys(equation.outvars, derivation))
            elif _is_shared(mask) and _is_small(equation):
                values = [
                    variable
                    for variable in equation.outvars
                    if (variable in outputs or any(masks[i] for i in readers[variable]))
                    and not has_one_small_reader(variable, mask)
                ]
                if values:
                    shared[index] = values
        return shared

    def _short_derivation(
        self, index: int, known: Mapping[Var, frozenset[int]]
    ) -> frozenset[int] | None:
        """The equations from which an equation's results come, if they are few and cheap."""
        equation = self.equations[index]
        read = _read_by(equation)
        if equation.effects or not equation_traits.is_cheap_to_repeat(equation):
            return None
        if not all(variable in known for variable in read):
            return None
        derivation = frozenset({index}).union(*(known[variable] for variable in read))
        return derivation if len(derivation) <= _REPEATED_EQUATIONS else None

    def _subprogram(
        self,
        outputs: Sequence[Var],
        results: Sequence[Result],
        known: Collection[Var],
        *,
        with_effects: bool = False,
        is_shared: bool = False,
    ) -> Subprogram:
        """What computes some values from constants and from values that are computed before."""
        pending = [self.producer[variable] for variable in outputs]
        if with_effects:
            pending += [i for i, equation in enumerate(self.equations) if equation.effects]
        needed: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in needed:
                needed.add(index)
                read = _read_by(self.equations[index])
                pending += [self.producer[variable] for variable in read if variable not in known]
        equations = [self.equations[index] for index in sorted(needed)]
        inside = {variable for equation in equations for variable in equation.outvars}
        read = [variable for equation in equations for variable in _read_by(equation)]
        inputs = dict.fromkeys(variable for variable in read if variable not in inside)
        return Subprogram(
            program_of(equations, [*inputs], outputs, _NAME), tuple(results), is_shared
        )


def _read_by(equation: JaxprEqn) -> list[Var]:
    return [atom for atom in equation.invars if isinstance(atom, Var)]


def _is_shared(mask: int) -> bool:
    """Whether a mask has several bits."""
    return mask & (mask - 1) != 0


def _is_small(equation: JaxprEqn) -> bool:
    types = [variable.aval for variable in equation.outvars]
    return equation_traits.element_count(types) <= _SMALL_RESULT


def _keeps_together(equation: JaxprEqn) -> bool:
    """Whether all that needs an equation's results is computed together."""
    expensive = not _is_small(equation) and not equation_traits.is_free(equation)
    return bool(equation.effects) or expensive
