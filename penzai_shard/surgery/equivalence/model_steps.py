"""One call of a model with its gradients, compiled to run as it is and in float64."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.library_apis.jax_api import UNOPTIMISED_COMPILATION
from penzai_shard.meshes import onto_auto_twin
from penzai_shard.processes import is_on_this_process
from penzai_shard.surgery.equivalence.comparable_arrays import (
    canonical_leaves,
    epsilon_of,
    is_float,
    to_numpy,
    widest,
)
from penzai_shard.surgery.equivalence.model_calls import ModelCall, with_values_of
from penzai_shard.surgery.equivalence.named_values import drawn
from penzai_shard.surgery.equivalence.program_constants import (
    Constants,
    constants_of,
    epsilons_of,
)
from penzai_shard.surgery.equivalence.random_rounding import (
    WIDEST_EPSILON,
    Rounding,
    scattered_numbers,
)
from penzai_shard.surgery.equivalence.tapping import Recorder, Recording, tapped
from penzai_shard.surgery.equivalence.wider_arithmetic import WiderRun, as_widest
from penzai_shard.surgery.equivalence.yardsticks import errors_of

OUTPUTS, STATE, GRADIENTS = "outputs", "state variables", "gradients"

_COTANGENT_SEED = 20240229
_ROUNDED_RUNS = 4
_MAGNIFIED = 2.0**20

Results = dict[tuple[str, str], Any]
"""Outputs, state variables after the call, and gradients: arrays by group and name."""


class ModelStep:
    """One call of a model: outputs, state and gradients by name.

    Args:
        call: The model and its inputs; values that it lacks are drawn.
        gradients: Whether to compute gradients of all parameters, of the sum of the outputs times
            fixed random numbers.
        original: For an edited model, the original's step, whose parameters and state it is run on.
        callbacks: Whether to call back to the host in float64 too, where the model does.

    Attributes:
        arguments: The parameters, state variables and other arrays, flat.
        program: The traced program.
        structure: The structure of its results.
        epsilons: The machine epsilons of all dtypes that it rounds to.
    """

    def __init__(
        self,
        call: ModelCall,
        gradients: bool,
        original: "ModelStep | None" = None,
        callbacks: bool = False,
    ) -> None:
        self.gradients, self.original, self.callbacks = gradients, original, callbacks
        self._call = call
        self._named = [
            {name: drawn(name, value) for name, value in values.items()}
            for values in (call.parameters, call.state)
        ]
        if original is not None:
            self._named = list(map(with_values_of, self._named, original._named))
        # Names may be of any type, and JAX sorts the keys of a dictionary.
        self._values = onto_auto_twin(
            tuple(list(values.values()) for values in (*self._named, call.arrays))
        )
        self._traced = jax.jit(_step(call, gradients)).trace(*self._values)
        self.arguments: list[Any] = jax.tree_util.tree_leaves(self._values)
        self.program = self._traced.jaxpr
        self.structure = jax.tree_util.tree_structure(self._traced.out_info)
        self.epsilons = epsilons_of(self.program)

    @functools.cached_property
    def _compiled(self) -> Any:
        return self._traced.lower().compile()

    @functools.cached_property
    def results(self) -> Results:
        """What the step computes as it is."""
        results = self._run(self._values)
        jax.effects_barrier()
        return results

    @functools.cached_property
    def wider(self) -> "WiderStep":
        """The step in float64."""
        return WiderStep(self)

    def recordings(self, in_float64: bool) -> dict[str, Recording]:
        """What goes through the model's layers, by path, as they are or in float64."""
        recorder = Recorder()
        call = ModelCall(tapped(self._call.model, recorder), *self._call.inputs)
        step = ModelStep(call, gradients=False, original=self.original, callbacks=True)
        _ = step.wider.results if in_float64 else step.results
        return recorder.recordings

    @functools.cached_property
    def constants(self) -> Constants:
        """The constants that are written into the step's program."""
        return Constants(constants_of(self.program))

    def _run(self, values: Any) -> Results:
        return jax.tree_util.tree_map(to_numpy, self._compiled(*values))

    def rounding_errors(self, in_float64: bool, coarsest: float = 0.0) -> Results:
        """How far rounding moves each element of the results that are real numbers.

        Args:
            in_float64: Whether to measure it in float64, with every operation rounded at random;
                otherwise the step runs as it is, on arguments disturbed by what they are rounded.
            coarsest: The machine epsilon to round to where a dtype's own is finer.
        """
        if not in_float64:
            disturbed = (self._disturbed(seed, coarsest) for seed in range(_ROUNDED_RUNS))
            return largest_errors(self.results, map(self._run, disturbed))
        # What float64 itself rounds is too small to be added to a float64 number.
        is_widest = max([coarsest, *self.epsilons], default=0.0) <= WIDEST_EPSILON
        scale = _MAGNIFIED if is_widest else 1.0
        runs = self.wider.rounded(_ROUNDED_RUNS, coarsest, scale)
        rounded = largest_errors(self.wider.results, runs)
        measured = largest_errors(self.wider.results, [self.results])
        return {key: np.maximum(rounded[key] / scale, error) for key, error in measured.items()}

    def _disturbed(self, seed: int, coarsest: float) -> Any:
        """The step's values, disturbed by as much as they are rounded."""
        draw = np.random.default_rng(seed)

        def disturbed(array: Any) -> Any:
            if not is_float(array):
                return array
            size = 2 * max(epsilon_of(array), coarsest)
            factors = 1 + size * draw.uniform(-1, 1, array.shape)
            moved = (array * factors).astype(array.dtype)
            return jax.device_put(moved, array.sharding) if isinstance(array, jax.Array) else moved

        return jax.tree_util.tree_map(disturbed, self._values)


