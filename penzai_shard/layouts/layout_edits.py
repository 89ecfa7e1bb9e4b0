"""The edits by which a model computes in a layout."""

from typing import Any

from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard.axis_rules import AxisRules
from penzai_shard.meshes import AnyMesh
from penzai_shard.surgery import Recipe, constrain_blocks


def constraining_edits(model: Any, mesh: AnyMesh, rules: AxisRules, blocks: Any = None) -> Recipe:
    """Constraints after each block and after each embedding lookup."""
    places = (TransformerBlock, pz.nn.EmbeddingLookup) if blocks is None else blocks
    return constrain_blocks(places, mesh, rules)
