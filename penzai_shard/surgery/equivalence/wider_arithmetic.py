"""A traced function run again in float64, exactly or with every rounding disturbed at random.

What a program computes in few digits is its own function plus rounding errors. Run in float64 the
same program shows the function itself, whatever dtypes it asks for; run with each operation's
result disturbed by as much as its own dtype rounds, it shows how large its rounding errors are
wherever they end up, also where large values cancel. No wider run can be fooled by a layer that
casts to bfloat16 and back: conversions between floating-point dtypes do nothing here.

Source: Parker 1997, "Monte Carlo Arithmetic"; Denis, de Oliveira Castro, Petit 2016, "Verificarlo".
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core

from penzai_shard.surgery.equivalence.program_constants import (
    Constants,
    is_float,
    literal_value,
    widest,
)

# Operations that are a function of their own, to be run in place.
_CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "composite": "jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}

# Operations that move, choose or count values, or flip their sign, and so never round.
_EXACT = frozenset(
    re.findall(
        r"\S+",
        """
        abs all_gather all_to_all broadcast_in_dim ceil clamp complex concatenate conj copy copy_p
        cummax cummin device_put dynamic_slice dynamic_update_slice expand_dims floor gather imag
        iota max mesh_cast min neg optimization_barrier pad pbroadcast pmax pmin ppermute pvary
        real reduce_max reduce_min reshape reshard rev round scatter select_n sharding_constraint
        sign slice sort split squeeze stop_gradient top_k transpose
        """,
    )
)

# Operations on the bits of a number, or that only their own dtype gives a meaning.
_NARROW = frozenset(
    {
        "bitcast_convert_type",
        "ffi_call",
        "io_callback",
        "nextafter",
        "pallas_call",
        "pure_callback",
        "random_gamma",
        "random_gamma_grad",
        "rng_uniform",
    }
)

_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter_add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter_sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter_mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter_min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
    "scatter_max": jax.lax.scatter_max,
}

_DTYPE_PARAMETERS = ("dtype", "new_dtype", "out_dtype", "preferred_element_type")

_PRIMES = (2654435761, 2246822519, 3266489917, 668265263, 374761393)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How to disturb a run.

    Attributes:
        seed: A number that decides how each rounding falls, as a uint32 scalar.
        scale: How large the roundings are, in those of the dtypes; 0 for an exact run.
        coarsest: The machine epsilon to round to where an operation's own is finer; 0 for none.
    """

    seed: Any
    scale: Any
    coarsest: Any


jax.tree_util.register_dataclass(Rounding, ["seed", "scale", "coarsest"], [])


def exact() -> Rounding:
    """No rounding."""
    return Rounding(np.uint32(0), np.float64(0), np.float64(0))


def epsilons_of(jaxpr: Any) -> set[float]:
    """The machine epsilons of all dtypes that a program rounds to, nested functions included.

    Args:
        jaxpr: The program.

    >>> sorted(epsilons_of(jax.make_jaxpr(lambda x: x.astype("bfloat16") + 1)(1.0).jaxpr))
    [1.1920928955078125e-07, 0.0078125]
    """
    found: set[float] = set()
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            if hasattr(variable.aval, "dtype") and is_float(variable.aval):
                found.add(float(jnp.finfo(variable.aval.dtype).eps))
        if equation.primitive.name == "reduce_precision":
            found.add(2.0 ** -equation.params["mantissa_bits"])
        for inner in jax_core.jaxprs_in_params(equation.params):
            found |= epsilons_of(inner)
    return found


