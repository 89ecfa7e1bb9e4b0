"""Putting arrays, models and train states on a mesh as a plan says."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from penzai.core.variables import AbstractVariable, AbstractVariableValue

from penzai_shard.array_kinds import (
    is_abstract,
    is_deleted,
    is_traced,
    loses_integers,
    own_copy_of_numpy,
)
from penzai_shard.equinox_modules import are_arrays
from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.library_apis.jax_api import is_weakly_typed
from penzai_shard.meshes import onto_auto_twin
from penzai_shard.model_variables import thawed
from penzai_shard.named_leaves import leaves_of
from penzai_shard.placement.stored_padding import (
    padded_on_devices,
    padded_struct,
    stored_as_planned,
)
from penzai_shard.planning import PlacingRequest, ShardingPlan
from penzai_shard.processes import put_all
from penzai_shard.readers import with_repeats, without_bare_arrays, without_repeats
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed


def place(
    tree: Any,
    plan_or_mesh: ShardingPlan | Mesh | None = None,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    plan: ShardingPlan | None = None,
) -> Any:
    """Puts a tree of arrays, a model or a train state on a mesh, each array as planned.

    Args:
        tree: Any tree that ``make_plan`` takes, its arrays concrete; also with NumPy data, which
            is copied, and with tensors of torch.
        plan_or_mesh: A plan, which is carried out exactly as it was printed; or a mesh, to plan
            for with the rules and options. A mesh with Explicit axes is treated as its twin with
            Auto axes.
        rules: Rules in any form that ``AxisRules`` reads; None maps each logical axis to the
            mesh axis of the same name. Not with a plan.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: The plan by name, as the ``restore_*`` functions take it.

    Returns:
        The tree with its arrays placed. Mutable variables in it are new ones with the same labels
        and metadata; the given ones keep their arrays. A variable that occurs several times in
        the tree does so in the result.

    Raises:
        ShardingError: Some array has no valid layout or no value, or the plan is of another tree:
            its paths, logical axes, shapes or dtypes differ. Nothing has been placed then.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> from penzai import pz
    >>> from penzai_shard.meshes import make_mesh
    >>> from penzai_shard.planning import make_plan
    >>> plan = make_plan(
    ...     {"w": pz.nx.ones({"a": 6, "b": 8})},
    ...     make_mesh({"data": 4, "model": 2}),
    ...     {"a": "data", "b": "model"},
    ...     on_indivisible="replicate",
    ... )
    >>> place({"w": pz.nx.zeros({"a": 6, "b": 8})}, plan)["w"].data_array.sharding.spec
    P(None, 'model')
    """
    if plan_or_mesh is None and plan is None:
        raise RuleTypeError(
            "place needs a plan, place(tree, plan), or a mesh, place(tree, mesh, rules). Make one: "
            "make_mesh({'data': 4, 'model': 2})."
        )
    request = PlacingRequest.read(
        "place", plan_or_mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed, plan
    )
    tree = without_repeats(tree)
    return with_repeats(put(tree, request.sharding_tree(tree), "place"))


def name_to_name_device_put(
    tree: Any,
    mesh: Mesh | None = None,
    axis_name_to_mesh_name: Any = None,
    *,
    rules: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    plan: ShardingPlan | None = None,
) -> Any:
    """Puts a tree of named arrays on a mesh, each laid out by its logical axis names.

    ``place`` under the name, and with the arguments, of
    ``penzai.toolshed.sharding_util.name_to_name_device_put``.

    Args:
        tree: A tree of named arrays, also with NumPy data, or a model.
        mesh: The mesh. One with Explicit axes is treated as its twin with Auto axes.
        axis_name_to_mesh_name: Rules, in any form that ``AxisRules`` reads; None maps each
            logical axis to the mesh axis of the same name.
        rules: The same; give one of the two.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: A plan to carry out instead of mesh, rules and options.

    Returns:
        What ``place`` returns.

    Raises:
        ShardingError: Some array has no valid layout; nothing has been placed then.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> from penzai import pz
    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> placed = name_to_name_device_put(pz.nx.ones({"batch": 8}), mesh, {"batch": "data"})
    >>> placed.data_array.sharding.spec
    P('data',)
    """
    request = PlacingRequest.read(
        "name_to_name_device_put",
        mesh,
        rules,
        axis_name_to_mesh_name,
        on_indivisible,
        on_unnamed,
        plan,
    )
    tree = without_repeats(tree)
    return with_repeats(put(tree, request.sharding_tree(tree), "name_to_name_device_put"))


def put(tree: Any, shardings: Any, called: str) -> Any:
    """``jax.device_put`` that gives a model new variables instead of failing on mutable ones.

    Args:
        tree: What ``place`` takes; also traced, and then its layout is a constraint.
        shardings: Its sharding tree.
        called: The function that was called, for messages.

    Returns:
        What ``place`` returns.

    Raises:
        ShardingError: Some array has no value, or was donated; or differs between processes.
    """
    tree = without_bare_arrays(tree, called)
    pad = functools.partial(padded_on_devices, called)
    tree = stored_as_planned(tree, shardings, pad)
    treedef: Any
    nodes, treedef = jax.tree_util.tree_flatten(tree)
    targets = treedef.flatten_up_to(shardings)
    # Each variable once, however often it occurs, and everything in one call.
    values: dict[int, Any] = {}
    layouts: dict[int, Any] = {}
    others: dict[int, Any] = {}
    # Numbered as they occur, so that all processes place them in one order.
    first = _first_occurrences(nodes)
    for place, node, target, is_array in zip(first, nodes, targets, are_arrays(tree), strict=True):
        is_variable = isinstance(node, AbstractVariable)
        if is_variable or is_array:
            values.setdefault(place, node.freeze() if is_variable else node)
            layouts.setdefault(place, target)
        else:
            others[place] = node
    _refuse_without_value(tree, values)
    values = stored_as_planned(values, layouts, pad)
    placed = others | {
        place: thawed(value) if isinstance(value, AbstractVariableValue) else value
        for place, value in _device_put(values, layouts, tree, called).items()
    }
    return treedef.unflatten([placed[place] for place in first])


def described(tree: Any, shardings: Any, called: str) -> Any:
    """What ``put`` would place, as structs with the layouts; touches no device.

    Args:
        tree: As for ``put``, its arrays concrete or structs.
        shardings: Its sharding tree.
        called: The function that was called, for messages.
    """
    tree = stored_as_planned(without_bare_arrays(tree, called), shardings, padded_struct)
    treedef: Any
    nodes, treedef = jax.tree_util.tree_flatten(tree)
    targets = treedef.flatten_up_to(shardings)
    structs = [
        described_array(node, target) if is_array else node
        for node, target, is_array in zip(nodes, targets, are_arrays(tree), strict=True)
    ]
    return treedef.unflatten(structs)


def described_array(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """A struct in place of an array, a struct or a number, with another layout."""
    kind = array if is_abstract(array) else jax.typeof(array)
    return jax.ShapeDtypeStruct(
        kind.shape, kind.dtype, sharding=sharding, weak_type=is_weakly_typed(kind)
    )


def _device_put(values: dict[int, Any], layouts: dict[int, Any], tree: Any, called: str) -> Any:
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten(values)
    are_traced = any(map(is_traced, leaves))
    if not are_traced and jax.process_count() == 1:
        if not _are_on_cpu(layouts):
            return jax.device_put(values, layouts)
        # One after the other, so that one copy is there at a time.
        copied = {
            place: jax.device_put(own_copy_of_numpy(value), layouts[place])
            for place, value in values.items()
            if isinstance(value, np.ndarray)
        }
        others = {place: value for place, value in values.items() if place not in copied}
        layouts = {place: layouts[place] for place in others}
        return copied | jax.device_put(jax.tree.map(own_copy_of_numpy, others), layouts)
    targets = treedef.flatten_up_to(
        jax.tree.broadcast(layouts, values, is_leaf=lambda node: node is None)
    )
    if not are_traced:
        own = list(map(own_copy_of_numpy, leaves))
        placed = put_all(own, targets, functools.partial(_paths, tree, leaves), called)
        return jax.tree_util.tree_unflatten(treedef, placed)
    # Inside a traced function JAX takes a placement for a mere hint.
    pinned = [
        leaf if target is None else jax.lax.with_sharding_constraint(onto_auto_twin(leaf), target)
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, pinned)


def _are_on_cpu(layouts: Any) -> bool:
    """Whether arrays are put into the memory that NumPy's are in."""
    for sharding in jax.tree_util.tree_leaves(layouts):
        return next(iter(sharding.device_set)).platform == "cpu"
    return jax.default_backend() == "cpu"


