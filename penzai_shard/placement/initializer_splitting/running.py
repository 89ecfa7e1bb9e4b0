"""Compiling and running the programs of a split initialiser."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penzai_shard.library_apis.jax_api import (
    LITTLE_OPTIMISED_COMPILATION,
    Var,
    is_weakly_typed,
    jaxpr_as_fun,
)
from penzai_shard.placement.initializer_splitting.equation_traits import byte_count
from penzai_shard.placement.initializer_splitting.grouping import Call, Program, SplitInitializer
from penzai_shard.processes import is_on_this_process, put_all

# So many bytes may always be in the making at once: waiting for each of many small arrays would
# take longer than computing them.
_SMALL_IN_FLIGHT = 2**24
# Random numbers need about three times their own size while they are made.
_SIZE_IN_THE_MAKING = 4


def run_split(split: SplitInitializer) -> dict[int, jax.Array]:
    """Compiles each program once and runs it for each of its calls.

    At any time there are, beyond the outputs that are done, only outputs in the making that
    together are about as large as the largest one.

    Args:
        split: A split initialiser. Its shardings, where given, are all on one mesh.

    Returns:
        The outputs by position, each laid out exactly as asked. Their buffers are their own, also
        where the initialiser returned one array twice, or one of its arguments.

    >>> from penzai_shard.placement.initializer_splitting.flat_programs import flat_program
    >>> from penzai_shard.placement.initializer_splitting.grouping import split_initializer
    >>> flat = flat_program(jax.make_jaxpr(lambda: (jax.numpy.zeros(2), 1.5))())
    >>> run_split(split_initializer(flat, {0: None, 1: None}))
    {0: Array([0., 0.], dtype=float32), 1: Array(1.5, dtype=float32, weak_type=True)}
    """
    return _Run(split).run()


class _Run:
    def __init__(self, split: SplitInitializer) -> None:
        self.split = split
        self.everywhere: Sharding | None = None
        self.one_device: Sharding | None = None
        self.compiler_options = None
        meshes = [s.mesh for s in split.shardings.values() if isinstance(s, NamedSharding)]
        if meshes:
            self.everywhere = NamedSharding(meshes[0], PartitionSpec())
            # Of several processes, each computes the same on a device of its own.
            device = meshes[0].local_devices[0]
            self.one_device = SingleDeviceSharding(device)
            self.compiler_options = (
                LITTLE_OPTIMISED_COMPILATION if device.platform == "cpu" else None
            )
        # By variable, or by position for outputs.
        self.values: dict[Any, Any] = dict(split.constants)
        self._placements: dict[tuple[Var, Sharding], jax.Array] = {}

    def run(self) -> dict[int, jax.Array]:
        functions = self._compile_all()
        in_flight: list[jax.Array] = []
        bytes_in_flight = 0
        largest = max((byte_count(program.traced.out_avals) for program in functions), default=0)
        for call in self.split.calls:
            in_flight += self._call(functions[call.program], call)
            bytes_in_flight += _SIZE_IN_THE_MAKING * byte_count(call.program.traced.out_avals)
            if bytes_in_flight >= max(_SMALL_IN_FLIGHT, largest):
                jax.block_until_ready(in_flight)
                in_flight, bytes_in_flight = [], 0
        for position, variable in self.split.available.items():
            sharding = self.split.shardings[position]
            self.values[position] = _own_copy(self.values[variable], sharding)
        return {position: self.values[position] for position in self.split.shardings}

    def _compile_all(self) -> dict[Program, Callable[..., list[jax.Array]]]:
        """Every program, compiled; several at a time, as compiling leaves Python's lock."""
        first_calls = {call.program: call for call in reversed(self.split.calls)}
        lowered = [self._lower(call) for call in first_calls.values()]
        # Programs on one device may sum, and since jaxlib 0.11 the order depends on the level.
        options = [None if one.on_one_device else self.compiler_options for one in first_calls]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda one, chosen: one.compile(chosen), lowered, options)
            return dict(zip(first_calls, compiled, strict=True))

    def _lower(self, call: Call) -> Any:
        program = call.program
        run_jaxpr = jaxpr_as_fun(program.traced)

        def initialize(*arguments: Any) -> list[Any]:
            return list(run_jaxpr(*arguments))

        shardings: Any = None
        if self.everywhere is not None:
            shardings = self.one_device if program.on_one_device else list(program.shardings)
        arguments = [self._argument(variable, program) for variable in call.arguments]
        return jax.jit(initialize, out_shardings=shardings).lower(*arguments, *call.integers)

    def _argument(self, variable: Var, program: Program) -> jax.ShapeDtypeStruct:
        aval: Any = variable.aval
        layout = self._layout_read(variable, program)
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=layout, weak_type=is_weakly_typed(aval)
        )

    def _call(self, function: Callable[..., list[jax.Array]], call: Call) -> list[jax.Array]:
        arguments = [self._placed(variable, call.program) for variable in call.arguments]
        outputs = function(*arguments, *call.integers)
        for index, sharding in enumerate(call.program.shardings):
            if call.program.on_one_device and sharding is not None:
                # One by one, so that each goes from the one device before the next is spread.
                outputs[index] = _put(outputs[index], sharding)
        self.values.update(zip(call.results, outputs, strict=True))
        return outputs

    def _layout_read(self, variable: Var, program: Program) -> Sharding | None:
        """The layout in which a program reads a constant or a value computed before."""
        if program.on_one_device:
            return self.one_device
        # An array of a result's shape is most likely read element by element: it is laid out as
        # that result, so that no device gets the whole of a large array.
        shape = getattr(variable.aval, "shape", ())
        for aval, sharding in zip(program.traced.out_avals, program.shardings, strict=True):
            if shape and aval.shape == shape and sharding is not None:
                return sharding
        return self.everywhere

    def _placed(self, variable: Var, program: Program) -> Any:
        layout = self._layout_read(variable, program)
        if layout is None:
            return self.values[variable]
        if (variable, layout) not in self._placements:
            placed = _put(self.values[variable], layout)
            self._placements[variable, layout] = placed
        return self._placements[variable, layout]


def _own_copy(value: Any, sharding: Sharding | None) -> jax.Array:
    """A value laid out as asked, in buffers of its own.

    A train step that donates the model must not delete an argument of the initialiser.
    """
    placed = _put(value, sharding)
    if not placed.is_fully_addressable:
        return jax.jit(jax.numpy.copy, out_shardings=placed.sharding)(placed)
    # Not in one step: spreading an array over devices reuses the buffer that it has on one of
    # them, whatever ``may_alias`` says.
    return jax.device_put(placed, placed.sharding, may_alias=False)


def _put(value: Any, sharding: Sharding | None) -> jax.Array:
    """A value laid out as asked, also if it is on devices of several processes, or is to be."""
    if sharding is None or jax.process_count() == 1:
        return jax.device_put(value, sharding)
    if sharding.is_fully_addressable and not is_on_this_process(value):
        # For a program that runs on one device of every process: each takes its own copy.
        everywhere = NamedSharding(value.sharding.mesh, PartitionSpec())
        value = jax.device_put(value, everywhere).addressable_data(0)
    placed: jax.Array
    (placed,) = put_all(
        [value], [sharding], lambda: ["an array of the initialiser"], "the initialiser"
    )
    return placed
