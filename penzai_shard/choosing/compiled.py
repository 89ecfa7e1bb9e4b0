"""Prices candidates by compiling their steps for simulated devices; nothing runs.

What compilers for CPUs make computes and sends as programs for accelerators do. What it holds is an
estimate, as those order operations by themselves.
"""

import collections
import itertools
import math
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.cost import StepCost, extrapolate
from penzai_shard.choosing.device_program import refuse_meshes
from penzai_shard.choosing.shallow import cut_model
from penzai_shard.choosing.workload import Workload
from penzai_shard.errors import CompilationError
from penzai_shard.inspection.attribution import Part
from penzai_shard.inspection.collectives import wire_bytes
from penzai_shard.inspection.compiling import make_compiled_step, read_standard_error
from penzai_shard.inspection.hlo import Instruction, Place, Program
from penzai_shard.inspection.lowering import LoweredStep, lower_step
from penzai_shard.inspection.memory import make_memory_report
from penzai_shard.jax_internals import compiler
from penzai_shard.layouts.axis_roles import mesh_axes_of

_FLAGS: dict[str, Any] = {
    # Nothing of it runs: code is made as fast as it can be.
    "xla_cpu_parallel_codegen_split_count": 1,
    # What is computed again must not be free to come early, nor may gradients wait for each other
    # to be summed together; and float16 must not be sent and held in float32. The order is the
    # usual one: a memory-optimised one holds what is computed again until gradients are made of it.
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner,change-op-data-type",
}
if jax.__version_info__ < (0, 11):
    # The older of two ways to make code is faster; later releases have one, and refuse the flag.
    _FLAGS["xla_cpu_use_fusion_emitters"] = False


def compile_candidates(
    workload: Workload, candidates: Sequence[Candidate]
) -> list[StepCost | CompilationError]:
    """What candidates cost by their compiled steps, two of which are compiled at once.

    Deep models are compiled with one and with two of their blocks.

    Args:
        workload: The step.
        candidates: Its layouts.

    Returns:
        For each candidate its cost, or what the compiler says that refuses its program.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``Layout.build``.
    """
    (models, blocks), threads = cut_model(workload), ThreadPoolExecutor(2)
    # What the compiler says of layouts that are not taken, nobody needs.
    with read_standard_error([], goes_on=False):
        try:
            started = [
                [_start(workload, x, model, threads) for model in models] for x in candidates
            ]
            pairs = zip(candidates, started, strict=True)
            return [_read_costs(*pair, blocks) for pair in pairs]
        finally:
            # Whoever interrupts does not wait for what has not begun.
            threads.shutdown(cancel_futures=True)


_Started = tuple[LoweredStep, "Future[compiler.Compiled]"]


def _start(
    workload: Workload, candidate: Candidate, model: Any, threads: ThreadPoolExecutor
) -> _Started:
    step, state, inputs = workload.build(candidate, model=model)
    with refuse_meshes():
        lowered = lower_step(step, (state,), inputs, "choose_layout", with_layers=False)
    count = candidate.mesh.size
    return lowered, threads.submit(
        compiler.compile_bytecode,
        compiler.write_bytecode(lowered.lowered, with_float16=True),
        compiler.simulated_devices(count),
        compiler.compile_options(count, overrides=_FLAGS),
    )


def _read_costs(
    candidate: Candidate, started: Sequence[_Started], blocks: int
) -> StepCost | CompilationError:
    """The cost of a step, or of all blocks by that of one and of two."""
    try:
        costs = [_read_cost(candidate, step, future.result()) for step, future in started]
    except jax.errors.JaxRuntimeError as error:
        return CompilationError(f"choose_layout: the compiler says: {error}")
    return extrapolate(costs, blocks)


# A compiled step


