"""Programs compiled in a process of their own, for devices that are not there."""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, BinaryIO, Self

from penzai_shard.errors import CompilationError
from penzai_shard.library_apis import compiler_process
from penzai_shard.library_apis.compiler_api import (
    Compiled,
    ExecutableMemory,
    module_from_bytes,
    options_of_this_process,
)
from penzai_shard.library_apis.compiler_process import Answer, Request
from penzai_shard.meshes import AnyMesh, mesh_text

_SIMULATED = "xla_force_host_platform_device_count"
# XLA numbers the devices of a process so that this many have a number.
MOST_SIMULATED_DEVICES = 2048
# So many lines of what a process wrote before it ended without an answer.
_LAST_LINES = 15


@dataclasses.dataclass(frozen=True)
class CompiledElsewhere:
    """What a process made of a program.

    Attributes:
        compiled: The program.
        device_kind: What it is for.
        seconds: How long the compiler took.
    """

    compiled: Compiled
    device_kind: str
    seconds: float


class CompilerProcess:
    """A process with devices of its own, which compiles one program for them and ends.

    It starts at once, so that it is ready when the program is. Leaving the ``with`` block ends it,
    and it ends by itself when this process does. The caller's JAX, devices and environment stay as
    they are.
    """

    def __init__(self, request: Request, environment: Mapping[str, str]) -> None:
        self._errors: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(pathlib.Path(compiler_process.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
        )
        self._send(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def compile(self, bytecode: bytes) -> CompiledElsewhere:
        """Compiles a program, once.

        Args:
            bytecode: As ``bytecode_of`` gives it.

        Raises:
            CompilationError: The compiler refuses the program, or the process ended without an
                answer.
        """
        answer = self._answer(bytecode)
        if "failed" in answer:
            raise CompilationError(f"the program cannot be compiled: {answer['message']}")
        memory = ExecutableMemory(**answer["memory"])
        compiled = Compiled(module_from_bytes(answer["module"]), memory)
        return CompiledElsewhere(compiled, answer["device_kind"], answer["seconds"])

    def _answer(self, bytecode: bytes) -> Answer:
        self._send(bytecode)
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


def simulated_devices(mesh: AnyMesh) -> CompilerProcess:
    """A process with as many simulated CPU devices as a mesh has.

    Raises:
        CompilationError: They are more than a process can have.
    """
    if mesh.size > MOST_SIMULATED_DEVICES:
        raise CompilationError(
            f"the mesh ({mesh_text(mesh)}) has {mesh.size:,} devices, and a process can simulate "
            f"{MOST_SIMULATED_DEVICES:,} at most. Make the mesh smaller, or compile for TPUs: "
            'compile_ahead(..., topology="v5p:16x16x16").'
        )
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if _SIMULATED not in flag]
    flags.append(f"--{_SIMULATED}={mesh.size}")
    environment = child_environment() | {"XLA_FLAGS": " ".join(flags)}
    return CompilerProcess(request_for(mesh, "cpu", "cpu"), environment)


def request_for(mesh: AnyMesh, platform: Any, topology: str, **options: Any) -> Request:
    """A request for the devices of a topology under a mesh."""
    return {
        "search_path": list(sys.path),
        "platform": platform,
        "topology": topology,
        "topology_options": options,
        "mesh_shape": {str(name): size for name, size in mesh.shape.items()},
        "dcn_shape": (1,) * len(mesh.shape),
        "options": options_of_this_process(mesh.size),
    }


def child_environment() -> dict[str, str]:
    """The caller's environment without what asks for its devices."""
    left_out = {"JAX_NUM_CPU_DEVICES", "JAX_PLATFORM_NAME", "JAX_ENABLE_COMPILATION_CACHE"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | {"JAX_PLATFORMS": "cpu"}
