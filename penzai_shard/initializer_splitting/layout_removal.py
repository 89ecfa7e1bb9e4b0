"""Taking out of a traced initialiser what it says about where its values lie.

Where the results lie is planned, and each program is compiled for that alone, some of them for one
device. A constraint inside would ask for a mesh there. It never changes a value, so it is taken
out: with it go placements, layouts of nested calls, and layouts in the types of arrays.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding, Sharding

from penzai_shard.errors import MeshError, raise_all
from penzai_shard.initializer_splitting.equation_traits import is_jit, runs_on_its_own_mesh

# Each result is the operand of the same position.
_LAYOUTS_ONLY = frozenset(
    {"device_put", "layout_constraint", "mesh_cast", "reshard", "sharding_constraint"}
)


def without_layouts(
    traced: jex_core.ClosedJaxpr, devices: frozenset[Any] | None = None
) -> jex_core.ClosedJaxpr:
    """The same computation without a word about layouts.

    Args:
        traced: What ``jax.make_jaxpr`` gives.
        devices: The devices that the results are for; None if there is no saying.

    Returns:
        The program, or the given one if it says nothing about layouts.

    Raises:
        MeshError: A constraint is for other devices than the results.

    >>> from jax.sharding import PartitionSpec as P
    >>> everywhere = NamedSharding(jax.make_mesh((8,), ("data",)), P())
    >>> traced = jax.make_jaxpr(lambda x: jax.device_put(x, everywhere) + 1)(1.0)
    >>> [equation.primitive.name for equation in without_layouts(traced).eqns]
    ['add']
    """
    remover = _Remover(devices)
    if not remover.concerns(traced.jaxpr):
        return traced
    with no_mesh_context():
        jaxpr = remover.jaxpr(traced.jaxpr)
    raise_all(
        MeshError,
        "the initialiser constrains values to other devices than those of the mesh:",
        list(dict.fromkeys(remover.problems)),
    )
    return jex_core.ClosedJaxpr(jaxpr, traced.consts)


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
    """The parameters of a nested ``jax.jit`` that is called with no word about layouts."""
    with no_mesh_context():
        (equation,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).eqns
    return dict(equation.params)


class _Remover:
    """Rewrites jaxprs; each only once, as calls of one function share one jaxpr."""

    def __init__(self, devices: frozenset[Any] | None) -> None:
        self.devices = devices
        self.problems: list[str] = []
        self._concerned: dict[int, bool] = {}
        self._rewritten: dict[int, jex_core.Jaxpr] = {}
        self._contexts: dict[int, Any] = {}
        self._kept: list[Any] = []

    def concerns(self, jaxpr: jex_core.Jaxpr) -> bool:
        """Whether anything in the jaxpr is about layouts."""
        known = self._concerned.get(id(jaxpr))
        if known is None:
            self._kept.append(jaxpr)
            variables = [*jaxpr.constvars, *jaxpr.invars]
            known = any(_has_mesh(variable.aval) for variable in variables) or any(
                map(self._concerns_equation, jaxpr.eqns)
            )
            self._concerned[id(jaxpr)] = known
        return known

    def _concerns_equation(self, equation: jex_core.JaxprEqn) -> bool:
        if runs_on_its_own_mesh(equation):
            return False
        return (
            equation.primitive.name in _LAYOUTS_ONLY
            or not equation.ctx.cur_abstract_mesh.empty
            or any(_has_mesh(variable.aval) for variable in equation.outvars)
            or any(map(_is_sharding, equation.params.values()))
            or (is_jit(equation.primitive) and _is_placed(equation))
            or any(map(self.concerns, jex_core.jaxprs_in_params(equation.params)))
        )

    def jaxpr(self, jaxpr: jex_core.Jaxpr) -> jex_core.Jaxpr:
        """The jaxpr without layouts."""
        if not self.concerns(jaxpr):
            return jaxpr
        if id(jaxpr) not in self._rewritten:
            self._rewritten[id(jaxpr)] = self._rewrite(jaxpr)
        return self._rewritten[id(jaxpr)]

    def _rewrite(self, jaxpr: jex_core.Jaxpr) -> jex_core.Jaxpr:
        new_var = jex_core.gensym()
        known: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex_core.Literal) else known[atom]

        def bind(variables: Any) -> list[Any]:
            for variable in variables:
                known[variable] = new_var(_without_mesh(variable.aval))
            return [known[variable] for variable in variables]

        constvars, invars = bind(jaxpr.constvars), bind(jaxpr.invars)
        equations = []
        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            if equation.primitive.name in _LAYOUTS_ONLY:
                self._check_devices(equation)
                known.update(zip(equation.outvars, operands, strict=True))
                continue
            equations.append(
                equation.replace(
                    invars=operands,
                    outvars=bind(equation.outvars),
                    params=self._params(equation),
                    ctx=self._context(equation.ctx),
                )
            )
        return jaxpr.replace(
            constvars=constvars,
            invars=invars,
            outvars=[read(atom) for atom in jaxpr.outvars],
            eqns=equations,
        )

    def _params(self, equation: jex_core.JaxprEqn) -> dict[str, Any]:
        if runs_on_its_own_mesh(equation):
            return equation.params
        params = {name: self._param(value) for name, value in equation.params.items()}
        if is_jit(equation.primitive):
            plain = _plain_jit_params()
            for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts"):
                params[name] = plain[name] * len(params[name])
            params["ctx_mesh"] = plain["ctx_mesh"]
        return params

    def _param(self, value: Any) -> Any:
        match value:
            case jex_core.ClosedJaxpr():
                inner = self.jaxpr(value.jaxpr)
                same = inner is value.jaxpr
                return value if same else self._closed(value, inner)
            case jex_core.Jaxpr():
                return self.jaxpr(value)
            case tuple() if type(value) is tuple:
                return tuple(map(self._param, value))
            case Sharding():
                return None
        return value

    def _closed(self, value: jex_core.ClosedJaxpr, inner: jex_core.Jaxpr) -> Any:
        key = id(inner)
        if key not in self._contexts:
            self._kept.append(inner)
            self._contexts[key] = jex_core.ClosedJaxpr(inner, value.consts)
        return self._contexts[key]

    def _context(self, context: Any) -> Any:
        """The context of an equation, such as its precision, without the mesh."""
        if context.cur_abstract_mesh.empty:
            return context
        if id(context) not in self._contexts:
            self._kept.append(context)
            with context.manager, no_mesh_context():
                self._contexts[id(context)] = type(context)()
        return self._contexts[id(context)]

    def _check_devices(self, equation: jex_core.JaxprEqn) -> None:
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


def _is_sharding(value: Any) -> bool:
    return isinstance(value, Sharding)


def _is_placed(equation: jex_core.JaxprEqn) -> bool:
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(map(_is_sharding, shardings))


def _has_mesh(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty


def _without_mesh(aval: Any) -> Any:
    return type(aval)(aval.shape, aval.dtype, aval.weak_type) if _has_mesh(aval) else aval
