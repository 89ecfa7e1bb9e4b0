"""Plans: a pure, printable decision for every array, and the sharding trees made from it."""

from penzai_shard.planning.axis_naming import name_axes
from penzai_shard.planning.field_plans import plan_fields
from penzai_shard.planning.layout_table import LayoutTable, shared_named_sharding
from penzai_shard.planning.name_shardings import (
    name_to_name_sharding,
    sharding_tree,
    shardings_and_axes,
)
from penzai_shard.planning.plan import LeafPlan, ShardingPlan
from penzai_shard.planning.plan_request import PlanRequest, make_plan, warn_caller
from penzai_shard.planning.plan_table import PlanTable, axes_text, bytes_text, grouped_rows
from penzai_shard.planning.planning_trees import plan_tree
from penzai_shard.rule_kinds import OnUnnamed

__all__ = [
    "LayoutTable",
    "LeafPlan",
    "OnUnnamed",
    "PlanRequest",
    "PlanTable",
    "ShardingPlan",
    "axes_text",
    "bytes_text",
    "grouped_rows",
    "make_plan",
    "name_axes",
    "name_to_name_sharding",
    "plan_fields",
    "plan_tree",
    "sharding_tree",
    "shardings_and_axes",
    "shared_named_sharding",
    "warn_caller",
]
