"""What the compiled step of a candidate costs: the truth that prices are judged by.

Collectives and memory are those that the library reports of a compiled program; floating point
operations are counted here, from the program's text alone.
"""

import collections
import dataclasses
import math
import re

from penzai_shard import make_mesh
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.steps.programs import compiled_program
from penzai_shard.inspection.traffic.collective_report import CollectiveReport


@dataclasses.dataclass(frozen=True)
class Truth:
    """What one device computes, sends and holds in a step."""

    flops: float
    traffic: dict
    parameters: int
    optimizer: int
    temporaries: int

    @property
    def wire_bytes(self):
        return sum(self.traffic.values())


def compiled_truth(problem, candidate):
    mesh = make_mesh(dict(candidate.mesh_axes))
    step, state, inputs = problem.built(
        candidate.layout, mesh, candidate.microbatches, candidate.on_indivisible
    )
    program = compiled_program(step, (state,), inputs)
    traffic = collections.Counter()
    for one in CollectiveReport.of(program).collectives:
        # An all-reduce of which each device keeps a slice is a reduce-scatter, but for the CPU.
        saved = (one.group_size - 1) / one.group_size * one.scattered_bytes
        traffic[one.mesh_axes] += (one.wire_bytes - saved) * one.times
    memory = MemoryReport.of(program)
    return Truth(
        flops_of(program.module, candidate.microbatches),
        dict(traffic),
        memory.parameters,
        memory.optimizer_state,
        memory.temporaries,
    )


def flops_of(module, microbatches):
    """The floating point operations of the products in a program.

    The loop over microbatches is the only one, and all products are in it if it is there.
    """
    flops = 0
    for one in module:
        if one.opcode == "dot":
            siblings = module.computations[one.computation].instructions
            left = siblings[one.operand_names[0]].results[0].shape
            contracted = re.search(r"lhs_contracting_dims={([\d,]*)}", one.text)[1]
            summed = math.prod(left[int(i)] for i in contracted.split(",") if i)
            flops += 2 * math.prod(one.results[0].shape) * summed
    return flops * microbatches
