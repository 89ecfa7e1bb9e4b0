"""A program with the layout of every value, and the ways that mesh axes went through it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax

from penzai_shard.library_apis.shardy_api import propagated
from penzai_shard.library_apis.shardy_records import ShardyValue
from penzai_shard.sharding_propagation.causes import Cause, causes
from penzai_shard.sharding_propagation.factors import FactorAxis, factor_axes, rule_of
from penzai_shard.sharding_propagation.flattening import flattened
from penzai_shard.sharding_propagation.losses import (
    Loss,
    all_losses,
    losses_behind,
    losses_by_place,
    lost_on_dimensions,
)
from penzai_shard.sharding_propagation.mesh_axis_parts import overlap
from penzai_shard.sharding_propagation.operations import Edge, Hop, Operation


@dataclasses.dataclass(frozen=True)
class PropagatedProgram:
    """A program with the layout of every value.

    Attributes:
        values: What is known of each value.
        operations: The operations, in order; those of a call or a loop stand where it stands.
        arguments: The values that go in, by the name that JAX gives them.
        laid_out: Those of them that had a layout before propagation, which nothing changes.
        results: The values that come out, as they come out: the last operations return them.
        mesh: The mesh axes with their sizes.
    """

    values: tuple[ShardyValue, ...]
    operations: tuple[Operation, ...]
    arguments: Mapping[str, int]
    laid_out: frozenset[int]
    results: tuple[int, ...]
    mesh: Mapping[str, int]

    @classmethod
    def of(cls, lowered: jax.stages.Lowered) -> "PropagatedProgram":
        """Propagates a lowered program, without any device.

        Raises:
            PropagationError: This jaxlib does not offer it, or cannot do it for the program.

        >>> program = PropagatedProgram.of(jax.jit(jax.numpy.sin).lower(1.0))
        >>> [operation.kind for operation in program.operations]
        ['stablehlo.sine', 'flow']
        """
        read = propagated(lowered)
        flat = flattened(read)
        return cls(
            flat.values, flat.operations, flat.arguments, flat.laid_out, flat.results, read.mesh
        )

    @functools.cached_property
    def makers(self) -> Mapping[int, Operation]:
        """The operation that makes each value; arguments have none."""
        return {value: each for each in self.operations for value in each.results}

    @functools.cached_property
    def users(self) -> Mapping[int, tuple[Operation, ...]]:
        """The operations that take each value."""
        users: dict[int, dict[int, Operation]] = {}
        for each in self.operations:
            for value in each.operands:
                users.setdefault(value, {})[each.number] = each
        return {value: tuple(found.values()) for value, found in users.items()}

    @property
    def returned(self) -> tuple[ShardyValue, ...]:
        """What is known of the results as they come out."""
        return tuple(self.values[result] for result in self.results)

    def way(self, value: int, mesh_axis: str) -> tuple[Hop, ...]:
        """How a mesh axis came to a value: from the value back to where it comes from.

        Args:
            value: A value that is laid out over the mesh axis.
            mesh_axis: As its layout has it; of a mesh axis whose parts came apart, also the whole.

        Returns:
            The hops, the last one first; empty if the mesh axis is the value's own.
        """
        hops: list[Hop] = []
        seen = {value}
        while found := self.arrival(value, mesh_axis):
            hops.append(found)
            value = found.source
            if value in seen:
                break
            seen.add(value)
        return tuple(hops)

    def arrival(self, value: int, mesh_axis: str) -> Hop | None:
        """The hop by which a mesh axis came to a value; None if it is the value's own."""
        found = None
        for operation, edge in self._arrivals.get(value, ()):
            if (found is None or edge.step < found.step) and overlap(edge.mesh_axis, mesh_axis):
                found = Hop(operation, edge.source, value, edge.step)
        return found

    def causes(self, value: int, mesh_axis: str) -> tuple[Cause, ...]:
        """Where a mesh axis of a value's layout comes from.

        Args:
            value: A value that is laid out over the mesh axis.
            mesh_axis: As its layout has it.

        Returns:
            What it came from; behind it what proposed the same at once, on the way, and so would
            be the cause if the first were not there.

        >>> from penzai_shard.meshes import make_mesh
        >>> mesh = make_mesh({"data": 2}, abstract=True)
        >>> layout = jax.NamedSharding(mesh, jax.P("data"))
        >>> x = jax.ShapeDtypeStruct((4,), jax.numpy.float32, sharding=layout)
        >>> lowered = jax.jit(jax.numpy.sin).trace(x).lower(lowering_platforms=("cpu",))
        >>> program = PropagatedProgram.of(lowered)
        >>> [(cause.kind, cause.name) for cause in program.causes(program.results[0], "data")]
        [('argument', 'x')]
        """
        return causes(self, value, mesh_axis)

    def cause(self, value: int, mesh_axis: str) -> Cause:
        """What a mesh axis of a value's layout came from: the first of ``causes``."""
        return self.causes(value, mesh_axis)[0]

    def losses(self, value: int | None = None) -> tuple[Loss, ...]:
        """The operations at which layouts got lost: each has a mesh axis, and its result has not.

        Args:
            value: Only what its dimensions would have had, had it not been lost on the way; by
                default all of the program, in order.

        Returns:
            The losses, and the reductions, which are none: behind them, devices sum up what each
            has.
        """
        return self._losses if value is None else losses_behind(self, value)

    @functools.cached_property
    def argument_names(self) -> Mapping[int, str]:
        """The name of each value that goes in."""
        return {value: name for name, value in self.arguments.items()}

    def pinning(self, value: int) -> Operation | None:
        """What gives a value a layout of its own: a constraint, or where a ``shard_map`` begins.

        That is what makes the value, or what takes it: then Shardy lays out the value at once.
        None of an argument that had its layout before.
        """
        maker = self.makers.get(value)
        if maker is not None and (maker.constraint or maker.boundary or value in self.results):
            return maker
        known = self.values[value]
        if value in self.laid_out or (all(known.is_open) and not known.origins):
            return None
        origins = set(known.origins.values())
        same = None
        for user in self.users.get(value, ()):
            boundary = user.boundary
            if user.constraint:
                origin, taken = user.constraint, self.values[user.results[0]].spec
            elif boundary and boundary.goes_in:
                origin, taken = boundary.origin, boundary.spec
            else:
                continue
            if origin in origins:
                return user
            if not all(known.is_open) and taken == known.spec:
                same = same or user
        return same

    def placed(self, operation: Operation) -> Sequence[tuple[int, list[FactorAxis]]]:
        """The operands of an operation, then its results, with the factors of their mesh axes."""
        if operation.number not in self._placed:
            rule = rule_of(operation, self.values)
            values = (*operation.operands, *operation.results)
            self._placed[operation.number] = (
                [
                    (value, factor_axes(self.values[value], each, rule.sizes, self.mesh))
                    for value, each in zip(values, (*rule.operands, *rule.results), strict=False)
                ]
                if rule
                else []
            )
        return self._placed[operation.number]

    @functools.cached_property
    def proposals(self) -> dict[tuple[int, int, int, int, str], tuple[int, ...]]:
        """Of hops by which a mesh axis came: the other values that had it before."""
        return {}

    @functools.cached_property
    def _placed(self) -> dict[int, list[tuple[int, list[FactorAxis]]]]:
        return {}

    @functools.cached_property
    def lost_on_dimensions(self) -> Mapping[tuple[int, int, str], frozenset[int]]:
        """What lost a mesh axis that a dimension of a value does not have: numbers of losses."""
        return lost_on_dimensions(self)

    @functools.cached_property
    def losses_by_place(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """The numbers of the losses at an operation, by its number and by the operand."""
        return losses_by_place(self)

    @functools.cached_property
    def _losses(self) -> tuple[Loss, ...]:
        return tuple(all_losses(self))

    @functools.cached_property
    def _arrivals(self) -> Mapping[int, list[tuple[Operation, Edge]]]:
        """The edges that brought mesh axes to each value."""
        arrivals: dict[int, list[tuple[Operation, Edge]]] = {}
        for operation in self.operations:
            for edge in operation.edges:
                for target in edge.targets:
                    arrivals.setdefault(target, []).append((operation, edge))
        return arrivals
