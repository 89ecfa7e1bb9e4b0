"""Puts the arrays of a tree on a mesh, or inside a trace pins where they lie."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import is_traced
from penzai_shard.arrays.structure import Structure
from penzai_shard.errors import MeshError, Problem
from penzai_shard.meshes import AnyMesh, auto_context, mesh_text
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import plan_tree
from penzai_shard.processes.arrays import put
from penzai_shard.rules import OnIndivisible


def place(
    tree: Any,
    plan_or_mesh: ShardingPlan | AnyMesh | None = None,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
    plan: ShardingPlan | None = None,
    mesh: AnyMesh | None = None,
    owned: bool = False,
) -> Any:
    """Puts the arrays of a tree where a plan, or rules on a mesh, say that they lie.

    Inside ``jax.jit`` it constrains the arrays, so that the same line lays out values that a
    function computes.

    Args:
        tree: As for ``make_plan``, with arrays in it.
        plan_or_mesh: A plan of this tree, or a mesh.
        rules: As for ``make_plan``.
        axis_name_to_mesh_name: The same under Penzai's name.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: The plan, by name.
        mesh: The mesh, by name.
        owned: Whether no array may share memory with one of ``tree``, so that all can be donated.

    Returns:
        The tree with placed arrays, and with new variables in place of mutable ones.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``.
        ShardingError: Some arrays are shapes, or deleted, or too wide for JAX.

    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> placed = place(pz.nx.ones({"batch": 8, "seq": 4}), mesh, {"batch": "data"})
    >>> placed.data_array.sharding.spec
    P('data',)
    """
    if isinstance(plan_or_mesh, ShardingPlan):
        plan, plan_or_mesh = plan_or_mesh, None
    mesh = plan_or_mesh if mesh is None else mesh
    options = axis_name_to_mesh_name, on_indivisible, on_unnamed
    request = arguments.read("place", mesh, rules, *options, plan=plan)
    return place_tree(tree, request, owned=owned)


def name_to_name_device_put(
    tree: Any,
    mesh: AnyMesh,
    axis_name_to_mesh_name: Any = None,
    *,
    rules: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
) -> Any:
    """Puts the arrays of a tree on a mesh by their logical axes: ``place`` under Penzai's name.

    Args:
        tree: As for ``place``.
        mesh: A mesh.
        axis_name_to_mesh_name: Rules in any form that ``make_plan`` takes.
        rules: Another name for them.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"foo": 4, "bar": 2})
    >>> name_to_name_device_put(pz.nx.ones({"a": 8}), mesh, {"a": "bar"}).data_array.sharding.spec
    P('bar',)
    """
    options = axis_name_to_mesh_name, on_indivisible, on_unnamed
    request = arguments.read("name_to_name_device_put", mesh, rules, *options)
    return place_tree(tree, request)


def place_tree(tree: Any, request: arguments.Request, *, owned: bool = False) -> Any:
    """Carries out what a caller asked for."""
    check_devices(request)
    plan = plan_tree(tree, request)
    # Tracers that lie on an Explicit mesh of jax.set_mesh are relabelled in it.
    with auto_context():
        leaves, structure = run_inputs(tree, request.called)
        values = [leaf.value for leaf in leaves]
        shardings = planned_shardings(plan, structure)
        is_constraint = any(map(is_traced, values))
        if is_constraint:
            placed = [
                value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)
                for value, sharding in zip(values, shardings, strict=True)
            ]
        else:
            placed = _put_all(values, shardings, structure.paths)
            # On a CPU, arrays of NumPy and arrays spread over devices share memory with what they
            # came from. One by one: each source may go before the next copy is made.
            for i, sharding in enumerate(shardings) if owned else ():
                placed[i] = jax.device_put(placed[i], sharding, may_alias=False)
    return structure.fill_alike(placed)


def planned_shardings(plan: ShardingPlan, structure: Structure) -> list[NamedSharding | None]:
    """The sharding of each array of a tree; a plan that was given may have another order."""
    if plan.structure.paths == structure.paths:
        return [leaf.sharding for leaf in plan.leaves]
    found = {leaf.path: leaf.sharding for leaf in plan.leaves}
    return [found[path] for path in structure.paths]


def check_devices(request: arguments.Request) -> None:
    """Refuses a mesh without devices.

    Raises:
        MeshError: The mesh is abstract.
    """
    if not isinstance(request.mesh, jax.sharding.Mesh):
        what = f"the mesh ({mesh_text(request.mesh)}) is abstract and has no devices"
        fix = f"Write make_mesh({dict(request.mesh.shape)})."
        raise MeshError(f"{request.called}:", [Problem("", what, fix)])


def _put_all(
    values: Sequence[Any], shardings: Sequence[NamedSharding | None], paths: Sequence[str]
) -> list[Any]:
    values = list(values)
    together: list[int] = []
    for i, sharding in enumerate(shardings):
        if isinstance(values[i], np.ndarray):
            # On a CPU, JAX uses the memory of NumPy arrays, and whoever writes to it would change
            # the model. One by one: no more than one copy is there besides.
            copied = np.array(values[i])
            values[i] = (
                copied if sharding is None else put([copied], [sharding], paths=[paths[i]])[0]
            )
        elif sharding is not None:
            together.append(i)
    targets: list[Any] = [shardings[i] for i in together]
    placed = put([values[i] for i in together], targets, paths=[paths[i] for i in together])
    for i, array in zip(together, placed, strict=True):
        values[i] = array
    # Others are left to JAX, and only become arrays.
    return [v if isinstance(v, jax.Array) else jax.numpy.asarray(v) for v in values]
