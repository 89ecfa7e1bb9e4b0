"""Being one of several processes of a job, from its beginning to a clean or an unclean end.

``jax.distributed`` alone lets a process that raises an error wait at the end for all others, up to
five minutes, while these wait for it in their next collective operation. Here it tells them, and
all end at once. A process that is killed cannot tell, but its connections are closed: see
``connections``. A job that was begun with ``jax.distributed.initialize`` alone is one from the
first call on in which its processes agree on something.
"""

import atexit
import contextlib
import linecache
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import jax

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.library_apis.jax_api import (
    coordinator_host,
    look_for_message,
    receive_message,
    send_message,
)
from penzai_shard.library_apis.python_api import delay_aborts
from penzai_shard.library_apis.treescope_api import show_own_parts
from penzai_shard.processes.connections import Connections

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
PROCESSES = "PENZAI_SHARD_PROCESSES"
PROCESS_ID = "PENZAI_SHARD_PROCESS_ID"
LAUNCHER = "PENZAI_SHARD_LAUNCHER"
"""What a process that starts others says to them through the environment."""

HEARTBEAT_SECONDS = 30

PATIENCE_SECONDS = 20.0
"""How long those that save or restore wait for one that does not come, if nothing else is said."""

ENDED_BY_ANOTHER = 75
"""Exit status of a process that ends because another one failed."""

_TOPIC = "penzai_shard/job"
# Process 0 carries the messages, so it is the last one to end.
_SECONDS_TO_READ = 0.5
_SECONDS_OF_THE_FIRST = 2.0
_SECONDS_TO_HEAR = 1.0
_SECONDS_TO_SAY_WHERE = 3.0
_SECONDS_AT_THE_END = 300.0
_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(threading.__file__)) + os.sep,
    "<",
)


