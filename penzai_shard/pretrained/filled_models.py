"""A model that is filled with weights, and where its arrays are to be."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from penzai_shard.checkpointing.arrays_by_name import ArraysByName, layouts_by_name
from penzai_shard.checkpointing.padded_layouts import PaddedLayout, stored_by, true_layouts
from penzai_shard.checkpointing.parameter_dict import (
    rebuilt,
    refuse_states_without_values,
    stored_params,
)
from penzai_shard.checkpointing.remaining_arrays import kept_values, refuse_without_values
from penzai_shard.errors import RuleTypeError
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.planning import PlacingRequest
from penzai_shard.readers import without_repeats


class ModelToFill:
    """A model that is filled, and where its arrays are to be.

    Attributes:
        leaves: The parameters to fill, by name.
    """

    def __init__(self, model: Any, request: PlacingRequest) -> None:
        self._model = without_repeats(model)
        self._arrays = ArraysByName(stored_params(self._model), "restoring")
        self.leaves: Mapping[str, NamedLeaf] = self._arrays.leaves
        self._kept: Mapping[str, NamedLeaf] = {}
        if not self.leaves:
            raise RuleTypeError(
                f"cannot load weights into this {type(model).__name__}: it has no parameters. "
                "Give a model, or a dictionary of arrays by name."
            )
        refuse_states_without_values(self._model, "loading parameters leaves these without values:")
        self._plan = request.plan(self._model)
        self._layouts = layouts_by_name(stored_params(self._plan.starting_shardings()))

    def keep(self, names: Sequence[str]) -> None:
        """Says which parameters keep their values; these are in ``leaves`` no more.

        Raises:
            CheckpointMismatchError: Some have no value that could be kept.
        """
        kept = {name: self.leaves[name] for name in names}
        refuse_without_values(
            kept,
            "cannot keep parameters that the files do not have:",
            "Initialise the model, or give its tensor with names={stored: name}.",
        )
        self._kept = kept
        self.leaves = {name: leaf for name, leaf in self.leaves.items() if name not in kept}

    def structs(self, names: Iterable[str], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every array that is read, as it is to be stored.

        Args:
            names: Their names.
            dtype: The dtype of floating numbers; None for those of the model.
        """
        structs = {}
        for name in names:
            leaf = self.leaves[name]
            is_cast = dtype is not None and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
            shape, layout = leaf.shape, self._layouts[name]
            if isinstance(layout, PaddedLayout):
                shape, layout = layout.stored_shape(shape), layout.sharding
            structs[name] = jax.ShapeDtypeStruct(
                shape, dtype if is_cast else leaf.dtype, sharding=layout
            )
        return structs

    def filled(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The model with these arrays, and with those that it keeps, all in their layouts."""
        shardings = true_layouts(self._layouts, self._kept)
        own = kept_values(self._kept, shardings, "load_safetensors")
        stored = stored_by(self._layouts, {**arrays, **own}, "load_safetensors")
        values = self._arrays.filled(stored)
        return rebuilt(self._model, values, self._plan.sharding_tree())
