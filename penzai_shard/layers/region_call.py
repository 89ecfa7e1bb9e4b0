"""One call of a layer inside a manual region: gather, run, check, hand out.

The layer is traced twice: once with the global lengths, which says what comes out, and once with
those of one device's part.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from penzai import pz

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.layers import variable_threading
from penzai_shard.layers.manual_region import Region, varying_axes
from penzai_shard.layers.region_boundary import BoundaryTree, take_apart
from penzai_shard.layers.split_axis_mixing import mixed_lengths
from penzai_shard.rule_kinds import sized_mesh_axes_text
from penzai_shard.tree_paths import path_text

SplitNames = Mapping[str, Sequence[Hashable]]


class ManualRegionError(ShardingError):
    """A layer cannot run per device under the given rules; every offender is told."""


class _NotReplicatedError(ManualRegionError):
    """Something differs between devices that should hold the same."""


@dataclasses.dataclass(frozen=True)
class _Output:
    """One array that leaves the region.

    Attributes:
        path: Where it is, for people.
        names: The logical axis of each of its dimensions, None for a positional one.
        shape: Its global shape.
        mesh_axes: The mesh axes of each of its dimensions.
    """

    path: str
    names: tuple[Hashable | None, ...]
    shape: tuple[int, ...]
    mesh_axes: tuple[tuple[str, ...], ...]

    def dimension_text(self, dimension: int) -> str:
        """A dimension, for people."""
        name = self.names[dimension]
        return f"positional dimension {dimension}" if name is None else f"logical axis {name!r}"


@dataclasses.dataclass(frozen=True)
class RegionCall:
    """All that a call depends on apart from arrays; equal for models that are built alike.

    Attributes:
        region: The region.
        weights: The frozen parameters and the body.
        activations: The argument, the side inputs, and the frozen other variables.
    """

    region: Region
    weights: BoundaryTree
    activations: BoundaryTree

    def run(
        self, weight_arrays: Sequence[Any], activation_arrays: Sequence[Any]
    ) -> tuple[Any, dict[int, Any]]:
        """Runs the layer per device.

        Args:
            weight_arrays: The global arrays of ``weights``.
            activation_arrays: The global arrays of ``activations``.

        Returns:
            The layer's output, and the contents of the variables that it reassigned, by index,
            parameters counted first.

        Raises:
            PlanError: A length does not divide.
            ManualRegionError: Something differs between devices that should hold the same.
        """
        region = self.region
        arrays = (list(weight_arrays), list(activation_arrays))
        weight_specs = region.parameter_specs(self.weights.put_together(arrays[0], fixed=False))
        activation_specs = region.activation_specs(
            self.activations.put_together(arrays[1], fixed=False)
        )
        split_names = self._split_names(arrays[1], activation_specs)
        built: list[tuple[BoundaryTree, list[str]]] = []

        def run_globally(weight_arrays: Any, activation_arrays: Any) -> Any:
            result, slots = self._call_body(weight_arrays, activation_arrays)
            boundary, arrays = take_apart(result)
            built.append((boundary, slots))
            return arrays, result

        # Traced and not run. The second result is the first one's shapes.
        whole, (structs, result) = jax.make_jaxpr(run_globally, return_shape=True)(*arrays)
        boundary, slots = built[-1]
        output_specs = region.activation_specs(boundary.put_together(structs, fixed=False))
        outputs = self._outputs(result, boundary, structs, output_specs)

        def run_per_device(
            gather_varying: bool, weight_arrays: Any, activation_arrays: Any
        ) -> list[Any]:
            gathered = [
                _gather(
                    array,
                    region.mesh_axes(spec, array.ndim),
                    split_names if gather_varying else (),
                )
                for array, spec in zip(weight_arrays, weight_specs, strict=True)
            ]

            # Inlined, this leaves no trace in the program, and what was traced is at hand.
            @functools.partial(jax.jit, inline=True)
            def run_locally(gathered: Any, activation_arrays: Any) -> Any:
                return self._call_body(gathered, activation_arrays, tuple(split_names))[0]

            try:
                part = run_locally.trace(gathered, activation_arrays).jaxpr
                local = run_locally(gathered, activation_arrays)
            except Exception as error:
                error.add_note(_note(split_names))
                raise
            handed_out = self._hand_out(result, boundary, outputs, local, split_names)
            lengths = self._lengths(arrays[1])
            raise_all(
                ManualRegionError,
                "the layer mixes elements that lie on different devices:",
                _mixing_problems(mixed_lengths(whole, part), split_names, lengths),
            )
            return handed_out

        def mapped(gather_varying: bool) -> list[Any]:
            return jax.shard_map(
                functools.partial(run_per_device, gather_varying),
                mesh=region.mesh,
                in_specs=(weight_specs, activation_specs),
                out_specs=output_specs,
                axis_names=set(region.manual),
            )(*arrays)

        try:
            output_arrays = mapped(True)
        except _NotReplicatedError as error:
            # To JAX, a gathered parameter varies between the devices, and with it all that is
            # computed from it alone. Gathered as the same on all devices it does not, and what
            # still differs does depend on a part of the activations.
            try:
                output_arrays = mapped(False)
            except _NotReplicatedError as final:
                headline = str(final).split("\n", 1)[0]
                raise ManualRegionError(headline, final.problems) from None
            del error
        after = boundary.put_together(output_arrays)
        changed = {
            index: after["changed"][slot]
            for index, slot in enumerate(slots)
            if slot in after["changed"]
        }
        return after["output"], changed

    def _call_body(
        self,
        weight_arrays: Sequence[Any],
        activation_arrays: Sequence[Any],
        fold_axes: tuple[str, ...] = (),
    ) -> tuple[dict[str, Any], list[str]]:
        """Runs the layer on arrays of whatever lengths.

        Returns:
            The output and the contents of the variables that were reassigned, by a readable
            text for each; and these texts for all variables in order.
        """
        parameters, body = self.weights.put_together(weight_arrays)
        given = self.activations.put_together(activation_arrays)
        variables = variable_threading.thaw((*parameters, *given["states"]))
        slots = [
            f"{type(variable).__name__} {getattr(variable, 'label', index)!r}"
            for index, variable in enumerate(variables)
        ]
        before = variable_threading.contents(variables)
        tree = pz.bind_variables((body, given["argument"], given["side_inputs"]), variables)
        body, argument, side_inputs = _fold_random_streams(tree, fold_axes)
        output = body(argument, **side_inputs)
        variable_threading.check_no_variable(output, "ShardMapped")
        changed = variable_threading.reassigned(variables, before)
        by_slot = {slots[index]: content for index, content in changed.items()}
        return {"output": output, "changed": by_slot}, slots

    def _split_names(
        self, arrays: Sequence[Any], specs: Sequence[PartitionSpec]
    ) -> dict[str, list[Hashable]]:
        """The logical axes of activations that are split, by mesh axis in the mesh's order."""
        found: dict[str, list[Hashable]] = {}
        leaves = [leaf for leaf in self.activations.leaves if leaf.fixed is None]
        for leaf, array, spec in zip(leaves, arrays, specs, strict=True):
            names = leaf.names or (None,) * array.ndim
            for name, entry in zip(names, self.region.mesh_axes(spec, array.ndim), strict=True):
                for mesh_axis in entry:
                    if name not in found.setdefault(mesh_axis, []):
                        found[mesh_axis].append(name)
        return {name: found[name] for name in self.region.manual if name in found}

    def _lengths(self, arrays: Sequence[Any]) -> dict[Hashable, int]:
        """The global length of each logical axis of the activations."""
        leaves = [leaf for leaf in self.activations.leaves if leaf.fixed is None]
        return {
            name: size
            for leaf, array in zip(leaves, arrays, strict=True)
            for name, size in zip(leaf.names or (), array.shape, strict=False)
            if name is not None
        }

    def _outputs(
        self,
        result: Any,
        boundary: BoundaryTree,
        structs: Sequence[Any],
        specs: Sequence[PartitionSpec],
    ) -> list[_Output]:
        places = jax.tree_util.tree_leaves_with_path(result, is_leaf=pz.nx.is_namedarray)
        leaves = [
            (path_text(path).removeprefix("changed/"), leaf.names)
            for (path, _), leaf in zip(places, boundary.leaves, strict=True)
            if leaf.fixed is None
        ]
        return [
            _Output(
                path,
                names or (None,) * len(struct.shape),
                tuple(struct.shape),
                tuple(self.region.mesh_axes(spec, len(struct.shape))),
            )
            for (path, names), struct, spec in zip(leaves, structs, specs, strict=True)
        ]

    def _hand_out(
        self,
        template: Any,
        boundary: BoundaryTree,
        outputs: Sequence[_Output],
        local: Any,
        split_names: SplitNames,
    ) -> list[Any]:
        """The arrays that one device hands out, after checking that they are what they should."""
        structure: Any = jax.tree_util.tree_structure(local, is_leaf=pz.nx.is_namedarray)
        if structure != boundary.structure.value:
            raise ManualRegionError(
                "the layer returns something else per device than for whole arrays: "
                f"{structure} instead of {boundary.structure.value}."
            )
        ordered = jax.tree_util.tree_leaves(
            pz.nx.order_like(local, template), is_leaf=pz.nx.is_namedarray
        )
        arrays = [
            leaf if described.names is None else leaf.data_array
            for leaf, described in zip(ordered, boundary.leaves, strict=True)
            if described.fixed is None
        ]
        problems: list[str] = []
        differing: list[str] = []
        handed_out = []
        for array, output in zip(arrays, outputs, strict=True):
            array, problem = self._own_part(jax.numpy.asarray(array), output)
            problems += [f"{output.path}: {problem}"] if problem else []
            mentioned = {name for mesh_axes in output.mesh_axes for name in mesh_axes}
            extra = varying_axes(array) - mentioned
            for mesh_axis in self.region.manual:
                if mesh_axis in extra:
                    differing.append(self._difference(output, mesh_axis, split_names))
            handed_out.append(array)
        headline = "the layer cannot run per device:"
        raise_all(ManualRegionError, headline, problems)
        raise_all(_NotReplicatedError, headline, differing)
        return handed_out

    def _own_part(self, array: Any, output: _Output) -> tuple[Any, str]:
        """A device's part of an output; devices that computed the whole keep their part of it."""
        for dimension, mesh_axes in enumerate(output.mesh_axes):
            whole = output.shape[dimension]
            expected = whole // self.region.parts(mesh_axes)
            size = array.shape[dimension]
            if size == expected:
                continue
            what = f"{output.dimension_text(dimension)} ({whole})"
            over = sized_mesh_axes_text(mesh_axes, self.region.mesh.shape) if mesh_axes else ""
            if size != whole:
                return array, (
                    f"{what} has length {size} on each device, and not {expected}. A split logical "
                    "axis must keep its name, and its elements be computed one by one."
                )
            if varying_axes(array) & set(mesh_axes):
                return array, (
                    f"{what} should be split over {over}, and each device computed another whole "
                    f"of it. Map it to None in activation_rules."
                )
            array = jax.lax.dynamic_slice_in_dim(
                array, _position(mesh_axes) * expected, expected, dimension
            )
        return array, ""

    def _difference(self, output: _Output, mesh_axis: str, split_names: SplitNames) -> str:
        names = split_names.get(mesh_axis, ())
        over = sized_mesh_axes_text((mesh_axis,), self.region.mesh.shape)
        listed = " and ".join(repr(name) for name in names)
        if not names:
            return f"{output.path}: it differs between the devices along {over}."
        own = [name for name in output.names if name is not None]
        has = f"has {', '.join(map(repr, own))}" if own else "has no logical axes"
        return (
            f"{output.path}: it {has}, and depends on logical axis {listed}, which is split over "
            f"{over}, so every device would hold another value. Compute it outside of the layer, "
            f"or map {listed} to None in activation_rules, "
            f"or leave {mesh_axis!r} out of manual_axes."
        )