class WiderProgram:
    """A traced function in float64.

    Args:
        closed: The function, as JAX traced it in its own dtypes.
        constants: The original's constants, for an edited model; None reads all as they are.
        callbacks: Whether to call back to the host where the function does.

    Attributes:
        opaque: The operations that could not be widened and were run in their own dtypes; known
            once the program was traced.
        has_new_constants: Whether it has constants that the original has not; known then, too.
    """

    def __init__(
        self, closed: Any, constants: Constants | None = None, callbacks: bool = False
    ) -> None:
        self.opaque: set[str] = set()
        self.has_new_constants = False
        self._closed = closed
        self._constants = constants
        self._callbacks = callbacks

    def __call__(
        self,
        arguments: Sequence[Any],
        rounding: Rounding | None = None,
        new_arguments: frozenset[int] = frozenset(),
    ) -> list[Any]:
        """Runs the function; to be traced under ``jax.enable_x64``.

        Args:
            arguments: The function's arguments, flat, floating-point ones widened.
            rounding: How to disturb each argument and operation of an original, or of an edited
                model the constants and arguments that are new; None for not at all.
            new_arguments: Which arguments of an edited model the original does not have.

        Returns:
            The function's results, flat and widened.
        """
        run = _Run(self, self._constants, self._callbacks, rounding)
        arguments = [
            run.argument(_wide(argument), variable.aval, number in new_arguments)
            for number, (argument, variable) in enumerate(
                zip(arguments, self._closed.jaxpr.invars, strict=True)
            )
        ]
        return run.jaxpr(self._closed.jaxpr, self._closed.consts, arguments)


