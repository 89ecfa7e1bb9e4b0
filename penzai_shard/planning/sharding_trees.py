"""Builds trees of shardings by axis name, fast enough for a hundred thousand arrays.

Arrays with equal names and sizes share one result, so that the work for each is one look-up. The
fast loop knows exact types only; all else, and every problem, is left to a plan.
"""

import sys
from collections.abc import Callable
from typing import Any

from jax.sharding import NamedSharding

from penzai_shard.errors import warn_caller
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import shared_sharding
from penzai_shard.planning.planner import find_doubts, plan_tree
from penzai_shard.rules import OnIndivisible, decide


class _NeedsPlan(Exception):
    """The tree has something that only a plan can treat or report."""


def name_to_name_sharding(
    tree: Any,
    mesh: AnyMesh,
    axis_name_to_mesh_name: Any = None,
    ignore_unnamed_arrays: bool = False,
    as_shape_dtype_struct: bool = False,
    *,
    rules: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
) -> Any:
    """Builds a tree of shardings from the logical axes of a tree of arrays.

    It takes the arguments of ``penzai.toolshed.sharding_util.name_to_name_sharding``. The tree is
    one for ``jax.device_put``, and for ``in_shardings`` and ``out_shardings`` of ``jax.jit``.

    Args:
        tree: As for ``make_plan``.
        mesh: A mesh; the shardings of an Explicit one are on its Auto twin.
        axis_name_to_mesh_name: Rules in any form that ``make_plan`` takes.
        ignore_unnamed_arrays: Put None, which leaves the choice to JAX, in place of arrays without
            names, whatever ``on_unnamed`` says.
        as_shape_dtype_struct: Give ``jax.ShapeDtypeStruct`` objects that carry the shardings.
        rules: Another name for ``axis_name_to_mesh_name``.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``.

    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"foo": 4, "bar": 2})
    >>> tree = {"one": pz.nx.ones({"a": 4, "b": 8}), "two": pz.nx.ones({"a": 8})}
    >>> shardings = name_to_name_sharding(tree, mesh, {"a": "bar", "b": "foo"})
    >>> shardings["one"].data_array.spec, shardings["two"].data_array.spec
    (P('bar', 'foo'), P('bar',))
    """
    on_unnamed = "infer" if ignore_unnamed_arrays else on_unnamed
    options = axis_name_to_mesh_name, on_indivisible, on_unnamed
    request = arguments.read("name_to_name_sharding", mesh, rules, *options)
    if as_shape_dtype_struct:
        return plan_tree(tree, request).restore_structs()
    try:
        return _fast_tree(tree, request)
    except _NeedsPlan:
        return plan_tree(tree, request).sharding_tree()


def _fast_tree(tree: Any, request: arguments.Request) -> Any:
    rules = request.rules.on(request.mesh.shape)
    items = tuple(request.mesh.shape.items())
    present: dict[Any, None] = {}

    def find_sharding(node: Any) -> NamedSharding | None:
        names, shape = tuple(node.named_axes), tuple(node.data_array.shape)
        front = len(shape) - len(names)
        if front < 0 or shape[front:] != tuple(node.named_axes.values()):
            raise _NeedsPlan
        decision = decide(rules, (None,) * front + names, shape, items, request.on_indivisible)
        # A plan finds all problems, with their paths, which this loop does not keep.
        if decision.problems:
            raise _NeedsPlan
        present.update(dict.fromkeys(names))
        return shared_sharding(request.mesh, decision.spec)

    made = _build(tree, find_sharding)
    doubts = find_doubts(request.rules, present, request.mesh.axis_names)
    warn_caller(f"{request.called}: {doubt}" for doubt in doubts)
    return made


def _build(tree: Any, find_sharding: Callable[[Any], NamedSharding | None]) -> Any:
    """The tree with a result for each array, which is made once for equal names and sizes."""
    # Nobody has its arrays who has not imported it.
    if "penzai" not in sys.modules:
        raise _NeedsPlan
    from penzai import pz

    named_array, variable_values = pz.nx.NamedArray, (pz.ParameterValue, pz.StateVariableValue)
    made: dict[Any, Any] = {}

    def build_array(node: Any) -> Any:
        try:
            axes = node.named_axes
            key = (node.data_array.shape, *axes.items())
        except AttributeError:
            raise _NeedsPlan from None
        if key not in made:
            made[key] = named_array(axes, find_sharding(node))
        return made[key]

    def build(node: Any) -> Any:
        kind = type(node)
        if kind is named_array:
            return build_array(node)
        if kind is dict:
            # Most trees of many arrays are flat dictionaries: the look-up stands in the loop, and a
            # copy, all of which is replaced, has room for all names.
            result = node.copy()
            for name, child in node.items():
                try:
                    result[name] = made[(child.data_array.shape, *child.named_axes.items())]
                except (KeyError, AttributeError):
                    result[name] = build(child)
            return result
        if kind is list or kind is tuple:
            return kind(map(build, node))
        if node is None:
            return None
        if kind in variable_values and type(node.value) is named_array:
            value = object.__new__(kind)
            value.__dict__.update(node.__dict__)
            value.__dict__["value"] = build_array(node.value)
            return value
        raise _NeedsPlan

    return build(tree)
