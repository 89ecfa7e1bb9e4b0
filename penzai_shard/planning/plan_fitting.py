"""Carrying a plan over to the tree that it was made for, or to one just like it.

A plan is usually made before any array exists: from an abstract model, whose variables are frozen
and may be in another order. What counts is that it has the same arrays under the same paths.
"""

import collections
import dataclasses
from typing import Any

from penzai_shard.errors import PlanError, raise_all
from penzai_shard.named_leaves import NamedLeaf, Stored
from penzai_shard.planning.plan import LeafPlan, ShardingPlan
from penzai_shard.planning.planner import number_arrays, stored_number
from penzai_shard.rule_kinds import array_text


def fitted_plan(
    plan: ShardingPlan, tree: Any, called: str = "place", keep_others: bool = False
) -> ShardingPlan:
    """The same decisions for another tree with the same arrays.

    Args:
        plan: A plan.
        tree: A tree whose arrays have the paths, logical axes, shapes and dtypes that the plan was
            made for; concrete or abstract, its variables mutable or frozen, in any order.
        called: The function that was called, for messages.
        keep_others: As for ``Planner.plan``.

    Returns:
        The plan, so that its sharding tree has the structure of this tree.

    Raises:
        PlanError: The arrays differ; all differences are reported at once.

    >>> import jax
    >>> from penzai import pz
    >>> from penzai_shard.planning.planner import Planner
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> plan = Planner(mesh, {"a": "data"}).plan({"w": pz.nx.ones({"a": 2})})
    >>> fitted_plan(plan, {"w": pz.nx.zeros({"a": 2})}).leaves == plan.leaves
    True
    >>> fitted_plan(plan, {"w": pz.nx.zeros({"b": 2})})
    Traceback (most recent call last):
    penzai_shard.errors.PlanError: place: the plan was made for another tree. Plan this one: ...
      w: is [a=2] in the plan and [b=2] in the tree.
    """
    indices: dict[str, list[int]] = collections.defaultdict(list)
    for index, planned in enumerate(plan.leaves):
        indices[planned.path].append(index)
    occurred: collections.Counter[str] = collections.Counter()
    problems: list[str] = []

    def find(leaf: NamedLeaf) -> int | Stored:
        candidates = indices.get(leaf.path)
        if not candidates:
            problems.append(f"{leaf.path or 'the array'}: is in the tree and not in the plan.")
            return -1
        # A variable that occurs several times is one array in the plan or several, depending on
        # whether the tree held it as one object.
        index = candidates[min(occurred[leaf.path], len(candidates) - 1)]
        occurred[leaf.path] += 1
        problems.extend(_difference(plan.leaves[index], leaf))
        return stored_number(index, leaf, plan.leaves[index])

    others: list[str] = []
    numbers = number_arrays(tree, find, others, keep_others)
    problems += [
        f"{path or 'the array'}: is in the plan and not in the tree."
        for path in indices
        if path not in occurred
    ]
    headline = f"{called}: the plan was made for another tree. Plan this one: make_plan(tree, ...)"
    raise_all(PlanError, headline, problems)
    return dataclasses.replace(plan, _numbers=numbers, others=tuple(others))


def _difference(planned: LeafPlan, leaf: NamedLeaf) -> list[str]:
    same_dtype = planned.dtype == leaf.dtype or None in (planned.dtype, leaf.dtype)
    if planned.names == leaf.names and planned.shape == leaf.shape and same_dtype:
        return []
    in_plan, in_tree = (
        ("" if same_dtype else str(array.dtype))
        + (
            f"{list(array.shape)} without names"
            if array.names is None
            else array_text(array.names, array.shape)
        )
        for array in (planned, leaf)
    )
    return [f"{leaf.path or 'the array'}: is {in_plan} in the plan and {in_tree} in the tree."]
