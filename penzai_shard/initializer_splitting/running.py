"""Compiling and running the programs of a split initialiser."""

import concurrent.futures
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penzai_shard.initializer_splitting.flattening import build_jaxpr
from penzai_shard.initializer_splitting.programs import Member, Program, SplitInitializer

# So many bytes may always be in the making at once: waiting for each of many small arrays would
# take longer than computing them.
_SMALL_IN_FLIGHT = 2**24
# A program of an initialiser runs a few times at most, and what the later passes of the CPU
# compiler would save then is a small part of the time that they take. Values are the same to the
# bit at this level, which is not so at level 0: that one forms no fused multiply-adds.
_CPU_COMPILER_OPTIONS = {"xla_backend_optimization_level": 1}
# Random numbers need about three times their own size while they are made.
_SIZE_IN_THE_MAKING = 4


def run_split(split: SplitInitializer) -> dict[int, jax.Array]:
    """Compiles each program once and runs it for each of its members.

    At any time there are, beyond the outputs that are done, only outputs in the making that
    together are about as large as the largest one.

    Args:
        split: A split initialiser. Its shardings, where given, are all on one mesh.

    Returns:
        The outputs by position, each laid out exactly as asked. Their buffers are their own, also
        where the initialiser returned one array twice, or one of its arguments.

    >>> from penzai_shard.initializer_splitting.programs import split_initializer
    >>> traced = jax.make_jaxpr(lambda: (jax.numpy.zeros(2), 1.5))()
    >>> run_split(split_initializer(traced, [None, None]))
    {0: Array([0., 0.], dtype=float32), 1: Array(1.5, dtype=float32, weak_type=True)}
    """
    return _Run(split).run()


