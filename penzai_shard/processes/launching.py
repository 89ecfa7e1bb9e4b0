"""Starting the processes of a job on this machine, and ending all of them if one of them ends.

Like ``mpirun`` and ``torchrun``, for processes that talk on loopback. Standard library alone.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from penzai_shard.processes.job import (
    COORDINATOR,
    ENDED_BY_ANOTHER,
    LAUNCHER,
    PROCESS_ID,
    PROCESSES,
)

# A process that failed tells the others, which then end by themselves.
_SECONDS_TO_END = 20.0
# JAX takes notice of SIGTERM without ending the process, so that this helps where Python runs.
_SECONDS_TO_STOP = 2.0
# How those end that lost another process: by themselves, when told so, and aborted by JAX.
_CONSEQUENCES = (ENDED_BY_ANOTHER, -signal.SIGABRT)
_SECONDS_TO_SEE_THE_CAUSE = 10.0
_LINES_SHOWN = 40


def run_processes(
    command: Sequence[str], processes: int, environment: Mapping[str, str] | None = None
) -> int:
    """Runs a command in several processes, each of which is told which one it is.

    What process 0 prints is shown; what another prints only if that one fails. If one of them ends
    before its time, the others are ended. Ctrl-C and SIGTERM are passed on to all, once; a second
    one kills them.

    Args:
        command: Program and arguments.
        processes: How many.
        environment: Variables to set for them.

    Returns:
        0, or the exit status of the process that failed first; as of a shell, 128 and the number
        of the signal that ended it.

    >>> run_processes([sys.executable, "-c", ""], 2)
    0
    """
    with contextlib.ExitStack() as stack:
        logs: list[Any] = [None]
        logs += [stack.enter_context(tempfile.TemporaryFile()) for _ in range(processes - 1)]
        port = stack.enter_context(reserved_port())
        children = _Children()
        stack.callback(children.kill)
        with children.passing_on_signals():
            children.start(command, logs, _job_environment(port, processes, environment or {}))
            failed = children.first_failure()
            if failed is None:
                return 0
            status = children.status(failed)
            if not children.is_stopped:
                kind = _ended_text(status)
                _say(f"process {failed} of {processes} {kind}. Ending the others.")
            children.end_all(_SECONDS_TO_END if status > 0 else 0)
        if failed and not children.is_stopped:
            _say(f"what process {failed} printed last:\n{_tail(logs[failed])}")
        return status if status > 0 else 128 - status


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port on loopback, where the first process of a job can serve.

    A process needs seconds until it serves there. Meanwhile nobody else is given the port, since it
    is bound here; the process gets it all the same, as gRPC shares its ports (``SO_REUSEPORT``).

    >>> with reserved_port() as port:
    ...     0 < port < 65536
    True
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def _job_environment(port: int, processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        COORDINATOR: f"127.0.0.1:{port}",
        PROCESSES: str(processes),
        LAUNCHER: str(os.getpid()),
        **environment,
    }


class _Children:
    def __init__(self) -> None:
        self.is_stopped = self._are_started = False
        self._children: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], logs: Sequence[Any], environment: Mapping[str, str]
    ) -> None:
        for number, log in enumerate(logs):
            child = subprocess.Popen(
                command,
                env={**environment, PROCESS_ID: str(number)},
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                # Signals of the terminal reach them through this process alone, and so once.
                start_new_session=True,
            )
            self._children.append(child)
        self._are_started = True
        if self.is_stopped:
            # Told to stop before there were all of them.
            self._signal(signal.SIGTERM)

    def status(self, number: int) -> int:
        return int(self._children[number].wait())

    def first_failure(self) -> int | None:
        """The process that ended first without success, or None once all are done."""
        seen_at = math.inf
        while True:
            statuses = [child.poll() for child in self._children]
            failed = [number for number, status in enumerate(statuses) if status]
            causes = [number for number in failed if statuses[number] not in _CONSEQUENCES]
            if causes or (failed and time.monotonic() > seen_at + _SECONDS_TO_SEE_THE_CAUSE):
                return (causes or failed)[0]
            if all(status == 0 for status in statuses):
                return None
            if failed:
                seen_at = min(seen_at, time.monotonic())
            time.sleep(0.05)

    def end_all(self, patience: float) -> None:
        """Ends what has not ended by itself after some seconds, gently and then for good."""
        if not self._wait(patience):
            self._signal(signal.SIGTERM)
            self._wait(_SECONDS_TO_STOP)
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        for child in self._children:
            child.wait()

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _wait(self, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while any(child.poll() is None for child in self._children):
            if time.monotonic() > ends:
                return False
            time.sleep(0.05)
        return True

    @contextlib.contextmanager
    def passing_on_signals(self) -> Iterator[None]:
        def pass_on(number: int, frame: FrameType | None) -> None:
            if self._are_started:
                self._signal(signal.SIGKILL if self.is_stopped else number)
            self.is_stopped = True

        before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ended_text(status: int) -> str:
    if status > 0:
        return f"failed with exit status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [
        line
        for line in log.read().decode(errors="replace").splitlines()
        if not line.startswith("[Gloo]")
    ]
    return "\n".join(f"  {line}" for line in lines[-_LINES_SHOWN:]) or "  nothing"


def _say(text: str) -> None:
    print(f"penzai-shard: {text}", file=sys.stderr, flush=True)
