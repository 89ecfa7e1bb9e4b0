"""What the layers of a model give while it is traced: shapes and logical axis names, no values."""

import contextlib
import dataclasses
from typing import Any

import jax
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.named_arrays import dimension_names
from penzai_shard.tree_paths import paths_and_leaves


class LayerOutputs:
    """The arrays that each layer gave, those alike once; equal to itself alone.

    >>> outputs = LayerOutputs()
    >>> outputs.note("mlp", pz.nx.ones({"batch": 4}))
    >>> [(array.shape, array.names) for array in outputs.of("mlp")]
    [((4,), ('batch',))]
    """

    def __init__(self) -> None:
        self._arrays: dict[str, dict[StepArray, None]] = {}

    def note(self, path: str, output: Any) -> None:
        """Adds what a layer gave.

        Args:
            path: The layer's path.
            output: Whatever it returned.
        """
        arrays = self._arrays.setdefault(path, {})
        # Layers may give what JAX cannot take apart, which is then not known.
        with contextlib.suppress(ValueError, TypeError):
            for place, leaf in paths_and_leaves(output, is_leaf=_is_named):
                data = leaf.data_array if _is_named(leaf) else leaf
                if is_array_like(data):
                    struct = jax.ShapeDtypeStruct(data.shape, data.dtype)
                    names = dimension_names(leaf) if _is_named(leaf) else None
                    array = StepArray.of(place, "outputs", struct)
                    arrays[dataclasses.replace(array, names=names)] = None

    def of(self, path: str) -> tuple[StepArray, ...]:
        """The arrays that a layer gave, in their order; none if it was not called."""
        return tuple(self._arrays.get(path, ()))


def _is_named(node: Any) -> bool:
    return isinstance(node, pz.nx.NamedArrayBase)
