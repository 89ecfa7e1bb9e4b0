"""Surgery as data: recipes that edit a model, prove that it computes the same, and come off."""

from penzai_shard.surgery.edit_report import EditReport, EditRow
from penzai_shard.surgery.edits import Edit
from penzai_shard.surgery.equivalence import (
    ArrayComparison,
    Comparison,
    Divergence,
    EquivalenceReport,
    NotEquivalentError,
    check_equivalent,
)
from penzai_shard.surgery.inserted_layers import Inserted, InsertedSequence, Original
from penzai_shard.surgery.making_edits import insert_after, insert_before, replace, wrap
from penzai_shard.surgery.places import ROOT, Where
from penzai_shard.surgery.recipe import Recipe
from penzai_shard.surgery.references import Ref
from penzai_shard.surgery.standard_recipes import (
    axes_in_place,
    constrain_blocks,
    jit_root,
    manual_fsdp,
    mixed_precision,
    rematerialise_blocks,
    roll_layer_stacks,
    scope_layers,
)
from penzai_shard.surgery.stripping import strip

__all__ = [
    "ROOT",
    "ArrayComparison",
    "Comparison",
    "Divergence",
    "Edit",
    "EditReport",
    "EditRow",
    "EquivalenceReport",
    "Inserted",
    "InsertedSequence",
    "NotEquivalentError",
    "Original",
    "Recipe",
    "Ref",
    "Where",
    "axes_in_place",
    "check_equivalent",
    "constrain_blocks",
    "insert_after",
    "insert_before",
    "jit_root",
    "manual_fsdp",
    "mixed_precision",
    "rematerialise_blocks",
    "replace",
    "roll_layer_stacks",
    "scope_layers",
    "strip",
    "wrap",
]
