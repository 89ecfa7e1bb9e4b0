"""Which dimensions of the values of a traced program are one logical axis."""

from penzai_shard.choosing.dimensions.program_dimensions import (
    DimensionClass,
    ProgramDimensions,
    length_of,
)
from penzai_shard.choosing.dimensions.tied_dimensions import Conflict

__all__ = ["Conflict", "DimensionClass", "ProgramDimensions", "length_of"]