class WiderStep:
    """A step compiled in float64, whose roundings can be disturbed; see ``wider_arithmetic``.

    Args:
        step: The step. Of an edited model's only the constants that it brings in are disturbed.

    Attributes:
        opaque: The operations in it that run in their own dtypes all the same.
        has_new_constants: Whether it has constants that the original has not.
    """

    def __init__(self, step: ModelStep) -> None:
        self._structure = step.structure
        constants, arguments, new = None, step.arguments, frozenset[int]()
        if step.original is not None:
            constants = step.original.constants
            arguments, new = _read_as_the_originals(arguments, step.original.arguments)

        def run(arguments: Sequence[Any], rounding: Rounding) -> list[Any]:
            wider = WiderRun(rounding, constants, step.callbacks)
            results = wider.results(step.program, arguments, new)
            self.opaque, self.has_new_constants = wider.opaque, wider.has_new_constants
            return results

        with jax.enable_x64(True):
            self._arguments = list(map(as_widest, arguments))
            lowered = jax.jit(run).lower(self._arguments, Rounding.of())
            self._compiled = lowered.compile(compiler_options=UNOPTIMISED_COMPILATION)

    @functools.cached_property
    def results(self) -> Results:
        """What the step computes in float64."""
        return self._run(Rounding.of())

    def rounded(self, runs: int, coarsest: float = 0.0, scale: float = 1.0) -> Iterator[Results]:
        """What it computes with its roundings disturbed.

        Args:
            runs: How often to run it, each time with other roundings.
            coarsest: The machine epsilon to round to where a dtype's own is finer.
            scale: How large the roundings are, in those of the dtypes.
        """
        for seed in range(runs):
            yield self._run(Rounding.of(seed + 1, scale, coarsest))

    def _run(self, rounding: Rounding) -> Results:
        with jax.enable_x64(True):
            flat = [to_numpy(array) for array in self._compiled(self._arguments, rounding)]
            jax.effects_barrier()
        return jax.tree_util.tree_unflatten(self._structure, flat)


def largest_errors(exact: Results, runs: Iterable[Results]) -> Results:
    """The largest error of each element over some runs, for all arrays of real numbers."""
    runs = list(runs)
    return {
        key: errors_of(widest(array), [run[key] for run in runs])
        for key, array in exact.items()
        if is_float(array)
    }


def _read_as_the_originals(
    arguments: Sequence[Any], originals: Sequence[Any]
) -> tuple[list[Any], frozenset[int]]:
    """Arrays of an edited model, each as the original has it, and which ones are new."""
    known = {id(array) for array in originals}
    unknown = {
        number: array
        for number, array in enumerate(arguments)
        if id(array) not in known and is_float(array) and is_on_this_process(array)
    }
    read, new = list(arguments), set()
    if not unknown:
        return read, frozenset()
    constants = Constants(
        to_numpy(array) for array in originals if is_float(array) and is_on_this_process(array)
    )
    for number, array in unknown.items():
        wide, is_new = constants.read(to_numpy(array))
        if is_new:
            new.add(number)
        elif isinstance(array, jax.Array) and array.committed:
            read[number] = jax.device_put(wide, array.sharding)
        else:
            read[number] = wide
    return read, frozenset(new)


def _step(call: ModelCall, gradients: bool) -> Callable[..., Results]:
    """A function that runs a model, and gives outputs, state and gradients by name."""

    def outputs_of(parameters: list[Any], state: list[Any], arrays: list[Any]) -> Any:
        output, new_state = call(parameters, state, arrays)
        leaves = canonical_leaves(output)
        total = _weighted_sum([array for _, array in leaves]) if gradients else None
        return total, _grouped(OUTPUTS, leaves) | _grouped(STATE, _flat_names(new_state))

    def step(parameters: list[Any], state: list[Any], arrays: list[Any]) -> Results:
        if not gradients:
            return outputs_of(parameters, state, arrays)[1]
        found, results = jax.grad(outputs_of, has_aux=True, allow_int=True)(
            parameters, state, arrays
        )
        named = _flat_names(dict(zip(call.parameters, found, strict=True)))
        return results | _grouped(
            GRADIENTS, [(name, g) for name, g in named if g.dtype != jax.dtypes.float0]
        )

    return step


def _grouped(group: str, named: Iterable[tuple[str, Any]]) -> Results:
    """Named arrays as results of a group; of several with one name the later ones are numbered."""
    results: Results = {}
    for name, array in named:
        own, number = name, 1
        while (group, own) in results:
            number += 1
            own = f"{name} ({number})"
        results[group, own] = array
    return results


def _flat_names(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The arrays of named trees, each by the name of its tree and its path in it."""
    for name, value in values.items():
        for path, array in canonical_leaves(value):
            yield _joined(str(name), path), array


def _joined(name: str, path: str) -> str:
    return name if not path or path == name else path if path.startswith(name) else f"{name}/{path}"


def _weighted_sum(arrays: Sequence[Any]) -> Any:
    """The sum of all elements times random numbers that depend on their places alone."""
    total: Any = jnp.float32(0)
    for index, array in enumerate(arrays):
        if not is_float(array):
            continue
        weights = scattered_numbers(_COTANGENT_SEED + index, array.shape)
        at_least = jnp.promote_types(jnp.finfo(array.dtype).dtype, jnp.float32)
        part = jnp.sum(jnp.real(array).astype(at_least) * weights)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            part += jnp.sum(jnp.imag(array).astype(at_least) * weights)
        total = total + part
    return total
