"""Layers that pin how the values that flow through them are laid out over a mesh.

The compiler chooses the layout of everything that is not pinned, and often badly: in fully
sharded training it has to know that activations are split over the batch.

Source: Lepikhin et al. 2020, "GShard"; ``jax.lax.with_sharding_constraint``.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from penzai import pz

from penzai_shard.array_kinds import is_concrete, is_traced
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, raise_all, warn_caller
from penzai_shard.library_apis.jax_api import manual_mesh_axes
from penzai_shard.meshes import (
    AnyMesh,
    auto_context,
    auto_twin,
    mesh_text,
    onto_auto_twin,
    shardings_on_auto_twin,
)
from penzai_shard.padded_arrays import pinned, without_padding
from penzai_shard.partition_specs import evenly_splitting, mesh_axes_used, restricted_spec
from penzai_shard.planning import Planner, PlanRequest, ShardingPlan, shared_named_sharding
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed
from penzai_shard.tree_paths import array_path_text


@pz.pytree_dataclass
class ConstrainSharding(pz.nn.Layer):
    """Pins the sharding of a tree of arrays; the values stay as they are.

    Arrays of an Explicit mesh come out on its Auto twin. Inside ``jax.shard_map``, the mesh axes
    that it has taken over are left out: each device then holds its part already.

    Attributes:
        sharding: One sharding for all arrays, or a tree of shardings whose structure is that of
            the tree of arrays or begins it; None leaves what is at its place alone. Shardings of
            an Explicit mesh mean its Auto twin.

    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 8})
    >>> layer = ConstrainSharding(NamedSharding(mesh, PartitionSpec("data")))
    >>> jax.jit(layer)(jax.numpy.ones(16)).sharding.shard_shape((16,))
    (2,)
    """

    sharding: Any = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, tree: Any, /, **side_inputs: Any) -> Any:
        """Constrains the tree.

        Args:
            tree: A tree of arrays, named or not.
            **side_inputs: Ignored.

        Returns:
            The same tree, every array laid out as ``sharding`` says.
        """
        structure: Any = jax.tree_util.tree_structure(tree)
        shardings = jax.tree.broadcast(
            shardings_on_auto_twin(self.sharding), tree, is_leaf=lambda node: node is None
        )
        return _constrain(tree, structure, structure.flatten_up_to(shardings))

    def meshes(self) -> list[Mesh]:
        """The meshes with devices that it pins arrays to."""
        shardings = jax.tree_util.tree_leaves(self.sharding)
        meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
        return [mesh for mesh in meshes if isinstance(mesh, Mesh)]

    def __hash__(self) -> int:
        """Lets the layer be given to ``jax.jit``, whatever kind of tree the shardings make."""
        shardings, structure = jax.tree_util.tree_flatten(self.sharding)
        return hash((ConstrainSharding, structure, *shardings))


@pz.pytree_dataclass(init=False, use_mutable_proxy_in_init=False)
class ConstrainShardingByName(pz.nn.Layer):
    """Pins the sharding of a tree of named arrays by the names of their logical axes.

    The values stay as they are. Arrays of an Explicit mesh come out on its Auto twin. Inside
    ``jax.shard_map``, the mesh axes that it has taken over are left out: each device then holds
    its part already.

    Attributes:
        mesh: The mesh. An Explicit mesh means its Auto twin.
        axis_name_to_mesh_name: Which logical axis goes to which mesh axis, in any form that
            ``AxisRules`` reads; None maps each logical axis to the mesh axis of the same name.
            The constructor takes it as ``rules`` too.
        on_indivisible: As for ``make_plan``; ``"pad"`` splits a length that does not divide too, as
            compiled programs can: the last parts are shorter. Nothing is padded. Outside of
            compiled programs JAX has no such arrays, and the dimension stays whole.
        on_unnamed: As for ``make_plan``; ``"infer"`` leaves arrays without names unpinned.

    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> layer = ConstrainShardingByName(mesh, {"batch": "data"})
    >>> x = pz.nx.ones({"batch": 8, "features": 3})
    >>> layer(x).data_array.sharding.spec
    P('data',)
    """

    mesh: AnyMesh = dataclasses.field(metadata={"pytree_node": False})
    axis_name_to_mesh_name: AxisRules | Mapping[Any, Any] | Sequence[Any] | None = (
        dataclasses.field(default=None, metadata={"pytree_node": False})
    )
    on_indivisible: OnIndivisible = dataclasses.field(
        default="error", metadata={"pytree_node": False}
    )
    on_unnamed: OnUnnamed = dataclasses.field(default="error", metadata={"pytree_node": False})

    def __init__(
        self,
        mesh: AnyMesh,
        axis_name_to_mesh_name: Any = None,
        *,
        rules: Any = None,
        on_indivisible: OnIndivisible = "error",
        on_unnamed: OnUnnamed = "error",
    ) -> None:
        PlanRequest.read(
            "ConstrainShardingByName",
            mesh,
            rules,
            axis_name_to_mesh_name,
            on_indivisible,
            on_unnamed,
        )
        given = axis_name_to_mesh_name if rules is None else rules
        self.__dict__.update(
            mesh=mesh,
            axis_name_to_mesh_name=given,
            on_indivisible=on_indivisible,
            on_unnamed=on_unnamed,
        )

    def __call__(self, tree: Any, /, **side_inputs: Any) -> Any:
        """Constrains the tree.

        Args:
            tree: A tree of named arrays.
            **side_inputs: Ignored.

        Returns:
            The same tree, every array laid out as the rules say.

        Raises:
            ShardingError: An array has no names, or no valid layout under the rules.

        Warns:
            ShardingWarning: The rules look like a mistake: one is nearly the name of a logical
                axis of the tree, or none names any of them.
        """
        return constrained_by_name(
            tree,
            self.mesh,
            self.axis_name_to_mesh_name,
            on_indivisible=self.on_indivisible,
            on_unnamed=self.on_unnamed,
            doubted=True,
        )

    def meshes(self) -> list[Mesh]:
        """The mesh, if it has devices."""
        return [self.mesh] if isinstance(self.mesh, Mesh) else []

    def __hash__(self) -> int:
        """Lets the layer be given to ``jax.jit``, whatever form the rules have."""
        rules = AxisRules.of(self.axis_name_to_mesh_name)
        options = (self.on_indivisible, self.on_unnamed)
        return hash((ConstrainShardingByName, self.mesh, rules, options))


def constrained_by_name(
    tree: Any,
    mesh: AnyMesh,
    rules: Any,
    *,
    on_indivisible: OnIndivisible,
    on_unnamed: OnUnnamed,
    doubted: bool = False,
) -> Any:
    """Constrains a tree of named arrays; see ``ConstrainShardingByName``.

    Args:
        tree: The tree.
        mesh: The mesh.
        rules: The rules.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        doubted: Whether to warn where the rules look like a mistake.
    """
    request = PlanRequest.read(
        "ConstrainShardingByName",
        _without_manual_extent(auto_twin(mesh)),
        rules,
        None,
        on_indivisible,
        on_unnamed,
    )
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(without_padding(tree))
    shardings, doubts = _layout_by_name(structure, tuple(map(_abstract, leaves)), request)
    if doubted:
        warn_caller(doubts)
    if on_indivisible == "pad":
        shardings = tuple(map(_possible, leaves, shardings))
    return _constrain(structure.unflatten(leaves), structure, shardings)


def _possible(leaf: Any, sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding that an array can have: outside of programs, all parts of one are equal."""
    if sharding is None or not is_concrete(leaf):
        return sharding
    spec = evenly_splitting(sharding.spec, leaf.shape, sharding.mesh.shape)
    return sharding if spec == sharding.spec else NamedSharding(sharding.mesh, spec)