class _Run:
    """One run of a program; holds what is being traced."""

    def __init__(
        self,
        program: WiderProgram,
        constants: Constants | None,
        callbacks: bool,
        rounding: Rounding | None,
    ) -> None:
        self._program = program
        self._constants = constants
        self._callbacks = callbacks
        self._rounding = rounding
        self._draw = np.random.default_rng(0)
        self._noise: list[dict[Any, Any]] = [{}]

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip(jaxpr.invars, map(_wide, arguments), strict=True))
        for variable, constant in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = self._constant(constant)
        for equation in jaxpr.eqns:
            inputs = [
                self._constant(literal_value(variable))
                if isinstance(variable, jax_core.Literal)
                else known[variable]
                for variable in equation.invars
            ]
            for variable, value in zip(
                equation.outvars, self._equation(equation, inputs), strict=True
            ):
                known[variable] = _wide(value)
        return [
            self._constant(literal_value(variable))
            if isinstance(variable, jax_core.Literal)
            else known[variable]
            for variable in jaxpr.outvars
        ]

    def _constant(self, value: Any) -> Any:
        if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return _wide(value)
        array = np.asarray(value)
        if not is_float(array):
            return array
        if self._constants is None:
            return widest(array)
        wide, is_new = self._constants.read(array)
        return self._either_way(wide, array.dtype) if is_new else wide

    def argument(self, value: Any, aval: Any, is_new: bool) -> Any:
        """An argument of the whole program."""
        if is_new and self._constants is not None and is_float(aval):
            return self._either_way(value, aval.dtype)
        return self.disturbed(value, aval)

    def _either_way(self, value: Any, dtype: Any) -> Any:
        """A constant that may have been rounded up or down to its dtype."""
        self._program.has_new_constants = True
        if self._rounding is None:
            return value
        noise = _noise(self._rounding, value.shape, float(jnp.finfo(dtype).eps))
        flip = self._draw.choice([-1.0, 1.0])
        # Half a unit in the last place, relative to the value.
        mantissa = jnp.maximum(jnp.frexp(jnp.abs(value))[0], 0.5)
        most = float(jnp.finfo(dtype).eps) / (4 * mantissa) * self._rounding.scale
        return value * (1 + flip * jnp.where(noise < 0, -most, most))

    def disturbed(self, value: Any, aval: Any) -> Any:
        """A result of an operation, rounded at random as its dtype would round it."""
        if self._rounding is None or self._constants is not None or not is_float(value):
            return value
        return self._times_noise(value, value.shape, float(jnp.finfo(aval.dtype).eps))

    def _times_noise(self, value: Any, shape: tuple[int, ...], epsilon: float) -> Any:
        fields = self._noise[-1]
        if (shape, epsilon) not in fields:
            fields[shape, epsilon] = _noise(self._rounding, shape, epsilon)
        weight = self._draw.choice([-1.0, 1.0]) * self._draw.uniform(0.5, 1.0)
        return value * (1 + weight * fields[shape, epsilon])

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """In the body of a loop or the like, which has values of its own."""
        self._noise.append({})
        yield
        self._noise.pop()

    def _equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, parameters = equation.primitive.name, equation.params
        if name in _CALLS and _CALLS[name] in parameters:
            inner = parameters[_CALLS[name]]
            return self.jaxpr(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
        structured = getattr(self, f"_{name}", None)
        if name in ("scan", "while", "cond", "shard_map") and structured is not None:
            return structured(inputs, **parameters)
        if name in ("debug_callback", "debug_print"):
            if self._callbacks and name == "debug_callback":
                _call_back(parameters["callback"], inputs)
            return []
        if name == "reduce_precision":
            epsilon = 2.0 ** -parameters["mantissa_bits"]
            rounds = self._rounding is not None and self._constants is None
            (value,) = inputs
            return [self._times_noise(value, value.shape, epsilon) if rounds else value]
        if name == "convert_element_type" and is_float(equation.outvars[0].aval):
            return [self._converted(equation, inputs[0])]
        if name in _SCATTERS:
            results = [_scattered(name, inputs, parameters)]
        elif name in _NARROW or any(True for _ in jax_core.jaxprs_in_params(parameters)):
            results = self._narrow(equation, inputs)
        else:
            results = _bound(equation.primitive, inputs, _widened_parameters(parameters))
        if name in _EXACT:
            return results
        return [
            self.disturbed(_wide(result), variable.aval)
            for result, variable in zip(results, equation.outvars, strict=True)
        ]

    def _converted(self, equation: Any, value: Any) -> Any:
        before, after = equation.invars[0].aval, equation.outvars[0].aval
        wide = value
        if jnp.issubdtype(before.dtype, jnp.complexfloating) and not jnp.issubdtype(
            after.dtype, jnp.complexfloating
        ):
            wide = jnp.real(value)
        wide = jnp.asarray(wide, jnp.promote_types(after.dtype, jnp.float64))
        exact_already = (
            is_float(before) and jnp.finfo(before.dtype).eps >= jnp.finfo(after.dtype).eps
        )
        return wide if exact_already else self.disturbed(wide, after)

    def _narrow(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """An operation as it is, on values rounded to the dtypes that it was written for."""
        if equation.primitive.name != "bitcast_convert_type" or is_float(equation.invars[0].aval):
            self._program.opaque.add(equation.primitive.name)
        own = [
            jnp.asarray(value, variable.aval.dtype) if is_float(variable.aval) else value
            for value, variable in zip(inputs, equation.invars, strict=True)
        ]
        return _bound(equation.primitive, own, equation.params)

    def _scan(self, inputs: list[Any], **parameters: Any) -> list[Any]:
        closed, consts = parameters["jaxpr"], parameters["num_consts"]
        carries = parameters["num_carry"]

        def turn(carry: Any, element: Any) -> tuple[Any, Any]:
            with self._inside():
                results = self.jaxpr(
                    closed.jaxpr, closed.consts, [*inputs[:consts], *carry, *element]
                )
            return tuple(results[:carries]), tuple(results[carries:])

        carry, stacked = jax.lax.scan(
            turn,
            tuple(map(jnp.asarray, inputs[consts : consts + carries])),
            tuple(inputs[consts + carries :]),
            length=parameters["length"],
            reverse=parameters["reverse"],
        )
        return [*carry, *stacked]

    def _while(self, inputs: list[Any], **parameters: Any) -> list[Any]:
        test, body = parameters["cond_jaxpr"], parameters["body_jaxpr"]
        tests, bodies = parameters["cond_nconsts"], parameters["body_nconsts"]
        of_test, of_body = inputs[:tests], inputs[tests : tests + bodies]

        def goes_on(carry: Any) -> Any:
            with self._inside():
                return self.jaxpr(test.jaxpr, test.consts, [*of_test, *carry])[0]

        def turn(carry: Any) -> Any:
            with self._inside():
                return tuple(self.jaxpr(body.jaxpr, body.consts, [*of_body, *carry]))

        start = tuple(map(jnp.asarray, inputs[tests + bodies :]))
        return list(jax.lax.while_loop(goes_on, turn, start))

    def _cond(self, inputs: list[Any], **parameters: Any) -> list[Any]:
        def branch(closed: Any) -> Callable[..., Any]:
            def run(*values: Any) -> Any:
                with self._inside():
                    return tuple(map(jnp.asarray, self.jaxpr(closed.jaxpr, closed.consts, values)))

            return run

        index = jnp.asarray(inputs[0]).astype(jnp.int32)
        return list(jax.lax.switch(index, list(map(branch, parameters["branches"])), *inputs[1:]))

    def _shard_map(self, inputs: list[Any], **parameters: Any) -> list[Any]:
        inner = parameters["jaxpr"]

        def per_device(*values: Any) -> Any:
            with self._inside():
                return tuple(self.jaxpr(inner, (), values))

        mapped = jax.shard_map(
            per_device,
            mesh=parameters["mesh"],
            in_specs=tuple(parameters["in_specs"]),
            out_specs=tuple(parameters["out_specs"]),
            axis_names=set(parameters["newly_manual_axes"]),
            check_vma=parameters["check_vma"],
        )
        return list(mapped(*inputs))


def _wide(value: Any) -> Any:
    if not hasattr(value, "dtype") or not is_float(value):
        return value
    return jnp.asarray(value, jnp.promote_types(value.dtype, jnp.float64))


def _noise(rounding: Any, shape: tuple[int, ...], epsilon: float) -> Any:
    """Numbers between minus and plus half an epsilon, the same for a place and seed."""
    size = jnp.maximum(epsilon, rounding.coarsest) / 2 * rounding.scale
    return scattered_numbers(rounding.seed, shape).astype(jnp.float64) * size


def scattered_numbers(seed: Any, shape: tuple[int, ...]) -> Any:
    """Numbers between -1 and 1 that depend on a seed and their places alone, as float32.

    They are hashes of the places: much less to compile than JAX's random numbers.

    >>> scattered_numbers(1, (2, 3)).shape
    (2, 3)
    """
    places = jnp.asarray(seed, jnp.uint32)
    for dimension, prime in zip(range(len(shape)), _PRIMES * len(shape), strict=False):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)
        places = (places + index * np.uint32(prime)) * np.uint32(747796405)
        places = places ^ (places >> np.uint32(15))
    places = places * np.uint32(2891336453)
    places = places ^ (places >> np.uint32(16))
    return (places >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-23) - np.float32(1)


def _call_back(callback: Callable[..., Any], values: Sequence[Any]) -> None:
    """Calls back to the host with each float64 as a sum of two float32.

    JAX calls back in a thread where float64 may not be enabled, and would halve its digits.
    """

    def halves(value: Any) -> tuple[Any, ...]:
        if value.dtype != jnp.float64:
            return (value,)
        most = value.astype(jnp.float32)
        rest = jnp.where(jnp.isfinite(most), value - most, 0)
        return most, rest.astype(jnp.float32)

    def receive(parts: list[tuple[Any, ...]]) -> None:
        callback(
            *(
                sum(np.asarray(part, np.float64) for part in each) if len(each) == 2 else each[0]
                for each in parts
            )
        )

    jax.debug.callback(receive, [halves(jnp.asarray(value)) for value in values])


def _widened_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {
        name: np.dtype(jnp.promote_types(parameters[name], jnp.float64))
        for name in _DTYPE_PARAMETERS
        if parameters.get(name) is not None and jnp.issubdtype(parameters[name], jnp.inexact)
    }
    if isinstance(parameters.get("precision"), jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        changed["precision"] = None
    return {**parameters, **changed}


def _scattered(name: str, inputs: Sequence[Any], parameters: dict[str, Any]) -> Any:
    kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return _SCATTERS[name](*inputs, **{key: parameters[key] for key in kept})


def _bound(primitive: Any, inputs: Sequence[Any], parameters: dict[str, Any]) -> list[Any]:
    result = primitive.bind(*inputs, **parameters)
    return list(result) if primitive.multiple_results else [result]
