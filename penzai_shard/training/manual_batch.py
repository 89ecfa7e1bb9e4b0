"""Loss and gradient of a batch, computed per device as guides to ``jax.shard_map`` write it.

Where the compiler splits the work it chooses what moves between the devices. Here it is written
down: each device computes the loss of its own examples, with the parameters gathered where they
are split, and the gradients are averaged over the devices, by one all-reduce or by reduce-scatters
into the layout that they are kept in. The optimizer runs outside, on whole arrays, so that every
optimizer of optax computes what it always does.

Source: Lippe, "UvA Deep Learning Tutorials", training models at scale; JAX's guide to
``jax.shard_map``; Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stages 2 and 3.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from penzai_shard.array_kinds import is_traced
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.layers.manual_region import (
    check_manual_axes,
    device_position,
    hides_what_differs,
    manual_axes,
)
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree, take_apart
from penzai_shard.layers.shard_map_regions.region_plan import Crossing, Tracking
from penzai_shard.meshes import auto_context
from penzai_shard.named_leaves import leaves_of
from penzai_shard.partition_specs import (
    mesh_axes_by_dimension,
    part_count,
    restricted_spec,
)
from penzai_shard.rule_kinds import sized_mesh_axes_text
from penzai_shard.training.device_part import DevicePart, WeightCrossing
from penzai_shard.training.leaving_aux import LeavingAux
from penzai_shard.training.manual_axes import ManualAxes
from penzai_shard.training.train_state import TrainState
from penzai_shard.training.update_layout import UpdateLayout

_MAKE_STATE = (
    "Place the model on a mesh before the state is made: place(model, mesh, rules), with rules "
    "{} for data parallel training; or the state: jax.device_put(state, train_state_sharding("
    "state, mesh, rules))."
)


@dataclasses.dataclass(frozen=True)
class ManualBatch:
    """The loss of one batch, computed per device, as a function of the trainable parameters.

    Attributes:
        axes: The mesh axes along which devices have examples of their own.
        mesh: The mesh.
        make: Makes one device's batch.
        state: The state that the step started from.
        rng: The random key of the step.
        inputs: The inputs.
        layout: How parameters and gradients are laid out.
        scale: What the loss is multiplied by before it is differentiated, or None.
    """

    axes: ManualAxes
    mesh: Mesh
    make: Callable[..., Any]
    state: TrainState
    rng: jax.Array
    inputs: Mapping[str, Any]
    layout: UpdateLayout
    scale: Any

    @classmethod
    def of(
        cls,
        axes: ManualAxes,
        make: Callable[..., Any],
        state: TrainState,
        rng: jax.Array,
        inputs: Mapping[str, Any],
        layout: UpdateLayout,
        scale: Any,
    ) -> "ManualBatch":
        """The batch, to be computed per device.

        Args:
            axes: The mesh axes along which devices have examples of their own.
            make: Makes a batch from a state, a random key, inputs, a layout, a scale, and the
                device.
            state: The state that the step starts from.
            rng: The random key of the step.
            inputs: The inputs.
            layout: How parameters and gradients are laid out.
            scale: What the loss is multiplied by before it is differentiated, or None.

        Raises:
            MeshError: The mesh does not have the mesh axes.
            ShardingError: The state is not on a mesh, or the inputs cannot be split.
        """
        if around := manual_axes():
            raise ShardingError(
                "a train step with manual_axes was called inside jax.shard_map, which has taken "
                f"over {', '.join(map(repr, sorted(around)))} already. Call it outside, or build "
                "it without manual_axes."
            )
        if layout.mesh is None:
            raise ShardingError(
                f"manual_axes={axes.names!r} needs a train state on a mesh, and this one is on "
                f"none that is known here. {_MAKE_STATE}"
            )
        check_manual_axes(axes.names, layout.mesh)
        _refuse_unknown_layouts(layout)
        _refuse_uneven_parts(state, layout)
        axes.check_lengths(inputs, layout.mesh)
        return cls(axes, layout.mesh, make, state, rng, inputs, layout, scale)

    def value(self, trainable: Any) -> jax.Array:
        """The loss: the mean of those of the devices."""

        def compute(batch: Any, trainable: Any, device: "DevicePart") -> Any:
            return device.mean(batch.value(trainable))

        return self._per_device(compute, trainable, lambda crossings: PartitionSpec())

    def gradient(self, trainable: Any) -> tuple[Any, jax.Array, Any, Any]:
        """Gradient, loss, what is carried on, and auxiliary outputs along a new first dimension.

        Gradient and loss are means over devices and microbatches. Auxiliary outputs with the
        batch axis are put together along it, and the others along the first dimension.
        """
        leaving: list[LeavingAux] = []
        carried_tree: list[BoundaryTree] = []

        def compute(batch: Any, trainable: Any, device: "DevicePart") -> Any:
            grads, loss, carried, auxes = batch.gradient(trainable)
            tree, carried_arrays = take_apart(carried)
            leaving.append(LeavingAux.of(auxes, self.axes, device))
            carried_tree.append(tree)
            return (
                device.summed(take_apart(grads)[1]),
                device.mean(loss),
                carried_arrays,
                leaving[-1].leave(auxes, device),
            )

        def out_specs(crossings: Sequence["WeightCrossing"]) -> Any:
            split = PartitionSpec(self.axes.names)
            tree, _ = take_apart((self.state.state_vars, self.state.loss_fn_state))
            return (
                [weight.gradient_spec for weight in crossings],
                PartitionSpec(),
                self.axes.split(tree),
                (split, split, PartitionSpec()),
            )

        grads, loss, carried, auxes = self._per_device(compute, trainable, out_specs)
        return (
            self.layout.for_update(take_apart(trainable)[0].put_together(grads)),
            loss,
            carried_tree[-1].put_together(carried),
            leaving[-1].put_together(auxes),
        )

    def _per_device(
        self,
        compute: Callable[[Any, Any, "DevicePart"], Any],
        trainable: Any,
        out_specs: Callable[[Sequence["WeightCrossing"]], Any],
    ) -> Any:
        """Computes something of one device's batch, on every device."""
        state, axes = self.state, self.axes
        frozen = {name: value for name, value in state.params.items() if name not in trainable}
        weights, weight_arrays = take_apart(trainable)
        split = {
            "inputs": dict(self.inputs),
            "state_vars": state.state_vars,
            "loss_fn_state": state.loss_fn_state,
        }
        examples, example_arrays = take_apart(split)
        constants, constant_arrays = take_apart((frozen, state.unbound_model, self.rng, self.scale))
        crossings = self._weights(trainable, weight_arrays)

        def run(tracking: Tracking) -> Any:
            device = DevicePart(axes, self.mesh, weights, crossings, tracking)

            def body(own_weights: Any, own_examples: Any, whole: Any) -> Any:
                frozen, model, rng, scale = constants.put_together(whole)
                own = examples.put_together(own_examples)
                local = dataclasses.replace(
                    state,
                    params=frozen,
                    unbound_model=model,
                    state_vars=own["state_vars"],
                    loss_fn_state=own["loss_fn_state"],
                )
                rng = jax.random.fold_in(rng, device_position(axes.names))
                batch = self.make(local, rng, own["inputs"], UpdateLayout.unknown(), scale, device)
                # As differing between devices, so that each has a gradient of its own to add up.
                own_weights = [
                    weight.entering.varying(array, axes.names, tracking)
                    for weight, array in zip(crossings, own_weights, strict=True)
                ]
                return compute(batch, weights.put_together(own_weights), device)

            specs = [weight.entering.spec for weight in crossings], axes.split(examples)
            mapped = self._mapped(body, specs, out_specs(crossings), tracking)
            arguments = weight_arrays, example_arrays, constant_arrays
            with auto_context():
                # What is left to the compiler has to be compiled, in a step that is not, too.
                if len(axes.names) == len(self.mesh.axis_names) and not any(
                    map(is_traced, jax.tree.leaves(arguments))
                ):
                    return mapped(*arguments)
                mapped = jax.jit(mapped)
                if tracking is Tracking.VARYING and hides_what_differs(
                    mapped.trace(*arguments).jaxpr, axes.names
                ):
                    return run(Tracking.UNTRACKED)
                return mapped(*arguments)

        try:
            return run(Tracking.VARYING)
        except ShardingError:
            raise
        except Exception:
            # What JAX tracks stands in the way: it refuses, for one, a loop that starts with the
            # same on all devices and turns it into something that differs. If that was not the
            # reason, the same fails again without it, and Python shows both errors.
            return run(Tracking.UNTRACKED)

    def _mapped(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, tracking: Tracking
    ) -> Callable[..., Any]:
        """What runs per device; its last argument is whole on every one."""
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(*in_specs, PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(self.axes.names),
            check_vma=tracking is not Tracking.UNTRACKED,
        )

    def _weights(self, trainable: Any, arrays: Sequence[Any]) -> list["WeightCrossing"]:
        names, layout = self.axes.names, self.layout
        others = [name for name in self.mesh.axis_names if name not in names]
        # A dictionary is flattened in the order of its keys.
        keys = sorted(trainable)
        stored = itertools.chain.from_iterable(layout.loss[key] for key in keys)
        kept = itertools.chain.from_iterable(layout.update[key] for key in keys)
        found = []
        for array, sharding, update in zip(arrays, stored, kept, strict=True):
            rank = array.ndim
            spec = PartitionSpec() if sharding is None else sharding.spec
            entering = Crossing(
                "",
                (None,) * rank,
                array.shape,
                mesh_axes_by_dimension(restricted_spec(spec, names), rank),
                whole_inside=frozenset(range(rank)),
                automatic=mesh_axes_by_dimension(restricted_spec(spec, others), rank),
            )
            wanted = PartitionSpec() if update is None else restricted_spec(update.spec, names)
            found.append(WeightCrossing.of(entering, mesh_axes_by_dimension(wanted, rank), names))
        return found


