"""Being one of several processes of a job, from its beginning to a clean or an unclean end.

``jax.distributed`` alone lets a process that raises an error wait at the end for all others, up to
five minutes, while these wait for it in their next collective operation. Here it tells them, and
all end at once. A process that is killed cannot tell; the others are ended by
``jax.distributed`` when it has not been heard for a while, or by whoever started them.
"""

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator

import jax

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.library_apis.jax_api import receive_message, send_message

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
PROCESSES = "PENZAI_SHARD_PROCESSES"
PROCESS_ID = "PENZAI_SHARD_PROCESS_ID"
LAUNCHER = "PENZAI_SHARD_LAUNCHER"
"""What a process that starts others says to them through the environment."""

HEARTBEAT_SECONDS = 30

ENDED_BY_ANOTHER = 75
"""Exit status of a process that ends because another one failed."""

_TOPIC = "penzai_shard/job"
# Process 0 carries the messages, so it is the last one to end.
_SECONDS_TO_READ = 0.5
_SECONDS_OF_THE_FIRST = 2.0


@contextlib.contextmanager
def several_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> Iterator[None]:
    """Makes this process one of several of a job, which end together.

    It calls ``jax.distributed.initialize``, unless that was done, so it comes before all else that
    touches devices. An error that leaves the block ends the whole job: every other process says
    which one failed and with what, and exits with status 75. A process that is killed ends the
    others after ``heartbeat_seconds``. At the end of the block all wait for each other.

    Args:
        coordinator: Address and port of process 0, such as ``"10.0.0.1:1234"``. By default what
            ``penzai-shard run`` says, or what JAX finds out on clusters that it knows.
        processes: How many processes the job has. With 1 nothing is done.
        process_id: The number of this one, from 0.
        heartbeat_seconds: How long a process may be silent before it counts as dead.

    Raises:
        ShardingError: JAX has its devices already, process 0 cannot be reached, or the port is in
            use.
        RuleTypeError: Nobody says how many processes there are.

    >>> with several_processes(processes=1):
    ...     jax.process_count()
    1
    """
    told = os.environ.get(PROCESSES), os.environ.get(PROCESS_ID)
    if processes is None and coordinator is None and all(told):
        processes, process_id = map(int, filter(None, told))
        coordinator = os.environ.get(COORDINATOR)
    if processes == 1:
        yield
        return
    starts = not jax.distributed.is_initialized()
    if starts:
        _initialize(coordinator, processes, process_id, heartbeat_seconds)
    if jax.process_count() == 1:
        yield
        return
    job = _Job()
    try:
        yield
    except BaseException as error:
        # To leave with sys.exit() is to be done.
        if isinstance(error, SystemExit) and not error.code:
            job.end(starts)
        else:
            job.fail(error)
        raise
    job.end(starts)


def _initialize(
    coordinator: str | None, processes: int | None, process_id: int | None, heartbeat: int
) -> None:
    # On loopback nobody else should reach the service.
    is_local = coordinator is not None and coordinator.startswith(("127.", "localhost:"))
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat,
            coordinator_bind_address=coordinator if is_local else None,
        )
    except ValueError as error:
        raise RuleTypeError(
            f"this process was not started as one of several ({error}) Start it so: penzai-shard "
            "run --processes 2 script.py; or say which one it is: several_processes("
            "'10.0.0.1:1234', processes=2, process_id=0); or that it is alone: processes=1."
        ) from error
    except RuntimeError as error:
        if "must be called before" in str(error):
            raise ShardingError(
                "several_processes comes too late: JAX has its devices already. Enter it before "
                "anything that touches them, such as jax.devices(), jnp.ones() or make_mesh()."
            ) from error
        what = (
            f"cannot serve at {coordinator}: the port may be in use. Choose another one"
            if "RPC server" in str(error)
            else f"cannot reach process 0 at {coordinator}. Start all {processes} processes, with "
            "the same address"
        )
        raise ShardingError(f"process {process_id} {what}. JAX says: {error}") from error


class _Job:
    """This process's part in ending a job: a thread that hears of failures, and word of its own."""

    def __init__(self) -> None:
        self.me, self.count = jax.process_index(), jax.process_count()
        self.has_failed = self.is_done = False
        self._launcher = int(os.environ.get(LAUNCHER, 0))
        self._ears = threading.Thread(target=self._listen, name="penzai-shard-job", daemon=True)
        self._ears.start()

    def end(self, shut_down: bool) -> None:
        """Waits for all others, and leaves the job."""
        if self.me == 0:
            for other in range(1, self.count):
                receive_message(f"{_TOPIC}/done/{other}", math.inf)
            send_message(f"{_TOPIC}/all done", "")
        else:
            send_message(f"{_TOPIC}/done/{self.me}", "")
            receive_message(f"{_TOPIC}/all done", math.inf)
        self.is_done = True
        self._ears.join()
        if shut_down:
            jax.distributed.shutdown()

    def fail(self, error: BaseException) -> None:
        """Tells the others, and has this process exit without waiting for them."""
        self.has_failed = True
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {' '.join(line.strip() for line in lines[:4])}"[:1000]
        for other in {*range(self.count)} - {self.me}:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                send_message(f"{_TOPIC}/failed/{other}", failure_text(self.me, text))
        code = error.code if isinstance(error, SystemExit) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
        # Before what jax.distributed has registered, which would wait for all others.
        atexit.register(self._exit, code if isinstance(code, int) else 1)

    def _exit(self, code: int) -> None:
        time.sleep(_SECONDS_OF_THE_FIRST if self.me == 0 else 0)
        _exit_now(code)

    def _listen(self) -> None:
        while not self.is_done:
            if self._launcher and os.getppid() != self._launcher:
                _say(f"process {self.me} of {self.count} ends: whoever started it is gone.")
                _exit_now(ENDED_BY_ANOTHER)
            try:
                message = receive_message(f"{_TOPIC}/failed/{self.me}", 1.0)
            except jax.errors.JaxRuntimeError:
                return  # The job is over.
            if message is None:
                continue
            # This process may be failing too, with a message of its own.
            time.sleep(_SECONDS_OF_THE_FIRST if self.me == 0 else _SECONDS_TO_READ)
            if not (self.has_failed or self.is_done):
                _say(f"{message} Process {self.me} of {self.count} ends too.")
                _exit_now(ENDED_BY_ANOTHER)
            return


def failure_text(process: int, text: str) -> str:
    """What other processes say when one has failed.

    >>> failure_text(1, "ValueError: no.")
    'penzai-shard: process 1 failed: ValueError: no.'
    """
    return f"penzai-shard: process {process} failed: {text}" + ("" if text.endswith(".") else ".")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
