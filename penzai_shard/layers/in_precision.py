"""Computing a layer in another floating-point precision than its parameters are kept in.

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740); bfloat16 keeps
float32's range, so that losses need no scaling.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import variable_threading
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.meshes import onto_auto_twin
from penzai_shard.model_variables import first_api, thawed

SENSITIVE_LAYERS: tuple[type, ...] = (
    pz.nn.LayerNorm,
    pz.nn.RMSLayerNorm,
    pz.nn.RMSStandardize,
    pz.nn.Softmax,
    pz.nn.Standardize,
)
"""Layers that sum many terms or divide by such sums, which few digits do badly."""


def is_sensitive(layer: Any) -> bool:
    """Whether a layer is computed in float32 unless one says otherwise: norms and softmax.

    >>> is_sensitive(pz.nn.Softmax("kv_seq")), is_sensitive(pz.nn.Identity())
    (True, False)
    """
    return isinstance(layer, SENSITIVE_LAYERS) or type(layer) in first_api.sensitive_layer_types()


@pz.pytree_dataclass
class InPrecision(WrapperLayer):
    """Wraps a layer so that it computes in another precision.

    The argument, the side inputs and the parameters are cast on the way in, and the output is
    cast back. The parameters themselves stay as they are: the optimizer updates them in their own
    dtype, and gradients arrive in it. Only floating-point values are cast; integers, truth values
    and random keys are left alone, and a finite constant stays finite where the other dtype
    reaches less far. State variables are read in the compute dtype and keep their own.

    Layers that ``keep`` names are computed in float32 (in the compute dtype where that is wider),
    with their parameters as they are, their inputs cast up and their outputs cast back to the
    compute dtype. A loss that is computed outside of the layer is so in the output's dtype. An
    ``InPrecision`` layer inside keeps its own precision.

    Attributes:
        body: The layer.
        compute_dtype: The dtype to compute in, such as ``"bfloat16"``.
        output_dtype: The dtype of floating-point outputs; None means that of the argument, or,
            where the argument has no floating-point array, that of the parameters.
        keep: Which layers are computed in float32: a layer type, a tuple of types, or a function
            of the layer. By default norms and softmax (``is_sensitive``); ``()`` for none.

    >>> linear = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 4})
    >>> layer = InPrecision(linear, "bfloat16", output_dtype="bfloat16")
    >>> layer(pz.nx.ones({"embedding": 8})).dtype, linear.weights.value.dtype
    (dtype(bfloat16), dtype('float32'))
    """

    body: Any
    compute_dtype: Any = dataclasses.field(metadata={"pytree_node": False})
    output_dtype: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    keep: Callable[[Any], bool] | type | tuple[type, ...] = dataclasses.field(
        default=is_sensitive, metadata={"pytree_node": False}
    )

    def __post_init__(self) -> None:
        """Refuses what cannot be read where it is written, not where the model runs."""
        _floating_dtype(self.compute_dtype, "compute_dtype")
        if self.output_dtype is not None:
            _floating_dtype(self.output_dtype, "output_dtype")
        _keep_predicate(self.keep)

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        compute = _floating_dtype(self.compute_dtype, "compute_dtype")
        keep_dtype = jnp.promote_types(compute, jnp.float32)
        is_kept = _keep_predicate(self.keep)
        output_dtype = self._output_dtype(argument)
        variables = _CastVariables()
        argument, side_inputs = variables.cast(onto_auto_twin((argument, side_inputs)), compute)

        def at_node(node: Any) -> Any:
            if isinstance(node, InPrecision):
                return variables.cast(node, None)
            if is_kept(node):
                return _BetweenCasts(variables.cast(node, keep_dtype), keep_dtype, compute)
            return variables.cast(node, compute)

        body = jax.tree_util.tree_map(
            at_node,
            self.body,
            is_leaf=lambda node: isinstance(node, InPrecision) or is_kept(node),
        )
        return _cast_floats(variables.call(body, argument, side_inputs), output_dtype)

    def _output_dtype(self, argument: Any) -> Any:
        if self.output_dtype is not None:
            return _floating_dtype(self.output_dtype, "output_dtype")
        body = pz.freeze_variables(self.body)
        # Constants, such as the epsilon of a norm, may be in another dtype than the parameters.
        parameters = pz.select(body).at_instances_of(pz.ParameterValue).get_sequence()
        for tree in (pz.freeze_variables(argument), parameters, body):
            dtypes = {leaf.dtype for leaf in jax.tree_util.tree_leaves(tree) if _is_floating(leaf)}
            if dtypes:
                return functools.reduce(jnp.promote_types, sorted(dtypes, key=str))
        return jnp.dtype(jnp.float32)


def compute_dtypes(model: Any) -> set[Any]:
    """The dtypes that the ``InPrecision`` layers of a model compute in.

    >>> compute_dtypes([InPrecision(pz.nn.Identity(), "float16"), pz.nn.Identity()])
    {dtype('float16')}
    """
    found: set[Any] = set()
    for node in jax.tree_util.tree_leaves(
        model, is_leaf=lambda node: isinstance(node, InPrecision)
    ):
        if isinstance(node, InPrecision):
            found.add(_floating_dtype(node.compute_dtype, "compute_dtype"))
            found |= compute_dtypes(node.body)
    return found


@pz.pytree_dataclass
class _BetweenCasts(WrapperLayer):
    """A layer that is computed in another dtype than those around it.

    Attributes:
        body: The layer, its arrays cast already.
        inside: The dtype that it sees.
        outside: The dtype that those around it see.
    """

    body: Any
    inside: Any = dataclasses.field(metadata={"pytree_node": False})
    outside: Any = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        argument, side_inputs = _cast_floats((argument, side_inputs), self.inside)
        return _cast_floats(self.body(argument, **side_inputs), self.outside)


class _CastVariables:
    """The variables of a call, each replaced by a cast one for as long as the call runs."""

    def __init__(self) -> None:
        self._temporary: dict[int, tuple[Any, Any]] = {}

    def cast(self, tree: Any, dtype: Any) -> Any:
        """The tree with all floating-point values cast; None leaves them as they are.

        Parameters become frozen, and gradients flow to where their values were taken from. State
        variables become temporary ones; one that occurs again is the same, in the dtype that it
        was first met in.
        """
        return jax.tree_util.tree_map(lambda leaf: self._cast_leaf(leaf, dtype), tree)

    def _cast_leaf(self, leaf: Any, dtype: Any) -> Any:
        if not variable_threading.is_variable(leaf):
            return _cast_constant(onto_auto_twin(leaf), dtype)
        if id(leaf) in self._temporary:
            return self._temporary[id(leaf)][1]
        frozen = _cast_floats(onto_auto_twin(leaf.freeze()), dtype)
        if isinstance(leaf, pz.Parameter):
            return frozen
        temporary = thawed(frozen)
        self._temporary[id(leaf)] = leaf, temporary
        return temporary

    def call(self, body: Any, argument: Any, side_inputs: dict[str, Any]) -> Any:
        """Calls a cast layer; what it assigns to variables, they get in their own dtypes."""
        variables = [variable for variable, _ in self._temporary.values()]
        temporary = [temporary for _, temporary in self._temporary.values()]
        output, changed = variable_threading.call_with(
            temporary, body, argument, side_inputs, "InPrecision"
        )
        variable_threading.assign(
            variables,
            {
                index: _as_dtypes_of(content, variable_threading.content_of(variables[index]))
                for index, content in changed.items()
            },
        )
        return output


_FLOATING = ("bfloat16", "float16", "float32", "float64")


def _floating_dtype(dtype: Any, what: str) -> Any:
    try:
        read = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        read = None
    if read is None or not jnp.issubdtype(read, jnp.floating):
        near = difflib.get_close_matches(str(dtype), _FLOATING, 1, 0.5)
        fix = f"Did you mean {near[0]!r}?" if near else "For instance 'bfloat16'."
        raise RuleTypeError(f"{what} must be a floating-point dtype, not {dtype!r}. {fix}")
    return read


def _keep_predicate(keep: Any) -> Callable[[Any], bool]:
    if isinstance(keep, type):
        keep = (keep,)
    if isinstance(keep, tuple | list) and all(isinstance(kind, type) for kind in keep):
        kinds = tuple(keep)
        return lambda node: isinstance(node, kinds)
    if callable(keep):
        # Asked about layers alone: a predicate need not know of the lists and arrays in between.
        return lambda node: _is_layer(node) and bool(keep(node))
    raise RuleTypeError(
        f"keep must be a layer type, a tuple of types or a function of the layer, not {keep!r}. "
        "Use () to keep no layer in float32."
    )


def _is_layer(node: Any) -> bool:
    return callable(node) and isinstance(node, pz.Struct)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _cast(leaf: Any, dtype: Any) -> Any:
    if dtype is None or not _is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    return jnp.asarray(leaf).astype(dtype)


def _cast_floats(tree: Any, dtype: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: _cast(leaf, dtype), tree)


def _cast_constant(leaf: Any, dtype: Any) -> Any:
    """A constant of a layer in another dtype: what is finite, such as a mask's value, stays so."""
    if dtype is not None and _is_floating(leaf):
        largest = float(jnp.finfo(dtype).max)
        if largest < float(jnp.finfo(leaf.dtype).max):
            leaf = jnp.where(jnp.isfinite(leaf), jnp.clip(leaf, -largest, largest), leaf)
    return _cast(leaf, dtype)


def _as_dtypes_of(content: Any, own: Any) -> Any:
    """The content, each floating-point array in the dtype of the one that it replaces."""
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(content)
    former = jax.tree_util.tree_leaves(own)
    if len(leaves) != len(former):
        # Built differently than before: nothing to take a dtype from.
        return content
    dtypes = [old.dtype if _is_floating(old) else None for old in former]
    return structure.unflatten(map(_cast, leaves, dtypes))
