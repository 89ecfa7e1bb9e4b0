"""What is split over the devices of a region: the plan of its inputs, and of what leaves it."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from penzai_shard.axis_decisions import PADDING_FIX
from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import PlanError, ShardingError, raise_all
from penzai_shard.layers.manual_region import (
    as_varying,
    device_position,
    varying_axes,
    with_all_mesh_axes,
)
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree
from penzai_shard.layers.shard_map_regions.split_values import Flow, Split, mesh_axes_of
from penzai_shard.meshes import AnyMesh
from penzai_shard.partition_specs import (
    canonical_spec,
    mesh_axes_by_dimension,
    mesh_axes_used,
    part_count,
    restricted_spec,
)
from penzai_shard.planning import Planner
from penzai_shard.rule_kinds import nearest_name, sized_mesh_axes_text


class ManualRegionError(ShardingError):
    """A layer cannot run per device under the given rules; every offender is reported."""


class NotReplicatedError(Exception):
    """To JAX, something differs between devices that should hold the same."""


class Tracking(enum.Enum):
    """What JAX is to know about gathered parameters and all that is computed from them.

    To JAX, a parameter that is gathered as varying differs between the devices, and with it all
    that is computed from it alone; its gradient is scattered. Gathered as invarying it does not
    differ, and more of its gradient moves. Untracked, JAX adds up every gradient, and takes no
    notice of a loop that starts with the same on all devices.
    """

    VARYING = enum.auto()
    INVARYING = enum.auto()
    UNTRACKED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Region:
    """Which mesh axes a region of the program takes over, and what is split over them.

    Attributes:
        mesh: The mesh, with Auto axes.
        parameter_rules: Rules for parameters.
        activation_rules: Rules for everything else.
        manual: The mesh axes that the region takes over.
        min_size: Parameters with fewer elements than this are not split.
        keep_split: The logical axes over which parameters stay split inside.
        per_device: Whether the layer is written for one device's part.
        assume_independent: Operations that are taken to treat elements independently.
        only_where_split: Whether it takes over only those that activations are split over.
    """

    mesh: AnyMesh
    parameter_rules: AxisRules
    activation_rules: AxisRules
    manual: tuple[str, ...]
    min_size: int = 0
    keep_split: tuple[Hashable, ...] = ()
    per_device: bool = False
    assume_independent: tuple[str, ...] = ()
    only_where_split: bool = False

    def narrowed(self, activations: Any) -> "Region":
        """The region that takes over no more mesh axes than these activations ask for."""
        if not self.only_where_split:
            return self
        used = frozenset().union(*map(mesh_axes_used, self.specs(activations)))
        # One that splits a parameter's axis together with one of these is for storage too.
        shared = [rule.mesh_axes for rule in self.parameter_rules.rules]
        used = used.union(*(axes for axes in shared if used.intersection(axes)))
        manual = tuple(name for name in self.manual if name in used)
        return dataclasses.replace(self, manual=manual or self.manual, only_where_split=False)

    @property
    def automatic(self) -> tuple[str, ...]:
        """The mesh axes that are left to the compiler."""
        return tuple(name for name in self.mesh.axis_names if name not in self.manual)

    def parts(self, mesh_axes: Iterable[str]) -> int:
        """How many parts some mesh axes make."""
        return part_count(mesh_axes, self.mesh.shape)

    def specs(self, tree: Any, of_parameters: bool = False) -> list[PartitionSpec]:
        """The specs of the arrays of a tree, over all mesh axes."""
        rules = self.parameter_rules if of_parameters else self.activation_rules
        min_size = self.min_size if of_parameters else 0
        planner = Planner(self.mesh, rules, on_unnamed="replicate", min_size=min_size)
        plan, found = planner.examined(tree)
        fix = _EQUAL_PARTS if of_parameters else ""
        problems = [
            f"{path or 'the array'}: {problem.replace(PADDING_FIX, fix)}" for path, problem in found
        ]
        raise_all(PlanError, "no valid layout for some arrays:", problems)
        return [s.spec for s in jax.tree_util.tree_leaves(plan.sharding_tree())]


_EQUAL_PARTS = (
    " Stored padded or not, a ShardMapped region has equal parts of the true length. To compute "
    "with uneven ones, leave the layer to the compiler: "
    'GatherParameters(layer, mesh, rules, on_indivisible="pad").'
)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """One array that crosses the boundary of a region, inwards or outwards.

    Attributes:
        path: Where it is, for people.
        names: The logical axis of each of its dimensions, None for a positional one.
        shape: Its global shape.
        mesh_axes: The manual mesh axes of each of its dimensions, outside.
        whole_inside: Which dimensions every device holds whole inside: they are gathered on the
            way in, and of those on the way out each device keeps its part.
        automatic: The mesh axes of each of its dimensions that are left to the compiler.
    """

    path: str
    names: tuple[Hashable | None, ...]
    shape: tuple[int, ...]
    mesh_axes: tuple[tuple[str, ...], ...]
    whole_inside: frozenset[int] = frozenset()
    automatic: tuple[tuple[str, ...], ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """Its canonical spec, outside."""
        return canonical_spec(self.mesh_axes)

    def gathered(self, array: Any, varying: Container[str], tracking: Tracking) -> Any:
        """The array as it is inside, from one device's part of it.

        The transpose of the gather is the scatter of the gradients' sum where the devices see
        different activations, and taking one's own part of the gradient where they see the same.

        Along the mesh axes that are left to the compiler the array stays as it is.
        """
        moved = {i for i in self.whole_inside if self.mesh_axes[i]}
        gather = functools.partial(self._gathered, varying=varying, tracking=tracking)
        return self._apart(gather, array, moved, tracking) if moved else array

    def scattered(
        self, array: Any, dimension: int, mesh_axes: tuple[str, ...], tracking: Tracking
    ) -> Any:
        """The sum of the devices' arrays, of which each keeps its part of one dimension."""

        def scatter(array: Any) -> Any:
            return jax.lax.psum_scatter(array, mesh_axes, scatter_dimension=dimension, tiled=True)

        return self._apart(scatter, array, {dimension}, tracking)

    def summed(self, array: Any, mesh_axes: tuple[str, ...], tracking: Tracking) -> Any:
        """The sum of the devices' arrays, whole on each."""
        return self._apart(lambda array: jax.lax.psum(array, mesh_axes), array, (), tracking)

    def varying(self, array: Any, mesh_axes: Iterable[str], tracking: Tracking) -> Any:
        """The array as one that differs between the devices; its gradient is summed."""
        return self._apart(lambda array: as_varying(array, mesh_axes), array, (), tracking)

    def _apart(
        self,
        function: Callable[[Any], Any],
        array: Any,
        moved: Container[int],
        tracking: Tracking,
    ) -> Any:
        entries = enumerate(self.automatic)
        spec = canonical_spec(() if i in moved else entry for i, entry in entries)
        tracked = tracking is not Tracking.UNTRACKED
        return with_all_mesh_axes(function, array, spec, tracked=tracked)

    def _gathered(self, array: Any, varying: Container[str], tracking: Tracking) -> Any:
        for dimension in sorted(self.whole_inside):
            groups: list[tuple[str, ...]] = []
            for name in self.mesh_axes[dimension]:
                if groups and (name in varying) == (groups[-1][0] in varying):
                    groups[-1] += (name,)
                else:
                    groups.append((name,))
            # The last mesh axis of an entry is the one whose parts are neighbours.
            for group in reversed(groups):
                invarying = tracking is not Tracking.UNTRACKED and group[0] not in varying
                to = {"to": "invarying"} if invarying else {}
                array = jax.lax.all_gather(array, group, axis=dimension, tiled=True, **to)
        return array

    def own_part(self, array: Any, region: Region) -> Any:
        """A device's part of the array that it computed.

        Raises:
            NotReplicatedError: JAX cannot tell that the devices along some mesh axis hold the
                same.
        """
        for dimension in sorted(self.whole_inside):
            mesh_axes = self.mesh_axes[dimension]
            size = self.shape[dimension] // region.parts(mesh_axes)
            start = device_position(mesh_axes) * size
            array = jax.lax.dynamic_slice_in_dim(array, start, size, dimension)
        if varying_axes(array) - {name for entry in self.mesh_axes for name in entry}:
            raise NotReplicatedError(self.path)
        return array


