"""One call of a model with its gradients, compiled to run as it is and in float64."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.meshes import onto_auto_twin
from penzai_shard.surgery.equivalence.differences import canonical_leaves, to_numpy
from penzai_shard.surgery.equivalence.model_calls import ModelCall, with_values_of
from penzai_shard.surgery.equivalence.program_constants import Constants, constants_of, is_float
from penzai_shard.surgery.equivalence.wider_arithmetic import (
    Rounding,
    WiderProgram,
    epsilons_of,
    exact,
    scattered_numbers,
)

_COTANGENT_SEED = 20240229

# The run in float64 is short: time spent on making its code faster would be lost.
_FASTER_COMPILATION: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}

Named = dict[str, Any]
Results = tuple[Named, Named, Named]
"""Outputs, state variables after the call, and gradients, each by name."""


class ModelStep:
    """One call of a model: outputs, state and gradients by name.

    Args:
        call: The model and its inputs.
        original: The call whose parameters and state to run it on.
        gradients: Whether to compute gradients of all parameters, of the sum of the outputs times
            fixed random numbers.

    Attributes:
        arguments: The parameters, state variables and other arrays, flat.
        epsilons: The machine epsilons of all dtypes that the step rounds to.
    """

    def __init__(self, call: ModelCall, original: ModelCall, gradients: bool) -> None:
        self._values = _values(call, original)
        self.arguments: list[Any] = jax.tree_util.tree_leaves(self._values)
        self._traced = jax.jit(_step(call, gradients)).trace(*self._values)
        self._structure = jax.tree_util.tree_structure(self._traced.out_info)
        self.epsilons = epsilons_of(self._traced.jaxpr.jaxpr)

    @functools.cached_property
    def _compiled(self) -> Any:
        return self._traced.lower().compile()

    @functools.cached_property
    def constants(self) -> list[np.ndarray]:
        """The constants that are written into the step's program."""
        return constants_of(self._traced.jaxpr)

    def run(self) -> Results:
        """Runs the step as it is."""
        results = jax.tree_util.tree_map(to_numpy, self._compiled(*self._values))
        jax.effects_barrier()
        return results

    def run_disturbed(self, seed: int, least: float = 0.0) -> Results:
        """Runs the step on arguments disturbed by as much as they, or all, are rounded.

        Args:
            seed: Decides how.
            least: The machine epsilon to disturb them by where their own is smaller.
        """
        draw = np.random.default_rng(seed)

        def disturbed(array: Any) -> Any:
            if not is_float(array):
                return array
            size = 2 * max(float(jnp.finfo(array.dtype).eps), least)
            factors = 1 + size * draw.uniform(-1, 1, array.shape)
            moved = (array * factors).astype(array.dtype)
            return jax.device_put(moved, array.sharding) if isinstance(array, jax.Array) else moved

        values = jax.tree_util.tree_map(disturbed, self._values)
        return jax.tree_util.tree_map(to_numpy, self._compiled(*values))

    def wider(self, original: "ModelStep | None" = None, callbacks: bool = False) -> "WiderStep":
        """Compiles the step in float64.

        Args:
            original: The original's step, if this is an edited model's.
            callbacks: Whether to call back to the host where the step does.
        """
        return WiderStep(self._traced.jaxpr, self._structure, self.arguments, original, callbacks)


