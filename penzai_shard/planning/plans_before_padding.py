"""Where arrays are until they are stored padded, which what other libraries hold them in cannot."""

import dataclasses
import math
from typing import Any

from jax.sharding import NamedSharding

from penzai_shard.even_layouts import true_layout
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning.plan import LeafPlan, ShardingPlan, itemsize, shared_named_sharding
from penzai_shard.planning.plan_making import make_plan
from penzai_shard.planning.planner import Planner
from penzai_shard.rule_kinds import OnUnnamed


def plan_before_padding(
    model: Any, mesh: AnyMesh, rules: Any, on_unnamed: OnUnnamed = "error"
) -> ShardingPlan:
    """The plan of a model whose arrays other libraries hold, which is padded in its state.

    Until the arrays are in the state, mesh axes over which a length does not divide split another
    one, so that the model is in parts too.

    Args:
        model: The model.
        mesh: The mesh.
        rules: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    >>> import jax
    >>> from penzai import pz
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> plan_before_padding({"w": pz.nx.ones({"a": 3, "b": 8})}, mesh, {"a": "data"}).leaves[0].spec
    P(None, 'data')
    """
    plan = make_plan(model, mesh, rules, on_indivisible="replicate", on_unnamed=on_unnamed)
    planner = Planner(mesh, rules, "pad", on_unnamed)

    def in_equal_parts(leaf: LeafPlan) -> LeafPlan:
        if leaf.names is None or leaf.sharding is None:
            return leaf
        decided = planner.decide(leaf.names, leaf.shape)
        if decided.stored_sizes == leaf.shape:
            return leaf
        spec = true_layout(NamedSharding(plan.mesh, decided.spec), leaf.shape).spec
        sharding = shared_named_sharding(plan.mesh, spec)
        part = sharding.shard_shape(leaf.shape)
        return dataclasses.replace(
            leaf,
            spec=spec,
            sharding=sharding,
            shard_shape=part,
            bytes_per_device=math.prod(part) * itemsize(leaf.dtype),
        )

    return dataclasses.replace(plan, leaves=tuple(map(in_equal_parts, plan.leaves)))