def _read_cost(candidate: Candidate, lowered: LoweredStep, program: compiler.Compiled) -> StepCost:
    compiled = make_compiled_step(lowered, program, "cpu", None, "")
    held = make_memory_report(compiled.step, compiled.figures, None)
    memory = {
        "parameters": held.parameters + held.constants + held.state_variables,
        "optimizer": held.optimizer_state,
        "inputs": held.inputs,
    }
    # With gradients, and what is gathered: a program does not say which is which.
    memory["activations"] = max(held.total - sum(memory.values()), 0)
    sent: dict[Any, float] = collections.defaultdict(float)
    added = _find_added(compiled.program)
    batch, sizes = {*mesh_axes_of("batch", [candidate.layout.compute])}, dict(candidate.mesh_sizes)
    for one in compiled.collectives.collectives:
        for part in one.parts:
            if one.name in added and not part.keeps_slice:
                continue
            # Compilers for CPUs write a reduce-scatter as an all-reduce and a slice.
            kind = "reduce-scatter" if part.keeps_slice else one.kind
            count = wire_bytes(kind, part.payload_bytes, one.group_size) * (one.times or 1)
            # Groups that are not those of mesh axes may use all links.
            axes = tuple(sizes) if one.mesh_axes is None else one.mesh_axes
            if count:
                over_batch = not batch.isdisjoint(axes)
                sent[_read_kind(compiled.step, part, over_batch), axes] += count
    in_bytes = {name: float(count) for name, count in memory.items()}
    return StepCost(float(_count_flops(compiled.program)), dict(sent), in_bytes)


def _read_kind(step: LoweredStep, part: Part, over_batch: bool) -> str:
    """What a collective moves."""
    path = part.moves.rpartition(" of ")[2]
    array = next((x for x in step.arguments if x.path == path), None)
    is_gradient = part.moves.startswith("gradient of ")
    is_part = array is not None and 4 * math.prod(array.shape) % max(part.payload_bytes, 1) == 0
    if is_gradient and not (is_part and over_batch):
        # What layers pass on, down to a table of embeddings, is not the gradient of that.
        array = None
    if part.phase == "optimizer" or (array and array.part == "optimizer state"):
        return "optimizer"
    if array is None or array.part != "parameters":
        return "activation"
    return "gradient" if is_gradient else "parameter"


# An array that is handed on.
_HANDED = ("bitcast", "call", "copy", "fusion", "get-tuple-element", "parameter", "tuple")


def _find_added(program: Program) -> set[str]:
    """The all-reduces that are only added to others, the first of which stands for all.

    Compilers for accelerators add before they reduce ("AllReduceReassociate" in XLA), those for
    CPUs do not. Fusions may hold several copies of an addition.
    """

    def find_users(place: Place) -> list[Place]:
        ways = program.walk(program.uses(place), program.uses, _HANDED)
        return [x for x in ways if x.instruction.opcode not in _HANDED or not program.uses(x)]

    def find_terms(place: Place) -> tuple[Instruction, ...]:
        """The all-reduces among the same devices of which a value is the sum."""
        while place.instruction.opcode in _HANDED:
            near = [*program.sources(place)]
            if len(near) != 1:
                return ()
            (place,) = near
        one = place.instruction
        if one.opcode == "all-reduce" and len(one.results) == 1:
            return (one,)
        parts = [find_terms(x) for x in program.sources(place)] if one.opcode == "add" else [()]
        terms = tuple(itertools.chain(*parts))
        is_one_sum = len({x.attribute("replica_groups") for x in terms}) == 1
        return terms if is_one_sum and all(parts) else ()

    def find_sums(place: Place) -> set[tuple[Instruction, ...]]:
        """The largest sums that a value goes into."""
        users = find_users(place)
        if users and all(find_terms(user) for user in users):
            return set().union(*map(find_sums, users))
        return {find_terms(place)}

    found = set()
    for one in program:
        sums = find_sums(Place(one)) if one.opcode == "all-reduce" else set()
        if len(sums) == 1 and sums != {()} and one not in {terms[0] for terms in sums}:
            found.add(one.name)
    return found


def _count_flops(program: Program) -> float:
    """Operations of products and convolutions, as often as they run."""
    total = 0.0
    for one in program:
        if one.opcode not in ("dot", "convolution"):
            continue
        left, right = (operand.results[0].shape for operand in program.operands(one)[:2])
        if one.opcode == "dot":
            dims = re.findall(r"\d+", one.attribute("lhs_contracting_dims") or "")
            summed: float = math.prod(left[int(dim)] for dim in dims)
        else:
            labels = re.split("_|->", one.attribute("dim_labels") or "")[1]
            sizes = zip(labels, right, strict=True)
            summed = math.prod(size for label, size in sizes if label != "o")
            # Between the elements of a dilated image there is nothing to multiply.
            dilation = re.search(r"lhs_dilate=([\dx]+)", one.attribute("window") or "")
            summed /= math.prod(map(int, dilation[1].split("x"))) if dilation else 1
        total += 2 * one.results[0].size * summed * (program.times[one.computation][0] or 1)
    return total
