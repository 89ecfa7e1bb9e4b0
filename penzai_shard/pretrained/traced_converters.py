"""What a converter of weights does to them, as views: the converter runs once, on no values.

Penzai's converters compute a model's parameters from another project's arrays. Tracing one tells
how each parameter is made, so that a part of it can be read without the rest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.library_apis.jax_api import JaxprEqn, Literal, Tracer
from penzai_shard.placement.initializer_splitting import no_mesh_context
from penzai_shard.pretrained.tensor_views import (
    Concatenated,
    Converted,
    Increased,
    Reshaped,
    TensorView,
    Transposed,
    part_of,
    stacked,
)
from penzai_shard.traced_programs import called_program, evaluate, walk


def converted_views(
    convert: Callable[[dict[str, Any]], Any], tensors: Mapping[str, TensorView]
) -> tuple[Any, dict[str, TensorView]]:
    """The model that a converter makes, without values, and where those of its parameters are.

    Args:
        convert: Called with arrays by name; returns a Penzai model.
        tensors: What stands for each array.

    Returns:
        The model, its parameters frozen and with ``jax.ShapeDtypeStruct`` objects in place of
        arrays; and a view of each parameter by its label. Constants of the layers are real.

    Raises:
        ShardingError: The converter does something to an array that cannot be done part by part.

    >>> from penzai_shard.pretrained.stored_tensors import StoredTensor
    >>> from penzai_shard.pretrained.tensor_views import WholeTensor
    >>> def convert(arrays):
    ...     weights = pz.nx.wrap(arrays["weight"]).tag("out", "in")
    ...     return {"layer": pz.Parameter(value=weights, label="layer.weights")}
    >>> tensors = {"weight": WholeTensor(StoredTensor("weight", (2, 3), "float32", "file"))}
    >>> model, views = converted_views(convert, tensors)
    >>> model["layer"].value.data_array, views["layer.weights"].tensors
    (ShapeDtypeStruct(shape=(2, 3), dtype=float32), ('weight',))
    """
    others: list[Any] = []
    trees: list[Any] = []

    def arrays_of_the_model(values: Sequence[Any]) -> list[Any]:
        model = convert(dict(zip(tensors, values, strict=True)))
        leaves, tree = jax.tree_util.tree_flatten(pz.unbind_params(model, freeze=True))
        # What does not come from the tensors need not be an array, and stays what it is.
        others[:] = [None if isinstance(leaf, Tracer) else leaf for leaf in leaves]
        trees[:] = [tree]
        return [leaf for leaf in leaves if isinstance(leaf, Tracer)]

    with no_mesh_context():
        program = jax.make_jaxpr(arrays_of_the_model)([_struct(v) for v in tensors.values()])
        results = iter(_results(program, list(tensors.values())))
    leaves = [next(results) if other is None else other for other in others]
    structs = [_struct(leaf) if isinstance(leaf, TensorView) else leaf for leaf in leaves]
    model, parameters = jax.tree_util.tree_unflatten(trees[0], structs)
    unbound, of_parameters = jax.tree_util.tree_unflatten(trees[0], leaves)
    if any(isinstance(leaf, TensorView) for leaf in jax.tree_util.tree_leaves(unbound)):
        raise ShardingError("Penzai's converter puts tensors beside the parameters of its model.")
    found = {p.label: jax.tree_util.tree_leaves(p) for p in of_parameters}
    raise_all(
        ShardingError,
        "Penzai's converter makes parameters that cannot be read from tensors:",
        [
            f"{label}: is not made of one tensor or more alone."
            for label, leaves in found.items()
            if [isinstance(leaf, TensorView) for leaf in leaves] != [True]
        ],
    )
    return pz.bind_variables(model, parameters), {label: leaf for label, (leaf,) in found.items()}


def _struct(view: TensorView) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(view.shape, jnp.dtype(view.dtype))


def _results(program: Any, arguments: Sequence[Any]) -> list[Any]:
    def literal(atom: Literal) -> Any:
        kind: Any = atom.aval
        return jnp.asarray(atom.val, kind.dtype)

    return walk(program, arguments, _step, literal=literal)


def _step(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    if (inner := called_program(equation)) is not None:
        return _results(inner, operands)
    if not any(isinstance(operand, TensorView) for operand in operands):
        # Indices and constants of layers, which depend on no tensor.
        return evaluate(equation, operands)
    name = equation.primitive.name
    wanted: Any = equation.outvars[0].aval
    rule = _RULES.get(name)
    view = rule(equation.params, wanted.shape, *operands) if rule else None
    if view is None or (view.shape, jnp.dtype(view.dtype)) != (wanted.shape, wanted.dtype):
        given = ", ".join(str(variable.aval) for variable in equation.invars)
        raise ShardingError(
            f"Penzai's converter computes {name!r} of {given}, which this version of penzai_shard "
            "cannot read from files part by part. Load the model with Penzai's converter, or give "
            "load_safetensors the model with into= and its names with names=."
        )
    return [view]


# Each rule gives the view of a result, or None where it does not know.


def _unchanged(_: Any, __: Any, source: Any) -> TensorView | None:
    return source


def _in_shape(parameters: Any, shape: tuple[int, ...], source: Any, *_: Any) -> TensorView | None:
    """Reshapes and operations that add or drop dimensions of length 1."""
    in_order = parameters.get("dimensions") is None
    return Reshaped(source, shape) if in_order else None


def _squeezed(_: Any, shape: tuple[int, ...], source: Any) -> TensorView | None:
    return Reshaped(source, shape)


def _broadcast(parameters: Any, shape: tuple[int, ...], source: Any, *_: Any) -> TensorView | None:
    places = list(parameters["broadcast_dimensions"])
    same = math.prod(shape) == math.prod(source.shape) and places == sorted(places)
    return Reshaped(source, shape) if same else None


def _transposed(parameters: Any, _: Any, source: Any) -> TensorView | None:
    return Transposed(source, parameters["permutation"])


def _converted(parameters: Any, _: Any, source: Any) -> TensorView | None:
    return Converted(source, str(jnp.dtype(parameters["new_dtype"])))


def _sliced(parameters: Any, shape: tuple[int, ...], source: Any) -> TensorView | None:
    if set(parameters["strides"] or [1]) != {1}:
        return None
    return part_of(source, parameters["start_indices"], shape)


def _gathered(
    parameters: Any, shape: tuple[int, ...], source: Any, indices: Any
) -> TensorView | None:
    """A gather of one box, as indexing an array by a number is."""
    numbers, lengths = parameters["dimension_numbers"], parameters["slice_sizes"]
    whole_box = tuple(map(int, numbers.offset_dims)) == tuple(range(len(shape)))
    if not isinstance(source, TensorView) or not whole_box or np.ndim(indices) != 1:
        return None
    if numbers.operand_batching_dims or numbers.start_indices_batching_dims:
        return None
    starts = [0] * len(source.shape)
    for dimension, start in zip(numbers.start_index_map, np.asarray(indices), strict=True):
        if not 0 <= start <= source.shape[dimension] - lengths[dimension]:
            return None
        starts[dimension] = int(start)
    return Reshaped(part_of(source, starts, lengths), shape)


def _concatenated(parameters: Any, _: Any, *sources: Any) -> TensorView | None:
    if not all(isinstance(source, TensorView) for source in sources):
        return None
    return Concatenated(sources, parameters["dimension"])


def _stacked(parameters: Any, _: Any, *sources: Any) -> TensorView | None:
    if not all(isinstance(source, TensorView) for source in sources):
        return None
    return stacked(sources, parameters["axis"])


def _increased(_: Any, shape: tuple[int, ...], one: Any, other: Any) -> TensorView | None:
    source, by = (one, other) if isinstance(one, TensorView) else (other, one)
    if isinstance(by, TensorView) or np.ndim(by) or source.shape != shape:
        return None
    return Increased(source, float(by))


_RULES: dict[str, Callable[..., TensorView | None]] = {
    "add": _increased,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "convert_element_type": _converted,
    "copy": _unchanged,
    "copy_p": _unchanged,
    "gather": _gathered,
    "reshape": _in_shape,
    "slice": _sliced,
    "squeeze": _squeezed,
    "stack": _stacked,
    "transpose": _transposed,
}
