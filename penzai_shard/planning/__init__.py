"""Plans: a pure, printable decision for every array, and the sharding trees made from it."""

from penzai_shard.planning.axis_naming import name_axes
from penzai_shard.planning.plan import LeafPlan, ShardingPlan, shared_named_sharding
from penzai_shard.planning.plan_making import make_plan, name_to_name_sharding
from penzai_shard.planning.plan_request import PlacingRequest, PlanRequest
from penzai_shard.planning.plan_table import PlanTable, axes_text, bytes_text, grouped_rows
from penzai_shard.planning.planner import Planner, plan_tree
from penzai_shard.rule_kinds import OnUnnamed

__all__ = [
    "LeafPlan",
    "OnUnnamed",
    "PlacingRequest",
    "PlanRequest",
    "PlanTable",
    "Planner",
    "ShardingPlan",
    "axes_text",
    "bytes_text",
    "grouped_rows",
    "make_plan",
    "name_axes",
    "name_to_name_sharding",
    "plan_tree",
    "shared_named_sharding",
]
