"""How long a step takes at least, by what it costs and the figures of the hardware."""

import dataclasses
from collections.abc import Mapping

from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.inspection.traffic.transfer_time import time_of_loads


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A lower bound of the time of a step, and what it is made of, in seconds.

    It holds for perfect overlap: everything is computed and sent at the same time, at the peak that
    the vendor publishes. Real steps take longer; which of two layouts is faster is said by the same
    figures. Source of the method: Williams et al. 2009, "Roofline".

    Attributes:
        compute: For the matrix products, at the peak in bfloat16.
        traffic: For everything that is sent, by the best division over the links.
        by_mesh_axis: For what is sent over each mesh axis; of what goes over several, each carries
            its part at the same time.
    """

    compute: float
    traffic: float
    by_mesh_axis: Mapping[str, float]

    @classmethod
    def of(cls, cost: StepCost, mesh_shape: Mapping[str, int], hardware: Hardware) -> "StepTime":
        """The time of a step.

        Args:
            cost: What the step costs one device. What is sent over unknown mesh axes counts as
                going over all.
            mesh_shape: The size of each mesh axis.
            hardware: The devices.

        Raises:
            MeshError: As ``Hardware.bandwidth`` does.

        >>> from penzai_shard.choosing.step_costs import Sent
        >>> sent = (Sent("parameter", "", (), ("data",), 5e10),)
        >>> cost = StepCost(flops=1.97e14, sent=sent, memory={})
        >>> StepTime.of(cost, {"data": 8, "model": 4}, Hardware.read("v5e:32"))
        StepTime(compute=1.0, traffic=1.0, by_mesh_axis={'data': 1.0, 'model': 0.0})
        """
        network = hardware.of_mesh(mesh_shape)
        real = tuple(axis for axis, links in network.rates.items() if links)
        loads: dict[frozenset[str], float] = {}
        for axes, bytes_ in cost.traffic.items():
            over = frozenset(axis for axis in axes or real if axis in real)
            if over:
                loads[over] = loads.get(over, 0.0) + bytes_
        by_axis = dict.fromkeys(mesh_shape, 0.0)
        for over, bytes_ in loads.items():
            seconds = bytes_ / network.carried(over)
            for axis in over:
                by_axis[axis] += seconds
        return cls(cost.flops / hardware.flops, time_of_loads(loads, network.carried), by_axis)

    @property
    def bound(self) -> float:
        """The larger of the two, which is what the step takes at least."""
        return max(self.compute, self.traffic)

    @property
    def without_overlap(self) -> float:
        """The two one after the other."""
        return self.compute + self.traffic
