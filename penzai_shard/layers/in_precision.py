"""Computes a layer in another floating-point precision than its parameters are kept in.

bfloat16 reaches as far as float32, so that losses need no scaling; it has few digits, so that long
sums, and divisions by them, are computed in float32 all the same.

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.arrays.kinds import is_array, is_struct
from penzai_shard.arrays.structure import flatten, leaves_of, read_variables, variables_of
from penzai_shard.errors import check_arguments
from penzai_shard.layers.pure_call import assign, find_pure_call, read_settings
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import auto_context, on_auto_twin
from penzai_shard.readers.reader import is_node

_SENSITIVE = ("LayerNorm", "RMSLayerNorm", "RMSStandardize", "Softmax", "Standardize")
_DTYPES = [*map(jnp.dtype, ("bfloat16", "float16", "float32", "float64"))]


def is_sensitive(layer: Any) -> bool:
    """Whether a layer is computed in float32 unless one says otherwise: Penzai's norms and softmax.

    >>> is_sensitive(pz.nn.Softmax("kv_seq")), is_sensitive(pz.nn.Identity())
    (True, False)
    """
    kinds = type(layer).__mro__
    return any(kind.__name__ in _SENSITIVE and kind.__module__[:7] == "penzai." for kind in kinds)


@pz.pytree_dataclass
class InPrecision(WrapperLayer):
    """Wraps a layer so that it computes in another precision.

    Parameters stay as they are, objects and names too: the optimizer updates them in their own
    dtype, and gradients arrive in it. So does state, which is read in the compute dtype. What
    changes: argument, side inputs and parameters are cast on the way in, and the output is cast
    back. Integers, truth values, complex numbers and random keys are left as they are, and a
    constant that is finite stays finite where the other dtype reaches less far. What a function
    closes over is not cast.

    Layers that ``keep`` names are computed in float32 (in the compute dtype where that is wider)
    with their parameters as they are; their inputs are cast up, and their outputs to the compute
    dtype. A layer ``InPrecision`` inside keeps its own precision.

    Attributes:
        body: The layer: of Penzai, or any function of arrays, such as a module of Equinox.
        compute_dtype: The dtype to compute in, such as ``"bfloat16"``.
        output_dtype: The dtype of outputs that are floating; None for that of the argument, or of
            the layer's parameters where the argument has no such arrays.
        keep: Which layers are computed in float32: a type, a tuple of types, or a function of the
            layer; ``()`` for none.

    Raises:
        RuleTypeError: A dtype is not floating, or ``keep`` cannot be read.

    >>> linear = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 4})
    >>> layer = InPrecision(linear, "bfloat16", output_dtype="bfloat16")
    >>> layer(pz.nx.ones({"embedding": 8})).dtype, linear.weights.value.dtype
    (dtype(bfloat16), dtype('float32'))
    """

    body: Any
    compute_dtype: Any = dataclasses.field(metadata={"pytree_node": False})
    output_dtype: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    keep: Any = dataclasses.field(default=is_sensitive, metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        compute, output, fix = self.compute_dtype, self.output_dtype, "a dtype such as 'bfloat16'"
        kinds = self.keep if isinstance(self.keep, tuple) else (self.keep,)
        is_function = callable(self.keep) and not isinstance(self.keep, pz.nn.Layer)
        is_place = is_function or all(isinstance(kind, type) for kind in kinds)
        checks = {
            "compute_dtype": (compute, compute is not None and compute in _DTYPES, fix),
            "output_dtype": (output, output is None or output in _DTYPES, fix),
            "keep": (self.keep, is_place, "types of layers or a function, or keep=() for none"),
        }
        check_arguments("InPrecision", checks)

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        compute: Any = jnp.dtype(self.compute_dtype)
        wide = jnp.promote_types(compute, jnp.float32)
        own: list[Any] = []

        def cast_node(node: Any) -> Any:
            if self._has_own_dtype(node):
                own.append(node)
                is_cast = isinstance(node, InPrecision)
                return node if is_cast else _BetweenCasts(_cast(node, wide), wide, compute)
            is_parameter = any(leaf.role == "parameter" for leaf in leaves_of(node))
            return _cast(node, compute, clips=not is_parameter)

        def is_end(node: Any) -> bool:
            return is_node(node) or self._has_own_dtype(node)

        with auto_context():
            inputs = {"argument": argument, "body": self.body, "side_inputs": side_inputs}
            inputs = jax.tree.map(cast_node, inputs, is_leaf=is_end)
            leaves, structure = flatten(inputs)
            # State is left to cast, but that of layers with their own precision.
            done = {*map(id, (None, *variables_of(own)))}
            values = [
                x.value if id(x.variable) in done else _cast(x.value, compute) for x in leaves
            ]
            output, assigned = find_pure_call(structure, read_settings(inputs))(values)
            output = _cast(output, self._find_output_dtype(argument))
        before = read_variables(inputs)
        new = {number: _cast_like(value, before[number]) for number, value in assigned.items()}
        assign(variables_of(inputs), new)
        return output

    def _has_own_dtype(self, node: Any) -> bool:
        """Whether a node is a layer that computes in another dtype than those around it."""
        # A function of layers need not know of the lists and arrays between them.
        if not callable(node) or jax.tree_util.all_leaves([node]):
            return False
        are_types = isinstance(self.keep, type | tuple)
        is_kept = isinstance(node, self.keep) if are_types else self.keep(node)
        return bool(is_kept) or isinstance(node, InPrecision)

    def _find_output_dtype(self, argument: Any) -> Any:
        if self.output_dtype is not None:
            return jnp.dtype(self.output_dtype)
        leaves = leaves_of(self.body)
        # Constants, such as the epsilon of a norm, may have another dtype than the parameters.
        parameters = [leaf for leaf in leaves if leaf.role == "parameter"]
        groups = (leaves_of(argument), parameters, leaves)
        found = ([x.dtype for x in group if _is_floating(x.value)] for group in groups)
        return jnp.result_type(*next(filter(None, found), [jnp.float32]))


@pz.pytree_dataclass
class _BetweenCasts(WrapperLayer):
    """A layer that computes in another dtype than those around it."""

    body: Any
    inside: Any = dataclasses.field(metadata={"pytree_node": False})
    outside: Any = dataclasses.field(metadata={"pytree_node": False})

    # Layers of other libraries take several arguments.
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), self.inside)
        return _cast(self.body(*args, **kwargs), self.outside)


def _is_floating(value: Any) -> bool:
    return is_array(value) and not is_struct(value) and jnp.issubdtype(value.dtype, jnp.floating)


def _is_live(node: Any) -> bool:
    """Whether a node is a mutable variable, or a module of them, which JAX would copy."""
    return is_node(node) and any(variable.live for variable in flatten(node)[1].variables)


def _cast(tree: Any, dtype: Any, *, clips: bool = False) -> Any:
    """A tree whose floating arrays have another dtype; variables of state stay as they are.

    Args:
        tree: The tree.
        dtype: The dtype.
        clips: Whether what is finite stays so, as the values of masks should.
    """
    largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]

    def cast(value: Any) -> Any:
        if isinstance(value, pz.Parameter):
            # Frozen, it may be cast in one layer and not in another.
            return jax.tree.map(cast, value.freeze())
        if not _is_floating(value) or value.dtype == dtype:
            return value
        value = on_auto_twin(value)
        if clips:
            value = jnp.where(jnp.isfinite(value), jnp.clip(value, -largest, largest), value)
        return jnp.asarray(value).astype(dtype)

    return jax.tree.map(cast, tree, is_leaf=_is_live)


def _cast_like(value: Any, before: Any) -> Any:
    """What a variable is to hold, each floating array in the dtype of the one before it."""
    leaves, own = jax.tree.leaves(value), jax.tree.leaves(before)
    if len(leaves) != len(own):
        return value  # What it held is no example.
    pairs = zip(leaves, own, strict=True)
    cast = [_cast(new, old.dtype) if _is_floating(old) else new for new, old in pairs]
    return jax.tree.unflatten(jax.tree.structure(value), cast)
