"""Reads the collectives out of a compiled program's text: what moves, over which mesh axes.

For the tests and benchmarks that count. The text is XLA's, as ``compiled.as_text()`` gives it; no
device is touched.

Bytes are those of ring algorithms, sent by one device in one run of the program (Thakur et al.
2005, "Optimization of Collective Communication Operations in MPICH"): of n devices, each sends
2 (n - 1) / n of the payload in an all-reduce, and (n - 1) / n of it in an all-gather, a
reduce-scatter or an all-to-all, where the payload is the whole array.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from benchmarks.device_groups import groups_of

# What one device sends in a ring of n, as a share of the payload.
RING_SHARES = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}
KINDS = tuple(RING_SHARES)
_BITS = {"pred": 8, "token": 0, "opaque": 0}
# Operations that treat elements one by one: who keeps a slice of their result could as well have
# taken it before.
_ELEMENTWISE = re.compile(
    "abs|add|bitcast|convert|copy|divide|maximum|minimum|multiply|negate|reshape|select|subtract"
    "|transpose"
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|condition|body|true_computation|false_computation"
    r"|branch_computations|called_computations)=(%?[\w.\-]+|\{[^}]*\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
        kind: What XLA runs, such as ``"all-reduce"``; the start of an asynchronous one counts.
        name: Its name in the program.
        mesh_axes: The mesh axes that it goes over, in the mesh's order; None if its groups are not
            those of whole mesh axes, or no mesh was given.
        group_size: How many devices take part in each group.
        payload_bytes: The size of the whole array, per group: what comes out of an all-gather or
            an all-reduce, what goes into a reduce-scatter or an all-to-all.
        scattered_bytes: The part of an all-reduce's payload of which every device goes on with its
            own slice alone: a reduce-scatter in other words, as XLA writes it for CPUs.
        added_bytes: What an all-reduce would not carry if what is only added up afterwards, as
            gradients of one input from several layers are, were added up before. Compilers for GPUs
            and TPUs do that (XLA's ``AllReduceReassociate``), the one for CPUs does not.
        arrays: Its results per device, such as ``("f32[8,16]",)``.
        times: How often one run of the program executes it.
        scope: The ``op_name`` of its metadata: where it comes from.
    """

    kind: str
    name: str
    mesh_axes: tuple[str, ...] | None
    group_size: int
    payload_bytes: int
    scattered_bytes: int
    added_bytes: int
    arrays: tuple[str, ...]
    times: int
    scope: str

    @property
    def meaning(self) -> str:
        """The kind, but ``"reduce-scatter"`` for an all-reduce that is only sliced afterwards."""
        whole = self.scattered_bytes and self.scattered_bytes == self.payload_bytes
        return "reduce-scatter" if whole else self.kind

    def bytes_moved(self, *, as_meant: bool = False) -> float:
        """What one device sends in all executions of one run.

        Args:
            as_meant: Count an all-reduce that is only sliced afterwards as a reduce-scatter.
        """
        return bytes_moved([self], as_meant=as_meant)


