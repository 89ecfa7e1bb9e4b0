"""Surgery as data: recipes that edit a model, prove that it computes the same, and come off."""

from penzai_shard.surgery.edit_report import EditReport, EditRow
from penzai_shard.surgery.edits import Edit, insert_after, insert_before, replace, wrap
from penzai_shard.surgery.inserted_layers import InsertedSequence
from penzai_shard.surgery.places import ROOT, Where
from penzai_shard.surgery.recipe import Recipe
from penzai_shard.surgery.stripping import strip

__all__ = [
    "ROOT",
    "Edit",
    "EditReport",
    "EditRow",
    "InsertedSequence",
    "Recipe",
    "Where",
    "insert_after",
    "insert_before",
    "replace",
    "strip",
    "wrap",
]