def is_of_16_bits(array: Any) -> bool:
    """Whether an array holds floating-point numbers of 16 bits or fewer."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating)) and array.dtype.itemsize <= 2


def crossings(
    region: Region,
    tree: BoundaryTree,
    structs: Sequence[Any],
    specs: Sequence[PartitionSpec] | None = None,
) -> list[Crossing]:
    """The arrays of a tree that crosses the boundary.

    Args:
        region: The region.
        tree: The tree.
        structs: The global shapes of its arrays.
        specs: Their specs outside; by default those of activations.
    """
    if specs is None:
        specs = region.specs(tree.put_together(structs, fixed=False))
    return [
        Crossing(
            path.removeprefix("changed/"),  # The key of a variable that changed says what it is.
            names or (None,) * len(struct.shape),
            tuple(struct.shape),
            mesh_axes_by_dimension(restricted_spec(spec, region.manual), len(struct.shape)),
            automatic=mesh_axes_by_dimension(
                restricted_spec(spec, region.automatic), len(struct.shape)
            ),
        )
        for path, names, struct, spec in zip(
            tree.array_paths(), tree.array_names(), structs, specs, strict=True
        )
    ]


@dataclasses.dataclass(frozen=True)
class RegionPlan:
    """What each array that enters a region is split over.

    Attributes:
        region: The region.
        inputs: The arrays that enter it, parameters first.
        weights: How many of them are arrays of parameters or of the layer itself.
        keys: Which of them are keys of random streams.
        random_axes: The mesh axes that activations are split over, along which streams differ.
    """

    region: Region
    inputs: list[Crossing]
    weights: int
    keys: list[int]
    random_axes: tuple[str, ...]

    @classmethod
    def of(cls, region: Region, tree: BoundaryTree, arrays: Sequence[Any]) -> "RegionPlan":
        """Plans a call.

        Args:
            region: The region.
            tree: What enters: what the layer holds, and what it is given.
            arrays: Its global arrays.

        Raises:
            PlanError: A length does not divide.
            ManualRegionError: No parameter has a logical axis that is to stay split.
        """
        weights, activations = tree.put_together(arrays, fixed=False)
        count = len(jax.tree_util.tree_leaves(weights))
        specs = [*region.specs(weights, of_parameters=True), *region.specs(activations)]
        inputs = crossings(region, tree, arrays, specs)
        inputs[:count] = [
            dataclasses.replace(
                weight,
                whole_inside=frozenset(
                    dimension
                    for dimension, name in enumerate(weight.names)
                    if name not in region.keep_split
                ),
            )
            for weight in inputs[:count]
        ]
        _check_keep_split(region, inputs[:count])
        used = {name for one in inputs[count:] for entry in one.mesh_axes for name in entry}
        random_axes = tuple(name for name in region.manual if name in used)
        return cls(region, inputs, count, tree.random_keys(), random_axes)

    def flows(self, parts: int | None = None) -> list[Flow]:
        """What is known of each array inside; with as many parts as there are, or as given."""
        return [
            Flow(
                tuple(
                    Split(entry, parts or self.region.parts(entry), name)
                    if self.region.parts(entry) > 1 and dimension not in array.whole_inside
                    else None
                    for dimension, (name, entry) in enumerate(
                        zip(array.names, array.mesh_axes, strict=True)
                    )
                ),
                random=bool(self.random_axes) and index in self.keys,
            )
            for index, array in enumerate(self.inputs)
        ]

    def mapped(
        self, function: Callable[..., list[Any]], tracking: Tracking, outputs: Sequence[Crossing]
    ) -> Callable[..., list[Any]]:
        """A function of one device's arrays as one of the global arrays."""
        return jax.shard_map(
            function,
            mesh=self.region.mesh,
            in_specs=tuple(array.spec for array in self.inputs),
            out_specs=[array.spec for array in outputs],
            axis_names=set(self.region.manual),
            check_vma=tracking is not Tracking.UNTRACKED,
        )

    def inside(self, arrays: Sequence[Any], tracking: Tracking) -> list[Any]:
        """One device's arrays as the layer sees them.

        Parameters are gathered, and keys of random streams are others for every position along
        the mesh axes that activations are split over.
        """
        weight_dims = (dim for flow in self.flows()[: self.weights] for dim in flow.dims)
        varying = (
            {*self.random_axes, *mesh_axes_of(weight_dims)} if tracking is Tracking.VARYING else ()
        )
        found = [
            crossing.gathered(array, varying, tracking)
            for crossing, array in zip(self.inputs, arrays, strict=True)
        ]
        if self.region.automatic and varying:
            for index, crossing in enumerate(self.inputs):
                if is_of_16_bits(found[index]):
                    found[index] = crossing.varying(found[index], varying, tracking)
        for index in self.keys if self.random_axes else ():
            found[index] = jax.random.fold_in(found[index], device_position(self.random_axes))
        return found

    def split_text(self) -> str:
        """What is split inside, for messages."""
        lengths = {
            (dim.name, dim.mesh_axes): length
            for array, flow in zip(self.inputs, self.flows(), strict=True)
            for length, dim in zip(array.shape, flow.dims, strict=True)
            if isinstance(dim, Split)
        }
        return "; ".join(
            f"{name!r} ({length}) over {sized_mesh_axes_text(axes, self.region.mesh.shape)}"
            for (name, axes), length in lengths.items()
        )


def _check_keep_split(region: Region, weights: Sequence[Crossing]) -> None:
    names = dict.fromkeys(name for weight in weights for name in weight.names if name)
    near = {name: nearest_name(name, names) for name in region.keep_split if name not in names}
    raise_all(
        ManualRegionError,
        "cannot keep parameters split:",
        [
            f"keep_split: no parameter has logical axis {name!r}. Did you mean {other!r}?"
            for name, other in near.items()
            if other is not None
        ],
    )
