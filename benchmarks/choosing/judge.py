"""What a compiled step costs, read without anything that prices candidates in the library.

The step is compiled in this process for as many simulated devices. Products and collectives are
counted in the text of the program, memory is XLA's own figure for it, and the time is that of a
linear program: every byte is given to a link, so that the busiest link carries as little as it can.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from scipy import optimize

from benchmarks.compiled_collectives import (
    arrays_of,
    bytes_by_kind,
    computations_of,
    executions_of,
    read_collectives,
)
from penzai_shard import make_mesh
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.inspection.devices.hardware import Hardware

# Nothing runs, so code is made quickly; and what compilers for CPUs do otherwise than those for
# accelerators is left out: they join what is to be computed again with what was computed before,
# compute half precision in float32, sum several gradients in one all-reduce, and order operations
# to keep many processors busy, whatever that needs of memory.
COMPILER_OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    # Of two ways to make code the quicker one, which later releases do not have.
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner,change-op-data-type",
}
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the compiled step of a layout costs one device.

    Attributes:
        flops: Operations of its products.
        sent: The bytes that it sends over each set of mesh axes.
        memory: The bytes that it needs at once.
        compute: How long the products take, in seconds.
        traffic: How long it sends.
        update: How long the optimizer's state is read and written.
    """

    flops: float
    sent: Mapping[tuple[str, ...], float]
    memory: int
    compute: float
    traffic: float
    update: float

    @property
    def time(self) -> float:
        """What the step takes at least, if all of that happens at the same time."""
        return max(self.compute, self.traffic, self.update)

    @property
    def price(self) -> tuple[float, float]:
        """The time, and of equal ones the sum of what overlaps."""
        return self.time, self.compute + self.traffic + self.update


def verdict(problem: TrainingProblem, candidate: Candidate, hardware: Hardware) -> Verdict:
    """Compiles a step in a layout, and reads what it costs."""
    shape = dict(candidate.mesh_axes)
    mesh = make_mesh(shape, jax.devices("cpu")[: math.prod(shape.values())])
    step, state, inputs = problem.built(
        candidate.layout, mesh, candidate.microbatches, candidate.on_indivisible
    )
    lowered = step.lower(state, **inputs)
    program = lowered.compile(compiler_options=dict(COMPILER_OPTIONS))
    return verdict_on(program, shape, hardware, state.opt_state)


def verdict_on(
    compiled: Any, shape: Mapping[str, int], hardware: Hardware, optimizer_state: Any
) -> Verdict:
    """Reads what a program costs.

    Args:
        compiled: The program, a ``jax.stages.Compiled`` for as many devices as the mesh has.
        shape: The sizes of the mesh axes.
        hardware: What the devices are meant to be.
        optimizer_state: What the optimizer keeps, in structs with shardings.
    """
    text = compiled.as_text()
    sent: dict[tuple[str, ...], float] = collections.defaultdict(float)
    for (_, axes), bytes_ in bytes_by_kind(read_collectives(text, shape), as_meant=True).items():
        sent[tuple(shape) if axes is None else axes] += bytes_
    memory = compiled.memory_analysis()
    held = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    flops = flops_of(text)
    links = links_of(hardware, tuple(shape.items()))
    return Verdict(
        flops,
        dict(sent),
        held,
        flops / hardware.flops,
        sending_time(sent, links),
        2 * _of_one_device(optimizer_state) / hardware.memory_bandwidth,
    )


def _of_one_device(tree: Any) -> int:
    """The bytes of some arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def flops_of(text: str) -> float:
    """The operations of all products that one run of a program executes.

    >>> flops_of('''ENTRY %e (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
    ...   %a = f32[4,8]{1,0} parameter(0)
    ...   %b = f32[8,16]{1,0} parameter(1)
    ...   ROOT %c = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''') == 2 * 4 * 8 * 16
    True
    """
    computations = computations_of(text)
    times = executions_of(computations)
    found = 0.0
    for computation in computations.values():
        for one in computation.instructions.values():
            if one.opcode != "dot" or not times.get(computation.name, 0):
                continue
            left = arrays_of(computation.instructions[one.operands[0]].type)[0][0]
            sizes = [int(size) for size in re.findall(r"\d+", left.partition("[")[2])]
            summed = [
                sizes[int(i)] for i in re.findall(r"\d+", _CONTRACTED.search(one.attributes)[1])
            ]
            made = sum(elements for _, elements, _ in arrays_of(one.type))
            found += times[computation.name] * 2 * made * math.prod(summed)
    return found


@functools.cache
def links_of(
    hardware: Hardware, mesh_axes: tuple[tuple[str, int], ...]
) -> Mapping[str, Mapping[str, float]]:
    """The links of each mesh axis, with the bytes that a device can send over each in a second."""
    return hardware.of_mesh(dict(mesh_axes)).rates


def sending_time(
    sent: Mapping[tuple[str, ...], float], links: Mapping[str, Mapping[str, float]]
) -> float:
    """The least time in which all is sent, each part over the links of its mesh axes.

    >>> sending_time({("x",): 6.0, ("x", "y"): 2.0}, {"x": {"a": 2.0}, "y": {"b": 2.0}})
    3.0
    """
    parts = [
        ([(link, rate) for axis in axes for link, rate in links[axis].items()], bytes_)
        for axes, bytes_ in sent.items()
        if bytes_
    ]
    parts = [part for part in parts if part[0]]
    if not parts:
        return 0.0
    names = sorted({link for part, _ in parts for link, _ in part})
    ways = [(i, link, rate) for i, (part, _) in enumerate(parts) for link, rate in part]
    # The unknowns are the bytes of each way, in units of the largest part, and the time.
    unit = max(bytes_ for _, bytes_ in parts)
    slowest = min(rate for _, _, rate in ways)
    busy = np.zeros((len(names), len(ways) + 1))
    whole = np.zeros((len(parts), len(ways) + 1))
    for number, (i, link, rate) in enumerate(ways):
        busy[names.index(link), number] = slowest / rate
        whole[i, number] = 1
    busy[:, -1] = -1
    solved = optimize.linprog(
        [0.0] * len(ways) + [1.0],
        A_ub=busy,
        b_ub=np.zeros(len(names)),
        A_eq=whole,
        b_eq=[bytes_ / unit for _, bytes_ in parts],
    )
    assert solved.success, solved.message
    return float(solved.fun) * unit / slowest
