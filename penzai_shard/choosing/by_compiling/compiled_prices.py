"""Candidates priced by their compiled steps, for simulated devices or for the hardware itself."""

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeAlias

from penzai_shard.choosing.by_compiling.compiled_costs import (
    cost_of,
    extrapolated,
    in_leaner_order,
    memory_of,
)
from penzai_shard.choosing.by_compiling.compiler_workers import CompilerWorkers
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.shallow_models import Shallow, shallow
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import ShardingError
from penzai_shard.inspection.ahead.compile_ahead import memory_of_too_large
from penzai_shard.inspection.devices.absent_devices import CompiledElsewhere, TooLargeError
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.library_apis.c_library import give_back_free_memory
from penzai_shard.library_apis.compiler_api import bytecode_of
from penzai_shard.meshes import mesh_shape_of

# As many programs wait for each process, so that none waits for a program.
_WAITING = 2

_Compiling: TypeAlias = tuple[LoweredStep, "Future[CompiledElsewhere]"]


class CompiledPrices:
    """What candidates cost by their compiled steps; a context manager, which holds processes.

    Steps are lowered here for abstract meshes, and compiled in processes of their own for as many
    simulated CPU devices, or for hardware that is not there. Of a deep model with equal blocks the
    steps with one and with two of them are compiled, and the rest follows; see ``shallow``. Blocks
    that run in a loop are compiled as they are.

    For simulated devices the programs have float16 in the place of bfloat16, which compilers for
    CPUs would compute, send and hold in float32. Memory for temporaries is an estimate of what the
    hardware needs: what the compiler for CPUs says of a program of all blocks. From one block to
    two its order of instructions may add what others hold one block after the other, such as
    gathered parameters; there it is what is there at once in the best order that is known, that
    of the compiler or one by what is in memory. What compilers for the hardware fuse otherwise,
    such as the scores of attention, is in it as compilers for CPUs have it.

    Args:
        problem: The step that a layout is looked for.
        topology: The devices to compile for, as ``compile_ahead`` takes them; simulated CPU devices
            by default.
        workers: How many processes compile at once.
        cut: The step with fewer blocks, if ``shallow`` was asked for it already.

    Raises:
        MissingExtraError: The compiler for the devices is not installed.
        MeshError: There is no such topology.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        topology: str | Topology | None = None,
        *,
        workers: int = 2,
        cut: Shallow | None = None,
    ) -> None:
        self._topology = Topology(topology) if isinstance(topology, str) else topology
        self._workers = workers
        self._running: dict[str, CompilerWorkers] = {}
        self._exits = contextlib.ExitStack()
        self._cut = shallow(problem) if cut is None else cut
        self._whole = (problem,)
        self._problems = self._whole if self._cut.is_loop else self._cut.problems
        if self._topology is not None:
            self._workers_of(self._topology)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()
        self._running.clear()

    @property
    def are_extrapolated(self) -> bool:
        """Whether costs follow from those of fewer blocks."""
        return len(self._problems) > 1

    def costs(
        self, candidates: Iterable[Candidate], *, closely: bool = False, whole: bool = False
    ) -> Iterator[StepCost | ShardingError]:
        """What each candidate costs, in their order.

        Args:
            candidates: What to price; they are taken as there is room to compile.
            closely: Whether of a deep model two blocks and three are compiled, in place of one and
                two: from two on, each further one adds what the one before did.
            whole: Whether all blocks are compiled, in place of one and two; of many blocks that
                takes as much longer.

        Yields:
            The cost; or the error, of a candidate that cannot be laid out or compiled so. One that
            does not fit into the devices' memory costs that memory, and nothing else is known.
        """
        problems, blocks = (self._whole if whole else self._problems), self._cut.blocks
        if closely and self.are_extrapolated:
            assert self._cut.deeper is not None
            problems, blocks = (problems[1], self._cut.deeper), blocks - 1
        left = iter(candidates)
        pending: collections.deque[list[_Compiling] | ShardingError] = collections.deque()
        try:
            while True:
                while self._has_room(pending):
                    candidate = next(left, None)
                    if candidate is None:
                        break
                    pending.append(self._started(candidate, problems))
                if not pending:
                    return
                cost = self._finished(pending.popleft(), blocks)
                give_back_free_memory()
                yield cost
        finally:
            for started in pending:
                for _, future in started if isinstance(started, list) else ():
                    future.cancel()

    def _has_room(self, pending: Iterable[list[_Compiling] | ShardingError]) -> bool:
        started = (one for one in pending if isinstance(one, list))
        futures = [future for _, future in itertools.chain.from_iterable(started)]
        return sum(not future.done() for future in futures) < _WAITING * self._workers

    def _started(
        self, candidate: Candidate, problems: Sequence[TrainingProblem]
    ) -> list[_Compiling] | ShardingError:
        mesh = candidate.mesh
        topology = self._topology or Topology(f"cpu:{mesh.size}")
        workers = self._workers_of(topology)
        started: list[_Compiling] = []
        try:
            topology.refuse_mesh(mesh_shape_of(mesh))
            for problem in problems:
                step, state, inputs = problem.built(
                    candidate.layout, mesh, candidate.microbatches, candidate.on_indivisible
                )
                lowered = lower_step(step, (state,), inputs, platform=topology.platform)
                is_simulated = topology.platform == "cpu"
                bytecode = bytecode_of(lowered.lowered, with_float16=is_simulated)
                started.append((lowered, workers.compiling(bytecode, mesh)))
        except ShardingError as error:
            return error
        return started

    def _workers_of(self, topology: Topology) -> CompilerWorkers:
        if topology.name not in self._running:
            workers = CompilerWorkers(topology, self._workers)
            self._running[topology.name] = self._exits.enter_context(workers)
        return self._running[topology.name]

    def _finished(
        self, started: list[_Compiling] | ShardingError, blocks: int
    ) -> StepCost | ShardingError:
        if isinstance(started, ShardingError):
            return started
        # Of each program the cost in the compiler's order of instructions and in a leaner one.
        found: list[tuple[StepCost, StepCost]] = []
        is_too_large = False
        for lowered, future in started:
            try:
                elsewhere = future.result()
            except TooLargeError as error:
                is_too_large = True
                cost = StepCost(0.0, (), memory_of(memory_of_too_large(lowered, error)))
                found.append((cost, cost))
            except ShardingError as error:
                return error
            else:
                program = _program(lowered, elsewhere)
                cost = cost_of(program)
                is_deep = self.are_extrapolated
                found.append((cost, in_leaner_order(cost, program) if is_deep else cost))
        orders = [list(costs) for costs in zip(*found, strict=True)]
        return min(
            (_of_all_blocks(costs, blocks, is_too_large) for costs in orders),
            key=lambda cost: cost.memory_bytes,
        )


def _of_all_blocks(found: list[StepCost], blocks: int, is_too_large: bool) -> StepCost:
    if is_too_large:
        found = [StepCost(0.0, (), cost.memory) for cost in found]
    if len(found) == 1:
        return found[0]
    return extrapolated(found[0], found[1], blocks)


def _program(lowered: LoweredStep, elsewhere: CompiledElsewhere) -> StepProgram:
    return StepProgram.of(
        lowered, elsewhere.compiled, elsewhere.device_kind, slice_of=elsewhere.slice_of
    )
