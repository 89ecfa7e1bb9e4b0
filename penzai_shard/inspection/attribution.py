"""Reads the collectives of a compiled step: kind, mesh axes, bytes, and whose each array is.

The name of an operation says which layer asked for it and in which phase. Where the compiler left
names out, or wrote one of several that it merged, the ways of values say the rest: a sum belongs
to what computed it, and anything else is brought to where it is used. What is not certain is left
open.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from penzai_shard.errors import Problems, ProgramError
from penzai_shard.inspection.device_groups import mesh_axes, read_groups
from penzai_shard.inspection.hlo import COLLECTIVES, Array, Instruction, Place, Program, split_text
from penzai_shard.programs import LOSS, OPTIMIZER

if TYPE_CHECKING:
    from penzai_shard.inspection.lowering import LoweredStep
    from penzai_shard.inspection.step_arrays import StepArray

_REDUCTIONS = ("all-reduce", "reduce-scatter")
_BY_NAME = ("/psum", "/psum_invariant")
# Earliest first; a step may have operations of which none is known.
_PHASES = ("forward", "backward", "optimizer", None)

_STRUCTURE = """
    async call conditional fusion get-tuple-element optimization-barrier parameter tuple while"""
_MOVES = """
    bitcast bitcast-convert concatenate convert copy dynamic-slice dynamic-update-slice pad reshape
    reverse slice transpose"""
_ARITHMETIC = """
    abs add and cbrt clamp compare divide exponential is-finite log maximum minimum multiply negate
    or power rsqrt select sign sqrt subtract tanh"""
_ELEMENTS_STAY = "bitcast convert copy reshape transpose"
# Behind these an array is the same array, or a part of it.
_SAME_ARRAY = COLLECTIVES | frozenset(f"{_STRUCTURE} {_MOVES}".split())
# What an optimizer does element by element. A norm of all gradients is not in it, nor what is
# multiplied by one: that is a number, and comes through a broadcast.
_SAME_PARAMETER = _SAME_ARRAY | frozenset(_ARITHMETIC.split())
# Who keeps a slice behind these could as well have taken it before.
_SAME_ELEMENTS = frozenset(f"{_STRUCTURE} {_ARITHMETIC} {_ELEMENTS_STAY}".split())


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the arrays that a collective moves.

    Attributes:
        layers: The labels of the innermost layers that it is for, ``"loss"`` or ``"optimizer"``;
            empty if the program does not say.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``, None if the program does not say.
        moves: What it is: the path of an argument, ``"gradient of PATH"``, ``"new value of PATH"``,
            ``"activation f32[8,16] of LAYER"``; empty if that is not certain.
        payload_bytes: The larger of what goes in and what comes out on one device.
        keeps_slice: Whether each device goes on with its own slice of a sum only.
        names: JAX's names of the operations that ask for it.
    """

    layers: tuple[str, ...]
    phase: str | None
    moves: str
    payload_bytes: int
    keeps_slice: bool = False
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Collective:
    """One place in a program where devices exchange data.

    Attributes:
        kind: What XLA calls it, such as ``"all-gather"``.
        name: The name of its instruction.
        mesh_axes: The mesh axes that it goes over; None where its groups are not along mesh axes.
        axes_text: The same as text, ``"data+model"``, which also says if it is a part of an axis.
        group_size: How many devices exchange with each other.
        payload_bytes: The larger of what goes in and what comes out on one device.
        times: How often one step runs it; None if that is not certain.
        is_upper_bound: Whether it may run less often, since it is in a branch of a condition.
        parts: What is known of each array that it moves.
    """

    kind: str
    name: str
    mesh_axes: tuple[str, ...] | None
    axes_text: str
    group_size: int
    payload_bytes: int
    times: int | None
    is_upper_bound: bool
    parts: tuple[Part, ...]


