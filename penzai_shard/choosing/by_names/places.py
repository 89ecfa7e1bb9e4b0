"""Where a layout pins activations and gathers parameters, as places in a model.

These are the places of the edits that a layout makes (``layouts.layout_edits``), found once.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from penzai_shard.choosing.by_names.step_arrays import Table
from penzai_shard.layers import Checkpointed
from penzai_shard.layouts.layout_edits import BLOCKS, REGIONS
from penzai_shard.layouts.vocabulary_layers import vocabulary_layers
from penzai_shard.surgery import Recipe, wrap
from penzai_shard.surgery.bare_paths import bare_paths
from penzai_shard.surgery.tree_nodes import is_layer, nodes_of


@dataclasses.dataclass(frozen=True)
class ModelPlaces:
    """The layers of a model that a layout edits, by their paths.

    Attributes:
        blocks: Those that parameters are gathered for.
        regions: Those that read activations and give what is added to them.
        lookups: Those that look tokens up.
        heads: Those that give logits.
        block_place: The blocks as a place of an edit.
    """

    blocks: frozenset[str]
    regions: frozenset[str]
    lookups: frozenset[str]
    heads: frozenset[str]
    block_place: Any = ()

    @classmethod
    def of(cls, model: Any, blocks: Any, vocabulary: Any) -> "ModelPlaces":
        """Finds them.

        Args:
            model: The model, not edited.
            blocks: As of a layout: a place of ``wrap``, None for those of Penzai, ``()`` for none.
            vocabulary: The logical axis of the vocabulary.
        """
        none: frozenset[str] = frozenset()
        if blocks == () or not any(is_layer(node) for _, node in nodes_of(model)):
            return cls(none, none, none, none)
        layers = vocabulary_layers(model, vocabulary)
        lookups = _paths(model, [layer.place for layer in layers if layer.looks_up])
        heads = _paths(model, [layer.place for layer in layers if not layer.looks_up])
        if blocks is not None:
            found = _paths(model, [blocks])
            return cls(found, found, lookups, heads, blocks)
        regions = _paths(model, REGIONS)
        # In a model without Penzai's blocks, the regions are the blocks.
        kinds = BLOCKS if _paths(model, BLOCKS) else REGIONS
        present = tuple(kind for kind in kinds if _paths(model, [kind]))
        return cls(_paths(model, present), regions, lookups, heads, present)

    def table(self, layers: Iterable[str]) -> Table:
        """Which rules lay out the activations of an operation.

        Args:
            layers: The layers that it is in, the outermost first; none if it is of the loss.
        """
        layers = tuple(layers)
        if not layers or not (self.heads | self.lookups).isdisjoint(layers):
            return Table.LOGITS
        return Table.BETWEEN if self.regions.isdisjoint(layers) else Table.INSIDE


def _paths(model: Any, places: Iterable[Any]) -> frozenset[str]:
    """The paths of the layers at some places, as marks of layers have them."""
    bare = bare_paths(model)
    found: set[str] = set()
    for place in places:
        for row in Recipe(wrap(place, Checkpointed)).report(model).rows:
            found |= {bare.get(path, path) for path in row.paths}
    return frozenset(found)
