"""Says what no compilation of a layout can beat: the seconds of a step, by the prices of ``cost``.

Each term is what every program must do that makes the step in that layout, whatever the compiler
chooses; what it only may have to do is left out:

- Operations: those of the step on one device, divided among all. Of a device with one example, half
  of them: the products that give gradients of weights are multiplications then, and not more than
  the others.
- Gradients: each device has a sum over its examples. Summed over the mesh axes of the batch, they
  are scattered at least, and what is not stored split over these axes is gathered (together an
  all-reduce: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
- The optimizer's statistics are read once and written once.
"""

import functools
import itertools
import math
from collections.abc import Iterator

from penzai_shard.choosing.candidates import Candidate, read_tables, state_arrays, stored_bytes
from penzai_shard.choosing.cost import Prices, Sent, StepCost
from penzai_shard.choosing.hardware import Hardware, step_time
from penzai_shard.choosing.problem import Problem
from penzai_shard.layouts.axis_roles import mesh_axes_of
from penzai_shard.layouts.layout import Layout
from penzai_shard.specs import part_count


def bound(problem: Problem, candidate: Candidate, hardware: Hardware) -> float:
    """The seconds of a step that no compilation of a layout can beat.

    Args:
        problem: The step.
        candidate: The layout.
        hardware: The devices.
    """
    sizes = dict(candidate.mesh_sizes)
    batch = mesh_axes_of("batch", [candidate.layout.compute])
    examples = problem.sizes[problem.batch_axis] // part_count(batch, sizes)
    flops = _count_flops(problem) / hardware.device_count
    if examples == candidate.microbatches:
        flops /= 2
    sent = tuple(_find_sent(problem, candidate))
    held = {"optimizer": stored_bytes(problem, candidate, ["optimizer"])}
    return step_time(StepCost(flops, sent, held), sizes, hardware).bound


@functools.lru_cache(maxsize=4)
def _count_flops(problem: Problem) -> float:
    """The operations of the whole step, which recomputes nothing."""
    layout = Layout(parameters={}, compute={}, names=problem.names, blocks=problem.blocks)
    return Prices(problem).price(Candidate((("data", 1),), layout)).flops


def _find_sent(problem: Problem, candidate: Candidate) -> Iterator[Sent]:
    """What must be sent for each parameter."""
    sizes, tables = dict(candidate.mesh_sizes), read_tables(problem, candidate)
    batch = {axis for axis in mesh_axes_of("batch", [candidate.layout.compute]) if sizes[axis] > 1}
    for array, count in state_arrays(problem).items():
        if array.part != "parameters":
            continue
        stored, used = (
            set(itertools.chain(*array.axes(tables[name].rules, candidate.mesh_sizes)))
            for name in ("parameters", "compute")
        )
        size = count * math.prod(array.shape) * array.item_bytes
        # What each device has in the end, or in the beginning, is the part of what is left over.
        for axes, kept in ((batch, used), (batch - stored, stored), (stored - used, used)):
            parts = part_count(axes, sizes)
            left = size / part_count(kept, sizes)
            ordered = tuple(axis for axis in sizes if axis in axes)
            yield Sent("", array.names or (), ordered, left * (parts - 1) / parts)
