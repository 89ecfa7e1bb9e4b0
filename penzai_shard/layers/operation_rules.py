"""Says which operations treat the elements of a split dimension independently of each other.

A rule reads one operation as it stands in two traces: with the whole lengths, and with those of one
part. It passes if for every split dimension the results of a part are the part of the results. What
has no rule and is not elementwise is refused where something of it is split: a mistake in a name
refuses, and never passes.

The operations are those of ``jax.lax`` (jax 0.10.2):
https://docs.jax.dev/en/latest/jax.lax.html
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import numpy as np

from penzai_shard.arrays.kinds import is_key_type
from penzai_shard.jax_internals.tracing import ClosedJaxpr, Jaxpr, JaxprEqn
from penzai_shard.programs import ELEMENTWISE, inner_programs, open_program

# The mesh axes over which each dimension of a value is split, () where it is whole.
Dims: TypeAlias = tuple[tuple[str, ...], ...]

# The beginnings of the names of operations that move data between devices, or ask which it is.
_COLLECTIVES = (
    *("psum", "pmax", "pmin", "pbroadcast", "ppermute", "pgather", "all_gather", "all_to_all"),
    *("ragged_all_to_all", "reduce_scatter", "unreduced_", "axis_index", "psend", "precv"),
)
# Parameters that may differ between the traces: layouts; lengths, which the results show; and the
# ends of slices, which starts and lengths tell.
_LAYOUTS, _LENGTHS = ("sharding", "out_sharding", "ctx_mesh"), ("shape", "new_sizes", "slice_sizes")
_MAY_DIFFER = frozenset((*_LAYOUTS, *_LENGTHS, "limit_indices", "name"))


class Mixes(Exception):
    """One operation does not treat the elements of a split dimension independently."""


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal of a program; () for what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def is_collective(operation: str) -> bool:
    """Whether an operation moves data between devices, or asks which one it runs on."""
    return operation.startswith(_COLLECTIVES)


def axes_in(dims: Dims) -> frozenset[str]:
    """All mesh axes over which a value is split."""
    return frozenset(name for axes in dims for name in axes)


def check_operation(whole: JaxprEqn, part: JaxprEqn, dims: Sequence[Dims]) -> None:
    """Refuses an operation that is not known to treat elements independently.

    Args:
        whole: The operation, with the whole lengths.
        part: It, with the lengths of a part.
        dims: What is split of each operand, then of each result.

    Raises:
        Mixes: It mixes elements, or is not known.
    """
    name = str(whole.primitive.name)
    is_known = name in _RULES or name in ELEMENTWISE or not any(map(any, dims))
    if is_collective(name) or not is_known:
        raise Mixes("it is not known to treat the elements of a split dimension independently")
    # One of whole arrays may bring its own transpose, which gets the cotangent of a part. Those of
    # ``jnp.linalg`` are linear, as a transpose must be.
    if name not in (*_RULES, "custom_linear_solve") and any(inner_programs(whole)):
        raise Mixes("it calls a program, which is not followed")
    # Only of this kind of keys each makes its own numbers. Of others the first makes all:
    # https://docs.jax.dev/en/latest/jax.random.html#advanced-rng-configuration
    is_drawing = name in ("random_bits", "random_fold_in", "random_split")
    is_split = any(map(any, dims[: len(whole.invars)]))
    if is_drawing and is_split and "fry" not in str(whole.invars[0].aval):
        raise Mixes("the first key makes the numbers of all; those of threefry2x32 do not")
    if name.startswith("debug_"):
        return
    # Effects reach what is no result: a mutable array, the host.
    if whole.effects:
        raise Mixes("it has effects, which are not followed")
    check_parameters(whole, part, _MAY_DIFFER)
    if name in _RULES:
        shapes = [shape_of(atom) for atom in (*whole.invars, *whole.outvars)]
        _RULES[name](whole.params, shapes, dims)


def check_parameters(whole: JaxprEqn, part: JaxprEqn, may_differ: Set[str]) -> None:
    """Refuses an operation that has other parameters for a part."""
    for key in (whole.params.keys() | part.params.keys()) - may_differ:
        if not is_same(whole.params.get(key), part.params.get(key)):
            raise Mixes(f"its {key} depends on the length of a split dimension")


def is_same(one: Any, other: Any) -> bool:
    """Whether two parameters or constants are the same; what cannot be compared is not."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, jax.core.Tracer):
        return False
    if isinstance(one, Jaxpr | ClosedJaxpr):
        has_constants = any(len(open_program(program)[1]) for program in (one, other))
        return not has_constants and str(one) == str(other)
    if isinstance(one, np.ndarray | jax.Array):
        # To read a key is an operation, and would become part of what is traced here.
        if is_key_type(one.dtype):
            return False
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return bool(np.all(one == other))


# Rules: each reads the parameters, and the shapes and split dimensions of operands, then results.

_Rule: TypeAlias = Callable[[Mapping[str, Any], Sequence[tuple[int, ...]], Sequence[Dims]], None]


def _check_whole(dims: Dims, along: Any, verb: str) -> None:
    for index in along if isinstance(along, Sequence) else (along,):
        if dims and dims[index]:
            raise Mixes(f"it {verb} a split dimension")


