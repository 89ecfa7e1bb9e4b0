"""What leaves a region: whether it is what the whole layer gives, and each device's part of it."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from penzai import pz

from penzai_shard.errors import ShardingError
from penzai_shard.layers.manual_region import Region, varying_axes
from penzai_shard.layers.region_boundary import BoundaryTree
from penzai_shard.layers.shard_map_regions.split_values import UNIFORM, Flow, Split
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.rule_kinds import sized_mesh_axes_text
from penzai_shard.tree_paths import path_text


class ManualRegionError(ShardingError):
    """A layer cannot run per device under the given rules; every offender is reported."""


class NotReplicatedError(Exception):
    """To JAX, something differs between devices that should hold the same."""


@dataclasses.dataclass(frozen=True)
class Output:
    """One array that leaves the region.

    Attributes:
        path: Where it is, for people.
        names: The logical axis of each of its dimensions, None for a positional one.
        shape: Its global shape.
        mesh_axes: The mesh axes of each of its dimensions.
        cut: Which dimensions every device computes whole, so that it must keep its part of them.
    """

    path: str
    names: tuple[Hashable | None, ...]
    shape: tuple[int, ...]
    mesh_axes: tuple[tuple[str, ...], ...]
    cut: frozenset[int] = frozenset()

    def own_part(self, array: Any, region: Region) -> Any:
        """A device's part of the array that it computed.

        Raises:
            NotReplicatedError: JAX cannot tell that the devices along some mesh axis hold the
                same.
        """
        for dimension in sorted(self.cut):
            mesh_axes = self.mesh_axes[dimension]
            size = self.shape[dimension] // region.parts(mesh_axes)
            start = position(mesh_axes) * size
            array = jax.lax.dynamic_slice_in_dim(array, start, size, dimension)
        if varying_axes(array) - {name for entry in self.mesh_axes for name in entry}:
            raise NotReplicatedError(self.path)
        return array

    def problems(self, flow: Flow, own: Sequence[int], region: Region) -> list[str]:
        """Why the parts that the devices compute do not make the whole; usually nothing.

        Args:
            flow: What its dimensions are inside the region.
            own: Its shape on one device.
            region: The region.
        """
        found = []
        if flow.random:
            found.append(
                f"{self.path}: it depends on numbers of a pz.RandomStream of which every device "
                "has its own."
            )
        for dimension, (dim, mesh_axes) in enumerate(zip(flow.dims, self.mesh_axes, strict=True)):
            what = f"{self._text(dimension)} ({self.shape[dimension]})"
            over = sized_mesh_axes_text(mesh_axes, region.mesh.shape) if mesh_axes else ""
            if isinstance(dim, Split) or dim == UNIFORM:
                fits = own[dimension] * region.parts(mesh_axes) == self.shape[dimension]
                if not fits or (isinstance(dim, Split) and dim.mesh_axes != mesh_axes):
                    inside = f"{dim}" if isinstance(dim, Split) else "of another length on a device"
                    asked = f"should be split over {over}" if over else "should be whole"
                    found.append(
                        f"{self.path}: {what} {asked} by activation_rules, and inside it is "
                        f"{inside}. A split logical axis must keep its name, and be mapped to the "
                        "same mesh axis in activation_rules."
                    )
            elif region.parts(mesh_axes) > 1 and flow.mesh_axes & set(mesh_axes):
                found.append(
                    f"{self.path}: {what} should be split over {over}, and each device computed "
                    "another whole of it. Map it to None in activation_rules."
                )
        return found

    def _text(self, dimension: int) -> str:
        name = self.names[dimension]
        return f"positional dimension {dimension}" if name is None else f"logical axis {name!r}"


def followed_outputs(
    region: Region, boundary: BoundaryTree, structs: Sequence[Any], flows: Sequence[Flow]
) -> list[Output]:
    """The outputs of a layer whose program was followed.

    Args:
        region: The region.
        boundary: The whole output without its arrays.
        structs: The global shapes of its arrays.
        flows: What their dimensions are inside the region.
    """
    specs = region.activation_specs(boundary.put_together(structs, fixed=False))
    outputs = []
    for (path, names), struct, spec, flow in zip(
        _places(boundary), structs, specs, flows, strict=True
    ):
        mesh_axes = mesh_axes_by_dimension(spec, len(struct.shape))
        cut = frozenset(
            i
            for i, (dim, entry) in enumerate(zip(flow.dims, mesh_axes, strict=True))
            if dim is None and region.parts(entry) > 1
        )
        names = names or (None,) * len(struct.shape)
        outputs.append(Output(path, names, tuple(struct.shape), mesh_axes, cut))
    return outputs


def unfollowed_outputs(
    region: Region, boundary: BoundaryTree, structs: Sequence[Any], tracked: bool
) -> list[Output]:
    """The outputs of a layer that is written for one device's part.

    A dimension that a rule splits is taken for a part of it, unless JAX knows that the devices
    hold the same: it then is the whole.

    Args:
        region: The region.
        boundary: One device's output without its arrays.
        structs: What one device computes.
        tracked: Whether JAX tracks along which mesh axes values vary.
    """
    all_parts = region.parts(region.manual)
    inflated = [
        jax.ShapeDtypeStruct(tuple(size * all_parts for size in struct.shape), struct.dtype)
        for struct in structs
    ]
    specs = region.activation_specs(boundary.put_together(inflated, fixed=False))
    outputs = []
    for (path, names), struct, spec in zip(_places(boundary), structs, specs, strict=True):
        mesh_axes = mesh_axes_by_dimension(spec, len(struct.shape))
        cut = frozenset(
            i
            for i, entry in enumerate(mesh_axes)
            if region.parts(entry) > 1 and tracked and not varying_axes(struct) & set(entry)
        )
        shape = tuple(
            size * (1 if i in cut else region.parts(entry))
            for i, (size, entry) in enumerate(zip(struct.shape, mesh_axes, strict=True))
        )
        outputs.append(Output(path, names or (None,) * len(shape), shape, mesh_axes, cut))
    # Planned again with the lengths that came out, so that one that does not divide is reported.
    final = [
        jax.ShapeDtypeStruct(output.shape, struct.dtype)
        for output, struct in zip(outputs, structs, strict=True)
    ]
    again = region.activation_specs(boundary.put_together(final, fixed=False))
    if again != specs:
        raise ManualRegionError(
            "the rules split the output otherwise by its global lengths than by those of a part. "
            "Map its logical axes in activation_rules by a mapping."
        )
    return outputs


def position(mesh_axes: Sequence[str]) -> Any:
    """The device's position along some mesh axes, the first of them counting most."""
    found: Any = 0
    for name in mesh_axes:
        found = found * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return found


def _places(boundary: BoundaryTree) -> list[tuple[str, Any]]:
    tree = jax.tree_util.tree_unflatten(boundary.structure.value, list(boundary.leaves))
    places = jax.tree_util.tree_leaves_with_path(tree, is_leaf=pz.nx.is_namedarray)
    return [
        (path_text(path).removeprefix("changed/"), leaf.names)
        for (path, _), leaf in zip(places, boundary.leaves, strict=True)
        if leaf.fixed is None
    ]
