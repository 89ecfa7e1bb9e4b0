"""``make_plan``, and ``name_to_name_sharding`` for the sharding tree alone."""

from typing import Any

from penzai_shard.errors import RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.plan_request import PlanRequest
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed


def make_plan(
    tree: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
) -> ShardingPlan:
    """Decides the layout of every array of a tree. Touches no device.

    The plan of a train state also shows the gradients of the parameters that are trained, which
    each device holds while a step runs.

    Args:
        tree: Any pytree: models with ``Parameter`` and ``StateVariable`` objects or their frozen
            values, models of Penzai's first API, named arrays and views, optimizer states, plain
            arrays; concrete or made of ``jax.ShapeDtypeStruct`` objects.
        mesh: The mesh, concrete or abstract. Explicit axes are treated as Auto ones.
        rules: ``AxisRules``, or anything they can be read from; None maps each logical axis to
            the mesh axis of the same name.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        on_indivisible: What becomes of named dimensions whose length does not divide: an error;
            whole on every device (``"replicate"``); or stored padded to the next length that
            divides (``"pad"``), while everything computes with the true length, see
            ``PaddedArray``. The reason says which. Of several rules for one name the first that
            divides wins, and without one the first is padded. Positional dimensions and arrays
            without names are never padded, nor are statistics of some dimensions of a parameter,
            such as adafactor's, which are small: what it pads is whole in them.
        on_unnamed: What becomes of arrays without names that have dimensions: an error, a copy
            on every device (``"replicate"``), or left to JAX (``"infer"``). Scalars have nothing
            to name and are replicated, unless JAX is to infer.

    Returns:
        The plan.

    Raises:
        RuleTypeError: The rules or options cannot be read.
        MeshError: A rule names a mesh axis that the mesh does not have.
        PlanError: Some arrays have no valid layout; all of them are reported at once.

    Warns:
        ShardingWarning: A rule matches nothing and its name is nearly a logical axis of it; or no
            rules are given, and no logical axis has the name of a mesh axis; or arrays of
            Equinox modules, which never have names, are copied to every device.

    >>> import jax
    >>> from penzai import pz
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> weights = {"up": pz.nx.ones({"embedding": 8, "neurons": 16})}
    >>> plan = make_plan(weights, mesh, {"embedding": "data", "neurons": "model"})
    >>> plan.leaves[0].spec, plan.leaves[0].shard_shape, plan.bytes_per_device
    (P('data', 'model'), (2, 8), 64)
    """
    request = PlanRequest.read(
        "make_plan", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed
    )
    return request.plan(tree)


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
    have no trailing ``None``, and rules that cannot be followed are errors.

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

    >>> from penzai import pz
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
        "name_to_name_sharding", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed
    )
    if as_shape_dtype_struct:
        return request.plan(tree).restore_structs()
    return request.sharding_tree(tree)