def read_collectives(
    program, mesh=None, *, unknown_trip_count: int | None = None
) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    Args:
        program: A ``jax.stages.Compiled``, or its text.
        mesh: The mesh, or its shape (``{"data": 4, "model": 2}``), to name groups by mesh axes.
            Devices count in the mesh's order.
        unknown_trip_count: How often to count the body of a loop whose number of turns the
            program does not say.

    Raises:
        ValueError: Such a loop has a collective and no number, or groups cannot be read.
    """
    text = program if isinstance(program, str) else program.as_text()
    sizes = None if mesh is None else dict(getattr(mesh, "shape", mesh))
    computations = computations_of(text)
    times = executions_of(computations)
    found = []
    for computation in computations.values():
        for one in computation.instructions.values():
            kind = one.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            count = times.get(computation.name, 0)
            if count is None:
                count = unknown_trip_count
            if count is None:
                raise ValueError(
                    f"{one.name}: is in a loop whose number of turns the program does not say. "
                    "Pass unknown_trip_count=."
                )
            if count:
                found.append(_collective(kind, one, computation, computations, sizes, count))
    return found


def counts(
    collectives: Iterable[Collective], *, as_meant: bool = True, executed: bool = True
) -> Counter:
    """How many collectives there are of each kind, over which mesh axes.

    Args:
        collectives: As `read_collectives` gives them.
        as_meant: By `Collective.meaning` instead of by kind.
        executed: Count every execution; otherwise every place in the program once.

    Returns:
        Numbers by ``(kind, mesh axes)``.
    """
    result: Counter = Counter()
    for one in collectives:
        kind = one.meaning if as_meant else one.kind
        result[kind, one.mesh_axes] += one.times if executed else 1
    return result


def bytes_by_kind(
    collectives: Iterable[Collective], *, as_meant: bool = False
) -> dict[tuple[str, tuple[str, ...] | None], float]:
    """What one device sends in one run of a program, by kind and mesh axes, in bytes.

    Args:
        collectives: As `read_collectives` gives them.
        as_meant: Count what is only sliced afterwards as a reduce-scatter, also where it is a part
            of an operation, and what is only added up afterwards once.
    """
    result: dict[tuple[str, tuple[str, ...] | None], float] = {}
    for one in collectives:
        scattered = one.scattered_bytes if as_meant else 0
        parts = {"reduce-scatter": scattered} if one.kind == "all-reduce" else {}
        parts[one.kind] = one.payload_bytes - scattered - (one.added_bytes if as_meant else 0)
        for kind, payload in parts.items():
            if payload:
                moved = one.times * payload * RING_SHARES[kind](one.group_size)
                key = (kind, one.mesh_axes)
                result[key] = result.get(key, 0) + moved
    return result


def bytes_moved(collectives: Iterable[Collective], *, as_meant: bool = False) -> float:
    """What one device sends in one run of a program; see `bytes_by_kind`."""
    return sum(bytes_by_kind(collectives, as_meant=as_meant).values())


# Reading the text


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    is_root: bool
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)


@dataclasses.dataclass
class _Computation:
    name: str
    is_entry: bool
    instructions: dict[str, _Instruction]

    @functools.cached_property
    def users(self) -> dict[str, list[_Instruction]]:
        """The instructions that use each result."""
        result: dict[str, list[_Instruction]] = {name: [] for name in self.instructions}
        for one in self.instructions.values():
            for name in dict.fromkeys(one.operands):
                if name in result:
                    result[name].append(one)
        return result


def computations_of(text: str) -> dict[str, _Computation]:
    result: dict[str, _Computation] = {}
    current = None
    for line in text.splitlines():
        line = line.strip()
        if opening := _COMPUTATION.match(line):
            current = _Computation(opening[2], bool(opening[1]), {})
            result[current.name] = current
        elif line == "}":
            current = None
        elif current is not None and (instruction := _instruction(line)):
            current.instructions[instruction.name] = instruction
    if not any(one.is_entry for one in result.values()):
        raise ValueError("this is not the text of a compiled program: it has no ENTRY.")
    return result


def _instruction(line: str) -> _Instruction | None:
    start = _INSTRUCTION.match(line)
    if not start:
        return None
    rest = line[start.end() :]
    # A type is one word, or a tuple in brackets.
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opcode, bracket, _ = rest.partition("(")
    if not bracket:
        return None
    end = _closing(rest, len(opcode))
    arguments = rest[len(opcode) + 1 : end - 1]
    return _Instruction(start[2], bool(start[1]), type_, opcode.strip(), arguments, rest[end:])


def _closing(text: str, opening: int) -> int:
    """The position behind the bracket that closes the one at a position."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i + 1
    raise ValueError(f"a bracket is not closed in {text[:80]!r}")


def _called(instruction: _Instruction) -> Iterator[tuple[str, int | None]]:
    """The computations that an instruction runs and how often, None for unknown."""
    turns: int | None = 1
    if instruction.opcode == "while":
        trips = _TRIPS.search(instruction.attributes)
        turns = int(trips[1]) if trips else None
    for names in _CALLED.findall(instruction.attributes):
        for name in re.findall(r"[\w.\-]+", names):
            yield name, turns


def executions_of(computations: Mapping[str, _Computation]) -> dict[str, int | None]:
    """How often one run executes each computation; None where a loop does not say."""
    result: dict[str, int | None] = {}

    def add(name: str, times: int | None) -> None:
        before = result.get(name, 0)
        result[name] = None if before is None or times is None else before + times
        for one in computations[name].instructions.values():
            for called, turns in _called(one):
                if called in computations:
                    add(called, None if times is None or turns is None else times * turns)

    for computation in computations.values():
        if computation.is_entry:
            add(computation.name, 1)
    return result


