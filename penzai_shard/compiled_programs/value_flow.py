"""Where a value of a compiled program comes from and where it goes, as long as it stays the same.

A value stays the same where it is copied, converted, cut, stacked or sent to other devices; and
where it goes in and out of fusions, loops, branches, calls and asynchronous instructions.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from penzai_shard.compiled_programs.instruction_text import ArrayType, Type
from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.compiled_programs.reachable_ends import ReachableEnds
from penzai_shard.compiled_programs.slices import partner

# Which operands come out of an instruction as they went in, or a part of them; None for all.
_KEPT: Mapping[str, tuple[int, ...] | None] = {
    "add-dependency": (0,),
    "bitcast": (0,),
    "bitcast-convert": (0,),
    "collective-broadcast": (0,),
    "collective-permute": (0,),
    "concatenate": None,
    "convert": (0,),
    "copy": (0,),
    "dynamic-slice": (0,),
    "dynamic-update-slice": (0, 1),
    "pad": (0,),
    "reduce-precision": (0,),
    "reshape": (0,),
    "reverse": (0,),
    "slice": (0,),
    "transpose": (0,),
}
# With several operands they give a tuple, one part for each.
_ONE_BY_ONE = frozenset({"all-gather", "all-reduce", "reduce-scatter", "all-to-all"})
# What went in is in the first part of the tuple that these give, what comes out in the second.
_STARTS = frozenset({"all-gather-start", "collective-permute-start"})
_SAME_STRUCTURE = frozenset(
    {"optimization-barrier", "all-reduce-done", "copy-done", "async-update", "domain", "recv-done"}
)
_DONE = frozenset({"all-gather-done", "collective-permute-done", "async-done"})
_CALLS = frozenset({"fusion", "call", "async-start"})
# What these give is a tuple, a part of one, or a token; what is not that part is not used by them.
_PASSING = (
    _SAME_STRUCTURE
    | _DONE
    | _CALLS
    | {"get-tuple-element", "tuple", "while", "conditional", "send-done"}
)

Path = tuple[int, ...]
_Uses: TypeAlias = list[tuple[Instruction, int]]
_UsersByPart: TypeAlias = tuple[Mapping[Path, _Uses], _Uses]


class _Every(Collection[str]):
    def __contains__(self, opcode: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


EVERY_OPCODE: Collection[str] = _Every()


class Place(NamedTuple):
    """An array in a program: of an instruction that gives a tuple, the path of one in it.

    ``callers`` are the instructions through which a walk came into this computation, so that it
    goes out where it came in.
    """

    one: Instruction
    path: Path = ()
    callers: tuple[Instruction, ...] = ()


@dataclasses.dataclass(frozen=True)
class ValueFlow:
    """The ways of values through a program.

    Attributes:
        module: The program.
        through: Opcodes that also count as leaving a value what it is, whatever operand it is:
            ``{"add", "multiply"}`` follows a gradient through an optimizer's arithmetic.
            ``EVERY_OPCODE`` follows whatever a value has an influence on.

    >>> module = Module.from_text('''HloModule m
    ... ENTRY e {
    ...   w = f32[4]{0} parameter(0), metadata={op_name="params['w']"}
    ...   s = f32[2]{0} slice(w), slice={[0:2]}
    ...   c = f32[2]{0} copy(s)
    ...   ROOT t = (f32[4]{0}, f32[2]{0}) tuple(w, c)
    ... }''')
    >>> flow = ValueFlow(module)
    >>> copy = module.computations["e"].instructions["c"]
    >>> flow.arguments_of(copy), flow.results_of(copy)
    ((("params['w']",),), ((1,),))
    """

    module: Module
    through: Collection[str] = ()

    def arguments_of(self, one: Instruction) -> tuple[tuple[str, ...], ...]:
        """For each operand of an instruction, the arguments of the program that are in it.

        Arguments have the names that JAX gave to the program's parameters, and their order.
        """
        parameters = self.module.computations[self.module.entry].parameters
        found = []
        for i in range(len(one.operand_names)):
            start = self.operand(Place(one), i)
            if all(array.dtype == "token" for array in start.one.results):
                continue
            arrays = [start._replace(path=path) for path in _array_paths(start.one.read.type)]
            found.append(tuple(parameters[n].op_name for n in self._first_ends.of(*arrays)))
        return tuple(found)

    def results_of(self, one: Instruction) -> tuple[tuple[int, ...], ...]:
        """For each array that comes out of an instruction, the results of the program it is in.

        Results count in the program's order. Of the start of an asynchronous instruction, the
        arrays are those that come out when it is done.
        """
        return tuple(self._last_ends.of(Place(one, path)) for path in _paths_out(one))

    def makers_of(self, one: Instruction) -> tuple[tuple[Instruction, ...], ...]:
        """For each operand of an instruction, what makes the values that are in it.

        That is what computes them, arguments of the program, and constants.
        """
        found = []
        for i in range(len(one.operand_names)):
            places = self._walk([self.operand(Place(one), i)], self.before)
            ends = (place.one for place in places if next(self.before(place), None) is None)
            found.append(tuple(dict.fromkeys(ends)))
        return tuple(found)

    def users_of(self, one: Instruction) -> tuple[tuple[Instruction, ...], ...]:
        """For each array that comes out of an instruction, what computes something of it."""
        found = []
        for path in _paths_out(one):
            users = (
                user
                for place in self._walk([Place(one, path)], self._after)
                for user, position in self._direct_users(place)
                if user.opcode not in _PASSING
                and next(self._into(user, position, place.path, place.callers), None) is None
            )
            found.append(tuple(dict.fromkeys(users)))
        return tuple(found)

    def reached_from(self, arguments: Collection[str]) -> frozenset[tuple[str, Path]]:
        """Where some arguments of the program are: instructions, and the arrays that they give."""
        start = [
            Place(one)
            for one in self.module.computations[self.module.entry].parameters
            if one.op_name in arguments
        ]
        return frozenset((place.one.name, place.path) for place in self._walk(start, self._after))

    @functools.cached_property
    def _first_ends(self) -> ReachableEnds[Place]:
        """The arguments of the program, backwards."""
        return ReachableEnds(self.before, self._argument_number)

    @functools.cached_property
    def _last_ends(self) -> ReachableEnds[Place]:
        """The results of the program, forwards."""
        return ReachableEnds(self._after, self._result_number)

    def _walk(
        self, start: Iterable[Place], step: Callable[[Place], Iterator[Place]]
    ) -> Iterator[Place]:
        """All places that a walk comes to."""
        left = list(start)
        seen = set(left)
        while left:
            place = left.pop()
            yield place
            for other in step(place):
                if other not in seen:
                    seen.add(other)
                    left.append(other)

    def _argument_number(self, place: Place) -> int | None:
        is_one = place.one.opcode == "parameter" and place.one.computation == self.module.entry
        return int(place.one.read.operands) if is_one else None

    def _result_number(self, place: Place) -> int | None:
        is_one = place.one.is_root and place.one.computation == self.module.entry
        return next(iter(place.path), 0) if is_one else None

    # Backwards

    def before(self, place: Place) -> Iterator[Place]:
        """The places that a value comes from, one step back."""
        one, path, callers = place
        if one.opcode == "parameter":
            yield from self._arguments_of_call(place)
        elif one.opcode == "get-tuple-element":
            yield self.operand(place, 0, (int(one.attributes["index"]), *path))
        elif one.opcode == "tuple":
            yield self.operand(place, path[0], path[1:])
        elif one.opcode in _SAME_STRUCTURE:
            yield self.operand(place, 0, path)
        elif one.opcode in _DONE:
            yield self.operand(place, 0, (1, *path))
        elif one.opcode == "recv":
            if path == (0,) and (sent := partner(self.module, one)) is not None:
                yield self.operand(Place(sent, (), callers), 0)
        elif one.opcode == "while":
            yield Place(self.module.called_as(one, "body").root, path, (*callers, one))
        elif one.opcode == "async-start" and path[0] == 0:
            yield self.operand(place, path[1], path[2:])
        elif one.opcode in _CALLS or one.opcode == "conditional":
            inside = path[1:] if one.opcode == "async-start" else path
            for name in self.module.called_by(one):
                yield Place(self.module.computations[name].root, inside, (*callers, one))
        else:
            for i in self._operands_by_path(one).get(path, ()):
                yield self.operand(place, i)

    def _arguments_of_call(self, place: Place) -> Iterator[Place]:
        one, path, _ = place
        position = int(one.read.operands)
        for caller, callers in self._callers(place):
            if caller.opcode == "while":
                body = self.module.called_as(caller, "body")
                yield Place(body.root, path, (*callers, caller))
            elif caller.opcode == "conditional":
                position = 1 + self.module.called_by(caller).index(one.computation)
            if position < len(caller.operand_names):
                yield self.operand(Place(caller, (), callers), position, path)

    def operand(self, place: Place, position: int, path: Path = ()) -> Place:
        """An operand of an instruction, or an array in it."""
        siblings = self.module.computations[place.one.computation].instructions
        return Place(siblings[place.one.operand_names[position]], path, place.callers)

    # Forwards

    def _after(self, place: Place) -> Iterator[Place]:
        one, path, callers = place
        if one.is_root:
            yield from self._results_of_call(place)
        if one.opcode == "send" and (received := partner(self.module, one)) is not None:
            yield Place(received, path, callers)
        for user, position in self._direct_users(place):
            yield from self._into(user, position, path, callers)

    def _direct_users(self, place: Place) -> Iterator[tuple[Instruction, int]]:
        """The instructions that an array is in an operand of, and in which."""
        # Of a tuple, hundreds may take one part each.
        of_part, of_all = self._users_by_part(place.one)
        yield from of_part.get(place.path[:1], ())
        yield from of_all

    @functools.cached_property
    def _users_by_part(self) -> Callable[[Instruction], _UsersByPart]:
        return functools.cache(self._read_users)

    def _read_users(self, one: Instruction) -> _UsersByPart:
        """The users of each part of a tuple, and those of all of it."""
        siblings = self.module.computations[one.computation].instructions
        of_part: dict[Path, _Uses] = collections.defaultdict(list)
        of_all: _Uses = []
        for name in dict.fromkeys(one.user_names):
            user = siblings[name]
            if user.opcode == "get-tuple-element":
                of_part[(int(user.attributes["index"]),)].append((user, 0))
            else:
                of_all += [(user, position) for position in user.positions[one.name]]
        return of_part, of_all

    def _into(
        self, user: Instruction, position: int, path: Path, callers: tuple[Instruction, ...]
    ) -> Iterator[Place]:
        if user.opcode == "get-tuple-element":
            yield Place(user, path[1:], callers)
        elif user.opcode == "tuple":
            yield Place(user, (position, *path), callers)
        elif user.opcode in _SAME_STRUCTURE:
            yield Place(user, path, callers)
        elif user.opcode in _DONE:
            if path and path[0] == 1:
                yield Place(user, path[1:], callers)
        elif user.opcode in _CALLS or user.opcode in ("while", "conditional"):
            called = self.module.called_by(user)
            if user.opcode == "conditional":
                called, position = called[position - 1 : position] if position else (), 0
            for name in called:
                parameter = self.module.computations[name].parameters[position]
                yield Place(parameter, path, (*callers, user))
        else:
            for out in self._paths_of_operand(user, position):
                yield Place(user, out, callers)

    def _results_of_call(self, place: Place) -> Iterator[Place]:
        for caller, callers in self._callers(place):
            if caller.opcode == "while":
                if place.one.computation != self.module.called_as(caller, "body").name:
                    continue
                yield Place(
                    self.module.called_as(caller, "body").parameters[0],
                    place.path,
                    (*callers, caller),
                )
            inside = (1, *place.path) if caller.opcode == "async-start" else place.path
            yield Place(caller, inside, callers)

    # Both ways

    def _paths_of_operand(self, one: Instruction, position: int) -> tuple[Path, ...]:
        """Where an operand is in what an instruction gives, if it stays what it is."""
        several = len(one.operand_names) > 1
        if one.opcode in _ONE_BY_ONE or one.opcode == "all-reduce-start":
            if one.opcode == "all-to-all" and several:
                return _parts(len(one.operand_names))
            return ((position,),) if several else ((),)
        if one.opcode in _STARTS:
            return ((0, position), (1, position)) if several else ((0,), (1,))
        if one.opcode == "copy-start":
            return ((),)
        if one.opcode == "send":
            return ((0,),) if position == 0 else ()
        if one.opcode in self.through:
            return ((),)
        if one.opcode in _KEPT:
            kept = _KEPT[one.opcode]
            return ((),) if kept is None or position in kept else ()
        return ()

    @functools.cached_property
    def _operands_by_path(self) -> Callable[[Instruction], Mapping[Path, Sequence[int]]]:
        return functools.cache(self._read_operands)

    def _read_operands(self, one: Instruction) -> Mapping[Path, Sequence[int]]:
        """Which operands are in each array that an instruction gives."""
        found: dict[Path, list[int]] = collections.defaultdict(list)
        for position in range(len(one.operand_names)):
            for path in self._paths_of_operand(one, position):
                found[path].append(position)
        return found

    def _callers(self, place: Place) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
        """The instructions through which a walk leaves a computation, with theirs."""
        if place.callers:
            yield place.callers[-1], place.callers[:-1]
        else:
            for caller in self._all_callers.get(place.one.computation, ()):
                yield caller, ()

    @functools.cached_property
    def _all_callers(self) -> Mapping[str, list[Instruction]]:
        callers: dict[str, list[Instruction]] = {}
        for one in self.module:
            if one.opcode in _CALLS or one.opcode in ("while", "conditional"):
                for name in self.module.called_by(one):
                    callers.setdefault(name, []).append(one)
        return callers


@functools.cache
def _parts(count: int) -> tuple[Path, ...]:
    return tuple((i,) for i in range(count))


def _paths_out(one: Instruction) -> list[Path]:
    """The paths of the arrays that come out of an instruction in the tuple that it gives."""
    type_ = one.read.type
    prefix: Path = ()
    if one.opcode in _STARTS or one.opcode == "async-start":
        assert not isinstance(type_, ArrayType)
        type_, prefix = type_[1], (1,)
    if isinstance(type_, ArrayType):
        return [prefix]
    if one.opcode == "send":
        return [(0,)]
    return [(*prefix, i) for i in range(len(type_))]


def _array_paths(type_: Type) -> list[Path]:
    """The paths of all arrays of a type, those of tuples in tuples included."""
    if isinstance(type_, ArrayType):
        return [()]
    return [(i, *path) for i, part in enumerate(type_) for path in _array_paths(part)]