def _gather(array: Any, mesh_axes: Sequence[tuple[str, ...]], varying: Any) -> Any:
    """A whole parameter from the devices' parts of it.

    The transpose of the gather is the scatter of the gradients' sum where the devices see
    different activations, and taking one's own part of the gradient where they see the same.
    """
    for dimension, entry in enumerate(mesh_axes):
        groups: list[tuple[str, ...]] = []
        for name in entry:
            if groups and (name in varying) == (groups[-1][0] in varying):
                groups[-1] += (name,)
            else:
                groups.append((name,))
        # The last mesh axis of an entry is the one whose parts are neighbours.
        for group in reversed(groups):
            to = "varying" if group[0] in varying else "invarying"
            array = jax.lax.all_gather(array, group, axis=dimension, tiled=True, to=to)
    return array


def _position(mesh_axes: Sequence[str]) -> Any:
    """The device's position along some mesh axes, the first of them counting most."""
    position: Any = 0
    for name in mesh_axes:
        position = position * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return position


def _fold_random_streams(tree: Any, mesh_axes: tuple[str, ...]) -> Any:
    """The tree with other random numbers for every position along some mesh axes."""
    if not mesh_axes:
        return tree
    return jax.tree_util.tree_map(
        lambda node: (
            dataclasses.replace(
                node, base_key=jax.random.fold_in(node.base_key, _position(mesh_axes))
            )
            if isinstance(node, pz.RandomStream)
            else node
        ),
        tree,
        is_leaf=lambda node: isinstance(node, pz.RandomStream),
    )


def _mixing_problems(
    mixed: Sequence[tuple[str, int, int]],
    split_names: SplitNames,
    lengths: Mapping[Hashable, int],
) -> list[str]:
    problems = []
    for operation, whole, part in dict.fromkeys(mixed):
        split = [
            (name, mesh_axis)
            for mesh_axis, names in split_names.items()
            for name in names
            if lengths.get(name) == whole
        ]
        names = " or ".join(f"{name!r} (split over {axis!r})" for name, axis in split)
        fix = " and ".join(repr(name) for name, _ in split)
        problems.append(
            f"{operation} over {whole} elements"
            + (f" of logical axis {names}" if split else "")
            + f", of which each device holds {part}. Map {fix or 'that logical axis'} to None in "
            "activation_rules, or wrap only layers that compute its elements one by one."
        )
    return problems


def _note(split_names: SplitNames) -> str:
    split = "; ".join(
        f"{', '.join(map(repr, names))} over mesh axis {mesh_axis!r}"
        for mesh_axis, names in split_names.items()
    )
    return (
        f"Inside ShardMapped each device sees its part of the activations (split: {split or '-'})."
        " A logical axis that the layer contracts, or that a parameter has too, must be mapped to "
        "None in activation_rules."
    )
