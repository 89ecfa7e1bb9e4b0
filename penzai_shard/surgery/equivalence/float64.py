"""Runs a traced program in float64, where conversions between floating-point dtypes do nothing.

What a program computes in few digits is its own function plus rounding errors. In float64 the same
program shows the function itself, whatever dtypes it asks for. To run the model with float64
switched on would not do: a layer that asks for float32 would go on to round.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.arrays.kinds import is_key_type, is_traced
from penzai_shard.jax_internals.tracing import JaxprEqn, Literal, scan_counts
from penzai_shard.programs import equations_in, inner_programs, open_program, walk

# Calls of a program whose operations could stand at the place of the call.
_CALLS = {"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"}
# Operations on the bits of a number, or that only their own dtype gives a meaning.
_NARROW = """
    bitcast_convert_type ffi_call io_callback nextafter pallas_call pure_callback random_gamma
    random_gamma_grad rng_uniform"""
_DTYPE_PARAMETERS = ("dtype", "new_dtype", "out_dtype", "preferred_element_type")
_SCATTER_OPTIONS = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


class Float64Run:
    """A traced program that can be run in float64.

    Args:
        program: The program.
        original: The run of the original, if the program is that of an edited model.

    Attributes:
        epsilons: The machine epsilons to which it rounds as it is, with their dtypes.
        opaque: The operations that could be run in their own dtypes only; known after a run.
        has_new_constants: Whether there are constants that the original does not have; likewise.
    """

    def __init__(self, program: Any, original: "Float64Run | None" = None) -> None:
        self.opaque: set[str] = set()
        self.has_new_constants = False
        self._original = original
        self.epsilons = _epsilons_in(program)
        # A program holds few numbers many times.
        constants = [x for x in _constants_in(program) if is_float(x) and not is_traced(x)]
        self._constants = {_find_key(x): x for x in map(np.asarray, constants)}
        # It runs once, and compiling it costs more than running it.
        options: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
        self._run = jax.jit(lambda values: self._walk(program, values), compiler_options=options)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The results of the program, flat, those of floats in float64."""
        with jax.enable_x64(True):
            results: list[Any] = jax.device_get(self._run(list(map(as_float64, arguments))))
        return results

    def _walk(self, program: Any, arguments: Sequence[Any]) -> list[Any]:
        return walk(
            program,
            arguments,
            lambda equation, inputs: list(map(as_float64, self._evaluate(equation, inputs))),
            constant=self._read,
            literal=lambda literal: self._read(_literal_value(literal)),
        )

    def _function(self, program: Any) -> Callable[..., tuple[Any, ...]]:
        return lambda *arguments: tuple(map(jnp.asarray, self._walk(program, arguments)))

    def _read(self, value: Any) -> Any:
        """A constant of the program in float64.

        An edit that computes in fewer digits rounds the constants in the code too: one that is the
        original's in another dtype is read as the original's.
        """
        if self._original is None or is_traced(value) or not is_float(value):
            return as_float64(value)
        value, known = np.asarray(value), self._original._constants
        if _find_key(value) in known:
            return as_float64(value)
        with np.errstate(over="ignore", invalid="ignore"):
            for each in known.values():
                down, up = each.astype(value.dtype), value.astype(each.dtype)
                if each.dtype != value.dtype and (is_equal(down, value) or is_equal(up, each)):
                    return as_float64(each)
        self.has_new_constants = True
        return as_float64(value)

    def _evaluate(self, equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        name, parameters = equation.primitive.name, equation.params
        if not equation.outvars:  # Such as debug_callback.
            return []
        if name in _CALLS:
            (called,) = inner_programs(equation)
            return self._walk(called, inputs)
        if name in _STRUCTURES:
            return list(_STRUCTURES[name](self, inputs, parameters))
        if name == "reduce_precision":
            return inputs[:1]
        aval: Any = equation.outvars[0].aval
        if name == "convert_element_type" and is_float(aval):
            return [jax.lax.convert_element_type(inputs[0], np.promote_types(aval.dtype, float))]
        # A scatter holds the function to combine values with, written for its own dtype; a plain
        # one has a function where x.at[i].apply was called.
        applies = name == "scatter" and parameters["update_jaxpr"] is not None
        if name.startswith("scatter") and not applies:
            options = {option: parameters[option] for option in _SCATTER_OPTIONS}
            return [getattr(jax.lax, name.replace("-", "_"))(*inputs, **options)]
        if name in _NARROW.split() or any(True for _ in inner_programs(equation)):
            return self._evaluate_in_own_dtypes(equation, inputs)
        return _bind(equation, inputs, _with_wide_dtypes(parameters))

    def _evaluate_in_own_dtypes(self, equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        # Random numbers are made of the bits of integers, which are the same in float64.
        name = equation.primitive.name
        avals: list[Any] = [variable.aval for variable in equation.invars]
        if name != "bitcast_convert_type" or is_float(avals[0]):
            self.opaque.add(name)
        values = [
            jnp.asarray(value, aval.dtype) if is_float(aval) else value
            for value, aval in zip(inputs, avals, strict=True)
        ]
        return _bind(equation, values, equation.params)

    def _scan(self, inputs: list[Any], parameters: dict[str, Any]) -> list[Any]:
        first, count = scan_counts(parameters)
        body = self._function(parameters["jaxpr"])

        def turn(carry: Any, element: Any) -> tuple[Any, Any]:
            results = body(*inputs[:first], *carry, *element)
            return results[:count], results[count:]

        carry, stacks = jax.lax.scan(
            turn,
            tuple(map(jnp.asarray, inputs[first : first + count])),
            tuple(inputs[first + count :]),
            length=parameters["length"],
            reverse=parameters["reverse"],
        )
        return [*carry, *stacks]

    def _cond(self, inputs: list[Any], parameters: dict[str, Any]) -> Any:
        branches = list(map(self._function, parameters["branches"]))
        return jax.lax.switch(jnp.asarray(inputs[0]).astype(jnp.int32), branches, *inputs[1:])

    def _shard_map(self, inputs: list[Any], parameters: dict[str, Any]) -> Any:
        return jax.shard_map(
            self._function(parameters["jaxpr"]),
            mesh=parameters["mesh"],
            in_specs=tuple(parameters["in_specs"]),
            out_specs=tuple(parameters["out_specs"]),
            axis_names=set(parameters["newly_manual_axes"]),
            check_vma=parameters["check_vma"],
        )(*inputs)


_STRUCTURES: dict[str, Callable[[Float64Run, list[Any], dict[str, Any]], Any]] = {
    "cond": Float64Run._cond,
    "scan": Float64Run._scan,
    "shard_map": Float64Run._shard_map,
}


def to_array(value: Any) -> Any:
    """A value as an array; a random key as its bits."""
    array = value if hasattr(value, "dtype") else jnp.asarray(value)
    return jax.random.key_data(array) if is_key_type(array.dtype) else array


def is_float(value: Any) -> bool:
    """Whether an array, or a leaf, has floating-point or complex numbers."""
    return value.dtype is not None and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def epsilon_of(value: Any) -> float:
    """The machine epsilon of the dtype of an array."""
    return float(jnp.finfo(value.dtype).eps)  # type: ignore[no-untyped-call]


def as_float64(array: Any) -> Any:
    """An array in float64 or complex128, if it has real or complex numbers."""
    return array.astype(np.promote_types(array.dtype, float)) if is_float(array) else array


def is_equal(one: Any, other: Any) -> bool:
    """Whether two arrays of one dtype have the same elements; NaN equals NaN."""
    a, b = (as_float64(np.asarray(to_array(x))) for x in (one, other))
    return one is other or np.array_equal(a, b, equal_nan=True)


def _epsilons_in(program: Any) -> dict[float, str]:
    """The machine epsilons to which a program rounds, with the dtypes that have them."""
    found = {}
    for equation in equations_in(program):
        avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
        floats = [aval for aval in avals if hasattr(aval, "dtype") and is_float(aval)]
        found.update({epsilon_of(aval): aval.dtype.name for aval in floats})
    return found or {2.0**-52: "float64"}


def _find_key(array: Any) -> tuple[Any, ...]:
    return array.shape, as_float64(array).tobytes()


def _constants_in(program: Any) -> Iterator[Any]:
    yield from open_program(program)[1]
    for equation in equations_in(program):
        yield from (_literal_value(x) for x in equation.invars if isinstance(x, Literal))
        for inner in inner_programs(equation):
            yield from open_program(inner)[1]


def _literal_value(literal: Any) -> Any:
    return np.asarray(literal.val, literal.aval.dtype)


def _with_wide_dtypes(parameters: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {
        name: np.promote_types(parameters[name], float)
        for name in _DTYPE_PARAMETERS
        if parameters.get(name) is not None and jnp.issubdtype(parameters[name], jnp.inexact)
    }
    if isinstance(parameters.get("precision"), jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        changes["precision"] = None
    return parameters | changes


def _bind(equation: JaxprEqn, inputs: Sequence[Any], parameters: dict[str, Any]) -> Sequence[Any]:
    result: Any = equation.primitive.bind(*inputs, **parameters)
    return result if equation.primitive.multiple_results else [result]
