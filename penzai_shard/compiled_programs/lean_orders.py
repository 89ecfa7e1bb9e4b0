"""A program's instructions in an order in which it holds little at once.

Compilers for CPUs walk back from a program's results to what they are made of. The gradient of a
weight is then computed just before its update, and until then all that it is made of is held: in a
step whose blocks are computed again for the backward pass, the activations of all blocks at once.
Compilers for accelerators order instructions by what is in memory (XLA's ``ListMemoryScheduler``).
Any order in which operands come first computes the same.
"""

import collections
import dataclasses
import heapq
import re

from penzai_shard.compiled_programs.live_values import lives_of, owners_of
from penzai_shard.compiled_programs.modules import Computation, Instruction, Module

_WITH_COMPUTATIONS_OF_THEIR_OWN = frozenset({"call", "conditional", "while"})
_NAMES = re.compile(r"[\w.\-]+")


def in_lean_order(module: Module) -> Module:
    """The program with its instructions in an order in which it holds little at once.

    What ends as many bytes as it makes comes as soon as its operands are there, such as the update
    of a weight. What is made of one argument alone comes just before its first use, such as a
    gathered parameter. All else comes in the order of how many instructions it waits for.

    Args:
        module: A compiled program, in an order in which it can run.

    >>> module = Module.from_text('''HloModule m, is_scheduled=true
    ... ENTRY e {
    ...   x = f32[4]{0} parameter(0)
    ...   w = f32[4]{0} parameter(1)
    ...   copied = f32[4]{0} copy(w)
    ...   y = f32[4]{0} sine(x)
    ...   z = f32[4]{0} cosine(y)
    ...   ROOT sum = f32[4]{0} add(z, copied)
    ... }''')
    >>> list(in_lean_order(module).computations["e"].instructions)
    ['x', 'y', 'z', 'w', 'copied', 'sum']
    """
    names = {module.entry}
    for one in module:
        if one.opcode in _WITH_COMPUTATIONS_OF_THEIR_OWN:
            names.update(module.called_by(one))
    computations = {
        name: _Ordering(one).ordered() if name in names else one
        for name, one in module.computations.items()
    }
    return dataclasses.replace(module, computations=computations)


class _Ordering:
    """A computation while its instructions are put in order."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self._all = computation.instructions
        self._positions = {name: i for i, name in enumerate(self._all)}
        self._before = {one.name: _before(one) for one in computation}
        self._on_demand = self._of_one_argument()
        self._read_values()
        self._levels: dict[str, int] = {}
        self._users: dict[str, list[str]] = collections.defaultdict(list)
        self._missing: dict[str, int] = {}
        for name, before in self._before.items():
            awaited = [one for one in before if one not in self._on_demand]
            self._levels[name] = 1 + max((self._levels[one] for one in awaited), default=0)
            if name not in self._on_demand:
                self._missing[name] = len(awaited)
                for one in awaited:
                    self._users[one].append(name)
        self._placed: dict[str, Instruction] = {}
        self._keys: dict[str, tuple[int, int, int]] = {}
        self._ready: list[tuple[tuple[int, int, int], str]] = []

    def ordered(self) -> Computation:
        """The computation in that order."""
        for name, count in self._missing.items():
            if not count:
                self._push(name)
        while self._ready:
            key, name = heapq.heappop(self._ready)
            if name in self._placed or self._keys[name] != key:
                continue
            self._place_with_operands(name)
            for user in self._users[name]:
                self._missing[user] -= 1
                if not self._missing[user]:
                    self._push(user)
        # Of what is made of one argument, what nothing uses: results, mostly.
        for name in self._on_demand:
            self._place_with_operands(name)
        return dataclasses.replace(self._computation, instructions=self._placed)

    def _of_one_argument(self) -> dict[str, None]:
        arguments: dict[str, frozenset[str]] = {}
        for one in self._computation:
            parts = [arguments[name] for name in self._before[one.name]]
            own = {one.name} if one.opcode == "parameter" else ()
            arguments[one.name] = frozenset(own).union(*parts)
        return dict.fromkeys(name for name, of in arguments.items() if len(of) <= 1)

    def _read_values(self) -> None:
        """What each instruction makes and reads, in bytes."""
        values, _ = lives_of(list(self._computation))
        self._sizes = {key: value.bytes for key, value in values.items()}
        self._left: dict[tuple[str, int], set[str]] = {key: set() for key in values}
        self._made: dict[str, int] = collections.Counter()
        self._reads: dict[str, list[tuple[str, int]]] = {}
        owners: dict[str, list[frozenset[tuple[str, int]]]] = {}
        for (name, _), size in self._sizes.items():
            self._made[name] += size
        for one in self._computation:
            owners[one.name] = owners_of(one, [owners[name] for name in one.operand_names])
            parts = (part for name in one.operand_names for part in owners[name])
            read = frozenset[tuple[str, int]]().union(*parts)
            self._reads[one.name] = [key for key in read if key in self._left]
            for key in self._reads[one.name]:
                self._left[key].add(one.name)

    def _push(self, name: str) -> None:
        ended = sum(self._sizes[key] for key in self._reads[name] if len(self._left[key]) == 1)
        gain = ended - self._made[name]
        place = (0, -gain) if gain >= 0 else (1, self._levels[name])
        key = (*place, self._positions[name])
        if self._keys.get(name) != key:
            self._keys[name] = key
            heapq.heappush(self._ready, (key, name))

    def _place_with_operands(self, name: str) -> None:
        waiting = [name]
        while waiting:
            one = waiting[-1]
            missing = [other for other in self._before[one] if other not in self._placed]
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if one not in self._placed:
                self._place(one)

    def _place(self, name: str) -> None:
        self._placed[name] = self._all[name]
        for key in self._reads[name]:
            readers = self._left[key]
            readers.discard(name)
            if len(readers) == 1:
                (last,) = readers
                if last in self._keys and last not in self._placed:
                    self._push(last)


def _before(one: Instruction) -> tuple[str, ...]:
    """The instructions that must come before it."""
    awaited = _NAMES.findall(one.attributes.get("control-predecessors", ""))
    return tuple(dict.fromkeys((*one.operand_names, *awaited)))
