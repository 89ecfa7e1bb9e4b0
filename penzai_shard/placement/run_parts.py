"""Compiles the parts of a split initialiser, and runs them where their outputs belong.

An exact part runs on all devices of the mesh, each making its own piece. Any other part (one with
a sum of floats, such as ``qr``) runs on one device and its outputs are spread afterwards, so that
values have the same bits on every mesh.
"""

import concurrent.futures
import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penzai_shard.arrays.kinds import is_key_type
from penzai_shard.jax_internals.tracing import ClosedJaxpr, Var, is_weak_type, jaxpr_as_fun
from penzai_shard.placement.split_program import (
    MOST_SMALL_ELEMENTS,
    Part,
    SplitProgram,
    split_program,
)
from penzai_shard.processes.arrays import put

# Bytes that may always be in the making: waiting for each small array takes longer than making it.
_LEAST_IN_FLIGHT = 2**24
# Random numbers need about three times their own size while they are made.
_SIZE_IN_THE_MAKING = 4
# The later passes of XLA's CPU compiler cost more than they save in programs that run a few times.
# Exact programs have the same bits at level 1 as at the default. At level 0, which forms no fused
# multiply-adds, they have not; nor have sums of floats at level 1 since jaxlib 0.11.
_QUICK_COMPILATION: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}


def run_initializer(
    traced: ClosedJaxpr, shardings: Mapping[int, Sharding | None]
) -> dict[int, jax.Array]:
    """Runs a traced initialiser part by part, each output computed where it belongs.

    Beyond the outputs that are done, memory is needed for outputs in the making that together are
    about as large as the largest one.

    Args:
        traced: The initialiser, without arguments: what it reads are its constants.
        shardings: The sharding of each output to compute, by its number: all on one mesh, or all
            ``None``, where JAX may choose.

    Returns:
        These outputs by number. Their buffers are their own, also where the initialiser returns an
        array twice, or one that it was given.

    >>> import jax
    >>> traced = jax.make_jaxpr(lambda: (jax.numpy.zeros(2), jax.numpy.ones((64, 64)), 1.5))()
    >>> run_initializer(traced, {0: None, 2: None})
    {0: Array([0., 0.], dtype=float32), 2: Array(1.5, dtype=float32, weak_type=True)}
    """
    with _outside_any_mesh():
        split = split_program(traced, shardings)
        outputs = _Run(split, shardings).outputs() | _place_known(split.known, shardings)
    return {number: outputs[number] for number in shardings}


@contextlib.contextmanager
def _outside_any_mesh() -> Iterator[None]:
    """Leaves the mesh of ``jax.set_mesh``, which parts that run on one device would contradict."""
    if jax.sharding.get_mesh().empty:
        yield
        return
    with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
        yield


# What a program takes for an input: the array; or the stack that it is in, and its place there.
_Input = tuple[jax.Array, int | None]


def _stack(arrays: Sequence[Any]) -> Any:
    """Arrays of one type as one, made on the host: a program would have as many operands."""
    if not is_key_type(arrays[0].dtype):
        return np.stack([np.asarray(array) for array in arrays])
    data: Any = np.stack([np.asarray(jax.random.key_data(key)) for key in arrays])
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(arrays[0]))


def _put(arrays: Sequence[Any], shardings: Sequence[Sharding | None]) -> list[jax.Array]:
    """``put``, where shardings may all be ``None``."""
    chosen = [sharding for sharding in shardings if sharding is not None]
    return put(arrays, chosen) if chosen else list(jax.device_put(list(arrays)))


