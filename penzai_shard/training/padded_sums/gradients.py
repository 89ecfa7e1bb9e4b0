"""The gradient of a loss with respect to parameters that are split unevenly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from penzai_shard.library_apis.jax_api import runs_at_once
from penzai_shard.padded_arrays import splits_unevenly
from penzai_shard.partition_specs import mesh_axes_by_dimension, padded_length, part_count
from penzai_shard.training.padded_sums.operation_shapes import Shape
from penzai_shard.training.padded_sums.running import PaddedValue, run_padded
from penzai_shard.training.padded_sums.whole_operands import with_whole_operands


def summed_in_equal_parts(
    gradient_of: Callable[..., tuple[Any, Any]],
    layouts: Mapping[str, Sequence[NamedSharding | None]],
    scope: str,
    lengths: frozenset[int] = frozenset(),
    mesh: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """A function's gradient, each array of it summed up over devices in equal parts.

    Values are the same. Where every length divides, so is the program; where one does not, its
    gradient is padded where it is computed, laid out, and cut.

    Args:
        gradient_of: ``gradient_of(parameters, *others) -> (gradients, more)``, parameters and
            gradients by name.
        layouts: How the gradient of each parameter's arrays will be laid out, as far as known.
        scope: What the operations are called that do so.
        lengths: The lengths that are split unevenly in the loss; see ``uneven_lengths``.
        mesh: The mesh that they are split over.
    """

    def summed(parameters: Mapping[str, Any], *others: Any) -> tuple[Any, Any]:
        leaves, form = jax.tree.flatten(parameters)
        wanted = _in_equal_parts(parameters, layouts)
        if not (any(wanted) or lengths) or any(map(runs_at_once, leaves)):
            return gradient_of(parameters, *others)

        def of_leaves(*leaves: Any) -> tuple[Any, Any]:
            return gradient_of(jax.tree.unflatten(form, leaves), *others)

        program, structs = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        program = with_whole_operands(program, lengths, mesh)
        results = jax.tree.structure(structs)
        shapes = [one and one[0] for one in wanted]
        shapes += [None] * (len(program.jaxpr.outvars) - len(wanted))
        values = run_padded(program, list(map(PaddedValue.of, leaves)), shapes)
        for i, one in enumerate(wanted):
            if one is not None:
                with jax.named_scope(scope):
                    padded = jax.lax.with_sharding_constraint(values[i].at(one[0]), one[1])
                values[i] = PaddedValue(padded, values[i].shape)
        # Constants of the program are no arrays yet.
        arrays = [jax.numpy.asarray(value.whole()) for value in values]
        gradients, more = jax.tree.unflatten(results, arrays)
        return gradients, more

    return summed


def _in_equal_parts(
    parameters: Mapping[str, Any], layouts: Mapping[str, Sequence[NamedSharding | None]]
) -> list[tuple[Shape, NamedSharding] | None]:
    """For each array of some parameters, in order, the lengths that divide, if it is uneven."""
    found: list[tuple[Shape, NamedSharding] | None] = []
    for name in sorted(parameters):
        leaves = jax.tree.leaves(parameters[name])
        for leaf, layout in zip(leaves, layouts.get(name) or [None] * len(leaves), strict=True):
            if layout is None or not splits_unevenly(layout, leaf.shape):
                found.append(None)
                continue
            axes = mesh_axes_by_dimension(layout.spec, leaf.ndim)
            lengths = (
                padded_length(length, part_count(split, layout.mesh.shape))
                for length, split in zip(leaf.shape, axes, strict=True)
            )
            found.append((tuple(lengths), layout))
    return found
