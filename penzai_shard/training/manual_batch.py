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
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.layers.manual_region import (
    as_varying,
    check_manual_axes,
    device_position,
    manual_axes,
    mesh_axis_names,
    varying_axes,
)
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree, take_apart
from penzai_shard.layers.shard_map_regions.region_plan import Crossing, Tracking
from penzai_shard.meshes import auto_context
from penzai_shard.partition_specs import (
    canonical_spec,
    mesh_axes_by_dimension,
    part_count,
    restricted_spec,
)
from penzai_shard.rule_kinds import sized_mesh_axes_text
from penzai_shard.training.aux_reductions import AuxReductions
from penzai_shard.training.train_state import TrainState
from penzai_shard.training.update_layout import UpdateLayout
from penzai_shard.tree_paths import join_paths

_MAKE_STATE = (
    "Place the model on a mesh before the state is made: place(model, mesh, rules), with rules "
    "{} for data parallel training; or the state: jax.device_put(state, train_state_sharding("
    "state, mesh, rules))."
)


class WholeBatch:
    """What one evaluation of the loss is a part of, if it is of the whole batch."""

    def whole(self, trainable: Any) -> Any:
        """The parameters as the loss sees them."""
        return trainable

    def share(self, loss: Any) -> Any:
        """The loss's share of that of the whole batch, of which the gradient is taken."""
        return loss

    def agreed(self, old: Any, new: Any) -> Any:
        """What the loss carries on, the same on all devices."""
        del old
        return new