def _refuse_unknown_layouts(layout: UpdateLayout) -> None:
    assert layout.mesh is not None
    if layout.mesh.size == 1:
        return
    raise_all(
        ShardingError,
        "manual_axes needs the layout of every trainable parameter, which is not known inside of "
        "another compiled function:",
        [
            f"{name}: declare it: build_train_step_fn(..., train_state_shardings="
            "train_state_sharding(state, mesh, rules))."
            for name, shardings in layout.loss.items()
            if None in shardings
        ],
    )


def _refuse_uneven_parts(state: TrainState, layout: UpdateLayout) -> None:
    """Refuses parameters that are stored padded, or of which the optimizer's state is."""
    assert layout.mesh is not None
    sizes = layout.mesh.shape
    problems: list[str] = []
    for name, stored in layout.loss.items():
        leaves = leaves_of(state.params[name], name)
        for leaf, *shardings in zip(leaves, stored, layout.update[name], strict=True):
            splits = [
                mesh_axes_by_dimension(sharding.spec, len(leaf.shape))
                for sharding in dict.fromkeys(shardings)
                if sharding is not None
            ]
            problems += [
                f"{name}: logical axis {axis!r} ({size}) over "
                f"{sized_mesh_axes_text(mesh_axes, sizes)}."
                for split in splits
                for axis, size, mesh_axes in zip(leaf.names or (), leaf.shape, split, strict=False)
                if size % part_count(mesh_axes, sizes)
            ]
    raise_all(
        ShardingError,
        "with manual_axes, jax.shard_map gives each device an equal part of every array, and what "
        "is stored padded has no equal parts. Leave manual_axes out, and the compiler splits the "
        "work; or leave these logical axes whole:",
        list(dict.fromkeys(problems)),
    )
