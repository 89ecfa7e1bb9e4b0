"""A traced function run again in float64, exactly or with every rounding disturbed at random.

What a program computes in few digits is its own function plus rounding errors. Run in float64 the
same program shows the function itself, whatever dtypes it asks for; run with each operation's
result disturbed by as much as its own dtype rounds (``random_rounding``), it shows how large its
rounding errors are wherever they end up, also where large values cancel. No wider run can be
fooled by a layer that casts to bfloat16 and back: conversions between floating-point dtypes do
nothing in it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.array_kinds import is_traced
from penzai_shard.library_apis.jax_api import scan_counts
from penzai_shard.surgery.equivalence.comparable_arrays import epsilon_of, is_float, widest
from penzai_shard.surgery.equivalence.program_constants import Constants, literal_value
from penzai_shard.surgery.equivalence.random_rounding import Rounding
from penzai_shard.traced_programs import called_program, inner_programs, walk

# Operations that move, choose or count values, or flip their sign, and so never round.
_EXACT = re.findall(
    r"\S+",
    """
    abs all_gather all_to_all broadcast_in_dim ceil clamp complex concatenate conj copy copy_p
    cummax cummin device_put dynamic_slice dynamic_update_slice expand_dims floor gather imag
    iota max mesh_cast min neg optimization_barrier pad pbroadcast pmax pmin ppermute pvary
    real reduce_max reduce_min reshape reshard rev round scatter select_n sharding_constraint
    sign slice sort split squeeze stop_gradient top_k transpose
    """,
)

# Operations on the bits of a number, or that only their own dtype gives a meaning.
_NARROW = re.findall(
    r"\S+",
    """
    bitcast_convert_type ffi_call io_callback nextafter pallas_call pure_callback random_gamma
    random_gamma_grad rng_uniform
    """,
)

# Operations that hold the function to combine values with, written for their own dtype; the
# functions of ``jax.lax`` make it anew. JAX writes some of their names with a hyphen.
_SCATTER = re.compile("scatter([-_](add|max|min|mul|sub))?")
_SCATTER_OPTIONS = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")

_DTYPE_PARAMETERS = ("dtype", "new_dtype", "out_dtype", "preferred_element_type")


class WiderRun:
    """One run of a traced program in float64; to be traced under ``jax.enable_x64``.

    Args:
        rounding: How to disturb each argument and operation of an original, or of an edited model
            the constants and arguments that are new.
        constants: The original's constants, for an edited model; None for an original.
        callbacks: Whether to call back to the host where the program does.

    Attributes:
        opaque: The operations that could not be widened and were run in their own dtypes.
        has_new_constants: Whether there were constants or arguments that the original has not.
    """

    def __init__(self, rounding: Rounding, constants: Constants | None, callbacks: bool) -> None:
        self.opaque: set[str] = set()
        self.has_new_constants = False
        self._rounding = rounding
        self._constants = constants
        self._callbacks = callbacks
        self._draw = np.random.default_rng(0)
        # Per body that is being traced, as the values of one must not get into another.
        self._errors: list[dict[Any, Any]] = [{}]

    def results(
        self, program: Any, arguments: Sequence[Any], new_arguments: frozenset[int]
    ) -> list[Any]:
        """Runs a program.

        Args:
            program: The program, as JAX traced it in its own dtypes.
            arguments: Its arguments, flat, floating-point ones widened.
            new_arguments: Which arguments of an edited model the original does not have.

        Returns:
            The program's results, flat and widened.
        """
        given = [
            self._of_either_rounding(argument, variable.aval)
            if number in new_arguments
            else self._rounded(argument, variable.aval)
            for number, (argument, variable) in enumerate(
                zip(arguments, program.jaxpr.invars, strict=True)
            )
        ]
        return self._run(program, given)

    def _run(self, program: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results of a program, or of one that it runs."""
        return walk(
            program,
            list(map(as_widest, arguments)),
            lambda equation, inputs: list(map(as_widest, self._equation(equation, inputs))),
            constant=lambda value, _: self._constant(value),
            literal=lambda literal: self._constant(literal_value(literal)),
        )

    def _body(self, program: Any) -> Callable[..., tuple[Any, ...]]:
        """A program that runs in a loop or the like, as a function of JAX."""

        def run(*arguments: Any) -> tuple[Any, ...]:
            self._errors.append({})
            results = self._run(program, arguments)
            self._errors.pop()
            return tuple(map(jnp.asarray, results))

        return run

    # Values that are rounded.

    def _constant(self, value: Any) -> Any:
        if is_traced(value) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return as_widest(value)
        array = np.asarray(value)
        if not is_float(array):
            return array
        if self._constants is None:
            return widest(array)
        wide, is_new = self._constants.read(array)
        return self._of_either_rounding(wide, array) if is_new else wide

    def _of_either_rounding(self, value: Any, own: Any) -> Any:
        """A new constant, which may have been rounded up or down to its own dtype."""
        self.has_new_constants = True
        epsilon = epsilon_of(own)
        errors = self._rounding.errors(value.shape, epsilon)
        flip = self._draw.choice([-1.0, 1.0])
        # Half a unit in the last place, relative to the value.
        mantissa = jnp.maximum(jnp.frexp(jnp.abs(value))[0], 0.5)
        most = epsilon / (4 * mantissa) * self._rounding.scale
        return value * (1 + flip * jnp.where(errors < 0, -most, most))

    def _rounded(self, value: Any, own: Any) -> Any:
        """A value of an original, rounded at random as its own dtype would round it."""
        return self._with_error(value, epsilon_of(own)) if is_float(value) else value

    def _with_error(self, value: Any, epsilon: float) -> Any:
        if self._constants is not None:
            return value
        errors, key = self._errors[-1], (value.shape, epsilon)
        if key not in errors:
            errors[key] = self._rounding.errors(*key)
        weight = self._draw.choice([-1.0, 1.0]) * self._draw.uniform(0.5, 1.0)
        return value * (1 + weight * errors[key])

    # Operations.

    def _equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, parameters = equation.primitive.name, equation.params
        if (called := called_program(equation)) is not None:
            return self._run(called, inputs)
        if name in _STRUCTURED:
            return list(_STRUCTURED[name](self, inputs, parameters))
        if name in ("debug_callback", "debug_print"):
            if self._callbacks and name == "debug_callback":
                _call_back(parameters["callback"], inputs)
            return []
        if name == "reduce_precision":
            return [self._with_error(inputs[0], 2.0 ** -parameters["mantissa_bits"])]
        if name == "convert_element_type" and is_float(equation.outvars[0].aval):
            return [self._converted(equation, inputs[0])]
        if _SCATTER.fullmatch(name):
            scatter = getattr(jax.lax, name.replace("-", "_"))
            results = [scatter(*inputs, **{key: parameters[key] for key in _SCATTER_OPTIONS})]
        elif name in _NARROW or any(True for _ in inner_programs(equation)):
            results = self._narrow(equation, inputs)
        else:
            results = _bound(equation.primitive, inputs, _widened_parameters(parameters))
        if name in _EXACT:
            return results
        return [
            self._rounded(as_widest(result), variable.aval)
            for result, variable in zip(results, equation.outvars, strict=True)
        ]

    def _converted(self, equation: Any, value: Any) -> Any:
        before, after = equation.invars[0].aval, equation.outvars[0].aval
        if not jnp.issubdtype(after.dtype, jnp.complexfloating):
            value = jnp.real(value)
        wide = jnp.asarray(value, jnp.promote_types(after.dtype, jnp.float64))
        is_exact = is_float(before) and epsilon_of(before) >= epsilon_of(after)
        return wide if is_exact else self._rounded(wide, after)

    def _narrow(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """An operation as it is, on values rounded to the dtypes that it was written for."""
        if equation.primitive.name != "bitcast_convert_type" or is_float(equation.invars[0].aval):
            self.opaque.add(equation.primitive.name)
        own = [
            jnp.asarray(value, variable.aval.dtype) if is_float(variable.aval) else value
            for value, variable in zip(inputs, equation.invars, strict=True)
        ]
        return _bound(equation.primitive, own, equation.params)

    def _scan(self, inputs: list[Any], parameters: dict[str, Any]) -> list[Any]:
        constants, carries = scan_counts(parameters)
        body = self._body(parameters["jaxpr"])

        def turn(carry: Any, element: Any) -> tuple[Any, Any]:
            results = body(*inputs[:constants], *carry, *element)
            return results[:carries], results[carries:]

        carry, stacked = jax.lax.scan(
            turn,
            tuple(map(jnp.asarray, inputs[constants : constants + carries])),
            tuple(inputs[constants + carries :]),
            length=parameters["length"],
            reverse=parameters["reverse"],
        )
        return [*carry, *stacked]

    def _while(self, inputs: list[Any], parameters: dict[str, Any]) -> Any:
        tests, bodies = parameters["cond_nconsts"], parameters["body_nconsts"]
        of_test, of_body = inputs[:tests], inputs[tests : tests + bodies]
        test, body = self._body(parameters["cond_jaxpr"]), self._body(parameters["body_jaxpr"])
        return jax.lax.while_loop(
            lambda carry: test(*of_test, *carry)[0],
            lambda carry: body(*of_body, *carry),
            tuple(map(jnp.asarray, inputs[tests + bodies :])),
        )

    def _cond(self, inputs: list[Any], parameters: dict[str, Any]) -> Any:
        index = jnp.asarray(inputs[0]).astype(jnp.int32)
        return jax.lax.switch(index, list(map(self._body, parameters["branches"])), *inputs[1:])

    def _shard_map(self, inputs: list[Any], parameters: dict[str, Any]) -> Any:
        return jax.shard_map(
            self._body(parameters["jaxpr"]),
            mesh=parameters["mesh"],
            in_specs=tuple(parameters["in_specs"]),
            out_specs=tuple(parameters["out_specs"]),
            axis_names=set(parameters["newly_manual_axes"]),
            check_vma=parameters["check_vma"],
        )(*inputs)


_STRUCTURED: dict[str, Callable[[WiderRun, list[Any], dict[str, Any]], Any]] = {
    "cond": WiderRun._cond,
    "scan": WiderRun._scan,
    "shard_map": WiderRun._shard_map,
    "while": WiderRun._while,
}


def as_widest(value: Any) -> Any:
    """A value in float64 or complex128, if it has real or complex numbers."""
    if not hasattr(value, "dtype") or not is_float(value):
        return value
    return jnp.asarray(value, jnp.promote_types(value.dtype, jnp.float64))


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


def _bound(primitive: Any, inputs: Sequence[Any], parameters: dict[str, Any]) -> list[Any]:
    result = primitive.bind(*inputs, **parameters)
    return list(result) if primitive.multiple_results else [result]
