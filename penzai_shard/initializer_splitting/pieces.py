"""Cutting a flat trace into pieces that can be compiled and run one by one."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from penzai_shard.initializer_splitting import equation_traits
from penzai_shard.initializer_splitting.flattening import FlatTrace, Step

# A shared value that so few cheap steps give is computed again by each output that uses it.
_REPEATED_STEPS = 4
# A shared value with at most so many elements is computed once, ahead, and handed to its users.
_SMALL_RESULT = 2**16


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some steps that are compiled and run together.

    Attributes:
        steps: Indices of the steps, in order.
        inputs: Numbers of the values that it reads, in the order of their first use.
        outputs: Numbers of the values that it gives.
        positions: Which outputs of the whole function these are; empty for a piece that is run
            ahead for others.
    """

    steps: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A whole trace, cut.

    Attributes:
        ahead: Pieces whose results others read, in an order in which they can be run.
        final: Pieces that give outputs of the function, or have its effects, in any order.
        available: Positions of outputs that are constants, literals, or results of pieces run
            ahead, so that nothing is left to compute.
    """

    ahead: tuple[Piece, ...]
    final: tuple[Piece, ...]
    available: tuple[int, ...]


def cut_into_pieces(trace: FlatTrace, wanted: Collection[int]) -> Pieces:
    """Cuts a trace so that each output is computed with as few others as sharing allows.

    * Outputs that share expensive work with a large result stay together in one piece.
    * Expensive work with a small result, and long derivations of keys, are done once, ahead.
    * Cheap short derivations are repeated in every piece that needs them.
    * Steps with effects (``jax.debug.print``) stay together, in order, in one piece, with the
      outputs that depend on them.

    Args:
        trace: The flat trace.
        wanted: Positions of the outputs that are wanted.

    Returns:
        The pieces.
    """
    return _Cutter(trace, wanted).cut()


class _Classes:
    """Disjoint sets of roots; roots of one set are computed in one piece."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, root: int) -> int:
        while self._parent[root] != root:
            self._parent[root] = self._parent[self._parent[root]]
            root = self._parent[root]
        return root

    def unite(self, roots: Iterable[int]) -> None:
        first = None
        for root in roots:
            if first is None:
                first = self.find(root)
            else:
                self._parent[self.find(root)] = first


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _is_shared(mask: int) -> bool:
    return mask & (mask - 1) != 0


