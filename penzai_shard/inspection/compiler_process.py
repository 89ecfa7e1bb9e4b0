"""Compiles a program in another process, for devices that need not be there.

Compilers for TPUs and GPUs read their settings from the environment, and may end the process that
they are in; so the caller's JAX, devices and environment stay as they are. This module is both
sides: the child answers one request, and ends.
"""

import math
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import jax
from jax.experimental.topologies import get_topology_desc

from penzai_shard.errors import CompilationError, Problem
from penzai_shard.inspection.topologies import SLICES, Topology
from penzai_shard.jax_internals.compiler import Compiled, compile_bytecode, simulated_devices
from penzai_shard.meshes import AnyMesh

# Variables that ask for devices that are here, or for a share of them.
_PRESENT_DEVICES = re.compile(
    r"JAX_(NUM_CPU_DEVICES|PLATFORM_NAME)|(?!TPU_LIBRARY_PATH$)TPU_.*|CLOUD_TPU_.*|MEGASCALE_.*"
)
_FOR_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
# How much of what a process wrote is quoted when it ended without an answer.
_MOST_WRITTEN = 2000

# Two messages of libtpu 0.0.42, from its scheduler and from its allocator.
_FIGURE = r"([\d.]+)([KMGTP]?)i?B?"
_TOO_LARGE = (
    rf"total memory required for [\w ]+\({_FIGURE}\) exceeds available HBM \({_FIGURE}\)",
    rf"Ran out of memory in memory space hbm\. Used {_FIGURE} of {_FIGURE} hbm",
)


class TooLargeError(CompilationError):
    """A program needs more memory than a device has.

    Attributes:
        needed: What it needs on one device, in bytes, rounded by the compiler.
        limit: What programs can have, in bytes.
        device_kind: What the devices are.
    """

    needed: int
    limit: int
    device_kind: str


def compile_in_process(
    bytecode: bytes, mesh: AnyMesh | None, topology: Topology, options: bytes | None = None
) -> tuple[Compiled, str, str]:
    """Compiles a lowered program for the devices of a topology, in a new process.

    Args:
        bytecode: The program, as ``write_bytecode`` gives it.
        mesh: Its mesh, which has as many devices as the topology; None for one device.
        topology: The devices.
        options: The settings of JAX and XLA, as ``compile_options`` gives them.

    Returns:
        What the compiler made of it, what the devices are, as JAX names them, and what the compiler
        wrote.

    Raises:
        TooLargeError: The program does not fit.
        MeshError: The topology has another number of devices than the mesh.
        CompilationError: The compiler refuses the program, JAX cannot describe the devices or lay
            the mesh over them, or the process ended without an answer.
    """
    sizes = {} if mesh is None else {str(axis): size for axis, size in mesh.shape.items()}
    if sizes:
        topology.check_mesh(sizes)
    # The parent's answers are of this module, not of one that is called __main__.
    command = [sys.executable, "-W", "ignore", "-P", "-c", f"import {__name__} as m; m.main()"]
    request = pickle.dumps((bytecode, sizes, topology, options))
    done = subprocess.run(command, input=request, capture_output=True, env=_environment(topology))
    written = done.stderr.decode("utf-8", "replace")
    try:
        # In place of a program the message of an error, and no kind if there are no devices.
        compiled, kind = pickle.loads(done.stdout)
    except Exception:
        # It was killed, or something else has written where the answer is to be.
        what = f"it ended with status {done.returncode}"
        what += f", and last wrote: {written[-_MOST_WRITTEN:]}" if written else ""
        fix = "Status -9 is how Linux ends a process where memory is short."
        problem = Problem("", what, fix if done.returncode == -9 else "")
        raise CompilationError("the process that compiles failed:", [problem]) from None
    if isinstance(compiled, str):
        raise _make_error(compiled, kind, topology)
    return compiled, kind, written


def _environment(topology: Topology) -> dict[str, str]:
    """The caller's environment without what is about its devices."""
    kept = {k: v for k, v in os.environ.items() if not _PRESENT_DEVICES.fullmatch(k)}
    kept["JAX_PLATFORMS"] = "cpu"
    kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    # Else XLA's warnings, which are read, might be switched off.
    kept["TF_CPP_MIN_LOG_LEVEL"] = "1"
    return kept | _FOR_TPUS if topology.platform == "tpu" else kept


def _make_error(message: str, device_kind: str, topology: Topology) -> CompilationError:
    problem, figures = Problem("", message), read_needed_memory(message)
    if figures is None:
        return CompilationError(f"the program cannot be compiled for {topology.name!r}:", [problem])
    error = TooLargeError("the program does not fit:", [problem])
    error.needed, error.limit = figures
    error.device_kind = device_kind
    return error


def read_needed_memory(message: str) -> tuple[int, int] | None:
    """The bytes that a program needs and can have, as a compiler says that refuses it.

    >>> read_needed_memory("Ran out of memory in memory space hbm. Used 2K of 1.5K hbm.")
    (2048, 1536)
    >>> text = "the total memory required for HLO temporaries (4.00T) exceeds available HBM (2G)."
    >>> read_needed_memory(text)
    (4398046511104, 2147483648)
    >>> read_needed_memory("Out of memory while trying to allocate 1024 bytes.")
    """
    for pattern in _TOO_LARGE:
        if found := re.search(pattern, message):
            texts, units = found.groups()[::2], found.groups()[1::2]
            needed, limit = (
                round(float(text) * 1024 ** " KMGTP".index(unit or " "))
                for text, unit in zip(texts, units, strict=True)
            )
            return needed, limit
    return None


# The child


def _find_devices(topology: Topology) -> list[Any]:
    """Simulated devices, or descriptions of others as JAX has them in a real run."""
    if topology.platform == "cpu":
        return simulated_devices(topology.device_count)
    name, options = topology.name, dict[str, Any]()
    if topology.platform == "cuda":
        hosts, gpus = (1, *topology.shape)[-2:]
        name = "gpu"
        options = {"topology": f"1x{hosts}x{gpus}", "target_config": topology.target_config}
    else:
        options = dict(SLICES[topology.kind].options)
        if topology.shape in SLICES[topology.kind].cubes():
            options["wrap"] = [True, True, True]
        if math.prod(topology.shape) == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
    return list(get_topology_desc(name, topology.platform, **options).devices)


def main() -> None:
    """Reads a request, and writes an answer to it."""
    answers = os.fdopen(os.dup(1), "wb")
    # What compilers print is no part of the answer.
    os.dup2(2, 1)
    bytecode, sizes, topology, options = pickle.load(sys.stdin.buffer)
    kind = ""
    try:
        devices = _find_devices(topology)
        kind = devices[0].device_kind
        # In the order in which a mesh of all of them has them in a real run.
        mesh = jax.make_mesh((*sizes.values(),), (*sizes,), devices=devices) if sizes else None
        devices = devices[:1] if mesh is None else [*mesh.devices.flat]
        answer: Any = compile_bytecode(bytecode, devices, options)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    pickle.dump((answer, kind), answers)
    answers.close()