def _harmless(params: Any, shapes: Any, dims: Any) -> None:
    pass


def _along(key: str, verb: str) -> _Rule:
    """Operations that mix elements along the dimensions that a parameter names, and no others."""

    def rule(params: Any, shapes: Any, dims: Any) -> None:
        for own in dims:
            if len(own) == len(dims[0]):
                _check_whole(own, params[key], verb)

    return rule


def _slice(params: Any, shapes: Any, dims: Any, window: int = -1) -> None:
    """Takes or writes a window of an array, or repeats it, or puts it into a larger one.

    Sound along dimensions of which the window has all: its start is 0, each element stays in place.
    """
    padding = params.get("padding_config") or [(0, 0, 0)] * len(shapes[0])
    for dim, length in enumerate(shapes[0]):
        is_all = (length, dims[0][dim]) == (shapes[window][dim], dims[window][dim])
        if not is_all or tuple(padding[dim]) != (0, 0, 0):
            for own in (dims[0], dims[window]):
                _check_whole(own, dim, "takes or writes a part of")


def _gather_or_scatter(params: Any, shapes: Any, dims: Any, window: int = -1) -> None:
    """Takes windows of the operand at given coordinates, or writes windows there.

    Sound along batching dimensions, whose lengths JAX makes equal in all three arrays; and along
    those of the operand that no coordinate moves and of which every window has all, as element i
    of a window is element i of the operand. Along other dimensions of the indices each takes its
    own window, so that these may be split too; but each device must have all windows to write.
    """
    window_dims, dropped, moved, batch, index_batch = params["dimension_numbers"]
    operand, indices = dims[:2]
    is_gather = window == -1
    shared = [-1] if is_gather else [d for d in range(len(indices)) if d not in index_batch]
    _check_whole(indices, shared, "indexes along")
    _check_whole(operand, dropped, "takes or writes by index along")
    kept = [dim for dim in range(len(operand)) if dim not in (*dropped, *batch)]
    for dim, other in zip(kept, window_dims, strict=True):
        is_all = (shapes[0][dim], operand[dim]) == (shapes[window][other], dims[window][other])
        if dim in moved or not is_all:
            _check_whole(operand, dim, "takes or writes by index along")
            _check_whole(dims[window], other, "takes or writes a part of")


def _broadcast(params: Any, shapes: Any, dims: Any) -> None:
    for source, target in enumerate(params["broadcast_dimensions"]):
        own = dims[0][source]
        if own != dims[-1][target] and (own or shapes[0][source] != 1):
            raise Mixes("it repeats a split dimension")


def _convolution(params: Any, shapes: Any, dims: Any) -> None:
    # Examples of a batch do not meet, unless they are put into groups.
    batch = params["dimension_numbers"].lhs_spec[0] if params["batch_group_count"] == 1 else None
    _check_whole(dims[0], [d for d in range(len(dims[0])) if d != batch], "convolves along")
    _check_whole(dims[1], range(len(dims[1])), "convolves with")


def _dot(params: Any, shapes: Any, dims: Any) -> None:
    # JAX makes batch dimensions equal, and no result may be split twice over the same mesh axes.
    for own, contracted in zip(dims, params["dimension_numbers"][0], strict=False):
        _check_whole(own, contracted, "contracts")


def _reshape(params: Any, shapes: Any, dims: Any) -> None:
    """Merges and divides dimensions.

    Sound if the same mesh axes split both sides below equally many elements of outer dimensions:
    within each of these a part is the same stretch of elements on both sides.
    """
    before, after = (
        {axes: math.prod(shape[:dim]) for dim, axes in enumerate(own) if axes}
        for own, shape in zip(dims, shapes, strict=True)
    )
    if params.get("dimensions") is not None or 0 in shapes[0] or before != after:
        raise Mixes("it merges or divides a split dimension so that parts do not stay together")


_NAMES: dict[str, _Rule] = {
    """debug_callback debug_print layout_constraint name optimization_barrier pcast pvary
    random_bits random_clone random_fold_in random_seed random_split reshard sharding_constraint
    stack threefry2x32 transpose""": _harmless,
    # What these drop, divide or merge has one length in both traces, or their parameters differ.
    "bitcast_convert_type random_unwrap random_wrap split squeeze unstack": _harmless,
    "cumlogsumexp cummax cummin cumprod cumsum": _along("axis", "accumulates along"),
    """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_sum""": _along("axes", "reduces"),
    "concatenate": _along("dimension", "concatenates along"),
    "iota": _along("dimension", "counts positions along"),
    "rev": _along("dimensions", "reverses"),
    "sort": _along("dimension", "sorts along"),
    "top_k": _along("axis", "takes the largest along"),
    "dynamic_slice pad slice tile": _slice,
    "dynamic_update_slice": functools.partial(_slice, window=1),
    "gather": _gather_or_scatter,
    """scatter scatter-add scatter-max scatter-min scatter-mul
    scatter-sub""": functools.partial(_gather_or_scatter, window=2),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "reshape": _reshape,
}
_RULES = {name: rule for names, rule in _NAMES.items() for name in names.split()}
