"""One call of a layer inside a manual region: read its program, gather, run, hand out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from penzai import pz

from penzai_shard.errors import ShardingError
from penzai_shard.layers import variable_threading
from penzai_shard.layers.manual_region import Region
from penzai_shard.layers.region_boundary import BoundaryTree
from penzai_shard.layers.region_gathering import Typing
from penzai_shard.layers.region_outputs import ManualRegionError, NotReplicatedError
from penzai_shard.layers.region_reading import Program, RegionReading
from penzai_shard.model_variables import thawed
from penzai_shard.partition_specs import canonical_spec


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
            ManualRegionError: The layer does not treat the elements of a split logical axis
                independently.
        """
        arrays = list(weight_arrays), list(activation_arrays)
        reading = RegionReading(self.region, self.weights, self.activations, arrays, self.call_body)
        try:
            return _results(reading, reading.read(Typing.VARYING))
        except ShardingError:
            raise
        except Exception:
            # What JAX tracks stands in the way: it refuses, for one, a loop that starts with the
            # same on all devices and turns it into something that differs.
            pass
        try:
            program = reading.read(Typing.UNTRACKED)
        except ShardingError:
            raise
        except Exception as error:
            reading.fail(error)
            raise
        return _results(reading, program)

    def call_body(
        self, weight_arrays: Sequence[Any], activation_arrays: Sequence[Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Runs the layer on arrays of whatever lengths.

        Returns:
            The output and the contents of the variables that were reassigned, by a readable
            text for each; and these texts for all variables in order.
        """
        parameters, body = self.weights.put_together(weight_arrays)
        given = self.activations.put_together(activation_arrays)
        variables = list(map(thawed, (*parameters, *given["states"])))
        slots = [
            f"{type(variable).__name__} {getattr(variable, 'label', index)!r}"
            for index, variable in enumerate(variables)
        ]
        before = variable_threading.contents(variables)
        body, argument, side_inputs = pz.bind_variables(
            (body, given["argument"], given["side_inputs"]), variables
        )
        output = body(argument, **side_inputs)
        variable_threading.check_no_variable(output, "ShardMapped")
        changed = variable_threading.reassigned(variables, before)
        by_slot = {slots[index]: content for index, content in changed.items()}
        return {"output": output, "changed": by_slot}, slots


def _results(reading: RegionReading, program: Program) -> tuple[Any, dict[int, Any]]:
    for typing in program.typings:
        try:
            arrays = _run(reading, program, typing)
            break
        except NotReplicatedError as error:
            if typing is Typing.INVARYING and not program.may_gather:
                raise ManualRegionError(
                    f"{error}: it differs between the devices, and no operation of the layer "
                    "makes it the same. Reduce it with jax.lax.psum or pmean, or keep the name "
                    "of the split logical axis."
                ) from None
            if typing is program.typings[-1]:
                raise
        except Exception:
            if typing is program.typings[-1]:
                raise
    after = program.boundary.put_together(arrays)
    changed = {
        index: after["changed"][slot]
        for index, slot in enumerate(program.slots)
        if slot in after["changed"]
    }
    return after["output"], changed


def _run(reading: RegionReading, program: Program, typing: Typing) -> list[Any]:
    def run(*arrays: Any) -> list[Any]:
        local = program.run(*reading.inside(arrays, typing))
        return [
            output.own_part(array, reading.region)
            for output, array in zip(program.outputs, local, strict=True)
        ]

    specs = [canonical_spec(output.mesh_axes) for output in program.outputs]
    return reading.mapped(run, typing, specs)(*reading.arrays)