class WiderStep:
    """A step compiled in float64; an original's can be disturbed, see ``wider_arithmetic``.

    Attributes:
        opaque: The operations in it that run in their own dtypes all the same.
        has_new_constants: Whether it has constants that the original has not.
    """

    def __init__(
        self,
        closed: Any,
        structure: Any,
        arguments: Sequence[Any],
        original: ModelStep | None,
        callbacks: bool,
    ) -> None:
        self._structure = structure
        if original is None:
            program = WiderProgram(closed, callbacks=callbacks)
            read, new = list(arguments), frozenset[int]()
        else:
            program = WiderProgram(closed, Constants(original.constants), callbacks)
            read, new = _read_as_the_originals(arguments, original.arguments)
        with jax.enable_x64(True):
            self._arguments = [_widened(array) for array in read]
            step = jax.jit(lambda arrays, rounding: program(arrays, rounding, new))
            lowered = step.lower(self._arguments, exact())
            self._compiled = lowered.compile(compiler_options=_FASTER_COMPILATION)
        self.opaque = program.opaque
        self.has_new_constants = program.has_new_constants

    def run(self, rounding: Rounding | None = None) -> Results:
        """Runs the step.

        Args:
            rounding: How to disturb it; by default not at all.
        """
        with jax.enable_x64(True):
            flat = [to_numpy(x) for x in self._compiled(self._arguments, rounding or exact())]
            jax.effects_barrier()
        return jax.tree_util.tree_unflatten(self._structure, flat)


def _read_as_the_originals(
    arguments: Sequence[Any], originals: Sequence[Any]
) -> tuple[list[Any], frozenset[int]]:
    """Arrays of an edited model, each as the original has it, and which ones are new."""
    known = {id(array) for array in originals}
    constants: Constants | None = None
    read: list[Any] = []
    new = set()
    for number, array in enumerate(arguments):
        if id(array) in known or not is_float(array) or not _is_here(array):
            read.append(array)
            continue
        if constants is None:
            constants = Constants([to_numpy(x) for x in originals if is_float(x) and _is_here(x)])
        wide, is_new = constants.read(to_numpy(array))
        if is_new:
            new.add(number)
        elif isinstance(array, jax.Array) and array.committed:
            wide = jax.device_put(wide, array.sharding)
        read.append(array if is_new else wide)
    return read, frozenset(new)


def _is_here(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _widened(array: Any) -> Any:
    if not is_float(array):
        return array
    return array.astype(np.dtype(jnp.promote_types(array.dtype, jnp.float64)))


def _values(call: ModelCall, original: ModelCall) -> tuple[Any, Any, Any]:
    """What to run a model on: the original's parameters and state, where it has them."""
    parameters = with_values_of(call.parameters, original.parameters)
    state = with_values_of(call.state, original.state)
    # Names may be of any type, and JAX sorts the keys of a dictionary.
    return onto_auto_twin((list(parameters.values()), list(state.values()), call.arrays))


def _step(call: ModelCall, gradients: bool) -> Callable[..., Results]:
    """A function that runs a model, and gives outputs, state and gradients by name."""
    parameter_names, state_names = list(call.parameters), list(call.state)

    def outputs_of(
        parameters: list[Any], state: list[Any], arrays: list[Any]
    ) -> tuple[Any, tuple[Named, Named]]:
        output, new_state = call(
            dict(zip(parameter_names, parameters, strict=True)),
            dict(zip(state_names, state, strict=True)),
            arrays,
        )
        leaves = canonical_leaves(output)
        total = _weighted_sum([array for _, array in leaves]) if gradients else None
        return total, (dict(leaves), flat_names(new_state))

    def step(parameters: list[Any], state: list[Any], arrays: list[Any]) -> Results:
        if not gradients:
            _, (outputs, new_state) = outputs_of(parameters, state, arrays)
            return outputs, new_state, {}
        grads, (outputs, new_state) = jax.grad(outputs_of, has_aux=True, allow_int=True)(
            parameters, state, arrays
        )
        named = flat_names(dict(zip(parameter_names, grads, strict=True)))
        kept = {name: array for name, array in named.items() if array.dtype != jax.dtypes.float0}
        return outputs, new_state, kept

    return step


def flat_names(values: Mapping[Any, Any]) -> Named:
    """The arrays of named trees, each by the name of its tree and its path in it."""
    return {
        _joined(str(name), path): array
        for name, value in values.items()
        for path, array in canonical_leaves(value)
    }


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
