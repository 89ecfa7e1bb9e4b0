"""Joins and leaves a job of several processes, which end together.

JAX alone has a process that raised an error wait for the others at its end, while these wait for it
in their next collective operation. Here it tells them, and all end. Of a process that was killed
JAX hears no heartbeat any more, and ends the others.
"""

import atexit
import contextlib
import functools
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from penzai_shard.errors import Problem, ShardingError
from penzai_shard.jax_internals import messages

ENDED_BY_ANOTHER = 75
"""Exit status of a process that ends because another one has failed."""

_SECONDS_TO_ANSWER = 2.0
# Processes that fail in the same call report their own errors.
_SECONDS_TO_FAIL = 0.5

_jobs = itertools.count()
_at_end: list[Callable[[], object]] = []


@contextlib.contextmanager
def several_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = 30,
) -> Iterator[None]:
    """Makes this process one of several of a job, which end together.

    It is the outermost block of the program, as it comes before anything that touches devices. On
    SLURM, Open MPI, TPU pods and Kubernetes JAX finds out all arguments. Where nothing is given and
    JAX finds no cluster there is one process: that is printed, and nothing else is done.

    An error that leaves the block ends the whole job: the other processes print whose it was, and
    exit with status 75. If a process is killed, JAX ends the others, and prints which one it was.
    At the end of the block all wait for each other.

    Args:
        coordinator: Address and port of process 0, such as ``"10.0.0.1:1234"``.
        processes: How many processes the job has. With 1 nothing is done.
        process_id: The number of this one, from 0.
        heartbeat_seconds: After how long a process that is silent counts as killed.

    Raises:
        ShardingError: Arguments are missing or wrong, or processes give other counts.
        RuntimeError: From ``jax.distributed.initialize``: JAX has its devices already, or a port is
            in use. If two have the same number, or some do not come in five minutes, JAX aborts the
            program.

    >>> with several_processes(processes=1):
    ...     jax.process_count()
    1
    """
    given, has_begun = (coordinator, processes, process_id), jax.distributed.is_initialized()
    if given == (None, None, None) and not (has_begun or messages.is_cluster()):
        _say("this is the only process: JAX finds no cluster, and no coordinator is given.")
        processes = 1
    if processes == 1:
        yield
        return
    if not has_begun:
        _join(*given, heartbeat_seconds)
    job = _Job()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            job.fail(error)
            raise
        job.end()
        raise
    job.end()
    if not has_begun:
        jax.distributed.shutdown()


def _join(coordinator: str | None, count: int | None, me: int | None, heartbeat: int) -> None:
    """Joins the job, once all its processes have come."""
    # Printed first: where two have one number, or some do not come, JAX aborts without an error.
    _say(f"joins the job: coordinator={coordinator}, processes={count}, process_id={me}.")
    try:
        jax.distributed.initialize(coordinator, count, me, heartbeat_timeout_seconds=heartbeat)
        # A process that counts more of them than there are would wait for these with its devices.
        if count is not None and me is not None:
            messages.send(f"penzai_shard/count/{me}", str(count))
            counts = (messages.receive(f"penzai_shard/count/{i}", math.inf) for i in range(count))
            if other := next((text for text in counts if text != str(count)), None):
                raise ValueError(f"it has processes={count}, and another one processes={other}")
    except (ValueError, TypeError, IndexError) as error:
        problem = Problem("", str(error), "Give all the same processes=, and each its process_id=.")
        raise ShardingError(f"process {me} of {count} cannot join the job:", [problem]) from error


class _Job:
    """What this process says to the others when it ends, and hears from them."""

    def __init__(self) -> None:
        self._me, self._count = jax.process_index(), jax.process_count()
        self._is_ending = self._has_heard = False
        # A program may have several, one after the other or one in the other.
        self._topic = f"penzai_shard/job/{next(_jobs)}"
        self._listener = threading.Thread(target=self._listen, name=self._topic, daemon=True)
        self._listener.start()

    def end(self) -> None:
        """Waits until all have come to the end of their program."""
        for function in reversed(_at_end):
            function()
        messages.send(f"{self._topic}/done/{self._me}", "")
        for process in range(self._count):
            messages.receive(f"{self._topic}/done/{process}", math.inf)
        # A thread that waits in a call of JAX when Python ends aborts the program.
        self._is_ending = True
        messages.send(f"{self._topic}/failed/{self._me}", "")
        self._listener.join()

    def fail(self, error: BaseException) -> None:
        """Tells the others, and has this process exit without waiting for them."""
        self._is_ending = True
        what = " ".join(str(error).split())[:1000]
        text = f"process {self._me} of {self._count} failed: {type(error).__name__}: {what}"
        end = time.monotonic() + _SECONDS_TO_ANSWER
        for process in {*range(self._count)} - {self._me}:
            answer = None
            # Another process may have told it before; or the service is gone.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                messages.send(f"{self._topic}/failed/{process}", text)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                answer = messages.receive(f"{self._topic}/heard/{process}", end - time.monotonic())
            if answer is None and not self._has_heard:
                _say(f"process {process} of {self._count} is gone: it was killed, or is lost.")
        code = error.code if isinstance(error, SystemExit) else 1
        code = 130 if isinstance(error, KeyboardInterrupt) else code  # As Python has it.
        at_end(functools.partial(_exit, code if isinstance(code, int) else 1))
        if self._me == 0:
            # Without its service JAX would abort the others before they say why they end.
            at_end(functools.partial(time.sleep, 2 * _SECONDS_TO_FAIL))

    def _listen(self) -> None:
        # Where the service has gone, JAX ends this process.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            text = messages.receive(f"{self._topic}/failed/{self._me}", math.inf)
            self._has_heard = True
            messages.send(f"{self._topic}/heard/{self._me}", "")
        time.sleep(0 if self._is_ending else _SECONDS_TO_FAIL)
        if self._has_heard and not self._is_ending:
            _say(f"{text}. Process {self._me} ends too.")
            _exit(ENDED_BY_ANOTHER)


def at_end(function: Callable[[], object]) -> None:
    """Has a function called at the end of a job, and at that of the program, the last one first.

    Other processes and threads still answer then, unlike when ``atexit`` calls something.
    """
    _at_end.append(function)
    getattr(threading, "_register_atexit", atexit.register)(function)


def _say(text: str) -> None:
    print(f"penzai_shard: {text}", file=sys.stderr, flush=True)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