def _abstract(leaf: Any) -> Any:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return leaf if shape is None or dtype is None else jax.ShapeDtypeStruct(shape, dtype)


@functools.lru_cache(maxsize=1024)
def _layout_by_name(
    structure: Any, leaves: tuple[Any, ...], request: PlanRequest
) -> tuple[tuple[Any, ...], list[str]]:
    """The sharding of each leaf, and what is to be warned of; equal trees are planned once."""
    tree = jax.tree_util.tree_unflatten(structure, leaves)
    plan = _plan(request.planner, tree)
    shardings = tuple(structure.flatten_up_to(plan.sharding_tree()))
    return shardings, request.doubts(plan.logical_axes, constrains=True)


def _plan(planner: Planner, tree: Any) -> ShardingPlan:
    """The plan of what flows through; nothing of it is padded, and parts may be uneven instead."""
    if planner.on_indivisible != "pad":
        return planner.plan(tree)
    plan = dataclasses.replace(planner, on_indivisible="replicate").plan(tree)
    leaves = [
        leaf
        if leaf.names is None
        else dataclasses.replace(
            leaf,
            sharding=shared_named_sharding(
                planner.mesh, planner.decide(leaf.names, leaf.shape).spec
            ),
        )
        for leaf in plan.leaves
    ]
    return dataclasses.replace(plan, leaves=tuple(leaves))


