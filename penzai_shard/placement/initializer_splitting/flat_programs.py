"""Writing a traced initialiser out as one flat program, without what it says about layouts.

Where the results are laid out is planned, and each part of the initialiser is compiled for that
alone, some parts for one device, where a constraint would ask for a mesh. Constraints never change
a value, so they are taken out: with them go placements, layouts of nested calls, and layouts in the
types of arrays.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from penzai_shard.errors import MeshError, raise_all
from penzai_shard.library_apis.jax_api import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    is_weakly_typed,
)
from penzai_shard.placement.initializer_splitting import equation_traits
from penzai_shard.traced_programs import is_jit, opened, walk

# Each result is the operand of the same position.
_LAYOUTS_ONLY = frozenset(
    {"device_put", "layout_constraint", "mesh_cast", "reshard", "sharding_constraint"}
)
_SMALL_SLICED_OPERAND = 2**16


def flat_program(traced: ClosedJaxpr, devices: frozenset[Any] | None = None) -> ClosedJaxpr:
    """Writes a traced initialiser out as a flat program that says nothing about layouts.

    Nested ``jax.jit`` calls are opened where that helps to tell outputs apart: those with several
    results, and those that derive random keys. Others stay one equation. Slices at a fixed place
    are written as slices at a given place, and ``unstack`` as such slices, so that taking the first
    and the second of many keys is the same operation with another integer.

    Args:
        traced: What ``jax.make_jaxpr`` gives for a function without arguments.
        devices: The devices that the results are for; None if they are not known.

    Returns:
        The same function. A constant that it closes over several times is one variable.

    Raises:
        MeshError: A constraint is for other devices than the results.

    >>> from jax.sharding import PartitionSpec as P
    >>> everywhere = NamedSharding(jax.make_mesh((8,), ("data",)), P())
    >>> nested = jax.jit(lambda x: (jax.device_put(x, everywhere) + 1, x * 2))
    >>> flat = flat_program(jax.make_jaxpr(lambda: nested(3.0))())
    >>> [equation.primitive.name for equation in flat.eqns]
    ['add', 'mul']
    """
    writer = _Writer(devices)
    with no_mesh_context():
        outputs = writer.inline(traced, ())
    raise_all(
        MeshError,
        "the initialiser constrains values to other devices than those of the mesh:",
        list(dict.fromkeys(writer.problems)),
    )
    variables = [variable for variable, _ in writer.constants.values()]
    about = traced.effects, traced.jaxpr.debug_info
    jaxpr = Jaxpr(variables, [], outputs, writer.equations, *about)
    return ClosedJaxpr(jaxpr, [value for _, value in writer.constants.values()])


@contextlib.contextmanager
def no_mesh_context() -> Iterator[None]:
    """Outside any context mesh (``jax.set_mesh``), so that programs may run on any devices.

    >>> with jax.set_mesh(jax.make_mesh((8,), ("data",))), no_mesh_context():
    ...     jax.sharding.get_mesh().empty
    True
    """
    if jax.sharding.get_mesh().empty:
        yield
        return
    with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
        yield


@functools.cache
def _plain_jit_params() -> dict[str, Any]:
    """What a nested ``jax.jit`` that is called without layouts has in the params about them."""
    with no_mesh_context():
        (equation,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).eqns
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "ctx_mesh")
    return {name: equation.params[name] for name in names}


class _Writer:
    """Writes equations of a traced program without layouts, between new variables.

    Each nested program is rewritten once: calls of one function share one program, on which later
    passes rely for speed.
    """

    def __init__(self, devices: frozenset[Any] | None) -> None:
        self.devices = devices
        self.problems: list[str] = []
        self.equations: list[JaxprEqn] = []
        self.constants: dict[int, tuple[Var, Any]] = {}
        # By identity, together with what was rewritten, so that no later object gets its id.
        self._rewritten: dict[int, tuple[Any, Any]] = {}

    def inline(self, program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Appends the equations of a program; returns the variables and literals it results in."""
        return walk(program, arguments, self._append, constant=self._constant)

    def _constant(self, value: Any, variable: Var) -> Var:
        return self.constants.setdefault(id(value), (_new_variable(variable), value))[0]

    def _append(self, equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if _is_to_be_opened(equation):
            return self.inline(equation.params["jaxpr"], operands)
        if equation.primitive.name == "unstack":
            return self.inline(_slices_instead(equation), operands)
        return self._write(self.equations, *_with_given_start(equation, operands))

    def _write(
        self, written: list[JaxprEqn], equation: JaxprEqn, operands: list[Any]
    ) -> Sequence[Any]:
        """Adds an equation to those written, unless it only lays out; returns its results."""
        if equation.primitive.name in _LAYOUTS_ONLY:
            self._check_devices(equation)
            return operands
        results = list(map(_new_variable, equation.outvars))
        params, context = self._params(equation), self._once(_without_mesh, equation.ctx)
        written.append(
            equation.replace(invars=operands, outvars=results, params=params, ctx=context)
        )
        return results

    def _params(self, equation: JaxprEqn) -> dict[str, Any]:
        if equation_traits.runs_on_its_own_mesh(equation):
            return equation.params
        params = {name: self._param(value) for name, value in equation.params.items()}
        if is_jit(equation.primitive):
            for name, plain in _plain_jit_params().items():
                params[name] = plain * len(params[name]) if isinstance(plain, tuple) else plain
        return params

    def _param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self._once(self._nested, value)
        if type(value) is tuple:
            return tuple(map(self._param, value))
        return None if isinstance(value, Sharding) else value

    def _once(self, rewrite: Callable[[Any], Any], value: Any) -> Any:
        if id(value) not in self._rewritten:
            self._rewritten[id(value)] = value, rewrite(value)
        return self._rewritten[id(value)][1]

    def _nested(self, program: ClosedJaxpr | Jaxpr) -> ClosedJaxpr | Jaxpr:
        """A nested program, closed or not, without layouts."""
        equations: list[JaxprEqn] = []
        jaxpr, values = opened(program)
        constants = list(map(_new_variable, jaxpr.constvars))
        arguments = list(map(_new_variable, jaxpr.invars))
        # The walk takes the constants of a closed program for what stands for them.
        closed = ClosedJaxpr(jaxpr, constants)
        outputs = walk(closed, arguments, functools.partial(self._write, equations))
        about = jaxpr.effects, jaxpr.debug_info
        rewritten = Jaxpr(constants, arguments, outputs, equations, *about)
        return ClosedJaxpr(rewritten, values) if isinstance(program, ClosedJaxpr) else rewritten

    def _check_devices(self, equation: JaxprEqn) -> None:
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if self.devices is None or not isinstance(sharding, NamedSharding):
            return
        if isinstance(sharding.mesh, Mesh) and sharding.device_set != self.devices:
            devices: Any = sharding.device_set
            ids = sorted(device.id for device in devices)
            shape = getattr(equation.outvars[0].aval, "shape", ())
            self.problems.append(
                f"a value of shape {tuple(shape)} is constrained to {sharding.spec} on devices "
                f"{ids}, and the model is built on devices "
                f"{sorted(device.id for device in self.devices)}. Use the same mesh for both."
            )


def _new_variable(variable: Var) -> Var:
    """A variable of the same type but for the mesh."""
    aval: Any = variable.aval
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return Var(aval)
    return Var(type(aval)(aval.shape, aval.dtype, is_weakly_typed(aval)))


def _without_mesh(context: Any) -> Any:
    """The context of an equation, such as its precision, without the mesh."""
    if context.cur_abstract_mesh.empty:
        return context
    with context.manager, no_mesh_context():
        return type(context)()


def _is_to_be_opened(equation: JaxprEqn) -> bool:
    return is_jit(equation.primitive) and (
        len(equation.outvars) > 1 or equation_traits.derives_keys(equation.params["jaxpr"])
    )


def _slices_instead(unstack: JaxprEqn) -> ClosedJaxpr:
    """A program with a slice for each part of an array, instead of one equation for all."""
    operand: Any = unstack.invars[0].aval
    axis = unstack.params["axis"]

    def parts(x: Any) -> list[Any]:
        return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]

    return jax.make_jaxpr(parts)(jax.ShapeDtypeStruct(operand.shape, operand.dtype))


def _with_given_start(equation: JaxprEqn, operands: list[Any]) -> tuple[JaxprEqn, list[Any]]:
    """A short slice at a fixed place as a slice whose place is an operand."""
    if equation.primitive is not jax.lax.slice_p:
        return equation, operands
    shape, params = getattr(equation.invars[0].aval, "shape", ()), equation.params
    is_strided = any(stride != 1 for stride in params["strides"] or ())
    if is_strided or not shape or math.prod(shape) > _SMALL_SLICED_OPERAND:
        return equation, operands
    starts = list(map(np.int32, params["start_indices"]))
    sizes = tuple(map(operator.sub, params["limit_indices"], params["start_indices"]))
    return (
        equation.replace(primitive=jax.lax.dynamic_slice_p, params={"slice_sizes": sizes}),
        [*operands, *(Literal(start, jax.typeof(start)) for start in starts)],
    )
