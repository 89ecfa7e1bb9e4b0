"""Edits of models as values: declared once, applied to any model, counted, shown, taken back."""

from penzai_shard.surgery.edits import Edit
from penzai_shard.surgery.inserted import Inserted, Original
from penzai_shard.surgery.references import Ref
from penzai_shard.surgery.where import Where

__all__ = ["Edit", "Inserted", "Original", "Ref", "Where"]
