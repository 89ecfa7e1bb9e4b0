"""One plan for a tree of named fields, each field under its own rules: train states."""

from collections.abc import Mapping
from typing import Any

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, raise_all
from penzai_shard.planning.layout_table import LayoutTable
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.plan_request import PlanRequest, warn_caller
from penzai_shard.planning.planning_trees import plan_with

# Fields of a train state whose arrays are data of a random generator, not of the model.
_KEYS = frozenset({"root_rng"})
_OPTIMIZER = "opt_state"


def plan_fields(
    request: PlanRequest, fields: Mapping[str, Any], optimizer_rules: Any = None
) -> dict[str, ShardingPlan]:
    """The plan of each field of a train state.

    Args:
        request: Mesh, rules and options.
        fields: The state's fields by name, as far as it has them.
        optimizer_rules: Other rules for the field ``opt_state``.

    Returns:
        A plan for each field. Paths in it begin with the field's name. Random keys in the field
        ``root_rng`` are replicated, whatever their form.

    Raises:
        PlanError: Some arrays have no valid layout; those of all fields are reported at once.

    >>> import jax
    >>> from penzai import pz
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> request = PlanRequest.read("place", mesh, {"a": "data"})
    >>> plans = plan_fields(request, {"params": pz.nx.ones({"a": 2}), "step": 0})
    >>> plans["params"].leaves[0].spec, plans["step"].leaves[0].path
    (P('data',), 'step')
    """
    table = request.table()
    optimizer_table = table
    if optimizer_rules is not None:
        rules = AxisRules.of(optimizer_rules)
        optimizer_table = LayoutTable(request.mesh, rules, request.on_indivisible)
    plans: dict[str, ShardingPlan] = {}
    problems: list[str] = []
    for name, tree in fields.items():
        try:
            plans[name] = plan_with(
                optimizer_table if name == _OPTIMIZER else table,
                {name: tree},
                "replicate" if name in _KEYS else request.on_unnamed,
            )
        except PlanError as error:
            problems.extend(error.problems)
    raise_all(PlanError, "no valid layout for some arrays:", problems)
    present = frozenset[Any]().union(*(plan.logical_axes for plan in plans.values()))
    warn_caller(request.doubts(present))
    return plans
