"""Deciding for every array of a tree, by a table of layouts."""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penzai_shard.errors import PlanError, raise_all
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_leaves import NamedLeaf, map_arrays
from penzai_shard.planning.layout_table import LayoutTable
from penzai_shard.planning.plan import LeafPlan, ShardingPlan, itemsize
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed, check_option

# Why an array lies whole on every device though nobody asked for it.
NAMELESS_MODULE = "no names, as in any Equinox module: replicated"


def plan_tree(
    tree: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
) -> ShardingPlan:
    """``make_plan`` without its warnings, for trees such as activations that see few of the rules.

    >>> plan_tree({}, jax.sharding.AbstractMesh((2,), ("data",))).leaves
    ()
    """
    return plan_with(LayoutTable(mesh, rules, on_indivisible), tree, on_unnamed)


def plan_with(
    table: LayoutTable, tree: Any, on_unnamed: OnUnnamed = "error", keep_others: bool = False
) -> ShardingPlan:
    """The plan of a tree by a table of layouts.

    Args:
        table: The layouts.
        tree: The tree.
        on_unnamed: As for ``make_plan``.
        keep_others: Whether all leaves that are not arrays stay as they are, instead of functions
            and classes alone.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> plan_with(LayoutTable(mesh, {}), {}).leaves
    ()
    """
    check_option("on_unnamed", on_unnamed)
    leaves: list[LeafPlan] = []
    others: list[str] = []
    problems: list[str] = []

    def plan_leaf(leaf: NamedLeaf) -> int:
        if stays_as_it_is(leaf, keep_others):
            others.append(leaf.path)
            return -1
        leaf_plan, found = _plan_leaf(leaf, table, on_unnamed)
        problems.extend(f"{leaf.path or 'the array'}: {problem}" for problem in found)
        leaves.append(leaf_plan)
        return len(leaves) - 1

    indexed = map_arrays(tree, plan_leaf)
    raise_all(PlanError, "no valid layout for some arrays:", problems)
    slots, treedef = jax.tree_util.tree_flatten(indexed)
    return ShardingPlan(
        table.mesh, table.rules, tuple(leaves), treedef, tuple(slots), tuple(others)
    )


def stays_as_it_is(leaf: NamedLeaf, keep_others: bool) -> bool:
    """Whether a leaf is not an array and not meant to be one.

    Models of other libraries have functions and classes among their leaves. Text, or an array of
    it, is more likely a mistake, unless whoever made the tree keeps ``others``.

    >>> stays_as_it_is(NamedLeaf("activation", None, (), None, len), keep_others=False)
    True
    """
    is_other = leaf.names is None and leaf.dtype is None
    return is_other and (keep_others or callable(leaf.array))


def _plan_leaf(
    leaf: NamedLeaf, table: LayoutTable, on_unnamed: OnUnnamed
) -> tuple[LeafPlan, tuple[str, ...]]:
    problems: tuple[str, ...] = ()
    spec: PartitionSpec | None = PartitionSpec()
    # A statistic that is not made of its parameter's dimensions has no names of its own.
    unfit = leaf.whole is not None and leaf.problem
    if leaf.names is not None and not unfit:
        layout = table.layout(leaf)
        spec, reason, problems = layout.spec, layout.reason, layout.problems
    elif on_unnamed == "infer":
        spec, reason = None, "no names: left to JAX"
    elif leaf.dtype is None:
        reason = ""
        problems = (
            f"a {type(leaf.array).__name__} is not an array. "
            "Keep it out of the tree, for instance as a static field.",
        )
    elif not leaf.shape:
        reason = "scalar: replicated"
    elif on_unnamed == "replicate":
        reason = f"{'names do not fit' if unfit else 'no names'}: replicated"
    elif unfit:
        reason = ""
        problems = (f'{leaf.problem}, or pass on_unnamed="replicate" for a copy on every device.',)
    elif leaf.in_nameless_module:
        reason = NAMELESS_MODULE
    else:
        reason = ""
        by_path = " or name_axes(tree, {...})" if leaf.path else ""
        problems = (
            f"this array of shape {leaf.shape} has no logical axis names. "
            f"Name it with pz.nx.wrap(array).tag(...){by_path}, "
            'or pass on_unnamed="replicate".',
        )
    sharding = None if spec is None else table.sharding(spec)
    shard_shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    held = math.prod(shard_shape) * itemsize(leaf.dtype)
    plan = LeafPlan(
        leaf.path, leaf.names, leaf.shape, leaf.dtype, spec, sharding, reason, shard_shape, held
    )
    return plan, problems
