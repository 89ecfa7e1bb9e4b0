"""Wrapper layers and constraint layers: they change how a model runs, not what it computes."""

from penzai_shard.layers.checkpointed import Checkpointed, resolve_policy
from penzai_shard.layers.compiled_structure import clear_compiled_structures
from penzai_shard.layers.constrain_sharding import ConstrainSharding, ConstrainShardingByName
from penzai_shard.layers.jitted import Jitted
from penzai_shard.layers.scoped import Scoped

__all__ = [
    "Checkpointed",
    "ConstrainSharding",
    "ConstrainShardingByName",
    "Jitted",
    "Scoped",
    "clear_compiled_structures",
    "resolve_policy",
]
