"""Builds trees of shardings by axis name, fast enough for a hundred thousand arrays.

Arrays with equal names and sizes share one result, so that the work for each is one look-up. The
fast loop knows exact types only; all else, and every problem, is left to a plan.
"""

from collections.abc import Callable
from typing import Any

import jax

from penzai_shard.errors import warn_caller
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.planning.doubts import find_doubts
from penzai_shard.planning.planner import plan_tree, shared_sharding
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
            names; the same as ``on_unnamed="infer"``.
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
    request = arguments.read(
        "name_to_name_sharding",
        mesh,
        rules,
        axis_name_to_mesh_name,
        on_indivisible=on_indivisible,
        on_unnamed="infer" if ignore_unnamed_arrays else on_unnamed,
    )
    try:
        return _fast_tree(tree, request, as_shape_dtype_struct)
    except _NeedsPlan:
        plan = plan_tree(tree, request)
    return plan.restore_structs() if as_shape_dtype_struct else plan.sharding_tree()


def _fast_tree(tree: Any, request: arguments.Request, as_structs: bool) -> Any:
    rules = request.rules.on(request.mesh.shape)
    items = tuple(request.mesh.shape.items())
    present: dict[Any, None] = {}

    def make_leaf(node: Any) -> Any:
        array, names = node.data_array, tuple(node.named_axes)
        shape = tuple(array.shape)
        front = len(shape) - len(names)
        if front < 0 or shape[front:] != tuple(node.named_axes.values()):
            raise _NeedsPlan
        decision = decide(rules, (None,) * front + names, shape, items, request.on_indivisible)
        if decision.problems:
            raise _NeedsPlan
        present.update(dict.fromkeys(names))
        sharding = shared_sharding(request.mesh, decision.spec)
        if as_structs:
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
        return sharding

    made = _build(tree, make_leaf, as_structs)
    doubts = find_doubts(request.rules, present, request.mesh.axis_names)
    warn_caller(f"{request.called}: {doubt}" for doubt in doubts)
    return made


def _build(tree: Any, make_leaf: Callable[[Any], Any], as_structs: bool) -> Any:
    """The tree with a result for each array, which is made once for equal names and sizes."""
    # Imported here: nobody has named arrays who has not imported Penzai.
    from penzai import pz

    named_array, variable_values = pz.nx.NamedArray, (pz.ParameterValue, pz.StateVariableValue)
    made: dict[Any, Any] = {}

    def build_array(node: Any) -> Any:
        try:
            axes, data = node.named_axes, node.data_array
            key = (data.shape, *axes, *axes.values(), *((data.dtype,) if as_structs else ()))
        except AttributeError:
            raise _NeedsPlan from None
        found = made.get(key)
        if found is None:
            found = made[key] = named_array(axes, make_leaf(node))
        return found

    def build(node: Any) -> Any:
        kind = type(node)
        if kind is named_array:
            return build_array(node)
        if kind is dict:
            # Most trees of many arrays are flat dictionaries: the look-up stands in the loop.
            result = {}
            for name, child in node.items():
                if type(child) is named_array and not as_structs:
                    try:
                        axes = child.named_axes
                        result[name] = made[(child.data_array.shape, *axes, *axes.values())]
                        continue
                    except (KeyError, AttributeError):
                        pass
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