@dataclasses.dataclass(frozen=True)
class ManualAxes:
    """The mesh axes along which each device computes the loss of its own examples.

    Attributes:
        names: The mesh axes, the first of them major.
        batch_axis: The logical axis that inputs are split along.
        parts: How many microbatches a device's examples are split into.
        aux_reductions: How auxiliary outputs become one.
    """

    names: tuple[str, ...]
    batch_axis: Any
    parts: int
    aux_reductions: AuxReductions

    @classmethod
    def of(
        cls, given: Any, batch_axis: Any, parts: int, aux_reductions: AuxReductions
    ) -> "ManualAxes | None":
        """Reads what ``build_train_step_fn`` got as ``manual_axes``.

        Raises:
            RuleTypeError: It is something else than a mesh axis or several.

        >>> ManualAxes.of("data", "batch", 1, AuxReductions({})).names
        ('data',)
        """
        if given is None:
            return None
        names = mesh_axis_names("manual_axes", given)
        if not names or len(set(names)) < len(names):
            raise RuleTypeError(
                f"manual_axes must name one mesh axis or several different ones, not {given!r}. "
                "Write for instance manual_axes=('data',), or leave it out."
            )
        return cls(names, batch_axis, parts, aux_reductions)

    def batch(
        self,
        make: Callable[..., Any],
        state: TrainState,
        rng: jax.Array,
        inputs: Mapping[str, Any],
        layout: UpdateLayout,
        scale: Any,
    ) -> "ManualBatch":
        """The batch, to be computed per device.

        Args:
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
                f"manual_axes={self.names!r} needs a train state on a mesh, and this one is on "
                f"none that is known here. {_MAKE_STATE}"
            )
        check_manual_axes(self.names, layout.mesh)
        _refuse_unknown_layouts(layout)
        self._check_lengths(inputs, layout.mesh)
        return ManualBatch(self, layout.mesh, make, state, rng, inputs, layout, scale)

    def _check_lengths(self, inputs: Mapping[str, Any], mesh: Mesh) -> None:
        tree, arrays = take_apart(dict(inputs))
        devices = part_count(self.names, mesh.shape)
        over = sized_mesh_axes_text(self.names, mesh.shape)
        each = f", into {self.parts} microbatches on each device" if self.parts > 1 else ""
        sizes = {
            path: array.shape[names.index(self.batch_axis)]
            for path, names, array in zip(
                tree.array_paths(), tree.array_names(), arrays, strict=True
            )
            if names is not None and self.batch_axis in names
        }
        whole = devices * self.parts
        raise_all(
            ShardingError,
            "the inputs cannot be split over the devices:",
            [
                f"input {path}: logical axis {self.batch_axis!r} ({size}) does not divide over "
                f"{over}{each}. Pad the batch to {-(-size // whole) * whole}, or leave "
                f"{size % whole} examples out."
                for path, size in sizes.items()
                if size % whole
            ],
        )
        if not sizes:
            raise ShardingError(
                f"manual_axes={self.names!r}, but no input has the logical axis "
                f"{self.batch_axis!r}, so that every device would compute the same. Name it, for "
                f'instance pz.nx.wrap(x, {self.batch_axis!r}, "features"), or pass the name that '
                'it has: build_train_step_fn(..., batch_axis="...").',
                [
                    f"{path}: {_axes_text(names)}."
                    for path, names in zip(tree.array_paths(), tree.array_names(), strict=True)
                ],
            )

    def split(self, tree: BoundaryTree) -> list[PartitionSpec]:
        """The specs of the arrays of inputs and states: split along the batch, or whole."""
        return [
            canonical_spec(self.names if name == self.batch_axis else None for name in names or ())
            for names in tree.array_names()
        ]


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

    def value(self, trainable: Any) -> jax.Array:
        """The loss: the mean of those of the devices."""

        def compute(batch: Any, trainable: Any, device: "_Device") -> Any:
            return device.mean(batch.value(trainable))

        return self._per_device(compute, trainable, lambda crossings: PartitionSpec())

    def gradient(self, trainable: Any) -> tuple[Any, jax.Array, Any, Any]:
        """Gradient, loss, what is carried on, and auxiliary outputs along a new first dimension.

        Gradient and loss are means over devices and microbatches. Auxiliary outputs with the
        batch axis are put together along it, and the others along the first dimension.
        """
        leaving: list[_LeavingAux] = []
        carried_tree: list[BoundaryTree] = []

        def compute(batch: Any, trainable: Any, device: "_Device") -> Any:
            grads, loss, carried, auxes = batch.gradient(trainable)
            tree, carried_arrays = take_apart(carried)
            leaving.append(_LeavingAux.of(auxes, self.axes, device))
            carried_tree.append(tree)
            return (
                device.summed(take_apart(grads)[1]),
                device.mean(loss),
                carried_arrays,
                leaving[-1].leave(auxes, device),
            )

        def out_specs(crossings: Sequence["_Weight"]) -> Any:
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
        compute: Callable[[Any, Any, "_Device"], Any],
        trainable: Any,
        out_specs: Callable[[Sequence["_Weight"]], Any],
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
            device = _Device(axes, self.mesh, weights, crossings, tracking)

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
                own_weights = [as_varying(array, axes.names) for array in own_weights]
                return compute(batch, weights.put_together(own_weights), device)

            mapped = jax.shard_map(
                body,
                mesh=self.mesh,
                in_specs=(
                    [weight.entering.spec for weight in crossings],
                    axes.split(examples),
                    PartitionSpec(),
                ),
                out_specs=out_specs(crossings),
                axis_names=set(axes.names),
                check_vma=tracking is not Tracking.UNTRACKED,
            )
            with auto_context():
                return mapped(weight_arrays, example_arrays, constant_arrays)

        try:
            return run(Tracking.VARYING)
        except ShardingError:
            raise
        except Exception:
            # What JAX tracks stands in the way: it refuses, for one, a loop that starts with the
            # same on all devices and turns it into something that differs. If that was not the
            # reason, the same fails again without it, and Python shows both errors.
            return run(Tracking.UNTRACKED)

    def _weights(self, trainable: Any, arrays: Sequence[Any]) -> list["_Weight"]:
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
            found.append(_Weight.of(entering, mesh_axes_by_dimension(wanted, rank), names))
        return found


@dataclasses.dataclass(frozen=True)
class _Weight:
    """One array of a trainable parameter.

    Attributes:
        entering: How it enters the region.
        scattered: The mesh axes that each dimension of its gradient is scattered over, apart
            from those that the gather scatters it over.
        summed: The mesh axes that its gradient is added up over.
    """

    entering: Crossing
    scattered: tuple[tuple[str, ...], ...]
    summed: tuple[str, ...]

    @classmethod
    def of(
        cls, entering: Crossing, kept: Sequence[tuple[str, ...]], names: Sequence[str]
    ) -> "_Weight":
        """Decides what becomes of the gradient of an array.

        Args:
            entering: How the array enters.
            kept: The mesh axes of each dimension of the gradient as the optimizer takes it.
            names: The mesh axes of the region.
        """
        left = [name for name in names if all(name not in entry for entry in entering.mesh_axes)]
        scattered: list[tuple[str, ...]] = []
        for stored, entry in zip(entering.mesh_axes, kept, strict=True):
            fits = not stored and set(entry) <= set(left)
            scattered.append(entry if fits else ())
            left = [name for name in left if name not in scattered[-1]]
        return cls(entering, tuple(scattered), tuple(left))

    @property
    def gradient_spec(self) -> PartitionSpec:
        """The spec with which its gradient leaves."""
        pairs = zip(self.entering.mesh_axes, self.scattered, strict=True)
        return canonical_spec(stored or scattered for stored, scattered in pairs)


@dataclasses.dataclass(frozen=True)
class _Device(WholeBatch):
    """One device inside the region.

    Attributes:
        axes: The mesh axes of the region.
        mesh: The mesh.
        weights: The trainable parameters without their arrays.
        crossings: How these arrays enter.
        tracking: What JAX knows about values that differ between devices.
    """

    axes: ManualAxes
    mesh: Mesh
    weights: BoundaryTree
    crossings: Sequence[_Weight]
    tracking: Tracking

    @property
    def tracked(self) -> bool:
        """Whether JAX knows what differs between the devices."""
        return self.tracking is not Tracking.UNTRACKED

    def whole(self, trainable: Any) -> Any:
        """The parameters, gathered; the transpose scatters the sum of the gradients."""
        tree, arrays = take_apart(trainable)
        return tree.put_together(
            [
                weight.entering.gathered(array, self.axes.names, self.tracking)
                for weight, array in zip(self.crossings, arrays, strict=True)
            ]
        )

    def share(self, loss: Any) -> Any:
        """The loss over the number of devices, so that the gradients' sum is their mean."""
        return loss / part_count(self.axes.names, self.mesh.shape)

    def agreed(self, old: Any, new: Any) -> Any:
        """What the loss carries on.

        Raises:
            ShardingError: Something differs between the devices, or may do so.
        """
        names = self.axes.names
        tree, arrays = take_apart(new)
        before = take_apart(old)[1]
        over = sized_mesh_axes_text(names, self.mesh.shape)
        problems = []
        for path, spec, was, is_ in zip(
            _state_paths(new), self.axes.split(tree), before, arrays, strict=True
        ):
            differs = varying_axes(is_).intersection(names) if self.tracked else is_ is not was
            if differs and not spec:
                problems.append(
                    f"{path}: each device would have another after the step over {over}, as it "
                    "sees its own examples alone. Make it one in the loss function: "
                    f"jax.lax.pmean(value, {names!r}), or psum, pmax or pmin; or train without "
                    "manual_axes."
                )
        raise_all(ShardingError, "a state differs between the devices:", problems)
        return new

    def mean(self, value: jax.Array) -> jax.Array:
        """The mean over the devices."""
        return jax.lax.pmean(as_varying(value, self.axes.names), self.axes.names)

    def summed(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """The gradients added up over the devices, as they leave the region."""
        found = []
        for weight, gradient in zip(self.crossings, gradients, strict=True):
            for dimension, entry in enumerate(weight.scattered):
                if entry:
                    gradient = weight.entering.scattered(gradient, dimension, entry, self.tracking)
            if weight.summed:
                gradient = weight.entering.summed(gradient, weight.summed, self.tracking)
            found.append(gradient)
        return found


@dataclasses.dataclass(frozen=True)
class _LeavingAux:
    """How auxiliary outputs leave the region.

    Attributes:
        tree: One microbatch's outputs, without their arrays.
        joined: Of each array with the batch axis, which dimension that is, after the microbatches.
        once: Which arrays are the same on all devices, and not to be counted for each.
    """

    tree: BoundaryTree
    joined: Sequence[int | None]
    once: Sequence[bool]

    @classmethod
    def of(cls, auxes: Any, axes: ManualAxes, device: _Device) -> "_LeavingAux":
        """Decides it for the outputs of all microbatches."""
        tree, _ = take_apart(jax.tree.map(lambda x: x[0], auxes))
        joined = [
            1 + names.index(axes.batch_axis) if names and axes.batch_axis in names else None
            for names in tree.array_names()
        ]
        once = [
            device.tracked
            and not varying_axes(array).intersection(axes.names)
            and axes.aux_reductions.word(path) is None
            for path, array in zip(tree.array_paths(), jax.tree.leaves(auxes), strict=True)
        ]
        return cls(tree, joined, once)

    def leave(self, auxes: Any, device: _Device) -> tuple[list[Any], list[Any], list[Any]]:
        """The arrays to put together along the batch, along a first dimension, and those alike."""
        joined, stacked, once = [], [], []
        for array, dimension, alike in zip(
            jax.tree.leaves(auxes), self.joined, self.once, strict=True
        ):
            if dimension is not None:
                joined.append(as_varying(jnp.moveaxis(array, dimension, 0), device.axes.names))
            elif alike:
                once.append(array)
            else:
                stacked.append(as_varying(array, device.axes.names))
        return joined, stacked, once

    def put_together(self, left: tuple[list[Any], list[Any], list[Any]]) -> Any:
        """The outputs of all devices and microbatches along a new first dimension."""
        joined, stacked, once = map(iter, left)
        arrays = []
        for dimension, alike in zip(self.joined, self.once, strict=True):
            if dimension is not None:
                arrays.append(jnp.moveaxis(next(joined), 0, dimension))
            else:
                arrays.append(next(once if alike else stacked))
        one = self.tree.put_together(
            [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in arrays]
        )
        return jax.tree.unflatten(jax.tree.structure(one), arrays)


def _state_paths(carried: Any) -> list[str]:
    """The paths of the arrays of what a loss carries on."""
    return [
        join_paths(field, path)
        for field, tree in zip(("state_vars", "loss_fn_state"), carried, strict=True)
        for path in take_apart(tree)[0].array_paths()
    ]


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


def _axes_text(names: Sequence[Any] | None) -> str:
    return "an array without names" if names is None else f"its logical axes are {names}"
