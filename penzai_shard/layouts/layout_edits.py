"""The edits by which a model computes in a layout."""

from typing import Any

from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layers import Checkpointed, GatherParameters
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import Planner
from penzai_shard.surgery import Recipe, constrain_blocks, wrap


def constraining_edits(mesh: AnyMesh, rules: AxisRules, blocks: Any = None) -> Recipe:
    """Constraints after each block and after each embedding lookup."""
    places = (TransformerBlock, pz.nn.EmbeddingLookup) if blocks is None else blocks
    return constrain_blocks(places, mesh, rules)


def gathering_edits(
    mesh: AnyMesh, compute: AxisRules, again: bool = False, blocks: Any = None
) -> Recipe:
    """Each block's parameters gathered when it runs.

    Args:
        mesh: The mesh.
        compute: How parameters are laid out while they are used.
        again: Whether they are gathered a second time in the backward pass.
        blocks: Where the blocks are.
    """
    place = TransformerBlock if blocks is None else blocks
    edits = [wrap(place, GatherParameters, mesh=mesh, rules=compute)]
    if again:
        edits.append(wrap(GatherParameters, Checkpointed, policy="all_but_gathered"))
    return Recipe(*edits)


def are_gathered(model: Any, mesh: AnyMesh, parameters: AxisRules, compute: AxisRules) -> bool:
    """Whether some parameter is stored in another layout than the one it is used in."""
    stored, used = (
        Planner(mesh, rules, on_indivisible="replicate", on_unnamed="replicate").plan(model)
        for rules in (parameters, compute)
    )
    return [leaf.spec for leaf in stored.leaves] != [leaf.spec for leaf in used.leaves]
