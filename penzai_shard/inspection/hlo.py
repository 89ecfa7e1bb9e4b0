"""Reads a compiled program's text: its instructions, the ways of values, how often each part runs.

A program is a set of computations, each a list of instructions; one is the entry. An instruction
runs others: a fusion and a call once, a loop its body again and again, a condition one of its
branches. What the compiler does not write, such as the number of turns of a loop, is read from
constants, or is None: nothing here is a guess.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penzai_shard.errors import Problem, ProgramError

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)(.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|condition|body|true_computation|false_computation|branch_computations"
    r"|called_computations)=(%[\w.\-]+|\{[^}]*\})"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BITS = {"pred": 8, "token": 0, "opaque": 0}

# They run a computation once.
_CALLS = frozenset({"fusion", "call", "async-start"})
_COLLECTIVES = """
    all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all
    reduce-scatter"""
# With several operands they give an array for each, in the order of the operands; a ragged one
# gives one for the first.
COLLECTIVES = frozenset(_COLLECTIVES.split())
# They give what they take, in its order.
_SAME_ARRAYS = frozenset({"async-update", "optimization-barrier", "tuple"})
# The others among their operands say where something is, or fill up.
_OPERANDS_THAT_STAY = {"dynamic-slice": 1, "dynamic-update-slice": 2, "pad": 1}
# Through these an integer stays the integer that it is.
_SAME = """
    bitcast copy fusion get-tuple-element optimization-barrier parameter reshape tuple while"""
_SAME_INTEGER = frozenset(_SAME.split())


@dataclasses.dataclass(frozen=True)
class Array:
    """Dtype, shape and layout of an array on one device.

    >>> Array("bf16", (2, 3)).bytes, str(Array("s4", (3,)))
    (12, 's4[3]')
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """What it takes without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int("".join(re.findall(r"^[a-z]+(\d+)", self.dtype)))
        return -(-self.size * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a program's text.

    Attributes:
        name: Its name, unique in its computation.
        opcode: What it does.
        type_text: What it gives, as text.
        given: What stands in its parentheses: operands, or the value of a constant.
        rest: The text behind them.
        computation: The computation that it is in.
        is_root: Whether it gives the computation's result.
    """

    name: str
    opcode: str
    type_text: str
    given: str
    rest: str
    computation: str
    is_root: bool

    @functools.cached_property
    def kind(self) -> str:
        """Its opcode without what tells where it starts and ends in the background."""
        return re.sub("-(start|update|done)$", "", self.opcode)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        return tuple(_NAME.findall(self.given))

    @functools.cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays that it gives; tuples in tuples are opened."""
        return tuple(
            # "<=8" is a length that may be less.
            Array(dtype, tuple(int(n.lstrip("<=")) for n in lengths.split(",") if n), layout)
            for dtype, lengths, layout in _ARRAY.findall(self.type_text)
        )

    @functools.cached_property
    def op_name(self) -> str:
        """The scopes and the primitive that JAX wrote; empty if it wrote none."""
        found = _OP_NAME.search(self.rest)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        return tuple(_NAME.findall(" ".join(_CALLED.findall(self.rest))))

    def attribute(self, key: str) -> str | None:
        """The text of an attribute; None if it has none."""
        _, found, text = self.rest.partition(f", {key}=")
        if not found:
            return None
        parts = split_text(text, ", ")
        value, order = next(parts), next(parts, "")
        # The order of devices is a part of the groups along the axes of a mesh.
        return f"{value}, {order}" if order.startswith("device_ids=") else value


class Place(NamedTuple):
    """A value in a program: what an instruction gives, or one of the arrays in that tuple."""

    instruction: Instruction
    number: int = 0


def places_of(one: Instruction) -> list[Place]:
    """All arrays that an instruction gives."""
    return [Place(one, number) for number in range(len(one.results))]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
        entry: The name of the computation that runs first.
        computations: The instructions of each computation by name, in the order of the text.

    >>> program = Program.read('''HloModule m
    ... ENTRY %main {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} negate(%x), metadata={op_name="jit(f)/neg"}
    ... }''')
    >>> root = program.root(program.entry)
    >>> root.opcode, root.op_name, str(root.results[0])
    ('negate', 'jit(f)/neg', 'f32[4]')
    """

    entry: str
    computations: Mapping[str, dict[str, Instruction]]

    @classmethod
    def read(cls, text: str) -> "Program":
        """Reads a text in which names begin with ``%``, as ``compiled.as_text()`` gives it.

        Raises:
            ProgramError: There is none in it.
        """
        computations: dict[str, dict[str, Instruction]] = {}
        entry = name = ""
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                name = head[2]
                computations[name] = {}
                entry = name if head[1] else entry
            elif found := _INSTRUCTION.match(line):
                root, own, type_text, opcode, given, rest = found.groups()
                computations[name][own] = Instruction(
                    own, opcode, type_text, given, rest[1:], name, bool(root)
                )
        if not computations.get(entry):
            fix = "Give what compiled.as_text() gives."
            problem = Problem("", "it has no ENTRY with instructions, or no % before names", fix)
            raise ProgramError("the text of a program:", [problem])
        return cls(entry, computations)

    def __iter__(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions.values()

    @functools.cached_property
    def callers(self) -> Mapping[str, list[Instruction]]:
        """The instructions that run each computation."""
        found = collections.defaultdict(list)
        for one in self:
            # What runs in the background is run by its start.
            for name in one.called if one.opcode not in ("async-update", "async-done") else ():
                found[name].append(one)
        return found

    def is_argument(self, one: Instruction) -> bool:
        """Whether an instruction gives an argument of the program."""
        return one.opcode == "parameter" and one.computation == self.entry

    def root(self, name: str) -> Instruction:
        """What gives the result of a computation."""
        return next(one for one in self.computations[name].values() if one.is_root)

    def parameters(self, name: str) -> list[Instruction]:
        """The parameters of a computation, in their order."""
        found = [one for one in self.computations[name].values() if one.opcode == "parameter"]
        return sorted(found, key=lambda one: int(one.given))

    # The ways of values

    def operands(self, one: Instruction) -> list[Instruction]:
        """What an instruction takes."""
        return [self.computations[one.computation][name] for name in one.operands]

    def result(self, one: Instruction, position: int) -> Place:
        """What a collective gives for an operand."""
        index = position if len(one.operands) > 1 and one.kind in COLLECTIVES else 0
        return Place(one, self.given_back(one) + index)

    def given_back(self, one: Instruction) -> int:
        """How many arrays a start gives before what comes out: what goes in."""
        if not one.opcode.endswith("-start") or one.kind in ("all-reduce", "copy"):
            return 0
        return sum(len(operand.results) for operand in self.operands(one))

    def sources(self, place: Place) -> Iterator[Place]:
        """The values that a value is made of, one step back."""
        one, number = place
        operands = self.operands(one)
        taken = [given for operand in operands for given in places_of(operand)]
        if one.opcode == "parameter":
            for caller in self.callers.get(one.computation, ()):
                given = self.operands(caller)
                if caller.opcode == "while":
                    yield from self.sources(Place(caller, number))
                elif caller.opcode == "conditional":
                    yield Place(given[1 + caller.called.index(one.computation)], number)
                elif caller.opcode in _CALLS:
                    yield Place(given[int(one.given)], number)
        elif one.opcode == "get-tuple-element":
            yield Place(operands[0], int(one.attribute("index") or 0))
        elif one.opcode == "while":
            yield Place(self.root(_loop(one, "body")), number)
            yield Place(operands[0], number)
        elif one.called and one.opcode in (*_CALLS, "conditional"):
            for name in one.called if number >= self.given_back(one) else ():
                yield Place(self.root(name), number - self.given_back(one))
        elif one.opcode in _SAME_ARRAYS:
            yield taken[number]
        elif one.opcode.endswith("-done"):
            yield Place(operands[0], self.given_back(operands[0]) + number)
        elif len(operands) > 1 and one.kind in COLLECTIVES:
            yield Place(operands[number % len(operands)])
        else:
            yield from taken[: _OPERANDS_THAT_STAY.get(one.opcode)]

    def uses(self, place: Place) -> Sequence[Place]:
        """The values that a value goes into, one step on."""
        return self._uses.get(place, ())

    @functools.cached_property
    def _uses(self) -> Mapping[Place, Sequence[Place]]:
        found = collections.defaultdict(list)
        for one in self:
            for place in places_of(one):
                for source in self.sources(place):
                    found[source].append(place)
        return found

    def walk(
        self,
        starts: Iterable[Place],
        step: Callable[[Place], Iterable[Place]],
        through: Collection[str] | None = None,
    ) -> Iterator[Place]:
        """The values around some, the nearest first.

        Args:
            starts: Where to begin; they come first.
            step: ``sources`` or ``uses``.
            through: The kinds of instructions behind which to go on; by default all.
        """
        waiting = collections.deque(dict.fromkeys(starts))
        seen = set(waiting)
        while waiting:
            place = waiting.popleft()
            yield place
            goes_on = through is None or place.instruction.kind in through
            for other in step(place) if goes_on else ():
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)

    # How often each computation runs

    @functools.cached_property
    def times(self) -> Mapping[str, tuple[int | None, bool]]:
        """How often one run of the program runs each computation, and whether it may be less.

        None where a loop does not say how many turns it takes, and for what runs once per element
        of an array. A branch counts as if it were always taken, and may run less often.
        """
        found: dict[str, tuple[int | None, bool]] = {self.entry: (1, False)}

        def read(name: str) -> tuple[int | None, bool]:
            if name in found:
                return found[name]
            total: int | None = 0
            is_upper_bound = False
            for caller in self.callers.get(name, ()):
                times, is_less = read(caller.computation)
                is_upper_bound |= is_less or caller.opcode == "conditional"
                turns = 1 if caller.opcode in (*_CALLS, "conditional") else None
                if caller.opcode == "while" and (turns := self.turns(caller)) is not None:
                    turns += name == _loop(caller, "condition")
                if total is None or times is None or turns is None:
                    total = None
                else:
                    total += times * turns
            found[name] = total, is_upper_bound
            return found[name]

        for name in self.computations:
            read(name)
        return found

    def turns(self, loop: Instruction) -> int | None:
        """How often the body of a ``while`` runs; None if that is not certain.

        Where the compiler does not write it, as those for TPUs do not, the loop must be one as JAX
        writes for ``scan`` and ``fori_loop``: an integer that begins with a constant, to which the
        body adds one as long as it is less than another constant.
        """
        if known := _TURNS.search(loop.rest):
            return int(known[1])
        condition, body = _loop(loop, "condition"), _loop(loop, "body")
        compare = self._origin(Place(self.root(condition)), condition)
        if compare is None or compare.instruction.opcode != "compare":
            return None
        counter, limit = map(Place, self.operands(compare.instruction))
        own, last = self._origin(counter, condition), self._constant(limit)
        if own is None or own.instruction.opcode != "parameter" or last is None:
            return None
        first = self._constant(Place(self.operands(loop)[0], own.number))
        is_less = compare.instruction.attribute("direction") == "LT"
        if first is None or not is_less or not self._adds_one(body, own.number):
            return None
        return max(0, last - first)

    def _adds_one(self, body: str, number: int) -> bool:
        """Whether a loop's body adds one to a carried integer, and does nothing else."""
        total = self._origin(Place(self.root(body), number), body)
        if total is None or total.instruction.opcode != "add":
            return False
        counter, added = map(Place, self.operands(total.instruction))
        own = self._origin(counter, body)
        is_own = own is not None and (own.instruction.opcode, own.number) == ("parameter", number)
        return is_own and self._constant(added) == 1

    def _origin(self, place: Place, within: str) -> Place | None:
        """What computes an integer, or the parameter of a computation that it is."""
        while place.instruction.kind in _SAME_INTEGER:
            one = place.instruction
            if one.opcode == "parameter" and one.computation == within:
                return place
            before = list(self.sources(place))
            if len(before) != 1:
                return None
            (place,) = before
        return place

    def _constant(self, place: Place) -> int | None:
        """The integer that a value always is; None if it may be another."""
        found = set()
        for one, _ in self.walk([place], self.sources, _SAME_INTEGER):
            if one.kind in _SAME_INTEGER and not self.is_argument(one):
                continue
            if one.opcode != "constant" or one.results[0].dtype not in ("s32", "s64"):
                return None
            found.add(one.given)
        return int(found.pop()) if len(found) == 1 else None


def split_text(text: str, separator: str) -> Iterator[str]:
    """The parts of a text between separators that are not in brackets."""
    start = depth = 0
    for position, character in enumerate(text):
        if depth == 0 and text.startswith(separator, position):
            yield text[start:position]
            start = position + len(separator)
        else:
            depth += (character in "([{") - (character in ")]}")
    yield text[start:]


def _loop(one: Instruction, role: str) -> str:
    """The ``condition`` or the ``body`` of a ``while``."""
    return (one.attribute(role) or "").lstrip("%")
