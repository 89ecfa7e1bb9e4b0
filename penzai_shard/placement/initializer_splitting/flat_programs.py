"""Writing a traced initialiser out as one flat program, without what it says about layouts.

Where the results are laid out is planned, and each part of the initialiser is compiled for that
alone, some parts for one device. A constraint inside would ask for a mesh there. It never changes a
value, so it is taken out: with it go placements, layouts of nested calls, and layouts in the types
of arrays.
"""

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from penzai_shard.errors import MeshError, raise_all
from penzai_shard.library_apis.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from penzai_shard.placement.initializer_splitting import equation_traits
from penzai_shard.traced_programs import is_jit, walk

# Each result is the operand of the same position.
_LAYOUTS_ONLY = frozenset(
    {"device_put", "layout_constraint", "mesh_cast", "reshard", "sharding_constraint"}
)
_SMALL_SLICED_OPERAND = 2**16


def flat_program(traced: ClosedJaxpr, devices: frozenset[Any] | None = None) -> ClosedJaxpr:
    """Writes a traced initialiser out as a flat program that says nothing about layouts.

    Nested ``jax.jit`` calls are opened where that helps to tell outputs apart: those with several
    results, and those that derive random keys. Others stay one equation. Slices at a fixed place
    are written as slices at a given place, so that taking the first and the second of many keys is
    the same operation with another integer.

    Args:
        traced: What ``jax.make_jaxpr`` gives for a function without arguments.
        devices: The devices that the results are for; None if they are not known.

    Returns:
        The same function. A constant that it closes over several times is there once.

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
    constants = writer.constants.values()
    jaxpr = traced.jaxpr.replace(
        constvars=[variable for variable, _ in constants], eqns=writer.equations, outvars=outputs
    )
    return ClosedJaxpr(jaxpr, [value for _, value in constants])


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
    """Writes equations of a traced program without layouts.

    Nested programs that say nothing about layouts stay the same objects, and each of the others is
    rewritten once: calls of one function share one program, on which later passes rely for speed.
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
        write = functools.partial(self._write, self.equations, outermost=True)
        return walk(program, arguments, write, constant=self._constant)

    def _constant(self, value: Any, variable: Var) -> Var:
        return self.constants.setdefault(id(value), (Var(variable.aval), value))[0]

    def _write(
        self,
        written: list[JaxprEqn],
        equation: JaxprEqn,
        operands: list[Any],
        outermost: bool = False,
    ) -> Sequence[Any]:
        """Appends an equation between other variables; returns what stands for its results."""
        if equation.primitive.name in _LAYOUTS_ONLY:
            self._check_devices(equation)
            return operands
        if outermost and _is_to_be_opened(equation):
            return self.inline(equation.params["jaxpr"], operands)
        # At the top all variables are new, because a function called twice is written out twice.
        results = _without_mesh(equation.outvars, always_new=outermost)
        equation = self._equation(equation, operands, results)
        written.append(_with_given_start(equation) if outermost else equation)
        return results

    def _nested(self, program: ClosedJaxpr | Jaxpr) -> Any:
        """A nested program, closed or not, without layouts."""
        if id(program) not in self._rewritten:
            without: Any
            if isinstance(program, Jaxpr):
                without = self._nested_jaxpr(program)
            else:
                jaxpr = self._nested(program.jaxpr)
                same = jaxpr is program.jaxpr
                without = program if same else ClosedJaxpr(jaxpr, program.consts)
            self._rewritten[id(program)] = program, without
        return self._rewritten[id(program)][1]

    def _nested_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        equations: list[JaxprEqn] = []
        constants = _without_mesh(jaxpr.constvars)
        arguments = _without_mesh(jaxpr.invars)
        # The walk takes the constants of a closed program for what stands for them.
        closed = ClosedJaxpr(jaxpr, constants)
        outputs = walk(closed, arguments, functools.partial(self._write, equations))
        before = [*jaxpr.constvars, *jaxpr.invars, *jaxpr.eqns]
        if _are_same([*constants, *arguments, *equations], before):
            return jaxpr
        return jaxpr.replace(constvars=constants, invars=arguments, eqns=equations, outvars=outputs)

    def _equation(
        self, equation: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]
    ) -> JaxprEqn:
        params, context = self._params(equation), self._context(equation.ctx)
        before = [*equation.invars, *equation.outvars, *equation.params.values(), equation.ctx]
        if _are_same([*operands, *results, *params.values(), context], before):
            return equation
        return equation.replace(
            invars=list(operands), outvars=list(results), params=params, ctx=context
        )

    def _params(self, equation: JaxprEqn) -> dict[str, Any]:
        if equation_traits.runs_on_its_own_mesh(equation):
            return equation.params
        params = {name: self._param(value) for name, value in equation.params.items()}
        if is_jit(equation.primitive):
            for name, plain in _plain_jit_params().items():
                without = plain * len(params[name]) if isinstance(plain, tuple) else plain
                if params[name] != without:
                    params[name] = without
        return params

    def _param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self._nested(value)
        if type(value) is tuple:
            items = tuple(map(self._param, value))
            return value if _are_same(items, value) else items
        return None if isinstance(value, Sharding) else value

    def _context(self, context: Any) -> Any:
        """The context of an equation, such as its precision, without the mesh."""
        if context.cur_abstract_mesh.empty:
            return context
        if id(context) not in self._rewritten:
            with context.manager, no_mesh_context():
                self._rewritten[id(context)] = context, type(context)()
        return self._rewritten[id(context)][1]

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


def _are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _without_mesh(variables: Sequence[Var], always_new: bool = False) -> list[Var]:
    """Variables whose types have no mesh; the same ones where nothing changes, unless asked."""
    result = []
    for variable in variables:
        aval: Any = variable.aval
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty:
            variable = Var(type(aval)(aval.shape, aval.dtype, aval.weak_type))
        elif always_new:
            variable = Var(aval)
        result.append(variable)
    return result


def _is_to_be_opened(equation: JaxprEqn) -> bool:
    return is_jit(equation.primitive) and (
        len(equation.outvars) > 1 or equation_traits.derives_keys(equation.params["jaxpr"])
    )


def _with_given_start(equation: JaxprEqn) -> JaxprEqn:
    """A short slice at a fixed place as a slice whose place is an operand."""
    if equation.primitive.name != "slice":
        return equation
    operand: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    params = equation.params
    if (
        any(stride != 1 for stride in params["strides"] or ())
        or not operand.shape
        or equation_traits.element_count([operand]) > _SMALL_SLICED_OPERAND
    ):
        return equation
    starts = [
        Literal(np.int32(start), jax.typeof(np.int32(0))) for start in params["start_indices"]
    ]
    return equation.replace(
        primitive=jax.lax.dynamic_slice_p,
        params={"slice_sizes": tuple(result.shape)},
        invars=[equation.invars[0], *starts],
    )