def read_collectives(program: Program, step: "LoweredStep") -> tuple[Collective, ...]:
    """The collectives of a compiled step, in the order of the program's text.

    Those that run in the background count once, where they start.

    Args:
        program: What the compiler made of the step.
        step: The step.

    Raises:
        ProgramError: Groups of devices are in a form that is not known, or what comes out of a
            collective does not fit to what goes in; with all of these.
    """
    if step.mesh is None:
        return ()
    mesh = tuple(step.mesh.shape.items())
    attribution = _Attribution(program, step)
    problems = Problems("collectives that cannot be read:")
    found = []
    for one in _collective_instructions(program):
        kind = one.kind
        are_pairs = kind == "collective-permute"
        text = one.attribute("source_target_pairs" if are_pairs else "replica_groups") or "{}"
        groups = read_groups(text, math.prod(size for _, size in mesh))
        into, out = _arrays(program, one)
        size = 2 if are_pairs else len(groups[0]) if groups else 0
        if groups is None or not _fit(kind, into, out, size):
            sides = " -> ".join(", ".join(map(str, side)) for side in (into, out))
            what = f"a form of {kind} that is not known: {sides} among {text}"
            problems.add(one.name, what, "Compile it with jaxlib 0.10.")
            continue
        if all(len(set(group)) == 1 for group in groups):
            continue
        parts = tuple(attribution.parts(one, into, out, size))
        is_fused = any(c.opcode == "fusion" for c in program.callers.get(one.computation, ()))
        if is_fused and all(part.keeps_slice for part in parts):
            # The compiler for TPUs writes a reduce-scatter as a sum and a slice in one fusion.
            kind = "reduce-scatter"
            parts = tuple(dataclasses.replace(part, keeps_slice=False) for part in parts)
        axes, axes_text = mesh_axes(groups, mesh, are_pairs=are_pairs)
        payload = max(sum(array.bytes for array in side) for side in (into, out))
        form = kind, one.name, axes, axes_text, size, payload
        found.append(Collective(*form, *program.times[one.computation], parts))
    problems.raise_if_any(ProgramError)
    return tuple(found)


def _collective_instructions(program: Program) -> Iterator[Instruction]:
    """The collectives, each once.

    The compiler for TPUs writes a collective into each of the fusions during which it runs.
    """

    def chain(one: Instruction) -> tuple[str | None, ...]:
        keys = ("replica_groups", "channel_id", "frontend_attributes")
        return one.opcode, *map(one.attribute, keys)

    def is_written(one: Instruction, end: str) -> bool:
        users = (use.instruction for use in program.uses(Place(one)))
        targets = [user.attribute("custom_call_target") for user in users]
        return f'"AsyncCollective{end}"' in targets

    every = (one for one in program if one.kind in COLLECTIVES)
    found = [one for one in every if not one.opcode.endswith("-done")]
    started = {chain(one) for one in found if is_written(one, "Start")}
    for one in found:
        is_named = "chain_id=" in (one.attribute("frontend_attributes") or "")
        goes_on = chain(one) in started and (is_named or is_written(one, "Done"))
        if is_written(one, "Start") or not goes_on:
            yield one


def _arrays(program: Program, one: Instruction) -> tuple[Sequence[Array], Sequence[Array]]:
    """What goes into a collective, and what comes out of it."""
    # Behind the first operand of a ragged one are the room for what comes out, and tables.
    count = 1 if one.kind == "ragged-all-to-all" else None
    into = [array for operand in program.operands(one)[:count] for array in operand.results]
    out = one.results
    # A start gives what goes in, too.
    if one.opcode.endswith("-start") and one.kind != "all-reduce":
        out = out[len(into) : 2 * len(into)]
    return into, out


def _fit(kind: str, into: Sequence[Array], out: Sequence[Array], size: int) -> bool:
    """Whether as many elements come out as must; else something was misread."""
    grown = sum(a.size for a in into) * (size if kind == "all-gather" else 1)
    shrunk = sum(a.size for a in out) * (size if kind == "reduce-scatter" else 1)
    return grown == shrunk or kind == "ragged-all-to-all"


