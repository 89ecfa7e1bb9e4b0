"""Reading a layer's program before it runs per device.

It is traced with the global lengths and with those of one device's part, and followed operation
by operation. A layer that is written for one device's part is only traced with the latter.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from penzai_shard.errors import raise_all
from penzai_shard.layers.manual_region import Region
from penzai_shard.layers.region_boundary import BoundaryTree, take_apart
from penzai_shard.layers.region_gathering import Typing, gather
from penzai_shard.layers.region_outputs import (
    ManualRegionError,
    Output,
    followed_outputs,
    unfollowed_outputs,
)
from penzai_shard.layers.region_random import base_keys, fold_position
from penzai_shard.layers.shard_map_regions.following import Problem, SplitFlow, collectives
from penzai_shard.layers.shard_map_regions.split_values import Flow, Split
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.rule_kinds import nearest_name, sized_mesh_axes_text
from penzai_shard.traced_programs import equations, exception_location_text

_LONGEST = 400
"""How many characters of another library's message are shown."""

Arrays = tuple[list[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a layer's program gives, and how it may run.

    Attributes:
        run: The layer, from one device's arrays to those of its output.
        boundary: Its output without the arrays.
        slots: A readable text for each variable.
        outputs: Its arrays.
        typings: What JAX may know in it, the best first.
        may_gather: Whether it may hold the same on all devices where JAX cannot tell.
    """

    run: Callable[..., list[Any]]
    boundary: BoundaryTree
    slots: list[str]
    outputs: list[Output]
    typings: list[Typing]
    may_gather: bool = True


def has_own_gradient(program: Any) -> bool:
    """Whether a program contains a ``jax.custom_vjp`` function."""
    return any(one.primitive.name == "custom_vjp_call" for one in equations(program))


def must_be_untracked(program: Any) -> bool:
    """Whether JAX fails to compile an operation of a program where it tracks what varies."""
    return any(one.primitive.name == "regularized_incomplete_beta" for one in equations(program))


class TrackingError(Exception):
    """What JAX tracks of values stands in the way."""


class RegionReading:
    """The program of one call: what it gives, and whether it may run per device.

    Attributes:
        region: The region.
        arrays: The global arrays, the weights' and then the activations'.
    """

    def __init__(
        self,
        region: Region,
        weights: BoundaryTree,
        activations: BoundaryTree,
        arrays: Arrays,
        call_body: Callable[[Any, Any], tuple[Any, list[str]]],
    ) -> None:
        self.region, self.arrays, self._call_body = region, arrays, call_body
        self.specs = (
            region.parameter_specs(weights.put_together(arrays[0], fixed=False)),
            region.activation_specs(activations.put_together(arrays[1], fixed=False)),
        )
        self.dimensions = tuple(
            [
                list(
                    zip(
                        names or (None,) * array.ndim,
                        mesh_axes_by_dimension(spec, array.ndim),
                        strict=True,
                    )
                )
                for names, array, spec in zip(tree.array_names(), own, specs, strict=True)
            ]
            for tree, own, specs in zip((weights, activations), arrays, self.specs, strict=True)
        )
        self.random_axes = self._in_order(
            name for array in self.dimensions[1] for _, entry in array for name in entry
        )
        self._check_kept()
        self.keys = (base_keys(weights), base_keys(activations))

    def _in_order(self, mesh_axes: Iterable[str]) -> tuple[str, ...]:
        found = set(mesh_axes)
        return tuple(name for name in self.region.manual if name in found)

    def mapped(self, function: Callable[..., Any], typing: Typing, out_specs: Any) -> Any:
        """A function of one device's arrays as one of the global arrays."""
        return jax.shard_map(
            function,
            mesh=self.region.mesh,
            in_specs=self.specs,
            out_specs=out_specs,
            axis_names=set(self.region.manual),
            check_vma=typing is not Typing.UNTRACKED,
        )

    def inside(self, arrays: Any, typing: Typing) -> Arrays:
        """One device's arrays as the layer sees them."""
        weights, activations = arrays
        kept = self.region.keep_split
        varying = {*self.random_axes, *(n for flow in self._flows()[0] for n in flow.mesh_axes)}
        gathered = [
            gather(
                array,
                [() if name in kept else entry for name, entry in dimensions],
                varying if typing is Typing.VARYING else (),
                typing,
            )
            for array, dimensions in zip(weights, self.dimensions[0], strict=True)
        ]
        return (
            fold_position(gathered, self.keys[0], self.random_axes),
            fold_position(activations, self.keys[1], self.random_axes),
        )

    def _flows(self, parts: int | None = None) -> tuple[list[Flow], list[Flow]]:
        """What is known of each array inside; with as many parts as there are, or as given."""
        return tuple(  # type: ignore[return-value]
            [
                Flow(
                    tuple(
                        Split(entry, parts or self.region.parts(entry), name)
                        if self.region.parts(entry) > 1
                        and (stays or name in self.region.keep_split)
                        else None
                        for name, entry in array
                    ),
                    random=bool(self.random_axes) and index in keys,
                )
                for index, array in enumerate(arrays)
            ]
            for stays, arrays, keys in zip((False, True), self.dimensions, self.keys, strict=True)
        )

    # Reading the program.

    def read(self, typing: Typing) -> "Program":
        """Reads the program, and checks it unless it is written for one device's part.

        Args:
            typing: What JAX is to track in it.

        Raises:
            ManualRegionError: The layer does not treat the elements of a split logical axis
                independently.
            TrackingError: It may do so where JAX tracks nothing.
        """
        read: list[Program] = []

        def dry(*arrays: Any) -> list[Any]:
            read.append(self._read_inside(self.inside(arrays, typing), typing))
            return []

        jax.eval_shape(self.mapped(dry, typing, []), *self.arrays)
        return read[-1]

    def _read_inside(self, local: Arrays, typing: Typing) -> "Program":
        body, built = self._body()
        # Compiled in line it leaves no trace in the program, and is traced once for both uses.
        program = jax.jit(body, inline=True)
        part = program.trace(*local).jaxpr
        tracked = typing is not Typing.UNTRACKED
        if tracked and must_be_untracked(part):
            raise TrackingError
        # What a ``jax.custom_vjp`` does depends on what JAX tracks, and is followed as it will run.
        own_gradient = has_own_gradient(part)
        typings = [*Typing] if tracked and not own_gradient else [typing]
        own = [atom.aval for atom in part.jaxpr.outvars]
        boundary, slots = built[-1]
        if self.region.per_device:
            outputs = unfollowed_outputs(self.region, boundary, own, tracked)
            moves = bool(collectives(part))
            return Program(program, boundary, slots, outputs, typings, may_gather=moves)
        self._check_collectives(part)
        structs = tuple([_struct(array) for array in arrays] for arrays in self.arrays)
        whole, results = jax.make_jaxpr(body, return_shape=True)(*structs)
        if not built[-1][0].built_alike(boundary):
            raise ManualRegionError(
                "the layer returns something else per device than for whole arrays: "
                f"{boundary.structure.value} instead of {built[-1][0].structure.value}."
            )
        boundary = built[-1][0]
        problems, flows = self._follow(body, whole, part, tracked)
        outputs = followed_outputs(self.region, boundary, results, flows)
        try:
            self._check(problems, flows, outputs, own)
        except ManualRegionError as error:
            if tracked and own_gradient:
                raise TrackingError from error
            raise
        return Program(program, boundary, slots, outputs, typings)

    def _body(self) -> tuple[Callable[..., list[Any]], list[tuple[BoundaryTree, list[str]]]]:
        built: list[tuple[BoundaryTree, list[str]]] = []

        def body(weights: Any, activations: Any) -> list[Any]:
            result, slots = self._call_body(weights, activations)
            boundary, arrays = take_apart(result)
            built.append((boundary, slots))
            return arrays

        return body, built

    def _follow(
        self, body: Any, whole: Any, part: Any, tracked: bool
    ) -> tuple[list[Problem], list[Flow]]:
        problems, flows = self._followed(whole, part, tracked)
        lengths = [
            size // self.region.parts(dim.mesh_axes)
            for arrays, found in zip(self.arrays, self._flows(), strict=True)
            for array, flow in zip(arrays, found, strict=True)
            for size, dim in zip(array.shape, flow.dims, strict=True)
            if isinstance(dim, Split)
        ]
        if not any(flow.refused for flow in flows) or 1 not in lengths:
            return problems, flows
        # Some functions of JAX trace to other operations where a length is 1. They are followed in
        # the whole and in another that is twice as long.
        doubled = tuple(
            [
                _struct(array, [2 if isinstance(dim, Split) else 1 for dim in flow.dims])
                for array, flow in zip(arrays, found, strict=True)
            ]
            for arrays, found in zip(self.arrays, self._flows(), strict=True)
        )
        try:
            longer = jax.make_jaxpr(body)(*doubled)
        except Exception:
            # The body takes no other length, so what was refused at this one stays refused.
            return problems, flows
        of_longer = self._followed(longer, whole, tracked, parts=2)
        if any(flow.refused for flow in of_longer[1]):
            return of_longer
        return self._followed(whole, part, tracked, part_of_one=True)

    def _followed(
        self,
        whole: Any,
        part: Any,
        tracked: bool,
        parts: int | None = None,
        part_of_one: bool = False,
    ) -> tuple[list[Problem], list[Flow]]:
        given = [flow for flows in self._flows(parts) for flow in flows]
        splits = frozenset(dim for flow in given for dim in flow.dims if isinstance(dim, Split))
        real = frozenset(name for name in self.region.manual if self.region.mesh.shape[name] > 1)
        analysis = SplitFlow(
            splits,
            random_axes=real.intersection(self.random_axes),
            # Untracked, the gradient of an output is divided by the number of devices that hold
            # the same, to be added up over them.
            summed_axes=frozenset(n for s in splits for n in s.mesh_axes) if tracked else real,
            vouched=frozenset(self.region.assume_independent),
            part_of_one=part_of_one,
        )
        return analysis.problems, list(analysis.results(whole, part, given))

    # What is refused.

    def _check_kept(self) -> None:
        names = dict.fromkeys(name for array in self.dimensions[0] for name, _ in array if name)
        problems = []
        for name in self.region.keep_split:
            near = None if name in names else nearest_name(name, names)
            if near is not None:
                problems.append(
                    f"keep_split: no parameter has logical axis {name!r}. Did you mean {near!r}?"
                )
        raise_all(ManualRegionError, "cannot keep parameters split:", problems)

    def _split_text(self) -> str:
        lengths = {
            (name, entry): size
            for arrays, found in zip(self.arrays, self.dimensions, strict=True)
            for array, dimensions in zip(arrays, found, strict=True)
            for size, (name, entry) in zip(array.shape, dimensions, strict=True)
        }
        split = dict.fromkeys(
            (dim.name, dim.mesh_axes)
            for flows in self._flows()
            for flow in flows
            for dim in flow.dims
            if isinstance(dim, Split)
        )
        return "; ".join(
            f"{name!r} ({lengths[name, axes]}) over "
            f"{sized_mesh_axes_text(axes, self.region.mesh.shape)}"
            for name, axes in split
        )

    def _check(
        self,
        problems: Sequence[Problem],
        flows: Sequence[Flow],
        outputs: Sequence[Output],
        own: Sequence[Any],
    ) -> None:
        raise_all(
            ManualRegionError,
            "the layer does not treat the elements that lie on different devices independently"
            f" (split: {self._split_text()}):",
            [
                f"{problem.where}: {problem.reason}. Needed for {_listed(needing)}. Do it outside "
                "of the layer, or map the logical axis to None in activation_rules; if the "
                "elements are independent after all, say "
                f"assume_independent=({problem.operation!r},)."
                for index, problem in enumerate(problems)
                if (
                    needing := [
                        o.path for o, f in zip(outputs, flows, strict=True) if index in f.refused
                    ]
                )
            ],
        )
        raise_all(
            ManualRegionError,
            "the layer cannot run per device:",
            [
                text
                for output, flow, aval in zip(outputs, flows, own, strict=True)
                for text in output.problems(flow, aval.shape, self.region)
            ],
        )

    def _check_collectives(self, part: Any) -> None:
        raise_all(
            ManualRegionError,
            "the layer moves data between devices itself:",
            [
                f"{where}: a layer that calls jax.lax.{name} is written for one device's part. Say "
                "per_device=True to run it as it is, unchecked."
                for name, where in collectives(part)
            ],
        )

    def fail(self, error: Exception) -> None:
        """Says what is known of a layer that cannot be traced on one device's part."""
        first = " ".join(str(error).split("\n---", 1)[0].split())
        first = f"{first[:_LONGEST]} ..." if len(first) > _LONGEST else first
        where = exception_location_text(error)
        if isinstance(error, NameError) and "axis name" in str(error):
            raise ManualRegionError(
                f"the layer uses a mesh axis that the region does not take over{where}: {first}. "
                f"It takes over {self.region.manual}; see manual_axes."
            ) from error
        if self.region.per_device:
            return

        def dry(*_: Any) -> list[Any]:
            jax.eval_shape(self._body()[0], *structs)
            return []

        structs = tuple([_struct(array) for array in arrays] for arrays in self.arrays)
        # A layer that fails on whole arrays too fails by its own error.
        jax.eval_shape(self.mapped(dry, Typing.UNTRACKED, []), *self.arrays)
        raise ManualRegionError(
            "the layer works on whole arrays, and fails on one device's part of them:",
            [
                f"{type(error).__name__}{where}: {first}. Each device sees its part of the "
                f"activations (split: {self._split_text()}). A logical axis that the layer "
                "contracts, or that a parameter has too, must be mapped to None in "
                "activation_rules."
            ],
        ) from error


def _named(
    names: Sequence[Hashable | None] | None, mesh_axes: Sequence[tuple[str, ...]]
) -> list[tuple[Hashable | None, tuple[str, ...]]]:
    return list(zip(names or (None,) * len(mesh_axes), mesh_axes, strict=True))


def _needing(problem: int, outputs: Sequence[Output], flows: Sequence[Flow]) -> list[str]:
    return [o.path for o, f in zip(outputs, flows, strict=True) if problem in f.refused]


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def _struct(array: Any, times: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    shape = tuple(n * m for n, m in zip(array.shape, times or [1] * array.ndim, strict=True))
    weak = bool(getattr(jax.typeof(array), "weak_type", False))
    return jax.ShapeDtypeStruct(shape, array.dtype, weak_type=weak)
