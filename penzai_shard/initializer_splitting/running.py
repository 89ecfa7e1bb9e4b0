"""Compiling and running the programs of a split initialiser."""

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
        meshes = [s.mesh for s in split.shardings.values() if isinstance(s, NamedSharding)]
        if meshes:
            self.everywhere = NamedSharding(meshes[0], PartitionSpec())
            # Of several processes, each computes the same on a device of its own.
            self.one_device = SingleDeviceSharding(meshes[0].local_devices[0])
        self.values: dict[int, Any] = dict(split.constants)
        self.results: dict[int, jax.Array] = {}
        self._placed: dict[tuple[int, Sharding], jax.Array] = {}
        self._in_flight: list[jax.Array] = []
        self._bytes_in_flight = 0
        self._allowed_in_flight = max(
            _SMALL_IN_FLIGHT,
            *(_byte_count(aval) for program in split.programs for aval in program.jaxpr.out_avals),
            0,
        )

    def run(self) -> dict[int, jax.Array]:
        functions = {id(program): self._function(program) for program in self.split.programs}
        for program, member in self.split.ahead:
            outputs = self._call(functions[id(program)], program, member)
            self.values.update(zip(member.values, outputs, strict=True))
        for program in self.split.programs:
            for member in program.members:
                if not member.values:
                    outputs = self._call(functions[id(program)], program, member)
                    self._finish(program, member, outputs)
        self._put_available()
        return {position: self.results[position] for position in self.split.wanted}

    def _function(self, program: Program) -> Callable[..., list[jax.Array]]:
        run_jaxpr = jex_core.jaxpr_as_fun(program.jaxpr)

        def initialize(*arguments: Any) -> list[Any]:
            return list(run_jaxpr(*arguments))

        if self.everywhere is None:
            return jax.jit(initialize)
        if program.on_one_device:
            return jax.jit(initialize, out_shardings=self.one_device)
        return jax.jit(initialize, out_shardings=list(program.shardings))

    def _call(
        self, function: Callable[..., list[jax.Array]], program: Program, member: Member
    ) -> list[jax.Array]:
        arguments = [self._argument(number, program) for number in member.inputs]
        return function(*arguments, *member.integers)

    def _argument(self, number: int, program: Program) -> Any:
        """A constant or a value computed ahead, put where a program reads it."""
        target = self.one_device if program.on_one_device else self.everywhere
        if target is None:
            return self.values[number]
        if not program.on_one_device:
            # An array of the result's shape is most likely read element by element: it is put as
            # the result lies, so that no device gets the whole of a large array.
            shape = self.split.types[number].shape
            for aval, sharding in zip(program.jaxpr.out_avals, program.shardings, strict=True):
                if shape and aval.shape == shape and sharding is not None:
                    target = sharding
                    break
        placed = self._placed.get((number, target))
        if placed is None:
            placed = jax.device_put(self.values[number], target)
            self._placed[number, target] = placed
        return placed

    def _finish(self, program: Program, member: Member, outputs: list[jax.Array]) -> None:
        outputs.reverse()
        for position, sharding in zip(member.positions, program.shardings, strict=True):
            output = outputs.pop()
            size = _byte_count(output.aval)
            if program.on_one_device and sharding is not None:
                output = jax.device_put(output, sharding)
                size *= 2  # until the copy is done, the array on one device exists as well
            self.results[position] = output
            self._in_flight.append(output)
            self._bytes_in_flight += size
        if self._bytes_in_flight >= self._allowed_in_flight:
            jax.block_until_ready(self._in_flight)
            self._in_flight = []
            self._bytes_in_flight = 0

    def _put_available(self) -> None:
        """Outputs that are literals, constants, or values computed ahead."""
        positions = list(self.split.available)
        atoms = list(self.split.available.values())
        literals = _literal_arrays([a for a in atoms if isinstance(a, jex_core.Literal)])
        arrays = [self.values[atom] if isinstance(atom, int) else literals.pop(0) for atom in atoms]
        targets = [self.split.shardings[position] for position in positions]
        # Not aliased: a train step that donates the model must not delete somebody's argument.
        placed = jax.device_put(arrays, targets, may_alias=False)
        self.results.update(zip(positions, placed, strict=True))


def _literal_arrays(literals: Sequence[jex_core.Literal]) -> list[jax.Array]:
    """Arrays of exactly the literals' types, weak ones included."""
    if not literals:
        return []
    jaxpr = build_jaxpr([], [], literals, lambda number: None, {})
    return list(jax.jit(jex_core.jaxpr_as_fun(jaxpr))())


def _byte_count(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)
