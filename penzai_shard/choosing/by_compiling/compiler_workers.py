"""Several processes that compile programs at once, each of them many."""

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from jax.sharding import AbstractMesh

from penzai_shard.inspection.devices.absent_devices import CompiledElsewhere, CompilerProcess
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.library_apis.compiler_api import FOR_PRICES_ON_CPUS


class CompilerWorkers:
    """Processes that compile for some devices, started at once and ended by leaving the ``with``.

    Programs for simulated devices are compiled to be looked at, not to run well.

    Args:
        topology: The devices.
        count: How many processes.

    Raises:
        MissingExtraError: The compiler for the devices is not installed.
        MeshError: GPUs without a target configuration.
    """

    def __init__(self, topology: Topology, count: int) -> None:
        self._topology = topology
        self._is_simulated = topology.platform == "cpu"
        self._free: queue.SimpleQueue[CompilerProcess] = queue.SimpleQueue()
        self._all: list[CompilerProcess] = []
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compiling")
        self._is_open = True
        for _ in range(count):
            self._free.put(self._new_process())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        # Whoever waits for an answer gets an error once the process is gone.
        for process in self._all:
            process.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._all:
            process.close()

    def compiling(self, bytecode: bytes, mesh: AbstractMesh) -> "Future[CompiledElsewhere]":
        """Compiles a program as soon as a process is free.

        Args:
            bytecode: As ``bytecode_of`` gives it.
            mesh: Its mesh.

        Returns:
            What comes of it, and raises what ``CompilerProcess.compile`` does.
        """
        return self._threads.submit(self._compile, bytecode, mesh)

    def _compile(self, bytecode: bytes, mesh: AbstractMesh) -> CompiledElsewhere:
        process = self._free.get()
        try:
            options = FOR_PRICES_ON_CPUS if self._is_simulated else None
            return process.compile(bytecode, mesh, options)
        finally:
            if process.has_ended and self._is_open:
                # It fell over this program; there may be others that it would not.
                process = self._new_process()
            self._free.put(process)

    def _new_process(self) -> CompilerProcess:
        process = CompilerProcess(self._topology)
        self._all.append(process)
        return process
