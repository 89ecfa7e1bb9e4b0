"""What the splitting of an initialiser has to know about single equations."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from penzai_shard.library_apis.jax_api import ClosedJaxpr, JaxprEqn
from penzai_shard.traced_programs import ELEMENTWISE, inner_programs, is_jit


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Repeating one of these in every output that uses it costs nothing that one would notice, however
# large its result: compilers fuse them into what reads them.
_FREE = _names(
    "broadcast_in_dim iota squeeze reshape expand_dims copy random_wrap random_unwrap "
    "random_clone random_seed"
)

# Each element of the result comes from at most one element of each operand by a fixed formula, or
# from an exact choice among elements, whose outcome does not depend on the order of evaluation.
_ELEMENTWISE = ELEMENTWISE | _names("bitcast_convert_type copy_p opt_barrier optimization_barrier")
_MOVES_ELEMENTS = _names(
    "broadcast_in_dim concatenate device_put dynamic_slice dynamic_update_slice expand_dims gather "
    "iota pad reshape rev scatter select_and_gather_add slice sort split squeeze transpose tile "
    "unstack"
)
_EXACT_REDUCTIONS = _names(
    "argmax argmin cummax cummin reduce_and reduce_max reduce_min reduce_or reduce_xor top_k"
)
_RANDOM = _names(
    "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap "
    "random_wrap threefry2x32 rng_bit_generator"
)
_LAYOUT_INDEPENDENT = _ELEMENTWISE | _MOVES_ELEMENTS | _EXACT_REDUCTIONS | _RANDOM

# What these do is decided by the equations inside.
_CALLS = _names(
    "jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr cond while scan"
)
_KEEPS_VALUES = _LAYOUT_INDEPENDENT | _CALLS
_KEY_DERIVATIONS = _names("random_seed random_wrap random_fold_in random_split")

_FEW_ELEMENTS = 64


def runs_on_its_own_mesh(equation: JaxprEqn) -> bool:
    """Whether the equation is written for the devices of a mesh, as ``jax.shard_map`` is."""
    return equation.primitive.name == "shard_map"


def element_count(avals: Iterable[Any]) -> int:
    """How many elements arrays of these types have together."""
    return sum(math.prod(getattr(aval, "shape", ())) for aval in avals)


def byte_count(avals: Iterable[Any]) -> int:
    """How many bytes arrays of these types have together, about 8 for a random key."""
    return sum(math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8) for aval in avals)


def is_free(equation: JaxprEqn) -> bool:
    """Whether the equation costs next to nothing, whatever the size of its result."""
    return equation.primitive.name in _FREE


def is_cheap_to_repeat(equation: JaxprEqn) -> bool:
    """Whether each output that needs the equation may as well compute it again.

    True of everything free, and of key derivations and element-by-element formulas with small
    results.
    """
    name = equation.primitive.name
    if name in _FREE:
        return True
    if element_count([var.aval for var in equation.outvars]) > _FEW_ELEMENTS:
        return False
    return name in _ELEMENTWISE or name in _MOVES_ELEMENTS or name in _RANDOM


def keeps_values_in_any_layout(equation: JaxprEqn) -> bool:
    """Whether the result is the same to the bit however the arrays are spread over devices.

    It is not where floating-point numbers are summed: partial sums per device are added in an
    order that depends on the layout. Unknown operations on floating-point numbers are taken to
    be of that kind. Of a call, a loop or a branch this says nothing: ask for the equations inside.
    """
    if equation.primitive.name in _KEEPS_VALUES:
        return True
    return not any(inner_programs(equation)) and all(
        _is_exact_type(atom.aval) for atom in (*equation.invars, *equation.outvars)
    )


def _is_exact_type(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and (dtype.kind in "iub")


# A small cache: JAX gives the same nested program to each call of one jitted function, so that one
# initialiser has few of them. Entries are dropped with age; they hold only program text.
@functools.lru_cache(maxsize=512)
def derives_keys(program: ClosedJaxpr) -> bool:
    """Whether the program, or a function that it calls under jit, derives random keys."""
    return any(
        equation.primitive.name in _KEY_DERIVATIONS
        or (is_jit(equation.primitive) and any(map(derives_keys, inner_programs(equation))))
        for equation in program.eqns
    )
