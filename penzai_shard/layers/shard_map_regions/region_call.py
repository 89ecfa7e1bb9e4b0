"""One call of a layer inside a manual region: plan, trace, check, call."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from penzai import pz

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.layers import variable_threading
from penzai_shard.layers.shard_map_regions.boundaries import BoundaryTree, take_apart
from penzai_shard.layers.shard_map_regions.following import collectives
from penzai_shard.layers.shard_map_regions.region_check import (
    RegionCheck,
    Traced,
    struct_of,
    unchecked_outputs,
)
from penzai_shard.layers.shard_map_regions.region_plan import (
    Crossing,
    ManualRegionError,
    NotReplicatedError,
    Region,
    RegionPlan,
    Tracking,
    is_of_16_bits,
)
from penzai_shard.model_variables import thawed
from penzai_shard.traced_programs import equations, exception_location_text

_LONGEST = 400
"""How many characters of another library's message are shown."""


class TrackingError(Exception):
    """What JAX tracks of values stands in the way."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A layer's program that may run per device.

    Attributes:
        run: The layer, from one device's arrays to those of its output.
        tree: Its output without the arrays.
        outputs: How these leave the region.
        trackings: What JAX may know in it, the best first.
        may_gather: Whether it may hold the same on all devices where JAX cannot tell.
    """

    run: Callable[..., list[Any]]
    tree: BoundaryTree
    outputs: list[Crossing]
    trackings: list[Tracking]
    may_gather: bool


