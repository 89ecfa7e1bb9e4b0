"""How long a step takes at least, by what it costs and the figures of the hardware."""

import dataclasses
from collections.abc import Mapping

from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.inspection.traffic.transfer_time import time_of_loads


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A lower bound of the time of a step, and what it is made of, in seconds.

    It holds for perfect overlap: everything is computed, sent and updated at the same time, at the
    peak that the vendor publishes; of devices that share the same cores, one after the other. Real
    steps take longer; which of two layouts is faster is said by the same figures. Source of the
    method: Williams et al. 2009, "Roofline"; of the update's part in it: Xu et al. 2020,
    arXiv:2004.13336.

    Attributes:
        compute: For matrix products and convolutions, at the peak in bfloat16.
        traffic: For everything that is sent, by the best division over the links.
        by_mesh_axis: For what is sent over each mesh axis; of what goes over several, each carries
            its part at the same time, or less where the best division has another carry more.
        update: For the optimizer's state, which is read from memory and written back once.
        overlaps: Whether all of that happens at the same time.
    """

    compute: float
    traffic: float
    by_mesh_axis: Mapping[str, float]
    update: float = 0.0
    overlaps: bool = True

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
        >>> cost = StepCost(flops=1.97e14, sent=sent, memory={"optimizer": 8.19e9})
        >>> time = StepTime.of(cost, {"data": 8, "model": 4}, Hardware.read("v5e:32"))
        >>> time.compute, time.traffic, time.by_mesh_axis, time.update
        (1.0, 1.0, {'data': 1.0, 'model': 0.0}, 0.02)
        """
        network = hardware.of_mesh(mesh_shape)
        loads: dict[frozenset[str], float] = {}
        for axes, bytes_ in cost.traffic.items():
            if over := network.used(axes):
                loads[over] = loads.get(over, 0.0) + bytes_
        by_axis = dict.fromkeys(mesh_shape, 0.0)
        for over, bytes_ in loads.items():
            seconds = bytes_ / network.carried(over)
            for axis in over:
                by_axis[axis] += seconds
        traffic = time_of_loads(loads, network.carried)
        updated = 2 * cost.memory.get("optimizer", 0.0)
        return cls(
            cost.flops / hardware.flops,
            traffic,
            {axis: min(seconds, traffic) for axis, seconds in by_axis.items()},
            updated / hardware.memory_bandwidth if hardware.memory_bandwidth else 0.0,
            hardware.overlaps,
        )

    @property
    def bound(self) -> float:
        """The largest of the three, which is what the step takes at least; or their sum."""
        if not self.overlaps:
            return self.without_overlap
        return max(self.compute, self.traffic, self.update)

    @property
    def without_overlap(self) -> float:
        """The three one after the other."""
        return self.compute + self.traffic + self.update
