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
from penzai_shard.errors import MeshError, Problem
from penzai_shard.layers import manual
from penzai_shard.layers.remat import GATHERED
from penzai_shard.training.microbatches import LossCall, find_examples, reduce_outputs
from penzai_shard.training.train_state import TrainState

_WHOLE = PartitionSpec()
_MeshAxes = tuple[tuple[str, ...], ...]


class _Parameter(NamedTuple):
    """How a parameter enters a device.

    Attributes:
        stored: The manual mesh axes over which each dimension is split.
        gathered: Those of them over which the step gathers it. The loss function does the others.
        free: How the compiler splits it over other mesh axes.
    """

    stored: _MeshAxes
    gathered: _MeshAxes
    free: PartitionSpec

    def gather(self, part: Any, device_count: int) -> Any:
        """The parameter as the loss function gets it."""

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
        return part + (device_count - 1) * (part - lax.stop_gradient(part))

    def average(self, gradient: Any, manual_axes: Sequence[str], device_count: int) -> Any:
        """The mean of a gradient over the devices; of what was gathered JAX made the sum."""
        axes = tuple(axis for axis in manual_axes if all(axis not in own for own in self.stored))
        return self._move(lambda x: lax.psum(x, axes), gradient) / device_count

    def _move(self, function: Callable[[Any], Any], array: Any) -> Any:
        """Runs a function that moves data, on what each device has of an array.

        The compiler does not know how to gather or scatter what it has split itself: it gathers it
        over its own mesh axes first (jax 0.10.2).
        """
        others = {*jax.sharding.get_abstract_mesh().axis_names} - manual.manual_axes()
        if not others:
            return function(array)
        options: Any = {"in_specs": self.free, "out_specs": self.free, "axis_names": others}
        return jax.shard_map(function, **options)(array)


def run_per_device(
    call: LossCall,
    state: TrainState,
    shardings: Mapping[str, NamedSharding],
    inputs: Any,
    run: Callable[..., Any],
    with_grads: bool,
) -> tuple[Any, Any, Any]:
    """Runs a loss, and its gradient, on each device's examples.

    Args:
        call: The loss function. Examples are split over its manual mesh axes, the first major.
        state: The state.
        shardings: By path where its parameters lie.
        inputs: The inputs of the whole batch.
        run: Takes a device's part of state and inputs, and what gathers parameters. Gives loss,
            weight and gradients; what is carried on; and the outputs.
        with_grads: Whether there are gradients.

    Returns:
        The same, with means over the devices; and outputs joined.

    Raises:
        MeshError: The state is on no mesh that has the axes.
        ShardingError: The examples do not divide.
    """
    manual_axes = call.manual_axes
    meshes = [sharding.mesh for sharding in shardings.values()]
    if missing := [axis for axis in manual_axes if not meshes or axis not in meshes[0].shape]:
        fix = "Lay the state out: jax.device_put(state, train_state_sharding(state, mesh, rules))."
        problem = Problem("params", f"they lie on no mesh with the mesh axes {missing}", fix)
        raise MeshError("a step per device cannot run:", [problem])
    mesh, sizes = meshes[0], meshes[0].shape
    device_count = specs.part_count(manual_axes, sizes)
    parameters = _read_parameters(manual_axes, state, shardings)
    leaves, structure = flatten(inputs)
    dims = find_examples(call, leaves, device_count * call.accumulate_steps)

    # Where JAX keeps account of what differs between devices, it refuses loops that begin with
    # zeros and end with what differs. It has to where something is carried on, which must not
    # differ, and where the compiler splits other mesh axes: XLA for CPUs ends the process else.
    carry = jax.tree.leaves((state.state_arrays, state.loss_fn_state))
    is_tracked = bool(carry) or device_count < mesh.size
    aux_form: Any = None

    def gather(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {path: parameters[path].gather(part, device_count) for path, part in parts.items()}

    def vary(tree: Any) -> Any:
        return jax.tree.map(lambda x: manual.vary_over(x, manual_axes), tree)

    def run_one(state: TrainState, values: Sequence[Any]) -> Any:
        nonlocal aux_form
        state = dataclasses.replace(state, trained_arrays=vary(state.trained_arrays))
        (*sums, gradients), carry, aux = run(state, structure.fill_alike(values), gather)
        for path in gradients:
            gradients[path] = parameters[path].average(gradients[path], manual_axes, device_count)
        sums = jax.tree.map(lambda x: lax.pmean(x, manual_axes), vary(sums))
        aux_form = flatten(aux)
        outputs = vary([jnp.asarray(leaf.value) for leaf in aux_form[0]])
        return (*sums, gradients), carry, [output[None] for output in outputs]

    stored = {path: specs.canonical(own.stored) for path, own in parameters.items()}
    trained = {path: stored[path] for path in state.trained_arrays}
    fixed = {path: stored[path] for path in state.fixed_arrays}
    examples = {i: PartitionSpec(*(None,) * dim, manual_axes) for i, dim in dims.items()}
    sums_specs = _WHOLE, _WHOLE, trained if with_grads else _WHOLE
    state_specs: Any = _WHOLE, trained, *(_WHOLE,) * 4, fixed, state.template
    mapped = jax.shard_map(
        run_one,
        mesh=mesh,
        in_specs=(TrainState(*state_specs), [examples.get(i, _WHOLE) for i in range(len(leaves))]),
        out_specs=(sums_specs, _WHOLE, PartitionSpec(manual_axes)),
        axis_names={*(manual_axes if is_tracked else mesh.axis_names)},
        check_vma=is_tracked,
    )
    # In a step that is not compiled, what is left to the compiler is compiled all the same.
    state = dataclasses.replace(state, opt_arrays=None)
    sums, carry, outputs = jax.jit(mapped)(state, [leaf.value for leaf in leaves])
    return sums, carry, reduce_outputs(call, aux_form, outputs, place=0)


def _read_parameters(
    manual_axes: Sequence[str], state: TrainState, shardings: Mapping[str, NamedSharding]
) -> dict[str, _Parameter]:
    """How trained parameters enter a device, and frozen ones and constants, which are whole."""
    arrays = state.trained_arrays | state.fixed_arrays
    seen = leaves_of(state.template.bind_for_loss(arrays | state.state_arrays))
    names = dict(zip(state.template.structure.paths, [leaf.names for leaf in seen], strict=True))
    parameters = {}
    for path, array in arrays.items():
        rank = len(array.shape)
        split = specs.mesh_axes(shardings[path].spec if path in shardings else _WHOLE, rank)
        gathered = [tuple(axis for axis in axes if axis in manual_axes) for axes in split]
        # Of a dimension with axes of both kinds, what is gathered would not be in order.
        free = [() if own else axes for own, axes in zip(gathered, split, strict=True)]
        stored = [*gathered]
        for dim, name in enumerate(names[path] or ()):
            # The name of a mesh axis says that a device has its part.
            if name in manual_axes:
                stored[dim], gathered[dim] = (name,), ()
        parameters[path] = _Parameter(tuple(stored), tuple(gathered), specs.canonical(free))
    return parameters
