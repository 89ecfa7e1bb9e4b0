"""Where the layout of each value of a program comes from, by the compiler's own propagation."""

from penzai_shard.sharding_propagation.causes import Cause, CauseKind
from penzai_shard.sharding_propagation.losses import Loss, LossKind, Standing
from penzai_shard.sharding_propagation.operations import FLOW, Edge, Hop, Operation
from penzai_shard.sharding_propagation.program import PropagatedProgram
from penzai_shard.sharding_propagation.value_walks import walk

__all__ = [
    "FLOW",
    "Cause",
    "CauseKind",
    "Edge",
    "Hop",
    "Loss",
    "LossKind",
    "Operation",
    "PropagatedProgram",
    "Standing",
    "walk",
]
