"""What rules say of every array of a tree: a plan that can be read before anything is placed."""

from penzai_shard.planning.plan import LeafPlan, ShardingPlan

__all__ = ["LeafPlan", "ShardingPlan"]
