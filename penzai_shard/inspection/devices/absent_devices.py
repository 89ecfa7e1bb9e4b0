"""Programs compiled in a process of their own, for devices that are not there."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, BinaryIO, Self

from penzai_shard.errors import CompilationError, MeshError, MissingExtraError, require_installed
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.library_apis import compiler_process
from penzai_shard.library_apis.compiler_api import (
    Compiled,
    ExecutableMemory,
    module_from_bytes,
    options_of_this_process,
)
from penzai_shard.library_apis.compiler_process import Answer, DevicesWanted, Program
from penzai_shard.meshes import AnyMesh, mesh_text

_SIMULATED = "xla_force_host_platform_device_count"
# So many lines of what a process wrote before it ended without an answer.
_LAST_LINES = 15
# What asks for devices that are there, or for others' share of them.
_OF_PRESENT_DEVICES = re.compile(
    r"JAX_(NUM_CPU_DEVICES|PLATFORM_NAME)|(?!TPU_LIBRARY_PATH$)TPU_.*|CLOUD_TPU_.*|MEGASCALE_.*"
)
_FOR_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_FIGURE = r"([\d.]+)([KMGTP]?)i?B?"
_TOO_LARGE = [
    re.compile(
        rf"total memory required for [\w ]+\({_FIGURE}\) exceeds available HBM \({_FIGURE}\)"
    ),
    re.compile(rf"Ran out of memory in memory space hbm\. Used {_FIGURE} of {_FIGURE} hbm"),
]


class TooLargeError(CompilationError):
    """A program needs more memory than the devices have.

    Attributes:
        needed: What it needs on one device, in bytes.
        limit: What programs can have of one device's memory, in bytes.
        device_kind: What the devices are.
    """

    def __init__(self, message: str, needed: int, limit: int, device_kind: str) -> None:
        super().__init__(message)
        self.needed, self.limit, self.device_kind = needed, limit, device_kind


@dataclasses.dataclass(frozen=True)
class CompiledElsewhere:
    """What a process made of a program.

    Attributes:
        compiled: The program.
        device_kind: What it is for.
        slice_of: Which TPU slice each device of the mesh is of, if there are several.
        seconds: How long the compiler took.
    """

    compiled: Compiled
    device_kind: str
    slice_of: tuple[int, ...] | None
    seconds: float


class CompilerProcess:
    """A process that compiles programs for devices that need not be there, one after the other.

    It starts at once, so that it is ready when the first program is. Leaving the ``with`` block
    ends it, and it ends by itself when this process does. The caller's JAX, devices and environment
    stay as they are.

    Args:
        topology: The devices.

    Raises:
        MissingExtraError: The compiler for them is not installed.
        MeshError: GPUs without a target configuration.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.compiler = compiler_of(topology)
        name, options = topology.request()
        wanted: DevicesWanted = {
            "search_path": list(sys.path),
            "platform": topology.platform,
            "topology": name,
            "topology_options": options,
        }
        self._errors: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(pathlib.Path(compiler_process.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(topology),
        )
        self._send(wanted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def end(self) -> None:
        """Ends the process; whoever waits for an answer of it gets an error."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the process and closes what it was asked and answered through."""
        self.end()
        self._errors.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def compile(
        self,
        bytecode: bytes,
        mesh: AnyMesh | None,
        options: Mapping[str, bool | int | str] | None = None,
    ) -> CompiledElsewhere:
        """Compiles a program.

        Args:
            bytecode: As ``bytecode_of`` gives it.
            mesh: Its mesh, which has as many devices as the topology; None for one device.
            options: What else is asked of the compiler than what JAX' settings and ``XLA_FLAGS``
                ask here.

        Raises:
            TooLargeError: It does not fit.
            MeshError: JAX cannot lay the mesh over the devices.
            CompilationError: The compiler refuses the program, or the process ended without an
                answer.
        """
        mesh_shape = {} if mesh is None else {str(name): n for name, n in mesh.shape.items()}
        program: Program = {
            "bytecode": bytecode,
            "mesh_shape": mesh_shape,
            "dcn_shape": self.topology.slices_of_axes(mesh_shape) if mesh_shape else (),
            "options": options_of_this_process(1 if mesh is None else mesh.size, options),
        }
        self._send(program)
        answer = self._answer()
        if "failed" in answer:
            raise self._failure(answer, mesh_shape)
        memory = ExecutableMemory(**answer["memory"])
        compiled = Compiled(module_from_bytes(answer["module"]), memory)
        kind, slice_of = answer["device_kind"], answer["slice_of"]
        return CompiledElsewhere(compiled, kind, slice_of, answer["seconds"])

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, so that it compiles nothing any more."""
        return self._process.poll() is not None

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        try:
            answer: Answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        return answer

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        # A process that ended has answered already; if not, that is reported where it is read.
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def _failure(self, answer: Answer, mesh_shape: dict[str, int]) -> Exception:
        message, name = answer["message"], self.topology.name
        if answer["failed"] == "mesh":
            return MeshError(
                f"JAX cannot lay mesh ({mesh_text(mesh_shape)}) over topology {name!r}, nor could "
                f"it where these devices are: {message}"
            )
        if answer["failed"] == "devices":
            return CompilationError(
                f"{self.compiler} cannot describe the devices of topology {name!r}: {message}"
            )
        if found := memory_figures(message):
            return TooLargeError(
                f"the program does not fit: {message}", *found, answer["device_kind"]
            )
        return CompilationError(f"{self.compiler} cannot compile the program: {message}")

    def _ended(self) -> CompilationError:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").splitlines()[-_LAST_LINES:]
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        return CompilationError(
            f"the process that compiles ended {how}, without an answer. "
            + ("Signal 9 is what Linux sends where memory is short. " if code == -9 else "")
            + ("The last that it wrote:" if lines else "It wrote nothing."),
            lines,
        )


def memory_figures(message: str) -> tuple[int, int] | None:
    """How much memory a program needs and has on one device, by a compiler that refused it.

    Args:
        message: What the compiler said.

    Returns:
        Both in bytes; None if the message is about something else.

    >>> memory_figures(
    ...     "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    ...     "temporaries (196.00G) exceeds available HBM (15.75G)."
    ... )
    (210453397504, 16911433728)
    """
    for pattern in _TOO_LARGE:
        if found := pattern.search(message):
            needed, needed_unit, limit, limit_unit = found.groups()
            return (
                round(float(needed) * _UNITS[needed_unit]),
                round(float(limit) * _UNITS[limit_unit]),
            )
    return None


def compiler_of(topology: Topology) -> str:
    """The compiler for some devices with its version, such as ``"libtpu 0.0.42.1"``.

    Raises:
        MissingExtraError: It is not installed; the message says how to install it.
    """
    if topology.platform == "cpu":
        package = "jaxlib"
    elif topology.platform == "tpu":
        require_installed("libtpu", "tpu")
        package = "libtpu"
    else:
        package = _installed_gpu_plugin()
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package  # Put there by hand.


def version_note(compiler: str) -> str | None:
    """What to say of a compiler for TPUs that belongs to another version of JAX; None of others.

    Args:
        compiler: As ``compiler_of`` gives it.
    """
    package, _, version = compiler.partition(" ")
    jax_version = importlib.metadata.version("jax")
    for line in importlib.metadata.requires("jax") or ():
        found = re.match(rf"{package}==([\d.]+)\*", line)
        if found and not f"{version}.".startswith(found[1]):
            return (
                f"{compiler} belongs to another version of JAX than {jax_version}, which comes "
                f"with {package} {found[1]}*: a run with that one may differ"
            )
    return None


def _installed_gpu_plugin() -> str:
    with contextlib.suppress(ModuleNotFoundError):
        for version in ("13", "12"):
            if importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None:
                return f"jax-cuda{version}-pjrt"
    jax_version = importlib.metadata.version("jax")
    raise MissingExtraError(
        "compiling for GPUs needs JAX' plugin for CUDA, which is not installed. Its compiler needs "
        "neither a GPU nor the rest of CUDA: pip install --no-deps "
        f"jax-cuda12-plugin=={jax_version} jax-cuda12-pjrt=={jax_version}"
    )


def _environment(topology: Topology) -> dict[str, str]:
    """The caller's environment without what is about its devices."""
    kept = {k: v for k, v in os.environ.items() if not _OF_PRESENT_DEVICES.fullmatch(k)}
    flags = [flag for flag in kept.get("XLA_FLAGS", "").split() if _SIMULATED not in flag]
    if topology.platform == "cpu":
        flags.append(f"--{_SIMULATED}={topology.device_count}")
    if topology.platform == "tpu":
        kept |= _FOR_TPUS
    return kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
