"""Batches of which every process of a job has its own part."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import PlanError, ShardingError, raise_all
from penzai_shard.meshes import mesh_text
from penzai_shard.named_leaves import NamedLeaf, is_named_unit, leaves_of
from penzai_shard.named_nodes import named_like, node_data
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.planning import PlacingRequest
from penzai_shard.processes import (
    Parts,
    array_of_parts,
    checksum_of,
    is_on_this_process,
    parts_along,
    processes_of,
    refuse_differences,
)

_FIX_LENGTH = (
    "Give parts of one length in every process: drop the last batch if it is short, or pad it."
)
_FIX_CONTENT = (
    "Processes whose devices have the same part must give the same data. To give different rows, "
    "make the mesh so that the mesh axis of the batch, the first one, goes over the processes."
)
# Layouts can depend on lengths, which depend on layouts. They agree after a turn or two.
_TURNS = 4


def shard_parts(batch: Any, request: PlacingRequest) -> Any:
    """Makes a batch of the parts that the processes of a mesh give; see ``shard_batch``.

    Args:
        batch: The part of this process.
        request: The mesh and the rules, or a plan of the whole batch.

    Returns:
        The whole batch, of which this process holds what is on its devices.

    Raises:
        ShardingError: Parts differ in form, have no valid layout together, or differ in data
            where they are the same part.
    """
    mesh = request.mesh
    assert isinstance(mesh, Mesh)
    processes = processes_of(NamedSharding(mesh, PartitionSpec()))
    if jax.process_index() not in processes:
        raise ShardingError(
            f"shard_batch(local=True): process {jax.process_index()} has no devices of the mesh "
            f"({mesh_text(mesh)}), and so no part of the batch. Make the mesh of devices of all "
            "processes, or call it in those alone that have some."
        )
    nodes, treedef = jax.tree_util.tree_flatten(batch, is_leaf=is_named_unit)
    leaves = leaves_of(batch)
    paths = [leaf.path or "the batch" for leaf in leaves]
    refuse_differences(
        "shard_batch",
        "shard_batch(local=True) got parts that differ between processes:",
        {"names": ", ".join(paths)} | dict(zip(paths, map(_form, leaves), strict=True)),
        _FIX_LENGTH,
        processes,
    )
    _refuse_unfit(nodes, leaves)
    layouts, whole = _layouts(request, nodes, treedef, leaves)
    shared: dict[str, str] = {}
    for leaf, path, (_, parts) in zip(leaves, paths, layouts, strict=True):
        if _different_parts(parts) < len(processes):
            own = ", ".join(f"{p.own} of {p.count}" for p in parts if p.count > 1)
            place = f"part {own} of {path}" if own else f"{path}, of which each has the whole"
            shared[place] = f"data with checksum {checksum_of(leaf.array)}"
    if len(processes) > 1 and any(_different_parts(p) < len(processes) for _, p in layouts):
        headline = "shard_batch(local=True) got different data for the same part:"
        refuse_differences("shard_batch", headline, shared, _FIX_CONTENT, processes)
    whole_nodes = jax.tree_util.tree_leaves(whole, is_leaf=is_named_unit)
    made = []
    for node, leaf, (sharding, _) in zip(whole_nodes, leaves, layouts, strict=True):
        array = array_of_parts(leaf.array, node_data(node).shape, sharding)
        made.append(named_like(node, array))
    return jax.tree_util.tree_unflatten(treedef, made)


def _form(leaf: NamedLeaf) -> str:
    """What must be the same of the parts of all processes."""
    if leaf.dtype is None:
        return f"a {type(leaf.array).__name__}"
    names = leaf.names or (None,) * len(leaf.shape)
    sizes = [
        str(size) if name is None else f"{name}={size}"
        for name, size in zip(names, leaf.shape, strict=True)
    ]
    return f"{leaf.dtype}[{', '.join(sizes)}]"


def _refuse_unfit(nodes: Sequence[Any], leaves: Sequence[NamedLeaf]) -> None:
    """Refuses what has no part of this process's own."""
    named = [isinstance(node, jax.Array) or is_named_unit(node) for node in nodes]
    problems = []
    for node, leaf, is_named in zip(nodes, leaves, named, strict=False):
        path = leaf.path or "the batch"
        if not is_on_this_process(leaf.array):
            problems.append(
                f"{path}: is on devices of several processes already. Give what this process has "
                "read, in host memory."
            )
        elif not (is_named or is_array_like(node)) or leaf.dtype is None:
            problems.append(f"{path}: is a {type(node).__name__}. Give named arrays and numbers.")
    raise_all(ShardingError, "shard_batch(local=True) cannot read the part of a process:", problems)


def _layouts(
    request: PlacingRequest, nodes: Sequence[Any], treedef: Any, leaves: Sequence[NamedLeaf]
) -> tuple[list[tuple[Any, tuple[Parts, ...]]], Any]:
    """Of each array its sharding and how processes share its dimensions; and the whole batch.

    The length of the whole depends on which dimensions are split over processes, and the rules may
    look at the length. So the first layout is that of lengths which always divide.
    """
    mesh = request.mesh
    assert isinstance(mesh, Mesh)

    def resized(factors: Sequence[Sequence[int]]) -> Any:
        structs = []
        for node, leaf, each in zip(nodes, leaves, factors, strict=True):
            shape = tuple(size * factor for size, factor in zip(leaf.shape, each, strict=True))
            struct = jax.ShapeDtypeStruct(shape, leaf.dtype)
            structs.append(named_like(node, struct))
        return jax.tree_util.tree_unflatten(treedef, structs)

    def parts_of(specs: Sequence[Any]) -> list[tuple[Parts, ...]]:
        return [
            tuple(
                parts_along(mesh, axes)
                for axes in mesh_axes_by_dimension(spec or PartitionSpec(), len(leaf.shape))
            )
            for spec, leaf in zip(specs, leaves, strict=True)
        ]

    if request.given is None:
        stretched = resized(
            [
                [
                    1 if name is None else mesh.size
                    for name in leaf.names or [None] * len(leaf.shape)
                ]
                for leaf in leaves
            ]
        )
        specs = [leaf.spec for leaf in request.planner.plan(stretched).leaves]
    else:
        specs = [leaf.spec for leaf in request.given.leaves]
        if len(specs) != len(leaves):
            specs = [PartitionSpec()] * len(leaves)  # Refused below, with what differs.
    for _ in range(_TURNS):
        parts = parts_of(specs)
        whole = resized([[part.count for part in each] for each in parts])
        try:
            plan = request.plan(whole)
        except PlanError as error:
            raise PlanError(
                "no valid layout for the whole batch, whose lengths are the sums of the parts "
                "that the processes give:",
                error.problems,
            ) from error
        shardings = [leaf.sharding for leaf in plan.leaves]
        if parts_of([leaf.spec for leaf in plan.leaves]) == parts:
            return list(zip(shardings, parts, strict=True)), whole
        specs = [leaf.spec for leaf in plan.leaves]
    raise PlanError(
        "the layout of the batch depends on its lengths, and these on which dimensions are split "
        "over processes. Give a plan of the whole batch, plan=make_plan(whole, mesh, rules), or "
        "rules without alternatives."
    )


def _different_parts(parts: Sequence[Parts]) -> int:
    count = 1
    for part in parts:
        count *= part.count
    return count