class _Run:
    def __init__(self, split: SplitInitializer) -> None:
        self.split = split
        self.everywhere: Sharding | None = None
        self.one_device: Sharding | None = None
        self.on_cpu = False
        meshes = [s.mesh for s in split.shardings.values() if isinstance(s, NamedSharding)]
        if meshes:
            self.everywhere = NamedSharding(meshes[0], PartitionSpec())
            # Of several processes, each computes the same on a device of its own.
            device = meshes[0].local_devices[0]
            self.one_device = SingleDeviceSharding(device)
            self.on_cpu = device.platform == "cpu"
        self.values: dict[int, Any] = dict(split.constants)
        self.results: dict[int, jax.Array] = {}
        self._placements: dict[tuple[int, Sharding], jax.Array] = {}
        self._in_flight: list[jax.Array] = []
        self._bytes_in_flight = 0
        self._allowed_in_flight = max(
            [_SMALL_IN_FLIGHT, *(_output_bytes(program) for program in split.programs)]
        )

    def run(self) -> dict[int, jax.Array]:
        functions = self._compile_all()
        for program, member in self.split.ahead:
            outputs = self._call(functions[id(program)], program, member)
            self.values.update(zip(member.values, outputs, strict=True))
        # The largest first, so that their temporaries go before the rest of the model comes.
        for program in sorted(self.split.programs, key=_output_bytes, reverse=True):
            function = functions.pop(id(program))
            for member in program.members:
                if not member.values:
                    self._finish(program, member, self._call(function, program, member))
        self._put_available()
        return {position: self.results[position] for position in self.split.wanted}

    def _compile_all(self) -> dict[int, Callable[..., list[jax.Array]]]:
        """Every program, compiled; several at a time, as compiling leaves Python's lock."""
        lowered = [self._lower(program) for program in self.split.programs]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = list(pool.map(self._compile, lowered))
        return {
            id(program): function
            for program, function in zip(self.split.programs, compiled, strict=True)
        }

    def _compile(self, lowered: Any) -> Callable[..., list[jax.Array]]:
        return lowered.compile(_CPU_COMPILER_OPTIONS if self.on_cpu else None)

    def _lower(self, program: Program) -> Any:
        run_jaxpr = jex_core.jaxpr_as_fun(program.jaxpr)

        def initialize(*arguments: Any) -> list[Any]:
            return list(run_jaxpr(*arguments))

        shardings: Any = None
        if self.everywhere is not None:
            shardings = self.one_device if program.on_one_device else list(program.shardings)
        member = program.members[0]
        types = map(self.split.types.__getitem__, member.inputs)
        arguments = [
            jax.ShapeDtypeStruct(
                aval.shape,
                aval.dtype,
                sharding=self._target(number, program),
                weak_type=aval.weak_type,
            )
            for number, aval in zip(member.inputs, types, strict=True)
        ]
        return jax.jit(initialize, out_shardings=shardings).lower(*arguments, *member.integers)

    def _call(
        self, function: Callable[..., list[jax.Array]], program: Program, member: Member
    ) -> list[jax.Array]:
        arguments = [self._placed(number, program) for number in member.inputs]
        return function(*arguments, *member.integers)

    def _target(self, number: int, program: Program) -> Sharding | None:
        """Where a program reads a constant or a value computed ahead."""
        if program.on_one_device:
            return self.one_device
        # An array of a result's shape is most likely read element by element: it is put as that
        # result lies, so that no device gets the whole of a large array.
        shape = self.split.types[number].shape
        for aval, sharding in zip(program.jaxpr.out_avals, program.shardings, strict=True):
            if shape and aval.shape == shape and sharding is not None:
                return sharding
        return self.everywhere

    def _placed(self, number: int, program: Program) -> Any:
        target = self._target(number, program)
        if target is None:
            return self.values[number]
        placed = self._placements.get((number, target))
        if placed is None:
            placed = jax.device_put(self.values[number], target)
            self._placements[number, target] = placed
        return placed

    def _finish(self, program: Program, member: Member, outputs: list[jax.Array]) -> None:
        outputs.reverse()
        for position, sharding in zip(member.positions, program.shardings, strict=True):
            output = outputs.pop()
            size = _SIZE_IN_THE_MAKING * _byte_count(output.aval)
            if program.on_one_device and sharding is not None:
                output = jax.device_put(output, sharding)
            self.results[position] = output
            self._in_flight.append(output)
            self._bytes_in_flight += size
        if self._bytes_in_flight >= self._allowed_in_flight:
            jax.block_until_ready(self._in_flight)
            self._in_flight = []
            self._bytes_in_flight = 0

    def _put_available(self) -> None:
        """Outputs that are literals, constants, or values computed ahead."""
        literals: dict[int, jex_core.Literal] = {}
        for position, atom in self.split.available.items():
            if isinstance(atom, int):
                self.results[position] = _own_copy(
                    self.values[atom], self.split.shardings[position]
                )
            else:
                literals[position] = atom
        targets = [self.split.shardings[position] for position in literals]
        arrays = jax.device_put(_literal_arrays(list(literals.values())), targets)
        self.results.update(zip(literals, arrays, strict=True))


def _own_copy(value: Any, sharding: Sharding | None) -> jax.Array:
    """A value laid out as asked, in buffers of its own.

    A train step that donates the model must not delete an argument of the initialiser.
    """
    placed = jax.device_put(value, sharding)
    # Not in one step: spreading an array over devices uses the buffer that it has on one of them,
    # even if told not to.
    return jax.device_put(placed, placed.sharding, may_alias=False)


def _literal_arrays(literals: Sequence[jex_core.Literal]) -> list[jax.Array]:
    """One array for each literal, of exactly its type, a weak one included."""
    if not literals:
        return []
    jaxpr = build_jaxpr([], [], literals, lambda number: None, {})
    return list(jax.jit(jex_core.jaxpr_as_fun(jaxpr))())


def _output_bytes(program: Program) -> int:
    return sum(map(_byte_count, program.jaxpr.out_avals))


def _byte_count(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)