class _Cutter:
    def __init__(self, trace: FlatTrace, wanted: Collection[int]) -> None:
        self.trace = trace
        self.producer = {
            number: index for index, step in enumerate(trace.steps) for number in step.outputs
        }
        self.wanted = sorted(wanted)
        # Roots are what there is to compute: the wanted outputs, and the effects as one more.
        self.roots = [
            position
            for position in self.wanted
            if isinstance(trace.outputs[position], int) and trace.outputs[position] in self.producer
        ]
        self.output_values = {trace.outputs[position] for position in self.roots}
        self.effects_root = len(self.roots)
        self.has_effects = any(step.equation.effects for step in trace.steps)

    def cut(self) -> Pieces:
        classes = _Classes(len(self.roots) + 1)
        step_masks, _ = self._masks(lambda root: root)
        for step, mask in zip(self.trace.steps, step_masks, strict=True):
            if _is_shared(mask) and self._keeps_together(step):
                classes.unite(_bits(mask))
        cuts = self._cuts(*self._masks(classes.find))
        stop = cuts.keys() | self.trace.constants.keys()
        ahead = [self._piece(outputs, (), stop) for outputs in self._by_step(cuts)]
        available = [
            position
            for position in self.wanted
            if position not in set(self.roots) or self.trace.outputs[position] in cuts
        ]
        final = []
        for members in self._members(classes).values():
            positions = [
                self.roots[root]
                for root in members
                if root != self.effects_root and self.trace.outputs[self.roots[root]] not in cuts
            ]
            with_effects = self.effects_root in members
            if positions or with_effects:
                outputs = [self._value_at(position) for position in positions]
                final.append(self._piece(outputs, positions, stop, with_effects))
        return Pieces(tuple(ahead), tuple(final), tuple(available))

    def _value_at(self, position: int) -> int:
        value = self.trace.outputs[position]
        assert isinstance(value, int)
        return value

    def _members(self, classes: _Classes) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for root in range(len(self.roots) + self.has_effects):
            members.setdefault(classes.find(root), []).append(root)
        return members

    def _masks(self, class_of: Callable[[int], int]) -> tuple[list[int], dict[int, int]]:
        """Which roots need each step and each value, as bits."""
        values: dict[int, int] = {}
        for root, position in enumerate(self.roots):
            number = self._value_at(position)
            values[number] = values.get(number, 0) | (1 << class_of(root))
        steps = [0] * len(self.trace.steps)
        effects_bit = 1 << class_of(self.effects_root)
        for index in range(len(steps) - 1, -1, -1):
            step = self.trace.steps[index]
            mask = effects_bit if step.equation.effects else 0
            for number in step.outputs:
                mask |= values.get(number, 0)
            steps[index] = mask
            if mask:
                for atom in step.inputs:
                    if isinstance(atom, int):
                        values[atom] = values.get(atom, 0) | mask
        return steps, values

    def _size(self, step: Step) -> int:
        return equation_traits.element_count([self.trace.types[n] for n in step.outputs])

    def _keeps_together(self, step: Step) -> bool:
        if step.equation.effects:
            return True
        return self._size(step) > _SMALL_RESULT and not equation_traits.is_free(step.equation)

    def _cuts(self, step_masks: list[int], masks: dict[int, int]) -> dict[int, int]:
        """Values that are computed ahead, each with the step that gives it."""
        readers: dict[int, list[int]] = {}
        for index, step in enumerate(self.trace.steps):
            for atom in step.inputs:
                if isinstance(atom, int):
                    readers.setdefault(atom, []).append(index)
        short: dict[int, frozenset[int]] = {n: frozenset() for n in self.trace.constants}
        cuts: dict[int, int] = {}
        for index, step in enumerate(self.trace.steps):
            origins = self._short_origins(index, step, short)
            if origins is not None:
                short.update((number, origins) for number in step.outputs)
            elif _is_shared(step_masks[index]) and self._size(step) <= _SMALL_RESULT:
                cuts.update(
                    (number, index)
                    for number in step.outputs
                    if masks.get(number, 0)
                    and not self._is_only_passed_on(number, step_masks[index], readers, step_masks)
                )
        return cuts

    def _short_origins(
        self, index: int, step: Step, short: dict[int, frozenset[int]]
    ) -> frozenset[int] | None:
        """The steps from which this one's results come, if they are few and cheap."""
        if step.equation.effects or not equation_traits.is_cheap_to_repeat(step.equation):
            return None
        origins = {index}
        for atom in step.inputs:
            if isinstance(atom, int):
                if atom not in short:
                    return None
                origins |= short[atom]
        return frozenset(origins) if len(origins) <= _REPEATED_STEPS else None

    def _is_only_passed_on(
        self, number: int, mask: int, readers: dict[int, list[int]], step_masks: list[int]
    ) -> bool:
        """Whether one small step alone reads the value, for all the same roots: cut after that."""
        if number in self.output_values or len(readers.get(number, ())) != 1:
            return False
        (reader,) = readers[number]
        step = self.trace.steps[reader]
        if step.equation.effects or self._size(step) > _SMALL_RESULT:
            return False
        return step_masks[reader] == mask

    def _by_step(self, cuts: dict[int, int]) -> list[list[int]]:
        by_step: dict[int, list[int]] = {}
        for number, index in cuts.items():
            by_step.setdefault(index, []).append(number)
        return list(by_step.values())

    def _piece(
        self,
        outputs: Sequence[int],
        positions: Sequence[int],
        stop: Collection[int],
        with_effects: bool = False,
    ) -> Piece:
        needed: set[int] = set()
        pending = [self.producer[number] for number in outputs]
        if with_effects:
            pending += [i for i, step in enumerate(self.trace.steps) if step.equation.effects]
        while pending:
            index = pending.pop()
            if index in needed:
                continue
            needed.add(index)
            pending += [
                self.producer[atom]
                for atom in self.trace.steps[index].inputs
                if isinstance(atom, int) and atom not in stop
            ]
        steps = sorted(needed)
        inside = {number for index in steps for number in self.trace.steps[index].outputs}
        inputs = dict.fromkeys(
            atom
            for index in steps
            for atom in self.trace.steps[index].inputs
            if isinstance(atom, int) and atom not in inside
        )
        return Piece(tuple(steps), tuple(inputs), tuple(outputs), tuple(positions))
