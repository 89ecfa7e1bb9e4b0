"""The command over several processes: started here, or by somebody else."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence

import jax

from penzai_shard.errors import MeshError
from penzai_shard.processes import several_processes
from penzai_shard.processes.job import PROCESSES
from penzai_shard.processes.launching import run_processes

_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S+")


def is_started() -> bool:
    """Whether somebody has started this process as one of several, or JAX knows that it is one."""
    return PROCESSES in os.environ or jax.distributed.is_initialized()


def start_processes(command: Sequence[str], processes: int, devices: int | None) -> int:
    """Runs a command in several processes on this machine.

    Args:
        command: The program with its arguments; that of a ``.py`` file is Python.
        processes: How many.
        devices: How many CPU devices to simulate in all; None leaves devices to JAX.

    Returns:
        The exit status.

    Raises:
        MeshError: The devices cannot be divided among the processes.
    """
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    environment = {}
    if devices is not None:
        others = _COUNT_FLAG.sub("", os.environ.get("XLA_FLAGS", ""))
        count = f"--xla_force_host_platform_device_count={share(devices, processes)}"
        environment = {"XLA_FLAGS": f"{others} {count}".strip(), "JAX_PLATFORMS": "cpu"}
    return run_processes(command, processes, environment)


def share(devices: int, processes: int) -> int:
    """How many of some devices each process has.

    Raises:
        MeshError: They cannot be divided.

    >>> share(8, 2)
    4
    """
    if processes < 1:
        raise MeshError(f"--processes must be at least 1, not {processes}.")
    if devices < 1 or devices % processes:
        lower, upper = devices // processes * processes, -(-devices // processes) * processes
        fits = " or ".join(str(count) for count in (lower, upper) if count > 0)
        raise MeshError(
            f"{devices} simulated devices cannot be divided among {processes} processes. Give "
            f"--simulate-devices {fits or processes}, or another number of processes."
        )
    return devices // processes


@contextlib.contextmanager
def joined(
    coordinator: str | None, processes: int, process_id: int | None, devices: int
) -> Iterator[None]:
    """A block that is run by each process of a job; with one process nothing happens.

    Args:
        coordinator: Address and port of process 0; None if this process was told in another way.
        processes: How many processes there are.
        process_id: The number of this one.
        devices: How many CPU devices to simulate in all, where there are no others and nobody has
            said how many.
    """
    if processes == 1 and not is_started():
        yield
        return
    _keep_output_for_python()
    if coordinator is not None:
        if not _COUNT_FLAG.search(os.environ.get("XLA_FLAGS", "")):
            jax.config.update("jax_num_cpu_devices", share(devices, processes))
        with several_processes(coordinator, processes, process_id):
            yield
    else:
        with several_processes():
            yield


def _keep_output_for_python() -> None:
    """Sends what libraries write past Python to nowhere: Gloo reports each of its connections."""
    sys.stdout.flush()
    own = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding="utf-8", errors="replace")
