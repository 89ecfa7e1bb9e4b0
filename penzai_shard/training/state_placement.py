"""Laying out a new train state as the model's parameters are already."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.array_kinds import is_abstract, is_array_like, is_traced
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.meshes import AnyMesh, auto_context, mesh_text
from penzai_shard.named_arrays import dimension_names
from penzai_shard.padded_arrays import is_padded, padded_as, padded_like, without_padding
from penzai_shard.placement import described_array
from penzai_shard.planning import Planner, shardings_like_params
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed
from penzai_shard.training.flat_state import CONSTANT_FIELDS
from penzai_shard.training.optimizer_calls import initial_optimizer_state
from penzai_shard.training.state_layout import (
    as_array,
    canonical,
    committed,
    mesh_of,
    meshes_of,
    with_strong_type,
)
from penzai_shard.tree_paths import array_path_text


def place_initial_fields(
    fields: dict[str, Any],
    optimizer_def: Any,
    trainable: frozenset[str],
    on_unnamed: OnUnnamed = "error",
    optimizer_rules: Any = None,
    on_indivisible: OnIndivisible = "error",
) -> dict[str, Any]:
    """Places the fields of a new state and makes the optimizer's.

    Args:
        fields: The trees of all other fields. Weak types are kept in those that a step only reads.
        optimizer_def: The optimizer.
        trainable: Names of the parameters that the optimizer is to know.
        on_unnamed: What becomes of its arrays that are not made of a parameter's dimensions.
        optimizer_rules: How they are laid out on a mesh; None as the parameters are.
        on_indivisible: What becomes of lengths that these rules cannot divide.

    Returns:
        All fields. On one device they stay where they are; if any array is on a mesh, all are.
        Where any array is a struct, all are structs, with the layouts that arrays would get.

    Raises:
        ShardingError: Some array is committed to other devices than the rest, or the optimizer
            cannot take these parameters.
    """
    init = functools.partial(_initial, optimizer_def)
    shardings_of = functools.partial(
        _optimizer_shardings,
        init,
        on_unnamed=on_unnamed,
        rules=optimizer_rules,
        on_indivisible=on_indivisible,
    )
    if any(map(is_abstract, jax.tree.leaves(fields))):
        return _described(fields, init, trainable, shardings_of)
    fields = {
        name: jax.tree.map(as_array if name in CONSTANT_FIELDS else with_strong_type, tree)
        for name, tree in fields.items()
    }
    flat, treedef = jax.tree_util.tree_flatten_with_path(fields)
    leaves = [leaf for _, leaf in flat]
    mesh = None if any(map(is_traced, leaves)) else mesh_of(leaves)
    if mesh is not None:
        placed = committed(leaves, mesh, lambda: [array_path_text(path) for path, _ in flat])
        fields = jax.tree.unflatten(treedef, placed)
    params = {name: value for name, value in fields["params"].items() if name in trainable}
    if mesh is None:
        # What the optimizer hands out may be its own, such as a random key, or a parameter.
        opt_state = jax.tree.map(lambda leaf: jnp.copy(with_strong_type(leaf)), init(params))
        opt_state = _padded_as_params(opt_state, params)
        return fields | {"opt_state": opt_state}
    with auto_context():
        shardings = shardings_of(params, mesh)
        opt_state = jax.jit(
            lambda params: padded_as(jax.tree.map(with_strong_type, init(params)), shardings),
            out_shardings=shardings,
        )(params)
    return fields | {"opt_state": opt_state}


def _initial(optimizer_def: Any, params: Mapping[str, Any]) -> Any:
    """The optimizer's state of parameters that may be stored padded, with true lengths."""
    return initial_optimizer_state(optimizer_def, without_padding(params))


def _padded_as_params(opt_state: Any, params: Mapping[str, Any]) -> Any:
    """The optimizer's state, padded where it has a parameter's dimensions and that is padded."""

    def is_by_name(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and node.keys() <= params.keys()

    def padded(node: Any) -> Any:
        if not is_by_name(node):
            return node
        return {
            name: padded_like(statistic, params[name])
            if is_padded(params[name])
            and isinstance(statistic, pz.nx.NamedArray)
            and is_array_like(statistic.data_array)
            and dimension_names(statistic)
            else statistic
            for name, statistic in node.items()
        }

    return jax.tree.map(padded, opt_state, is_leaf=is_by_name)


def _optimizer_shardings(
    init: Callable[[Any], Any],
    params: Mapping[str, Any],
    mesh: AnyMesh,
    *,
    on_unnamed: OnUnnamed,
    rules: Any,
    on_indivisible: OnIndivisible,
) -> Any:
    """How the optimizer's state is laid out, and where it is padded."""
    abstract = jax.eval_shape(init, params)
    if rules is None:
        return shardings_like_params(abstract, params, mesh, on_unnamed)
    plan = Planner(mesh, rules, on_indivisible, on_unnamed).plan(
        {"opt_state": abstract}, parameters=jax.eval_shape(without_padding, params)
    )
    return plan.sharding_tree()["opt_state"]


def _described(
    fields: dict[str, Any],
    init: Callable[[Any], Any],
    trainable: frozenset[str],
    shardings_of: Callable[[Any, AnyMesh], Any],
) -> dict[str, Any]:
    """Structs in place of all that a new state holds; on a mesh if any struct is on one."""

    def strong(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jax.tree.map(as_array if name in CONSTANT_FIELDS else with_strong_type, tree)
            for name, tree in fields.items()
        }

    flat, treedef = jax.tree_util.tree_flatten_with_path(fields)
    mesh = _one_mesh((array_path_text(path), leaf) for path, leaf in flat)
    structs = jax.eval_shape(strong, fields)
    if mesh is not None:
        placed = [
            _on_mesh(struct, given, mesh)
            for struct, (_, given) in zip(jax.tree.leaves(structs), flat, strict=True)
        ]
        structs = jax.tree.unflatten(treedef, placed)
    params = {name: value for name, value in structs["params"].items() if name in trainable}
    with auto_context():
        shardings = None if mesh is None else shardings_of(params, mesh)

        def made(given: Any) -> Any:
            opt_state = jax.tree.map(with_strong_type, init(given))
            if shardings is None:
                return _padded_as_params(opt_state, given)
            return padded_as(opt_state, shardings)

        opt_state = jax.eval_shape(made, params)
        if shardings is not None:
            opt_state = jax.tree.map(described_array, opt_state, shardings)
    return structs | {"opt_state": opt_state}


def _one_mesh(arrays: Iterable[tuple[str, Any]]) -> AnyMesh | None:
    """The Auto twin of the mesh that arrays and structs are on; None if none is on one."""
    by_mesh = meshes_of(arrays)
    if len(by_mesh) > 1:
        raise_all(
            ShardingError,
            "the arrays of this train state are on different meshes. Plan all of them for one: "
            "make_plan(model, mesh, rules).restore_structs().",
            [f"{path}: is on a mesh {mesh_text(mesh)}." for mesh, path in by_mesh.items()],
        )
    return next(iter(by_mesh), None)


def _on_mesh(struct: Any, given: Any, mesh: AnyMesh) -> Any:
    """A struct where an array would be: where it is on the mesh, or on every device of it."""
    sharding = getattr(given, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        sharding = NamedSharding(mesh, PartitionSpec())
    return described_array(struct, canonical(sharding))
