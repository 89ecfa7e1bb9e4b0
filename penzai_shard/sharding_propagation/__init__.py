"""Where the layout of each value of a program comes from, by the compiler's own propagation."""

from penzai_shard.sharding_propagation.program import (
    FLOW,
    Edge,
    Hop,
    Operation,
    PropagatedProgram,
)

__all__ = ["FLOW", "Edge", "Hop", "Operation", "PropagatedProgram"]
