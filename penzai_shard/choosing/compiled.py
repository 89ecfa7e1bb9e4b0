"""Prices candidates by compiling their steps for simulated devices; nothing runs.

Of compilers for CPUs the programs, and so operations and collectives, are those of accelerators.
What they hold is an estimate, for which they are asked to run operations in an order that holds
little, as compilers for accelerators do.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.cost import Sent, StepCost, extrapolate
from penzai_shard.choosing.problem import Problem
from penzai_shard.choosing.shallow import cut_model
from penzai_shard.errors import CompilationError, ShardingError
from penzai_shard.errors import Problem as Mistake
from penzai_shard.inspection.attribution import Part
from penzai_shard.inspection.collectives import wire_bytes
from penzai_shard.inspection.compiling import make_compiled_step, read_standard_error
from penzai_shard.inspection.hlo import Instruction, Program
from penzai_shard.inspection.lowering import LoweredStep, lower_step
from penzai_shard.inspection.memory import make_memory_report
from penzai_shard.jax_internals import compiler

_FLAGS = {
    # Nothing of it runs: code is made as fast as it can be, by the older of two ways.
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    # In that order what is computed again must not be free to come early, nor may gradients wait
    # for each other to be summed together; and float16 must not be sent and held in float32.
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner,change-op-data-type",
}


def compile_candidates(
    problem: Problem, candidates: Sequence[Candidate], *, whole: bool = False
) -> list[StepCost | ShardingError]:
    """What candidates cost by their compiled steps, two of which are compiled at once.

    Args:
        problem: The step.
        candidates: Its layouts.
        whole: Whether a deep model is compiled with all of its blocks, not with one and with two.

    Returns:
        The cost of each candidate, or why it cannot be built or compiled.
    """
    cut = None if whole else cut_model(problem)
    models = [problem.model] if cut is None else [cut.one, cut.two]
    threads, results = ThreadPoolExecutor(2, "compiling"), list[StepCost | ShardingError]()
    with read_standard_error([]):
        try:
            started = [_start(problem, each, models, threads) for each in candidates]
            for steps in started:
                try:
                    if isinstance(steps, ShardingError):
                        raise steps
                    costs = [_read_cost(step, future) for step, future in steps]
                    results.append(costs[0] if cut is None else _extrapolate(*costs, cut.blocks))
                except ShardingError as error:
                    results.append(error)
        finally:
            # Whoever interrupts does not wait for what has not begun.
            threads.shutdown(cancel_futures=True)
    return results


def _start(
    problem: Problem, candidate: Candidate, models: Sequence[Any], threads: ThreadPoolExecutor
) -> list[tuple[LoweredStep, "Future[compiler.Compiled]"]] | ShardingError:
    started, mesh = [], candidate.mesh
    devices = compiler.simulated_devices(mesh.size)
    options = compiler.compile_options(mesh.size, overrides=_FLAGS)
    try:
        for model in models:
            step, state, inputs = problem.build(candidate, model=model)
            lowered = lower_step(step, (state,), inputs, "choose_layout")
            bytecode = compiler.write_bytecode(lowered.lowered, with_float16=True)
            future = threads.submit(compiler.compile_bytecode, bytecode, devices, options)
            started.append((lowered, future))
    except ShardingError as error:
        return error
    return started


def _read_cost(step: LoweredStep, future: "Future[compiler.Compiled]") -> StepCost:
    try:
        compiled = make_compiled_step(step, future.result(), "cpu", None, "")
    except jax.errors.JaxRuntimeError as error:
        problem = Mistake("", str(error))
        raise CompilationError("choose_layout: the compiler says:", [problem]) from error
    held = make_memory_report(compiled.step, compiled.figures, None)
    memory = {
        "parameters": held.parameters + held.constants + held.state_variables,
        "optimizer": held.optimizer_state,
        "inputs": held.inputs,
    }
    # Gradients, too, and what is gathered: a program does not say which is which.
    memory["activations"] = max(held.total - sum(memory.values()), 0)
    sent: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for one in compiled.collectives.collectives:
        for part in one.parts:
            # Compilers for CPUs write a reduce-scatter as an all-reduce and a slice.
            kind = "reduce-scatter" if part.keeps_slice else one.kind
            count = wire_bytes(kind, part.payload_bytes, one.group_size) * (one.times or 1)
            what, names = _read_kind(compiled.step, part)
            sent[what, names, one.mesh_axes or ()] += count
    lines = tuple(Sent(*reason, bytes=count) for reason, count in sent.items() if count)
    memory = {name: float(count) for name, count in memory.items()}
    return StepCost(float(_count_flops(compiled.program)), lines, memory)


def _read_kind(step: LoweredStep, part: Part) -> tuple[str, tuple[Any, ...]]:
    """What a collective moves, and its logical axes if it is of an array of the state."""
    start, _, path = part.moves.rpartition(" of ")
    array = next((x for x in step.arguments if x.path == path), None)
    if array is None:
        return ("optimizer" if part.phase == "optimizer" else "activation"), ()
    kinds = {"parameters": "gradient" if start else "parameter", "optimizer state": "optimizer"}
    what = "optimizer" if part.phase == "optimizer" else kinds.get(array.part, "activation")
    return what, tuple(array.names or ())


def _extrapolate(one: StepCost, two: StepCost, blocks: int) -> StepCost:
    """The cost of all blocks.

    Where there is less of a line with two blocks than with one, it has another owner, though all
    lines together send what they should: then lines are put together.
    """
    reasons: list[Callable[[Sent], tuple[Any, ...]]] = [
        lambda line: (line.what, line.names, line.mesh_axes),
        lambda line: (line.what, (), line.mesh_axes),
        lambda line: ("activation", (), line.mesh_axes),
    ]
    for reason in reasons:
        sums = collections.Counter[tuple[Any, ...]](), collections.Counter[tuple[Any, ...]]()
        for found, cost in zip(sums, (one, two), strict=True):
            for line in cost.sent:
                found[reason(line)] += line.bytes
        if all(sums[1][key] >= count for key, count in sums[0].items()):
            break
    one, two = (
        dataclasses.replace(cost, sent=tuple(Sent(*key, bytes=n) for key, n in found.items()))
        for cost, found in zip((one, two), sums, strict=True)
    )
    return extrapolate(one, two, blocks)


def _count_flops(program: Program) -> int:
    total = 0
    for one in program:
        if one.opcode in ("dot", "convolution"):
            left, right = (operand.results[0].shape for operand in program.operands(one)[:2])
            total += (
                2
                * one.results[0].size
                * _count_summed(one, left, right)
                * (program.times[one.computation][0] or 1)
            )
    return total


def _count_summed(one: Instruction, left: Sequence[int], right: Sequence[int]) -> float:
    """How many products are added up in each number that a product or convolution gives."""
    if one.opcode == "dot":
        dims = re.findall(r"\d+", one.attribute("lhs_contracting_dims") or "")
        return math.prod(left[int(dim)] for dim in dims)
    # Between the elements of a dilated image there is nothing to multiply.
    labels = re.split("_|->", one.attribute("dim_labels") or "")[1]
    dilation = re.search(r"lhs_dilate=([\dx]+)", one.attribute("window") or "")
    taken = math.prod(size for label, size in zip(labels, right, strict=True) if label != "o")
    return taken / math.prod(map(int, dilation[1].split("x"))) if dilation else taken