def _without_manual_extent(mesh: AnyMesh) -> AnyMesh:
    """The mesh with each axis that ``jax.shard_map`` has taken over counted as of length one.

    Arrays inside have the shape of one device's part along it, which any further length would
    wrongly be asked to divide.
    """
    manual = manual_mesh_axes() & set(mesh.axis_names)
    if not manual:
        return mesh
    sizes = tuple(1 if name in manual else size for name, size in mesh.shape.items())
    return AbstractMesh(sizes, mesh.axis_names, axis_types=mesh.axis_types)


def _constrain(tree: Any, structure: Any, shardings: Sequence[Any]) -> Any:
    """The tree, each leaf as its sharding says; None leaves one alone."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    conflicts = [
        f"{array_path_text(path) or 'the array'}: is on the mesh {_devices_text(leaf.sharding)}, "
        f"and the constraint is for {_devices_text(sharding)}. Make the constraint with the mesh "
        "of the model, or place the input on it: place(x, mesh, rules)."
        for (path, leaf), sharding in zip(leaves, shardings, strict=True)
        if _is_for_other_devices(leaf, sharding)
    ]
    raise_all(MeshError, "a constraint is for other devices than what flows through it:", conflicts)
    constrain = _constrain_rest if manual_mesh_axes() else _constrain_array
    constrained = [
        leaf if sharding is None else constrain(leaf, sharding)
        for (_, leaf), sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, constrained)


def _is_for_other_devices(leaf: Any, sharding: Any) -> bool:
    """Whether an array is on a mesh of other devices: a constraint is no way to move it."""
    return (
        is_concrete(leaf)
        and isinstance(leaf.sharding, NamedSharding)
        and isinstance(sharding, NamedSharding)
        and not isinstance(sharding.mesh, AbstractMesh)
        and leaf.sharding.device_set != sharding.device_set
    )


def _devices_text(sharding: NamedSharding) -> str:
    devices: Any = sharding.device_set
    ids = sorted(device.id for device in devices)
    consecutive = ids == list(range(ids[0], ids[-1] + 1)) and len(ids) > 2
    devices = f"{ids[0]} to {ids[-1]}" if consecutive else ", ".join(map(str, ids))
    return f"({mesh_text(sharding.mesh)}) of device{'s' * (len(ids) > 1)} {devices}"


def _constrain_array(array: Any, sharding: Any) -> Any:
    with auto_context():
        if is_traced(array) or not isinstance(sharding, Sharding):
            return pinned(onto_auto_twin(array), sharding)
        if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
            raise MeshError(
                "a constraint for an AbstractMesh cannot pin arrays outside of jax.jit: it has no "
                "devices. Make the constraint with make_mesh({...})."
            )
        # JAX's constraint would refuse an array that is on other devices.
        return jax.device_put(array, sharding)


def _constrain_rest(array: Any, sharding: Any) -> Any:
    """Constrains an array inside ``jax.shard_map`` over the Auto mesh axes that are left.

    Nothing is left to say if there are none. If they are Explicit, the array's type has its
    layout, and a result on the Auto twin could not leave the region.
    """
    ambient = jax.sharding.get_abstract_mesh()
    spec = sharding if isinstance(sharding, PartitionSpec) else getattr(sharding, "spec", None)
    if spec is None or ambient.explicit_axes or not ambient.auto_axes:
        return array
    rest = restricted_spec(spec, mesh_axes_used(spec) - manual_mesh_axes())
    return jax.lax.with_sharding_constraint(array, NamedSharding(ambient, rest))