class _Attribution:
    """Says of each array of a collective whose it is."""

    def __init__(self, program: Program, step: "LoweredStep") -> None:
        self._program = program
        self._step = step
        self._arguments = {array.name: array for array in step.arguments}

    def parts(
        self, one: Instruction, into: Sequence[Array], out: Sequence[Array], size: int
    ) -> Iterator[Part]:
        """One answer for each array that a collective moves among groups of a size."""
        if one.kind == "all-to-all" and len(into) == size:
            # One array, written as a piece for each device.
            pieces = sum(array.bytes for array in into)
            yield dataclasses.replace(self._part(one, 0, into[0]), payload_bytes=pieces)
            return
        for position, array in enumerate(into):
            larger = array
            if len(out) == len(into):
                larger = max(array, out[position], key=lambda each: each.bytes)
            part = self._part(one, position, larger)
            # Compilers make a reduce-scatter of what the partitioner adds, not of what a user asks
            # for by name (seen on TPU v5e).
            is_found = one.kind == "all-reduce" and not one.op_name.endswith(_BY_NAME)
            is_sliced = is_found and self._is_sliced(one, position, size)
            yield dataclasses.replace(part, keeps_slice=is_sliced)

    def _part(self, one: Instruction, position: int, larger: Array) -> Part:
        """Whose the array of an operand is, and what it is."""
        is_sum = one.kind in _REDUCTIONS
        value = Place(self._program.operands(one)[position])
        result = self._program.result(one, position)
        argument = self._argument(value)
        array = argument or self._next_argument(result)
        holders = self._step.layers.holders(array.path) if array else ()

        # Of several arrays that the compiler merged, the name may name one only. Then the nearest
        # operations say it, if all of them do; of what is gathered for several, the first.
        names, start = self._names(one), value if is_sum else result
        own = names if len(one.operands) == 1 or one.kind == "all-to-all" else ()
        layers, phase = self._layers(own), _only_value(map(self._step.layers.phase, own))
        near = () if layers and len(own) == 1 else self._near_names(start, is_sum)
        phases = [*map(self._step.layers.phase, near)]
        earliest = min(phases, key=_PHASES.index, default=None)
        phase = phase or (_only_value(phases) if is_sum else earliest)
        if all(map(self._step.layers.owner, near)):
            layers = layers or self._layers(near)
        layers = layers or holders or self._layers_computed_with(start, is_sum)

        # The loss and the optimizer around all layers move a parameter for those that hold it.
        if holders and {*layers} <= {LOSS, OPTIMIZER}:
            layers = holders

        moves = ""
        if argument:
            moves = argument.path
        elif array and phase == "backward":
            moves = f"gradient of {array.path}"
        elif array and phase != "forward":
            moves, phase = f"new value of {array.path}", OPTIMIZER
        elif len(layers) == 1:
            # Behind a sum is what computed it; a gather in the backward pass brings either.
            is_again = any("rematted_computation" in name for name in own or near)
            if phase == "forward" or (is_sum and phase == "backward"):
                moves = f"activation {larger} of {layers[0]}"
                moves = moves if phase == "forward" or is_again else f"gradient of {moves}"
        return Part(tuple(sorted(layers)), phase, moves, larger.bytes, names=own or near)

    # Names

    def _names(self, one: Instruction) -> tuple[str, ...]:
        """The names of the operations that a collective is made of."""
        callers = self._program.callers.get(one.computation, ())
        outside = [c.op_name for c in callers if c.opcode in ("fusion", "async-start")]
        name = one.op_name or next(iter(outside), "")
        return split_merged_names(name) if name else ()

    def _layers(self, names: Iterable[str]) -> tuple[str, ...]:
        owners = map(self._step.layers.owner, names)
        return tuple(dict.fromkeys(owner for owner in owners if owner))

    def _near_names(self, start: Place, before: bool) -> tuple[str, ...]:
        """The names of the first that compute something, before a value or behind it."""
        names = (split_merged_names(one.op_name) for one in self._ends(start, before))
        return tuple(dict.fromkeys(itertools.chain.from_iterable(names)))

    def _layers_computed_with(self, start: Place, before: bool) -> tuple[str, ...]:
        """The layers of the parameters with which a value is computed, or something is of it.

        Without layers to mark, a product with a weight, or for the gradient of one, is named by
        what it is only.
        """
        found: dict[str, None] = {}
        for one in self._ends(start, before):
            taken = [self._argument(Place(operand)) for operand in self._program.operands(one)]
            for array in (self._next_argument(Place(one)), *taken):
                if array and array.part not in ("inputs", "optimizer state"):
                    found |= dict.fromkeys(self._step.layers.holders(array.path))
        return tuple(found)

    # The ways of values

    def _ends(self, start: Place, before: bool) -> list[Instruction]:
        """What an array comes from, or goes into, as long as it is the same array."""
        step = self._program.sources if before else self._program.uses
        places = self._program.walk([start], step, _SAME_ARRAY)
        ends = [x for x, _ in places if x.kind not in _SAME_ARRAY or self._program.is_argument(x)]
        return [one for one in ends if not self._is_filled(one)]

    def _is_filled(self, one: Instruction) -> bool:
        """Whether one number fills an array, as loops begin that in which they stack others."""
        if one.opcode == "broadcast":
            return self._program.operands(one)[0].results[0].shape == ()
        return one.opcode == "constant"

    def _argument(self, value: Place) -> "StepArray | None":
        """The argument of the step that a value is, or is a part of."""
        made_of = {*self._ends(value, True)}
        if len(made_of) != 1 or not self._program.is_argument(one := made_of.pop()):
            return None
        return self._arguments.get(one.op_name)

    def _next_argument(self, result: Place) -> "StepArray | None":
        """The one argument of whose next value a value is a part."""
        arrays = self._updates.get(result, {})
        return next(iter(arrays.values())) if len(arrays) == 1 else None

    @functools.cached_property
    def _updates(self) -> Mapping[Place, dict[str, "StepArray"]]:
        """The arguments, by path, in whose next value each value is, element by element.

        Those of what the loss is computed with: momenta and averages of a step that is written by
        hand are made of gradients, too. The first to use one may be without a name, so that only
        the backward pass says it.
        """
        found: dict[Place, dict[str, StepArray]] = collections.defaultdict(dict)
        root, sources = self._program.root(self._program.entry), self._program.sources
        # JAX leaves results out that are arguments as they came in, and does not say which.
        if len(self._step.results) != len(root.results):
            return found
        parameters = {one.op_name: one for one in self._program.parameters(root.computation)}
        for number, result in self._step.next_arguments.items():
            array = self._step.arguments[number]
            own = parameters.get(array.name)
            used = self._near_names(Place(own), False) if own else ()
            is_trained = {"forward", "backward"} & {*map(self._step.layers.phase, used)}
            if is_trained and array.part != "optimizer state":
                for value in self._program.walk([Place(root, result)], sources, _SAME_PARAMETER):
                    found[value][array.path] = array
        return found

    def _is_sliced(self, one: Instruction, position: int, size: int) -> bool:
        """Whether each of some devices uses its own slice of a sum only."""
        start, slices = self._program.result(one, position), 0
        first, result = self._program.uses(start), self._program.root(self._program.entry)
        for user, _ in self._program.walk(first, self._program.uses, _SAME_ELEMENTS):
            if user.opcode == "dynamic-slice":
                whole = self._program.operands(user)[0].results[0]
                if user.results[0].size * size != whole.size:
                    return False
                slices += 1
            elif user.kind not in _SAME_ELEMENTS or user is result:
                return False
        return slices > 0


def _only_value(values: Iterable[str | None]) -> str | None:
    """What all say; None if they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


@functools.lru_cache(maxsize=1 << 16)
def split_merged_names(name: str) -> tuple[str, ...]:
    """The names of the operations that a compiler merged into one.

    >>> split_merged_names("jit(f)/(a/add:jvp(b)/(mul:sub))")
    ('jit(f)/a/add', 'jit(f)/jvp(b)/mul', 'jit(f)/jvp(b)/sub')
    >>> split_merged_names("jit(f)/a/add;jit(f)/mul")
    ('jit(f)/a/add', 'jit(f)/mul')
    """
    whole = [*split_text(name, ";")]
    if len(whole) > 1:
        return tuple(one for part in whole for one in split_merged_names(part))
    for found in re.finditer(r"(?:^|/)\(", name):
        # What stands between the bracket and the one that closes it.
        inside = next(split_text(name[found.end() :], ")"))
        parts = [*split_text(inside, ":")]
        if len(parts) > 1:
            before, behind = name[: found.end() - 1], name[found.end() + len(inside) + 1 :]
            return tuple(o for part in parts for o in split_merged_names(before + part + behind))
    return (name,)