@contextlib.contextmanager
def several_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Iterator[None]:
    """Makes this process one of several of a job, which end together.

    It calls ``jax.distributed.initialize``, unless that was done, so it comes before all else that
    touches devices. An error that leaves the block ends the whole job: every other process says
    which one failed and with what, and exits with status 75; so does one that is killed, which the
    others say. At the end of the block all wait for each other.

    Args:
        coordinator: Address and port of process 0, such as ``"10.0.0.1:1234"``. By default what
            ``penzai-shard run`` says, or what JAX finds out on clusters that it knows.
        processes: How many processes the job has. With 1 nothing is done.
        process_id: The number of this one, from 0.
        heartbeat_seconds: How long a process may be silent before ``jax.distributed`` counts it
            as dead. One that was killed is noticed at once all the same, and a machine that was
            lost within 40 seconds.
        patience_seconds: How long a process that saves or restores waits for one that does not
            come to do the same, before it is an error that says where that one is instead.

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
    job = joined(patience_seconds)
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
    at = f"at {coordinator}" if coordinator else "where JAX has found it to be"
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
            f"cannot serve {at}: the port may be in use. Choose another one"
            if "RPC server" in str(error)
            else f"cannot reach process 0 {at}. Start all {processes or ''}".rstrip()
            + " processes, with the same address"
        )
        who = "this process" if process_id is None else f"process {process_id}"
        raise ShardingError(f"{who} {what}. JAX says: {error}") from error


class _Job:
    """This process's part in ending a job: threads that hear of others, and word of its own.

    Attributes:
        patience: How long those that save or restore wait for one that does not come.
        under_way: What this process does together with the others, the outermost first.
    """

    def __init__(self, patience: float) -> None:
        self.me, self.count = jax.process_index(), jax.process_count()
        self.patience = patience
        self.under_way: list[str] = []
        self._has_failed = self._is_losing = self._is_done = False
        self._heard = threading.Event()
        self._launcher = int(os.environ.get(LAUNCHER, 0))
        self._ears = threading.Thread(target=self._listen, name="penzai-shard-job", daemon=True)
        self._ears.start()
        # Not where losing some process is what JAX was told to live with.
        recovers = getattr(jax.config, "jax_enable_recoverability", False)
        self._connections = None if recovers else Connections(self.me, self.count, self._lose, _say)
        if self._connections and self.me:
            # Once process 0 is gone, JAX aborts this process, and leaves the reason to be guessed.
            delay_aborts()
        send_message(f"{_TOPIC}/joined/{self.me}", "", replaces=True)

    def end(self, shut_down: bool) -> None:
        """Ends what is still under way, waits for all others, and leaves the job."""
        for act in _before_end:
            act()
        if self.me == 0:
            send_message(_done(0), "", replaces=True)
            for other in range(1, self.count):
                receive_message(_done(other), math.inf)
            send_message(f"{_TOPIC}/all done", "")
        else:
            send_message(_done(self.me), "", replaces=True)
            receive_message(f"{_TOPIC}/all done", math.inf)
        self._fall_silent()
        if shut_down:
            jax.distributed.shutdown()

    def end_with_program(self) -> None:
        """Waits for those others that have joined: a job that JAX will end, as it has begun it."""
        if self._has_failed or self._is_done:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError, ShardingError):
            send_message(_done(self.me), "", replaces=True)
            for other in range(self.count):
                if look_for_message(f"{_TOPIC}/joined/{other}") is not None:
                    receive_message(_done(other), _SECONDS_AT_THE_END)
        self._fall_silent()

    def fail(self, error: BaseException) -> None:
        """Tells the others, and has this process exit without waiting for them."""
        if self._has_failed or self._is_done:
            return
        # The collective operations of JAX fail where another process fails or is lost, which is
        # about to be heard, and said as the reason by the thread that hears it.
        if isinstance(error, jax.errors.JaxRuntimeError) and self._heard.wait(_SECONDS_TO_HEAR):
            time.sleep(_SECONDS_AT_THE_END)
        if self._is_losing:
            time.sleep(_SECONDS_AT_THE_END)
        self._has_failed = True
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {' '.join(line.strip() for line in lines[:4])}"[:1000]
        self._tell_others(failure_text(self.me, text))
        code = error.code if isinstance(error, SystemExit) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
        # Before what jax.distributed has registered, which would wait for all others.
        atexit.register(self._exit, code if isinstance(code, int) else 1)

    def has_ended(self, process: int) -> bool:
        """Whether another process has come to the end of the job, where it waits for the others."""
        return not self._is_done and look_for_message(_done(process)) is not None

    def where_is(self, process: int, thread: str) -> str:
        """Where another process is in its program, in words; empty if it does not say."""
        send_message(f"{_TOPIC}/asked/{process}", f"{self.me} {thread}", replaces=True)
        return receive_message(f"{_TOPIC}/where/{process}/{self.me}", _SECONDS_TO_SAY_WHERE) or ""

    def _exit(self, code: int) -> None:
        time.sleep(_SECONDS_OF_THE_FIRST if self.me == 0 else 0)
        self._exit_now(code)

    def _exit_now(self, code: int) -> None:
        if self._connections:
            self._connections.take_leave()
        _exit_now(code)

    def _fall_silent(self) -> None:
        self._is_done = True
        # So that the thread does not wait for a word until its turn is over.
        with contextlib.suppress(jax.errors.JaxRuntimeError, ShardingError):
            send_message(self._failures_of(self.me), "", replaces=True)
        self._ears.join()
        if self._connections:
            self._connections.take_leave()
            self._connections.close()

    def _tell_others(self, text: str) -> None:
        for other in {*range(self.count)} - {self.me}:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                send_message(self._failures_of(other), text)

    @staticmethod
    def _failures_of(process: int) -> str:
        return f"{_TOPIC}/failed/{process}"

    def _lose(self, process: int) -> None:
        """Ends this process, as another one is gone."""
        # The program itself may have ended the job, and go on.
        if self._has_failed or self._is_done or not jax.distributed.is_initialized():
            return
        self._is_losing = True
        self._heard.set()
        gone = f"penzai-shard: process {process} of {self.count} is gone: it was killed, or its "
        gone += "machine cannot be reached."
        _say(f"{gone} {self._ends_too()}")
        if self.me == 0:
            self._tell_others(gone)
            assert self._connections
            self._connections.wait_for_others_to_end(_SECONDS_OF_THE_FIRST)
        self._exit_now(ENDED_BY_ANOTHER)

    def _ends_too(self) -> str:
        doing = f", in the midst of {self.under_way[0]}" if self.under_way else ""
        return (
            f"Process {self.me} of {self.count} ends too{doing}. Checkpoints that were complete "
            "stay whole; start the job again to go on from the last one."
        )

    def _listen(self) -> None:
        while not self._is_done:
            if self._launcher and os.getppid() != self._launcher:
                _say(f"process {self.me} of {self.count} ends: whoever started it is gone.")
                self._exit_now(ENDED_BY_ANOTHER)
            try:
                message = receive_message(self._failures_of(self.me), 1.0)
                if message is None:
                    self._say_where()
            except (jax.errors.JaxRuntimeError, ShardingError):
                return  # The job is over.
            if not message:
                continue
            self._heard.set()
            # This process may be failing too, with a message of its own.
            time.sleep(_SECONDS_OF_THE_FIRST if self.me == 0 else _SECONDS_TO_READ)
            if not (self._has_failed or self._is_done or self._is_losing):
                _say(f"{message} Process {self.me} of {self.count} ends too.")
                self._exit_now(ENDED_BY_ANOTHER)
            return

    def _say_where(self) -> None:
        """Answers a process that waits for this one."""
        asked = look_for_message(f"{_TOPIC}/asked/{self.me}")
        if asked:
            asker, _, thread = asked.partition(" ")
            send_message(f"{_TOPIC}/asked/{self.me}", "", replaces=True)
            send_message(f"{_TOPIC}/where/{self.me}/{asker}", _position(thread), replaces=True)


_job: _Job | None = None
_before_end: list[Callable[[], None]] = []
_joining = threading.Lock()


def joined(patience: float | None = None) -> _Job:
    """This process's part in the job, which begins when it is first asked for.

    Args:
        patience: How long those that save or restore wait for one that does not come.

    Raises:
        ShardingError: There are several processes, and no coordination service.
    """
    global _job
    with _joining:
        if _job is None:
            coordinator_host()  # Refused where there is none.
            _job = _Job(PATIENCE_SECONDS)
            show_own_parts()
            if patience is None:
                atexit.register(_job.end_with_program)
                sys.excepthook = _failing_hook(_job, sys.excepthook)
        if patience is not None:
            _job.patience = patience
        return _job


def before_job_ends(act: Callable[[], None]) -> None:
    """Has a function called at the end of ``several_processes``, while processes can still agree.

    Args:
        act: The function; it should not raise.
    """
    _before_end.append(act)


@contextlib.contextmanager
def under_way(doing: str) -> Iterator[None]:
    """A block of what this process does together with others, said if one of them is lost in it.

    >>> with under_way("saving a checkpoint"):
    ...     pass
    """
    if jax.process_count() == 1:
        yield
        return
    blocks = joined().under_way
    blocks.append(doing)
    try:
        yield
    finally:
        blocks.remove(doing)


def _failing_hook(job: _Job, before: Any) -> Any:
    """What Python calls with an error that ends the program, to tell the other processes."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # At a prompt an error does not end the program.
        if not hasattr(sys, "ps1"):
            job.fail(error)
        before(kind, error, trace)

    return hook


def _position(thread_name: str) -> str:
    """Where a thread of this program is, in its own code: file, line and function.

    >>> _position("MainThread").startswith("it is at ")
    True
    """
    numbers = {thread.name: thread.ident for thread in threading.enumerate()}
    frame: FrameType | None = sys._current_frames().get(numbers.get(thread_name) or 0)
    if frame is None:
        return f"it has no thread {thread_name!r}"
    innermost = frame
    while frame is not None and _is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    where = f"it is at {code.co_filename}, line {frame.f_lineno}, in {code.co_name}"
    return f"{where}: {line}" if line else where


def _is_installed(file: str) -> bool:
    """Whether code is a library's or Python's, and not the program's."""
    return file.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in file


def _done(process: int) -> str:
    return f"{_TOPIC}/done/{process}"


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
