"""Plans: a pure, printable decision for every array, and the sharding trees made from it.

A call goes down the modules and enters each once: ``plan_making`` (the functions), ``plan_request``
(what their arguments mean), ``planner`` (the walk over a tree; ``quick_shardings`` where no plan is
asked for), ``axis_decisions`` (one array), and up comes what ``plan`` describes.
"""

from penzai_shard.planning.axis_naming import NamesByPath, name_axes, without_names
from penzai_shard.planning.optimizer_layouts import shardings_like_params
from penzai_shard.planning.plan import LeafPlan, ShardingPlan, shared_named_sharding
from penzai_shard.planning.plan_making import make_plan, name_to_name_sharding
from penzai_shard.planning.plan_request import DescribingRequest, PlacingRequest, PlanRequest
from penzai_shard.planning.plan_table import axes_text, bytes_text, grouped_rows
from penzai_shard.planning.planner import Planner
from penzai_shard.planning.plans_before_padding import plan_before_padding
from penzai_shard.planning.transient_arrays import parts_with_gradients

__all__ = [
    "DescribingRequest",
    "LeafPlan",
    "NamesByPath",
    "PlacingRequest",
    "PlanRequest",
    "Planner",
    "ShardingPlan",
    "axes_text",
    "bytes_text",
    "grouped_rows",
    "make_plan",
    "name_axes",
    "name_to_name_sharding",
    "parts_with_gradients",
    "plan_before_padding",
    "shardings_like_params",
    "shared_named_sharding",
    "without_names",
]