@dataclasses.dataclass(frozen=True)
class RegionCall:
    """All that a call depends on apart from arrays; equal for models that are built alike.

    Attributes:
        region: The region.
        inputs: What enters: the frozen parameters with the layer, and the argument, the side
            inputs and the frozen other variables.
    """

    region: Region
    inputs: BoundaryTree

    def run(self, arrays: Sequence[Any]) -> tuple[BoundaryTree, list[Any]]:
        """Runs the layer per device.

        Args:
            arrays: The global arrays of ``inputs``.

        Returns:
            The layer's output, and the contents of the variables that it reassigned by the texts
            of ``indices_by_text``; taken apart.

        Raises:
            PlanError: A length does not divide.
            ManualRegionError: The layer does not treat the elements of a split logical axis
                independently.
        """
        region = self.region.narrowed(self.inputs.put_together(arrays, fixed=False)[1])
        if region != self.region:
            return dataclasses.replace(self, region=region).run(arrays)
        plan = RegionPlan.of(self.region, self.inputs, arrays)
        try:
            program = self._program(plan, arrays, Tracking.VARYING)
            return program.tree, self._call(plan, program, arrays, program.trackings)
        except ShardingError:
            raise
        except Exception:
            # What JAX tracks stands in the way: it refuses, for one, a loop that starts with the
            # same on all devices and turns it into something that differs. If that was not the
            # reason, the same fails again without it, and Python shows both errors.
            program = self._program(plan, arrays, Tracking.UNTRACKED)
            return program.tree, self._call(plan, program, arrays, program.trackings)

    # Trace.

    def _program(self, plan: RegionPlan, arrays: Sequence[Any], tracking: Tracking) -> Program:
        """Traces the layer on one device's part, and checks it.

        Raises:
            ManualRegionError: It cannot run per device.
            TrackingError: It may do so where JAX tracks nothing.
        """
        found: list[Program] = []

        def dry(*own: Any) -> list[Any]:
            # Here, as values know along which mesh axes they vary only inside the region.
            found.append(self._read(plan, arrays, plan.inside(own, tracking), tracking))
            return []

        try:
            jax.eval_shape(plan.mapped(dry, tracking, []), *arrays)
        except ShardingError:
            raise
        except Exception as error:  # Whatever the layer raises; tracked, it is tried once more.
            if tracking is Tracking.UNTRACKED:
                self._explain(plan, arrays, error)
            raise
        return found[-1]

    def _read(
        self, plan: RegionPlan, arrays: Sequence[Any], own: Sequence[Any], tracking: Tracking
    ) -> Program:
        def body(arrays: Sequence[Any]) -> tuple[BoundaryTree, list[Any]]:
            # A function of its own: methods of equal calls are equal, and JAX would give one the
            # program of another, with its places in the source.
            return self._body(arrays)

        # Compiled in line it leaves no trace in the program, and is traced once for reading it
        # and for running it.
        run = jax.jit(body, inline=True)
        part = Traced.of(run, own)
        tracked = tracking is not Tracking.UNTRACKED
        names = {equation.primitive.name for equation in equations(part.program)}
        if tracked and "regularized_incomplete_beta" in names:
            raise TrackingError  # JAX fails to compile it where it tracks what varies.
        # What a jax.custom_vjp does depends on what JAX tracks, and is followed as it will run.
        own_gradient = "custom_vjp_call" in names
        trackings = [*Tracking] if tracked and not own_gradient else [tracking]
        if self.region.per_device:
            outputs = unchecked_outputs(self.region, part, tracked)
            moves = bool(collectives(part.program))
            return Program(run, part.tree, outputs, trackings, may_gather=moves)
        try:
            shapes = list(map(struct_of, arrays))
            tree, outputs = RegionCheck(plan, run, part, shapes, tracked).outputs()
        except ManualRegionError as error:
            if tracked and own_gradient:
                raise TrackingError from error
            raise
        return Program(run, tree, outputs, trackings, may_gather=True)

    def _body(self, arrays: Sequence[Any]) -> tuple[BoundaryTree, list[Any]]:
        """The layer on arrays of whatever lengths: its output, and the variables it reassigned."""
        (parameters, body), given = self.inputs.put_together(arrays)
        variables = list(map(thawed, (*parameters, *given["states"])))
        body, argument, side_inputs = pz.bind_variables(
            (body, given["argument"], given["side_inputs"]), variables
        )
        output, changed = variable_threading.call_with(
            variables, body, argument, side_inputs, "ShardMapped"
        )
        by_text = {
            text: changed[index]
            for text, index in indices_by_text(variables).items()
            if index in changed
        }
        return take_apart({"output": output, "changed": by_text})

    # Call.

    def _call(
        self,
        plan: RegionPlan,
        program: Program,
        arrays: Sequence[Any],
        trackings: Sequence[Tracking],
    ) -> list[Any]:
        """Runs the program with what JAX can do of its best tracking."""
        tracking, *others = trackings
        if tracking is not Tracking.VARYING:
            self._refuse_sums_of_16_bits(plan, arrays)

        def run(*own: Any) -> list[Any]:
            _, found = program.run(plan.inside(own, tracking))
            return [
                output.own_part(array, self.region)
                for output, array in zip(program.outputs, found, strict=True)
            ]

        try:
            return plan.mapped(run, tracking, program.outputs)(*arrays)
        except Exception as error:
            # To JAX something varies that should not, or it cannot tell: the next tracking may
            # do. If none does, Python shows the errors of all.
            differs = isinstance(error, NotReplicatedError)
            if differs and tracking is Tracking.INVARYING and not program.may_gather:
                raise ManualRegionError(
                    f"{error}: it differs between the devices, and no operation of the layer "
                    "makes it the same. Reduce it with jax.lax.psum or pmean, or keep the name "
                    "of the split logical axis."
                ) from None
            if not others:
                raise
            return self._call(plan, program, arrays, others)

    # What went wrong.

    def _refuse_sums_of_16_bits(self, plan: RegionPlan, arrays: Sequence[Any]) -> None:
        """Refuses what would end the process, now that JAX places the sums of gradients itself."""
        mesh, automatic = self.region.mesh, self.region.automatic
        if not automatic or not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "cpu":
            return
        raise_all(
            ManualRegionError,
            "XLA's compiler for CPUs cannot add up gradients of 16 bits in this layer, as it "
            f"leaves {', '.join(map(repr, automatic))} to the compiler and JAX cannot tell what "
            "differs between its devices:",
            [
                f"{crossing.path.lstrip('0123456789/')}: is of {array.dtype}. Take over all mesh "
                f"axes, manual_axes={tuple(mesh.axis_names)}, or compute in float32."
                for crossing, array in zip(plan.inputs, arrays, strict=True)
                if is_of_16_bits(array)
            ],
        )

    def _explain(self, plan: RegionPlan, arrays: Sequence[Any], error: Exception) -> None:
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
            jax.eval_shape(self._body, list(map(struct_of, arrays)))
            return []

        # A layer that fails on whole arrays too fails by its own error.
        jax.eval_shape(plan.mapped(dry, Tracking.UNTRACKED, []), *arrays)
        raise ManualRegionError(
            "the layer works on whole arrays, and fails on one device's part of them:",
            [
                f"{type(error).__name__}{where}: {first}. Each device sees its part of the "
                f"activations (split: {plan.split_text()}). A logical axis that the layer "
                "contracts, or that a parameter has too, must be mapped to None in "
                "activation_rules."
            ],
        ) from error


def indices_by_text(variables: Sequence[Any]) -> dict[str, int]:
    """The index of each variable by a text that says which one it is.

    >>> indices_by_text([pz.StateVariable(0, label="count"), pz.StateVariable(0, label="mean")])
    {"StateVariable 'count'": 0, "StateVariable 'mean'": 1}
    """
    return {
        f"{type(variable).__name__} {getattr(variable, 'label', index)!r}": index
        for index, variable in enumerate(variables)
    }
