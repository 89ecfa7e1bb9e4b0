"""Declarative model surgery and sharding by axis name, for Penzai models and JAX."""

from penzai_shard.axis_rules import AxisRules
from penzai_shard.meshes import make_mesh
from penzai_shard.planning import (
    LeafPlan,
    ShardingPlan,
    make_plan,
    name_axes,
    name_to_name_sharding,
)
from penzai_shard.rule_presets import data_parallel, fully_sharded, tensor_parallel

__all__ = [
    "AxisRules",
    "LeafPlan",
    "ShardingPlan",
    "data_parallel",
    "fully_sharded",
    "make_mesh",
    "make_plan",
    "name_axes",
    "name_to_name_sharding",
    "tensor_parallel",
]