def _paths(tree: Any, arrays: Sequence[Any]) -> list[str]:
    """The path in a tree of each of its arrays."""
    known = {id(leaf.array): leaf.path for leaf in leaves_of(tree)}
    return [known.get(id(array)) or f"array {number}" for number, array in enumerate(arrays)]


# What cannot be placed, the headline that says so, and for each array its fix. Without the second
# one JAX would hand on an array whose memory is gone where its layout stays the same, and without
# the third cut integers off.
_WITHOUT_VALUE = (
    (
        is_abstract,
        "only arrays can be placed, and these have a shape and no value:",
        "build it with sharded_init, or fill it with restore_params.",
    ),
    (
        is_deleted,
        "these arrays are no longer there, because something was called that donates them:",
        "was donated or deleted. Place what that call returned, such as the newest state.",
    ),
    (
        loses_integers,
        "JAX would keep other integers than these:",
        "has values of {dtype} beyond those of {narrow}. Set "
        "jax.config.update('jax_enable_x64', True), or scale them down.",
    ),
)


def _refuse_without_value(tree: Any, values: dict[int, Any]) -> None:
    leaves = jax.tree_util.tree_leaves(values)
    for is_unfit, headline, fix in _WITHOUT_VALUE:
        if any(map(is_unfit, leaves)):
            unfit = [leaf for leaf in leaves_of(tree) if is_unfit(leaf.array)]
            problems = [
                f"{leaf.path or 'the array'}: "
                + fix.format(dtype=getattr(leaf.array, "dtype", None), narrow=leaf.dtype)
                for leaf in unfit
            ]
            raise_all(ShardingError, headline, problems)


def _first_occurrences(nodes: Sequence[Any]) -> list[int]:
    """For each leaf of a tree the first one that is the same variable, or itself."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(node), index) if isinstance(node, AbstractVariable) else index
        for index, node in enumerate(nodes)
    ]
