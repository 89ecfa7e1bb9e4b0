"""What all processes of a job agree on: that a call failed, that values are equal, when to stop.

Each process says something, the first one of them decides, and all get the decision. What one
thread says is answered by the threads of the same name in the other processes, so that a thread
that makes batches and the one that trains do not mix.
"""

import collections
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from penzai_shard import errors
from penzai_shard.errors import ShardingError
from penzai_shard.library_apis.jax_api import forget_message, receive_message, send_message
from penzai_shard.processes.job import joined, under_way

# How long a process waits for the others, which may be reading data, compiling or writing. That one
# of them has died or ended is noticed much earlier, and so is one that does not begin to save.
PATIENCE_SECONDS = 600.0
_TURN = 1.0

_rounds: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()
_lock = threading.Lock()


@dataclasses.dataclass(eq=False)
class _Block:
    """A block that fails in all processes if it fails in one.

    Attributes:
        doing: What is being done.
        failure: What ended it before its end, if all processes know of that already.
    """

    doing: str
    failure: Exception | None = None


class _OpenBlocks(threading.local):
    """The blocks that a thread is in, the outermost first."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_open = _OpenBlocks()


@dataclasses.dataclass(frozen=True)
class Call:
    """A call in which processes agree.

    Attributes:
        name: What it is called, the same in all of them.
        to: What this process gives it, for messages.
        patience: For how many seconds one that does not come is waited for.
    """

    name: str
    to: str = ""
    patience: float = PATIENCE_SECONDS

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.to})' if self.to else ''}"


def any_process(flag: bool, asked: str = "any_process") -> bool:
    """Whether any process of the job says so; all must ask, and all get the same answer.

    For what must happen everywhere at the same step: a signal to stop that reached one process,
    a data set that ended in one of them. It takes about a millisecond for two processes, waits for
    no device, and may be called from any thread: what one thread asks is answered by the threads of
    the same name in the other processes, in the order of their calls.

    Args:
        flag: What this process says.
        asked: What is asked, for messages; the same in all processes.

    Returns:
        Whether one of them said True. With one process, ``flag``.

    Raises:
        ShardingError: Another process asks something else, or nothing for ten minutes.

    >>> any_process(False), any_process(True)
    (False, True)
    """
    if jax.process_count() == 1:
        return bool(flag)
    text = "yes" if flag else ""
    return bool(decided(Call(asked), text, lambda texts: "yes" if any(texts) else "", everyone()))


def totals_of_processes(asked: str, numbers: Sequence[int]) -> list[int]:
    """Adds up numbers over all processes; all must ask, and all get the same answer.

    Args:
        asked: What is asked, for messages; the same in all processes.
        numbers: What this process has: as many numbers as every other one.

    Returns:
        The totals. With one process, the numbers.

    Raises:
        ShardingError: Another process asks something else, or nothing for ten minutes.

    >>> totals_of_processes("counting", [3, 2**40])
    [3, 1099511627776]
    """
    if jax.process_count() == 1:
        return list(numbers)

    def decide(texts: Sequence[str]) -> str:
        return json.dumps([sum(each) for each in zip(*map(json.loads, texts), strict=True)])

    totals: list[int] = json.loads(
        decided(Call(asked), json.dumps(list(numbers)), decide, everyone())
    )
    return totals


@contextlib.contextmanager
def failing_together(doing: str) -> Iterator[None]:
    """A block that fails in every process of the job if it fails in one of them.

    Otherwise the others would go on, and wait for the one that failed in their next collective
    operation. With one process it does nothing. In the block there may be further such blocks, and
    other calls in which processes agree: those that wait there for one that failed fail too.

    Args:
        doing: What is being done, the same in all processes.

    Raises:
        ShardingError: The block failed in another process; of the class that it raised there, if
            that is one of this library's. Its message says which process that was.
        OSError: Or of this class, with the same number.

    >>> with failing_together("saving"):
    ...     pass
    """
    if jax.process_count() == 1:
        yield
        return
    block = _Block(doing)
    _open.blocks.append(block)
    try:
        try:
            with under_way(doing):
                yield
        except Exception as error:
            if block.failure is None:
                _failures(doing, error)
            raise
        if block.failure is not None:
            raise block.failure
        failures = _failures(doing, None)
        if failures:
            raise _failure_elsewhere(failures)
    finally:
        _open.blocks.remove(block)


def on_first_process(doing: str, act: Callable[[], None]) -> None:
    """Has the first process do something, such as to the file system; all raise what it raised.

    Args:
        doing: What is being done, the same in all processes.
        act: What the first process is to do.

    >>> on_first_process("greeting", lambda: print("hello"))
    hello
    """
    with failing_together(doing):
        if jax.process_index() == 0:
            act()


def said_by_first(doing: str, text: str) -> str:
    """What the first process gives; all must ask.

    >>> said_by_first("choosing a name", "mine")
    'mine'
    """
    if jax.process_count() == 1:
        return text
    return decided(Call(doing), text, lambda texts: texts[0], everyone())


def processes_text(processes: Sequence[int]) -> str:
    """Some processes in words.

    >>> processes_text([1]), processes_text([0, 2, 3]), processes_text(range(9))
    ('process 1', 'processes 0, 2 and 3', 'processes 0, 1, 2, 3, ... (9 of them)')
    """
    if len(processes) == 1:
        return f"process {processes[0]}"
    if len(processes) > 8:
        return f"processes {', '.join(map(str, processes[:4]))}, ... ({len(processes)} of them)"
    return f"processes {', '.join(map(str, processes[:-1]))} and {processes[-1]}"


def everyone() -> tuple[int, ...]:
    """The numbers of all processes of the job."""
    return tuple(range(jax.process_count()))


def _failures(doing: str, error: Exception | None) -> dict[str, str]:
    """What each process that failed failed with: kind, number and message, by process."""
    text = ""
    if error is not None:
        text = f"{type(error).__name__}:{getattr(error, 'errno', None) or 0}:{error}"

    def decide(texts: Sequence[str]) -> str:
        return json.dumps({str(number): text for number, text in enumerate(texts) if text})

    answer = decided(Call(doing), text, decide, everyone(), failed=error is not None)
    found: dict[str, str] = json.loads(answer)
    return found


def _failure_elsewhere(failures: Mapping[str, str]) -> Exception:
    process, text = next(iter(failures.items()))
    kind, _, rest = text.partition(":")
    code, _, message = rest.partition(":")
    message = f"process {process} failed: {message}"
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known(message)
    if int(code):
        return OSError(int(code), message)
    return ShardingError(f"{message} ({kind})")


def decided(
    call: Call,
    text: str,
    decide: Callable[[Sequence[str]], str],
    processes: tuple[int, ...],
    *,
    failed: bool = False,
) -> str:
    """What the first of some processes decides from what each of them says.

    Args:
        call: The call that this belongs to.
        text: What this process says.
        decide: Gives the decision for the texts in the order of the processes.
        processes: Those that take part; this one is one of them.
        failed: Whether this process says that the innermost block that it is in has failed.

    Raises:
        ShardingError: Some process is in another call, has ended, or does not come.
        Exception: Some process has failed in a block that this one is in too.
    """
    for block in _open.blocks:
        if block.failure is not None:
            raise block.failure  # The others have left the block.
    joined()
    thread = threading.current_thread().name
    with _lock:
        number = _rounds[thread, processes]
        _rounds[thread, processes] += 1
    topic = f"penzai_shard/{thread}/{'-'.join(map(str, processes))}/{number}"
    first, me = processes[0], jax.process_index()
    mine = json.dumps([call.name, str(call), text, [b.doing for b in _open.blocks], failed])
    send_message(f"{topic}/{me}", mine)
    if me != first:
        _heard(f"{topic}/{first}", first, call, call.patience)
        # The first one may wait as long for all others, and then asks where they are.
        return _read(_heard(f"{topic}/decision", first, call, call.patience + 10), processes)
    said = {me: mine}
    answer = None
    ends = time.monotonic() + call.patience
    for other in processes[1:]:
        try:
            said[other] = _heard(f"{topic}/{other}", other, call, ends - time.monotonic())
        except ShardingError as error:
            answer = json.dumps(["error", str(error)])
            break
        forget_message(f"{topic}/{other}")
    send_message(f"{topic}/decision", answer := answer or _decision(said, decide))
    if number:
        # All have said something in this round, so that nobody waits for the round before.
        before = f"{topic.rpartition('/')[0]}/{number - 1}"
        forget_message(f"{before}/decision")
        forget_message(f"{before}/{me}")
    return _read(answer, processes)


def _heard(key: str, other: int, call: Call, seconds: float) -> str:
    """What another process leaves under a key.

    Raises:
        ShardingError: It does not come in time, or has ended.
    """
    ends = time.monotonic() + seconds
    has_ended = False
    while True:
        left = ends - time.monotonic()
        message = receive_message(key, max(min(left, _TURN), 0.001))
        if message is not None:
            return message
        if has_ended or left <= _TURN:
            break
        # What it said before is there by then.
        has_ended = joined().has_ended(other)
    problem = f"process {other} of {jax.process_count()} has not come to {call}"
    fix = "Every process must make the same calls in the same order."
    if has_ended:
        raise ShardingError(f"{problem}: it is at the end of its program. {fix}")
    where = joined().where_is(other, threading.current_thread().name)
    problem += f" within {call.patience:.0f} s" + (f": {where}. " if where else ". ")
    if call.patience != PATIENCE_SECONDS:
        fix += (
            " One that comes late is waited for longer in several_processes(patience_seconds=300)."
        )
    raise ShardingError(problem + fix)


def _decision(said: Mapping[int, str], decide: Callable[[Sequence[str]], str]) -> str:
    calls: dict[str, list[int]] = {}
    called = {}
    texts = {}
    blocks = {}
    failed = []
    for process, message in said.items():
        call, shown, texts[process], blocks[process], has_failed = json.loads(message)
        calls.setdefault(call, []).append(process)
        called[call] = shown
        if has_failed:
            failed.append(process)
    if failed and (len(calls) > 1 or any(blocks[p] != blocks[failed[0]] for p in blocks)):
        # Some wait within a block that others have left by an error.
        outermost = min((blocks[process] for process in failed), key=len)
        if all(inside[: len(outermost)] == outermost for inside in blocks.values()):
            failures = {str(p): texts[p] for p in failed if blocks[p] == outermost}
            return json.dumps(["failed", json.dumps([len(outermost), failures])])
    if len(calls) > 1:
        where = ", ".join(
            f"{processes_text(them)} in {called[call]}" for call, them in calls.items()
        )
        return json.dumps(
            [
                "error",
                f"the processes of this job are in different calls: {where}. Every process must "
                "make the same calls in the same order.",
            ]
        )
    return json.dumps(["", decide(list(texts.values()))])


def _read(answer: str, processes: tuple[int, ...]) -> str:
    kind, text = json.loads(answer)
    if kind == "failed":
        depth, failures = json.loads(text)
        if str(jax.process_index()) in failures:
            return json.dumps(failures)
        raise _leaving(_open.blocks[depth - 1 :], _failure_elsewhere(failures))
    if kind:
        error = ShardingError(text)
        # What all processes know of ends the blocks that they are in, without another word.
        raise _leaving(_open.blocks if processes == everyone() else [], error)
    return str(text)


def _leaving(blocks: Sequence[_Block], failure: Exception) -> Exception:
    for block in blocks:
        block.failure = failure
    return failure
