"""Runs the loss of a step per device, as code under ``jax.shard_map`` is written.

Where the compiler splits a step it chooses what moves between devices. Here that is written down:
each device computes the loss of its own examples, parameters are gathered where they are split, and
gradients are averaged by one sum, or scattered while they are summed. The optimizer runs outside,
on whole arrays, so that those that look at more than one element compute what they always do.

Sources: Lippe 2024, "UvA Deep Learning Tutorials", training models at scale; Rajbhandari et al.
2020, "ZeRO" (arXiv:1910.02054), stages 2 and 3.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard import specs
from penzai_shard.arrays.structure import flatten, leaves_of
from penzai_shard.errors import MeshError, Problem, Problems, ShardingError
from penzai_shard.layers.manual import manual_axes as manual_axes_in_force
from penzai_shard.layers.manual import vary_over, varying_axes
from penzai_shard.layers.remat import GATHERED
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.training.train_state import TrainState

_MeshAxes = tuple[tuple[str, ...], ...]


class _Parameter(NamedTuple):
    """How a parameter enters a device, and its gradient leaves it.

    Attributes:
        stored: The manual mesh axes over which each dimension is split.
        gathered: Those of them over which the step gathers it. The loss function does the others.
        gradient: Those over which each dimension of its gradient is split.
        free: How the compiler splits it over other mesh axes.
    """

    stored: _MeshAxes
    gathered: _MeshAxes
    gradient: _MeshAxes
    free: PartitionSpec

    def gather(self, part: Any, count: int) -> Any:
        """The parameter as the loss function gets it on one of some devices."""

        def gather(part: Any) -> Any:
            for dim, axes in enumerate(self.gathered):
                if axes:
                    part = lax.all_gather(part, axes, axis=dim, tiled=True)
            return part

        part = self._move(gather, part)
        if self.gathered == self.stored:
            return checkpoint_name(part, GATHERED)
        # The gather of the loss function averages the gradient, and so does the step. This adds
        # zero, and multiplies the gradient by the number of devices.
        return part + (count - 1) * (part - lax.stop_gradient(part))

    def average(self, gradient: Any, manual_axes: Sequence[str], count: int) -> Any:
        """The mean of a gradient over the devices; of one that was gathered JAX made the sum."""

        def add(gradient: Any) -> Any:
            left = [axis for axis in manual_axes if all(axis not in axes for axes in self.stored)]
            for dim, (axes, stored) in enumerate(zip(self.gradient, self.stored, strict=True)):
                if axes != stored:
                    gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
                    left = [axis for axis in left if axis not in axes]
            return lax.psum(gradient, tuple(left)) if left else gradient

        return self._move(add, gradient) / count

    def _move(self, function: Callable[[Any], Any], array: Any) -> Any:
        """Runs a function that moves data, on what each device has of an array.

        The compiler does not know how to gather or scatter what it has split itself: it gathers it
        over its own mesh axes first (jax 0.10.2).
        """
        others = {*jax.sharding.get_abstract_mesh().axis_names} - manual_axes_in_force()
        if not others:
            return function(array)
        options: Any = {"in_specs": self.free, "out_specs": self.free, "axis_names": others}
        return jax.shard_map(function, **options)(array)


def run_per_device(
    manual_axes: tuple[str, ...],
    state: TrainState,
    shardings: Sequence[Mapping[str, NamedSharding]],
    inputs: Any,
    find_examples: Callable[[Any, int], Mapping[int, int]],
    run: Callable[..., Any],
) -> tuple[Any, Any, Any]:
    """Runs the loss and its gradient on each device's examples.

    Args:
        manual_axes: The mesh axes over which examples are split, the first major.
        state: The state.
        shardings: By path where its parameters lie, and where their gradients go, if any do.
        inputs: The inputs of the whole batch.
        find_examples: Takes leaves of inputs and the number of parts; gives the dimension of each
            that has its examples, by its number.
        run: Takes a device's part of state and inputs, what gathers parameters, and what makes a
            value vary between devices. Gives loss, weight and gradients; what is carried on; and
            the outputs.

    Returns:
        The same, with means over the devices; and in place of the outputs their leaves and
        structure, and their values on all devices along a new first dimension.

    Raises:
        MeshError: The mesh has no such axis.
        ShardingError: The state is on no mesh, or the examples do not divide.
    """
    mesh = _find_mesh(manual_axes, shardings[0])
    count = specs.part_count(manual_axes, mesh.shape)
    parameters = _read_parameters(manual_axes, state, *shardings)
    leaves, structure = flatten(inputs)
    dims = find_examples(leaves, count)

    # Where JAX keeps account of what differs between devices, it refuses loops that begin with
    # zeros and end with what differs. It has to where nothing that is carried on may differ, and
    # where the compiler splits other mesh axes: XLA for CPUs ends the process otherwise.
    others = [axis for axis in mesh.axis_names if axis not in manual_axes]
    carry = jax.tree.leaves((state.state_arrays, state.loss_fn_state))
    is_tracked = bool(carry) or specs.part_count(others, mesh.shape) > 1
    aux_form: Any = None

    def gather(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {path: parameters[path].gather(part, count) for path, part in parts.items()}

    def vary(tree: Any) -> Any:
        return jax.tree.map(lambda x: vary_over(x, manual_axes), tree) if is_tracked else tree

    def run_one(state: TrainState, values: Sequence[Any]) -> Any:
        nonlocal aux_form
        state = dataclasses.replace(state, trained_arrays=vary(state.trained_arrays))
        (*sums, gradients), carry, aux = run(state, structure.fill_alike(values), gather, vary)
        gradients = {
            path: parameters[path].average(gradient, manual_axes, count)
            for path, gradient in gradients.items()
        }
        sums = jax.tree.map(lambda x: lax.pmean(x, manual_axes), vary(sums))
        aux_form = flatten(aux)
        outputs = vary([jnp.asarray(leaf.value) for leaf in aux_form[0]])
        return (*sums, gradients), carry, [output[None] for output in outputs]

    whole, split = PartitionSpec(), PartitionSpec(manual_axes)
    stored = {path: specs.canonical(own.stored) for path, own in parameters.items()}
    left = {path: specs.canonical(own.gradient) for path, own in parameters.items()}
    state_specs: Any = whole, stored, whole, whole, whole, whole, whole, state.template
    mapped = jax.shard_map(
        run_one,
        mesh=mesh,
        in_specs=(
            TrainState(*state_specs),
            [
                PartitionSpec(*(None,) * dims[i], manual_axes) if i in dims else whole
                for i in range(len(leaves))
            ],
        ),
        out_specs=((whole, whole, left if shardings[1] else whole), whole, split),
        axis_names=set(manual_axes if is_tracked else mesh.axis_names),
        check_vma=is_tracked,
    )
    # In a step that is not compiled, what is left to the compiler is compiled all the same.
    state = dataclasses.replace(state, opt_arrays=None)
    sums, carry, outputs = jax.jit(mapped)(state, [leaf.value for leaf in leaves])
    return sums, carry, (aux_form, outputs)


def refuse_differences(carry: Any) -> None:
    """Refuses what is carried on and differs between devices, as far as JAX keeps account of it.

    Raises:
        ShardingError: Something does; all that does is in it.
    """
    problems = Problems("what a loss function carries on must be the same on all devices:")
    for leaf in leaves_of(carry):
        if axes := tuple(sorted(varying_axes(leaf.value))):
            what = f"it differs along {axes}, as each device sees examples of its own"
            problems.add(leaf.path, what, f"Average it: jax.lax.pmean(value, {axes}).")
    problems.raise_if_any(ShardingError)


def _find_mesh(manual_axes: Sequence[str], shardings: Mapping[str, NamedSharding]) -> AnyMesh:
    if not shardings:
        fix = "Lay it out: jax.device_put(state, train_state_sharding(state, mesh, rules))."
        problem = Problem("params", f"they are on no mesh with the axes {manual_axes}", fix)
        raise ShardingError("a step with manual_axes needs a state on a mesh:", [problem])
    mesh: AnyMesh = next(iter(shardings.values())).mesh
    problems = Problems(f"manual_axes name no axis of the mesh ({mesh_text(mesh)}):")
    for axis in manual_axes:
        if axis not in mesh.shape:
            problems.add(axis, "there is no such mesh axis", f"Write one of {mesh.axis_names}.")
    problems.raise_if_any(MeshError)
    return mesh


def _read_parameters(
    manual_axes: Sequence[str],
    state: TrainState,
    shardings: Mapping[str, NamedSharding],
    gradients: Mapping[str, NamedSharding],
) -> dict[str, _Parameter]:
    def find_axes(sharding: NamedSharding, rank: int, is_manual: bool = True) -> _MeshAxes:
        own = specs.mesh_axes(sharding.spec, rank)
        return tuple(tuple(x for x in axes if (x in manual_axes) == is_manual) for axes in own)

    # A dimension that is called by a mesh axis says that it is a device's part.
    arrays = state.trained_arrays | state.fixed_arrays | state.state_arrays
    seen = leaves_of(state.template.bind_for_loss(arrays))
    names = dict(zip(state.template.structure.paths, [leaf.names for leaf in seen], strict=True))
    parameters = {}
    for path, array in state.trained_arrays.items():
        rank = len(array.shape)
        stored = find_axes(shardings[path], rank)
        pairs = zip(stored, names[path] or (None,) * rank, strict=True)
        gathered = tuple(() if name in manual_axes else axes for axes, name in pairs)
        gradient = find_axes(gradients.get(path, shardings[path]), rank)
        if any(own and own != axes for own, axes in zip(stored, gradient, strict=True)):
            gradient = stored
        # Of a dimension with both kinds, what is gathered would not be in order.
        free = zip(find_axes(shardings[path], rank, False), stored, gradient, strict=True)
        spec = specs.canonical([() if any(others) else axes for axes, *others in free])
        parameters[path] = _Parameter(stored, gathered, gradient, spec)
    return parameters