class _Run:
    """The run of a split initialiser: where inputs and outputs of its parts lie."""

    def __init__(self, split: SplitProgram, shardings: Mapping[int, Sharding | None]) -> None:
        self.parts = split.parts
        self.shardings = shardings
        meshes = [s.mesh for s in shardings.values() if isinstance(s, NamedSharding)]
        self.everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        # Of several processes, each computes the same on a device of its own.
        device = meshes[0].local_devices[0] if meshes else jax.local_devices()[0]
        self.one_device = SingleDeviceSharding(device) if meshes else None
        self.platform = device.platform
        self.inputs = self._place_inputs(split.values)

    def outputs(self) -> dict[int, jax.Array]:
        """Computes the outputs of all parts, of which few are in the making at a time."""
        programs = self._compile()
        outputs: dict[int, jax.Array] = {}
        in_the_making: list[jax.Array] = []
        size = largest = 0
        for part in self.parts:
            made = programs[self._signature(part)](*self._inputs_of(part))
            if not part.is_exact:
                made = _put(made, [self.shardings[number] for number in part.outputs])
            outputs.update(zip(part.outputs, made, strict=True))

            # Wait before memory is needed for more than about one large array besides.
            in_the_making += made
            made_size = sum(array.nbytes for array in made)
            largest = max(largest, made_size)
            size += _SIZE_IN_THE_MAKING * made_size
            if size > max(_LEAST_IN_FLIGHT, largest):
                jax.block_until_ready(in_the_making)
                in_the_making, size = [], 0
        return outputs

    # Inputs

    def _place_inputs(self, values: Mapping[Var, Any]) -> dict[Any, _Input]:
        """Places what the parts take, small arrays of one type as one stack.

        Placing 674 keys one by one took 0.6 of the 3.8 s for 96 blocks.
        """
        # Arrays with a weak type are placed by themselves, since a stack has none.
        inputs: dict[Any, _Input] = {}
        stacks: dict[Any, list[Var]] = {}
        pairs = ((v, self._sharding_of(v, p)) for p in self.parts for v in p.program.jaxpr.invars)
        for variable, sharding in dict.fromkeys(pairs):
            aval: Any = variable.aval
            if aval.size <= MOST_SMALL_ELEMENTS and not is_weak_type(aval):
                stacks.setdefault((aval.shape, aval.dtype, sharding), []).append(variable)
            else:
                (array,) = _put([values[variable]], [sharding])
                inputs[variable, sharding] = array, None

        for (_, _, sharding), variables in stacks.items():
            (stack,) = _put([_stack([values[v] for v in variables])], [sharding])
            inputs.update({(v, sharding): (stack, place) for place, v in enumerate(variables)})
        return inputs

    def _inputs_of(self, part: Part) -> list[_Input]:
        return [self.inputs[v, self._sharding_of(v, part)] for v in part.program.jaxpr.invars]

    def _sharding_of(self, variable: Var, part: Part) -> Sharding | None:
        """The sharding in which a part takes an input."""
        if not part.is_exact:
            return self.one_device
        # A large input of an output's shape is most likely read element by element: it lies as
        # that output, so that no device gets the whole of it.
        aval: Any = variable.aval
        for number, output in zip(part.outputs, part.program.out_avals, strict=True):
            if aval.size > MOST_SMALL_ELEMENTS and output.shape == aval.shape:
                return self.shardings[number]
        return self.everywhere

    # Programs

    def _compile(self) -> dict[Hashable, jax.stages.Compiled]:
        """Compiles a program for all parts that do the same and lie the same."""

        def compile_one(part: Part, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            is_quick = part.is_exact and self.platform == "cpu"
            return lowered.compile(_QUICK_COMPILATION if is_quick else None)

        distinct = {self._signature(part): part for part in self.parts}
        # In threads, since XLA leaves Python's lock. Lowering does not, and happens in this one.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            lowered = map(self._lower, distinct.values())
            compiled = pool.map(compile_one, distinct.values(), lowered)
            return dict(zip(distinct, compiled, strict=True))

    def _signature(self, part: Part) -> Hashable:
        return part.key, tuple(self.shardings[number] for number in part.outputs)

    def _lower(self, part: Part) -> jax.stages.Lowered:
        run = jaxpr_as_fun(part.program)

        def initialize(*inputs: _Input) -> Any:
            return run(*(x if i is None else index(x, i, keepdims=False) for x, i in inputs))

        index = jax.lax.dynamic_index_in_dim
        shardings: Any = [self.shardings[number] for number in part.outputs]
        jitted = jax.jit(initialize, out_shardings=shardings if part.is_exact else self.one_device)
        return jitted.lower(*self._inputs_of(part))


def _place_known(
    known: Mapping[int, Any], shardings: Mapping[int, Sharding | None]
) -> dict[int, jax.Array]:
    """Copies of constants, literals and small values, each with its sharding."""
    arrays = _put([*known.values()], [shardings[number] for number in known])
    placed = dict(zip(known, arrays, strict=True))
    # Not in one step: spreading an array reuses the buffer that it has on one device, whatever
    # may_alias says, and a train step that donates the model would delete the caller's array.
    for number, array in placed.items():
        # JAX copies no typed keys of several processes, and ``put`` has made new ones.
        if array.is_fully_addressable or not is_key_type(array.dtype):
            placed[number] = jax.device_put(array, shardings[number], may_alias=False)
    return placed
