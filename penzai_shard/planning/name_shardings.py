"""Sharding trees by name in one call, fast enough for a hundred thousand arrays."""

import contextlib
from collections.abc import Collection
from typing import Any

from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_leaves import dimension_names
from penzai_shard.planning.layout_table import LayoutTable
from penzai_shard.planning.plan_request import PlanRequest, warn_caller
from penzai_shard.planning.planning_trees import plan_with
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible, OnUnnamed


def name_to_name_sharding(
    tree: Any,
    mesh: AnyMesh,
    axis_name_to_mesh_name: Any = None,
    ignore_unnamed_arrays: bool = False,
    as_shape_dtype_struct: bool = False,
    *,
    rules: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
) -> Any:
    """The sharding tree of a tree of named arrays.

    Takes what ``penzai.toolshed.sharding_util.name_to_name_sharding`` takes, and more. What it
    decides is the plan of ``make_plan``; what is new: positional dimensions stay unsharded, specs
    have no trailing ``None``, and rules that cannot be kept are errors.

    Args:
        tree: A pytree of named arrays, concrete or abstract. Data arrays may be missing.
        mesh: The mesh to lay it out on. Explicit axes are treated as Auto ones.
        axis_name_to_mesh_name: Rules, in any form that ``AxisRules`` reads; None maps each
            logical axis to the mesh axis of the same name.
        ignore_unnamed_arrays: Whether arrays without names get None, for JAX to infer, instead
            of being an error: the same as ``on_unnamed="infer"``.
        as_shape_dtype_struct: Whether to give ``jax.ShapeDtypeStruct`` objects with ``.sharding``
            instead, as Orbax takes them.
        rules: The same as ``axis_name_to_mesh_name``; give one of the two.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Returns:
        A tree like the input with ``NamedSharding`` or struct objects in place of the data arrays,
        variables replaced by their frozen values. For ``jax.jit`` and ``jax.device_put``.

    Raises:
        ShardingError: As ``make_plan`` does.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> tree = {"w": pz.nx.ones({"in": 8, "out": 4})}
    >>> name_to_name_sharding(tree, mesh, {"out": "model"})["w"].data_array.spec
    P(None, 'model')
    """
    if ignore_unnamed_arrays:
        if on_unnamed not in ("error", "infer"):
            raise RuleTypeError(
                "name_to_name_sharding: ignore_unnamed_arrays=True means on_unnamed='infer', and "
                f"on_unnamed={on_unnamed!r} is given. Give one of them."
            )
        on_unnamed = "infer"
    request = PlanRequest.read(
        "name_to_name_sharding",
        mesh,
        rules,
        axis_name_to_mesh_name=axis_name_to_mesh_name,
        on_indivisible=on_indivisible,
        on_unnamed=on_unnamed,
    )
    return (
        request.plan(tree).restore_structs()
        if as_shape_dtype_struct
        else sharding_tree(request, tree)
    )


def sharding_tree(request: PlanRequest, tree: Any) -> Any:
    """``request.plan(tree).sharding_tree()``, in less time.

    >>> import jax
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> request = PlanRequest.read("place", mesh, {"a": "data"})
    >>> sharding_tree(request, [pz.nx.ones({"a": 2})])[0].data_array.spec
    P('data',)
    """
    if request.given is None and tree is not None:
        quick = _QuickTree(request.table())
        with contextlib.suppress(_NeedsPlan):
            shardings = quick.shardings(tree)
            warn_caller(request.doubts(quick.logical_axes()))
            return shardings
    return request.plan(tree).sharding_tree()


def shardings_and_axes(request: PlanRequest, tree: Any) -> tuple[Any, Collection[LogicalAxis]]:
    """The sharding tree of activations, and their logical axes; without any warning.

    >>> import jax
    >>> request = PlanRequest.read("place", jax.sharding.AbstractMesh((2,), ("data",)), {})
    >>> shardings_and_axes(request, [pz.nx.ones({"a": 2})])[1]
    {'a'}
    """
    quick = _QuickTree(request.table())
    try:
        return quick.shardings(tree), quick.logical_axes()
    except _NeedsPlan:
        plan = plan_with(request.table(), tree, request.on_unnamed)
        return plan.sharding_tree(), plan.logical_axes


class _NeedsPlan(Exception):
    """The tree has something that only the full plan can treat or tell of."""


class _QuickTree:
    """Sharding trees for plain containers of well-formed named arrays.

    Arrays alike share one result, so the work per array is one dictionary look-up. Anything else,
    and anything wrong, is left to the plan, which decides through the same table.
    """

    def __init__(self, table: LayoutTable) -> None:
        self.table = table
        self.made: dict[Any, Any] = {}

    def logical_axes(self) -> set[LogicalAxis]:
        """The logical axes of the arrays that were laid out."""
        return {name for named_array in self.made.values() for name in named_array.named_axes}

    def shardings(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is pz.nx.NamedArray:
            return self._named_array(tree)
        if kind is dict:
            return self._dict(tree)
        if kind is list or kind is tuple:
            return kind([self.shardings(child) for child in tree])
        if tree is None:
            return None
        if kind is pz.ParameterValue or kind is pz.StateVariableValue:
            return self._variable_value(tree)
        raise _NeedsPlan

    def _dict(self, tree: dict[Any, Any]) -> dict[Any, Any]:
        # Most trees of many arrays are flat dictionaries of named arrays: looked up in place.
        made, named_array, build = self.made, pz.nx.NamedArray, self.shardings
        result = {}
        for key, node in tree.items():
            if type(node) is named_array:
                try:
                    axes = node.named_axes
                    result[key] = made[(node.data_array.shape, *axes, *axes.values())]
                    continue
                except (KeyError, AttributeError, TypeError):
                    pass
            result[key] = build(node)
        return result

    def _named_array(self, node: Any) -> Any:
        axes = node.named_axes
        try:
            key = (node.data_array.shape, *axes, *axes.values())
        except AttributeError:
            raise _NeedsPlan from None
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = self._lay_out(node)
        return found

    def _lay_out(self, node: Any) -> Any:
        names = dimension_names(node)
        if names is None:
            raise _NeedsPlan
        explained = self.table.decide(names, tuple(node.data_array.shape))
        if explained.problems:
            raise _NeedsPlan
        return pz.nx.NamedArray(node.named_axes, self.table.sharding(explained.spec))

    def _variable_value(self, node: Any) -> Any:
        if type(node.value) is not pz.nx.NamedArray:
            raise _NeedsPlan
        made = object.__new__(type(node))
        made.__dict__.update(node.__dict__)
        made.__dict__["value"] = self._named_array(node.value)
        return made