def arrays_of(type_: str) -> list[tuple[str, int, int]]:
    """The arrays of a type: each as text, its number of elements, and its size in bytes."""
    result = []
    for dtype, sizes in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", type_)):
        bits = _BITS[dtype] if dtype in _BITS else int(re.search(r"\d+", dtype)[0])
        elements = math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        result.append((f"{dtype}[{sizes}]", elements, -(-elements * bits // 8)))
    return result


def _collective(kind, one, computation, computations, sizes, times) -> Collective:
    type_ = one.type
    if one.opcode.endswith("-start") and kind != "all-reduce" and type_.startswith("("):
        # An asynchronous start returns its operands too: the second part is the result.
        type_ = _parts(type_)[1]
    arrays = arrays_of(type_)
    axes, group_size = groups_of(kind, one.name, one.attributes, sizes)
    payload = sum(size for _, _, size in arrays)
    if kind == "reduce-scatter":
        payload *= group_size
    scattered = added = 0
    if kind == "all-reduce":
        values = _results(one, computation)
        scattered = _scattered(values, group_size, computation, computations)
        added = 0 if scattered else _added(values, computation, computations)
    scope = _OP_NAME.search(one.attributes)
    return Collective(
        kind=kind,
        name=one.name,
        mesh_axes=axes,
        group_size=group_size,
        payload_bytes=payload,
        scattered_bytes=scattered,
        added_bytes=added,
        arrays=tuple(text for text, _, _ in arrays),
        times=times,
        scope=scope[1] if scope else "",
    )


def _parts(type_: str) -> list[str]:
    """The outermost parts of a tuple's type."""
    parts, depth, start = [], 0, 1
    for i, character in enumerate(type_):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if (character == "," and depth == 1) or (character == ")" and not depth):
            parts.append(type_[start:i].strip())
            start = i + 1
    return parts


# All-reduces of which each device keeps a slice


def _results(one, computation) -> list[_Instruction]:
    """The arrays that come out of an operation, as values of their own."""
    if not one.type.startswith("("):
        return [one]
    return [user for user in computation.users[one.name] if _tuple_index(user) is not None]


def _scattered(values, group_size, computation, computations) -> int:
    """How much of an all-reduce's payload is only used through one slice per device, in bytes."""
    return sum(
        size
        for value in values
        if _Slices(group_size, computations).are_all_of(value, computation, ())
        for _, _, size in arrays_of(value.type)
    )


def _tuple_index(instruction: _Instruction) -> int | None:
    index = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(index[1]) if index and instruction.opcode == "get-tuple-element" else None


@dataclasses.dataclass(frozen=True)
class _Slices:
    """Whether a value is used through slices alone, each a device's share of it."""

    group_size: int
    computations: Mapping[str, _Computation]

    def are_all_of(self, value, computation, callers) -> bool:
        """Whether it is so; ``callers`` are the fusions around it, with their computations."""
        users = computation.users[value.name]
        if value.is_root:
            return bool(callers) and self.are_all_of(*callers[-1], callers[:-1])
        return bool(users) and all(self._is_one(one, value, computation, callers) for one in users)

    def _is_one(self, user, value, computation, callers) -> bool:
        if user.opcode == "dynamic-slice":
            whole, part = (sum(n for _, n, _ in arrays_of(one.type)) for one in (value, user))
            return user.operands[0] == value.name and part * self.group_size == whole
        if _ELEMENTWISE.fullmatch(user.opcode):
            return self.are_all_of(user, computation, callers)
        if user.opcode == "fusion":
            inner = next(self.computations[name] for name, _ in _called(user))
            numbers = [str(i) for i, name in enumerate(user.operands) if name == value.name]
            return all(
                self.are_all_of(one, inner, (*callers, (user, computation)))
                for one in inner.instructions.values()
                if one.opcode == "parameter" and one.arguments in numbers
            )
        if user.opcode == "tuple" and user.is_root and callers:
            # One of several results of a fusion.
            fusion, outer = callers[-1]
            indices = [i for i, name in enumerate(user.operands) if name == value.name]
            taken = [one for one in outer.users[fusion.name] if _tuple_index(one) in indices]
            return bool(taken) and all(self.are_all_of(one, outer, callers[:-1]) for one in taken)
        return False


# All-reduces whose results are only added up


def _added(values, computation, computations) -> int:
    """How much less an all-reduce would send if it came after the additions, in bytes."""
    alike: dict[object, list[_Instruction]] = {}
    for value in values:
        users = frozenset(user.name for user in computation.users[value.name])
        alike.setdefault((users, value.type), []).append(value)
    saved = 0
    for (users, type_), members in alike.items():
        if len(members) > 1 and all(
            _adds_up([one.name for one in members], computation.instructions[user], computations)
            for user in users
        ):
            saved += (len(members) - 1) * arrays_of(type_)[0][2]
    return saved


def _adds_up(names: list[str], user: _Instruction, computations) -> bool:
    """Whether an instruction uses some values through their sum alone."""
    if user.opcode == "add":
        return set(user.operands) == set(names)
    if user.opcode != "fusion":
        return False
    inner = next(computations[name] for name, _ in _called(user))
    numbers = {str(user.operands.index(name)) for name in names}
    parts = {
        one.name
        for one in inner.instructions.values()
        if one.opcode == "parameter" and one.arguments in numbers
    }
    # Each addition of two parts, which nothing else uses, is a part in their place.
    while len(parts) > 1:
        sums = [
            one
            for one in inner.instructions.values()
            if one.opcode == "add"
            and set(one.operands) <= parts
            and all(inner.users[name] == [one] for name in one.operands)
        ]
        if not sums:
            return False
        parts = parts - set(sums[0].operands) | {sums[0].name}
    return True
