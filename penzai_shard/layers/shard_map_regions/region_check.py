"""Whether the parts that the devices compute make what the whole layer computes.

The layer's program is traced with the global lengths and with those of one device's part, and
followed operation by operation. A layer that is written for one device's part is only traced with
the latter.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from penzai_shard.errors import raise_all
from penzai_shard.layers.manual_region import varying_axes
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree
from penzai_shard.layers.shard_map_regions.following import Problem, SplitFlow, collectives
from penzai_shard.layers.shard_map_regions.region_plan import (
    Crossing,
    ManualRegionError,
    Region,
    RegionPlan,
    crossings,
)
from penzai_shard.layers.shard_map_regions.split_values import UNIFORM, Flow, Split, mesh_axes_of
from penzai_shard.library_apis.jax_api import is_weakly_typed
from penzai_shard.rule_kinds import sized_mesh_axes_text


@dataclasses.dataclass(frozen=True)
class Traced:
    """A layer's program, traced with arrays of some lengths.

    Attributes:
        program: The program.
        tree: Its output without the arrays.
        structs: What the arrays of its output are.
    """

    program: Any
    tree: BoundaryTree
    structs: Sequence[Any]

    @classmethod
    def of(cls, run: Any, arrays: Sequence[Any]) -> "Traced":
        """Traces a compiled function that returns a tree taken apart."""
        traced = run.trace(arrays)
        tree, _ = traced.out_info
        return cls(traced.jaxpr, tree, [atom.aval for atom in traced.jaxpr.jaxpr.outvars])


@dataclasses.dataclass(frozen=True)
class RegionCheck:
    """The check of a layer that is written for whole arrays.

    Attributes:
        plan: The plan of what enters.
        run: The layer, compiled, on arrays of whatever lengths.
        part: It on one device's part.
        arrays: The global shapes of what enters.
        tracked: Whether JAX tracks along which mesh axes values vary.
    """

    plan: RegionPlan
    run: Any
    part: Traced
    arrays: Sequence[jax.ShapeDtypeStruct]
    tracked: bool

    def outputs(self) -> tuple[BoundaryTree, list[Crossing]]:
        """The output without its arrays, and how its arrays leave.

        Raises:
            ManualRegionError: The layer does not treat the elements of a split logical axis
                independently.
        """
        part, region = self.part, self.plan.region
        _check_collectives(part.program)
        whole = Traced.of(self.run, self.arrays)
        if not whole.tree.built_alike(part.tree):
            raise ManualRegionError(
                "the layer returns something else per device than for whole arrays: "
                f"{part.tree.structure.value} instead of {whole.tree.structure.value}."
            )
        problems, flows = self._followed_at_any_length(whole)
        outputs = []
        for output, flow in zip(crossings(region, whole.tree, whole.structs), flows, strict=True):
            dims = enumerate(zip(flow.dims, output.mesh_axes, strict=True))
            cut = {i for i, (dim, entry) in dims if dim is None and region.parts(entry) > 1}
            outputs.append(dataclasses.replace(output, whole_inside=frozenset(cut)))
        self._check_independent(problems, flows, outputs)
        raise_all(
            ManualRegionError,
            "the layer cannot run per device:",
            [
                text
                for output, flow, own in zip(outputs, flows, part.structs, strict=True)
                for text in _output_problems(output, flow, own.shape, region)
            ],
        )
        return whole.tree, outputs

    def _followed_at_any_length(self, whole: Traced) -> tuple[list[Problem], list[Flow]]:
        problems, flows = self._followed(whole, self.part)
        inputs = list(zip(self.arrays, self.plan.flows(), strict=True))
        of_one = any(
            isinstance(dim, Split) and dim.parts == length
            for array, flow in inputs
            for length, dim in zip(array.shape, flow.dims, strict=True)
        )
        if not any(flow.refused for flow in flows) or not of_one:
            return problems, flows
        # Some functions of JAX trace to other operations where a length is 1. They are followed in
        # the whole and in another that is twice as long.
        doubled = [
            struct_of(array, [2 if isinstance(dim, Split) else 1 for dim in flow.dims])
            for array, flow in inputs
        ]
        try:
            longer = Traced.of(self.run, doubled)
        except Exception:
            # The body, which may raise anything, takes no other length. What was refused at this
            # one stays refused, and is reported.
            return problems, flows
        of_longer = self._followed(longer, whole, parts=2)
        if any(flow.refused for flow in of_longer[1]):
            return of_longer
        return self._followed(whole, self.part, part_of_one=True)

    def _followed(
        self, whole: Traced, part: Traced, parts: int | None = None, part_of_one: bool = False
    ) -> tuple[list[Problem], list[Flow]]:
        """What is refused, and what the results are."""
        region, inputs = self.plan.region, self.plan.flows(parts)
        splits = frozenset(dim for flow in inputs for dim in flow.dims if isinstance(dim, Split))
        real = frozenset(name for name in region.manual if region.mesh.shape[name] > 1)
        analysis = SplitFlow(
            splits,
            random_axes=real.intersection(self.plan.random_axes),
            # Untracked, the gradient of an output is divided by the number of devices that hold
            # the same, to be added up over them.
            summed_axes=mesh_axes_of(splits) if self.tracked else real,
            vouched=frozenset(region.assume_independent),
            part_of_one=part_of_one,
        )
        flows = analysis.results(whole.program, part.program, inputs)
        return analysis.problems, list(flows)

    def _check_independent(
        self, problems: Sequence[Problem], flows: Sequence[Flow], outputs: Sequence[Crossing]
    ) -> None:
        needed = [
            [out.path for out, flow in zip(outputs, flows, strict=True) if index in flow.refused]
            for index in range(len(problems))
        ]
        raise_all(
            ManualRegionError,
            "the layer does not treat the elements that are on different devices independently"
            f" (split: {self.plan.split_text()}):",
            [
                f"{problem.where}: {problem.reason}. Needed for {_listed(paths)}. Do it outside "
                "of the layer, or map the logical axis to None in activation_rules; if the "
                "elements are independent after all, say "
                f"assume_independent=({problem.operation!r},)."
                for problem, paths in zip(problems, needed, strict=True)
                if paths
            ],
        )


def unchecked_outputs(region: Region, part: Traced, tracked: bool) -> list[Crossing]:
    """What leaves the region of a layer that is written for one device's part.

    A dimension that a rule splits is taken for a part of it, unless JAX knows that the devices
    hold the same: it then is the whole.

    Args:
        region: The region.
        part: The layer on one device's part.
        tracked: Whether JAX tracks along which mesh axes values vary.
    """
    # The lengths are known once it is known what is split, for which long ones stand in.
    all_parts = region.parts(region.manual)
    longest = [struct_of(struct, [all_parts] * len(struct.shape)) for struct in part.structs]
    guessed = crossings(region, part.tree, longest)
    whole, final = [], []
    for struct, output in zip(part.structs, guessed, strict=True):
        axes = list(enumerate(output.mesh_axes))
        varying = varying_axes(struct) if tracked else set(region.manual)  # Anything may vary.
        whole.append(frozenset(i for i, e in axes if region.parts(e) > 1 and not varying & set(e)))
        parts = [1 if i in whole[-1] else region.parts(entry) for i, entry in axes]
        final.append(struct_of(struct, parts))
    # Planned again with the lengths that came out, so that one that does not divide is reported.
    outputs = crossings(region, part.tree, final)
    if [output.spec for output in outputs] != [output.spec for output in guessed]:
        raise ManualRegionError(
            "the rules split the output otherwise by its global lengths than by those of a part. "
            "Map its logical axes in activation_rules by a mapping."
        )
    return [
        dataclasses.replace(output, whole_inside=cut)
        for output, cut in zip(outputs, whole, strict=True)
    ]


def _output_problems(output: Crossing, flow: Flow, own: Sequence[int], region: Region) -> list[str]:
    """Why the parts that the devices compute do not make the whole output; usually nothing.

    Args:
        output: The output.
        flow: What its dimensions are inside the region.
        own: Its shape on one device.
        region: The region.
    """
    found = []
    if flow.random:
        found.append(
            f"{output.path}: it depends on numbers of a pz.RandomStream of which every device "
            "has its own."
        )
    for dimension, (dim, mesh_axes) in enumerate(zip(flow.dims, output.mesh_axes, strict=True)):
        name, length = output.names[dimension], output.shape[dimension]
        which = f"positional dimension {dimension}" if name is None else f"logical axis {name!r}"
        over = sized_mesh_axes_text(mesh_axes, region.mesh.shape) if mesh_axes else ""
        parts = region.parts(mesh_axes)
        if isinstance(dim, Split) or dim == UNIFORM:
            fits = own[dimension] * parts == length
            if not fits or (isinstance(dim, Split) and dim.mesh_axes != mesh_axes):
                inside = f"{dim}" if isinstance(dim, Split) else "of another length on a device"
                asked = f"should be split over {over}" if over else "should be whole"
                found.append(
                    f"{output.path}: {which} ({length}) {asked} by activation_rules, and inside it "
                    f"is {inside}. A split logical axis must keep its name, and be mapped to the "
                    "same mesh axis in activation_rules."
                )
        elif parts > 1 and flow.mesh_axes & set(mesh_axes):
            found.append(
                f"{output.path}: {which} ({length}) should be split over {over}, and each device "
                "computed another whole of it. Map it to None in activation_rules."
            )
    return found


def _check_collectives(program: Any) -> None:
    raise_all(
        ManualRegionError,
        "the layer moves data between devices itself:",
        [
            f"{where}: a layer that calls jax.lax.{name} is written for one device's part. Say "
            "per_device=True to run it as it is, unchecked."
            for name, where in collectives(program)
        ],
    )


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def struct_of(array: Any, times: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """The shape of an array, or one that is as many times as long in each dimension."""
    times = times or [1] * len(array.shape)
    shape = tuple(length * n for length, n in zip(array.shape, times, strict=True))
    kind = jax.typeof(array) if isinstance(array, jax.Array) else array
    return jax.ShapeDtypeStruct(shape, array.dtype, weak_type=is_weakly_typed(kind))
