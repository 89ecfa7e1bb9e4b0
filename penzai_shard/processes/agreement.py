"""What all processes of a job agree on: that a call failed, that values are equal, when to stop.

Each process says something, the first one of them decides, and all get the decision. What one
thread says is answered by the threads of the same name in the other processes, so that a thread
that makes batches and the one that trains do not mix.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from penzai_shard import errors
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.library_apis.jax_api import forget_message, receive_message, send_message

# How long a process waits for the others, which may be reading data or compiling. That one of them
# has died is noticed by jax.distributed, much earlier.
PATIENCE_SECONDS = 600.0
# Texts longer than this are compared by their checksums first.
_LONGEST_AT_ONCE = 2000

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
    return bool(_decided(asked, text, lambda texts: "yes" if any(texts) else "", _everyone()))


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

    totals: list[int] = json.loads(_decided(asked, json.dumps(list(numbers)), decide, _everyone()))
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


def refuse_differences(
    called: str,
    headline: str,
    entries: Mapping[str, str],
    fix: str,
    processes: Sequence[int] | None = None,
) -> None:
    """Refuses values that differ between processes, in all of them.

    Args:
        called: The function that was called.
        headline: What must be the same, and is not.
        entries: Texts by name, such as an array's shape and checksum. Those are compared that at
            least two processes have.
        fix: What to do about it.
        processes: The processes that take part, all by default.

    Raises:
        ShardingError: Some differ; all are reported.

    >>> refuse_differences("place", "these differ:", {"w": "float32[2] 5e1f"}, "Use one seed.")
    """
    processes = _everyone() if processes is None else tuple(processes)
    if len(processes) == 1:
        return
    full = json.dumps(dict(entries))
    digest = hashlib.blake2b(full.encode(), digest_size=16).hexdigest()
    short = full if len(full) <= _LONGEST_AT_ONCE else digest
    answer = _decided(called, short, lambda texts: _compared(processes, texts), processes)
    if answer == _MORE:
        answer = _decided(called, full, lambda texts: _compared(processes, texts), processes)
    if answer:
        raise_all(ShardingError, headline, [f"{line} {fix}" for line in json.loads(answer)])


_MORE = "more"


def _compared(processes: Sequence[int], texts: Sequence[str]) -> str:
    """The differences as a list in JSON; empty if there are none, ``_MORE`` if texts are cut."""
    if len(set(texts)) == 1:
        return ""
    if not all(text.startswith("{") for text in texts):
        return _MORE
    said: dict[str, dict[str, list[int]]] = {}
    for process, text in zip(processes, texts, strict=True):
        for name, entry in json.loads(text).items():
            said.setdefault(name, {}).setdefault(entry, []).append(process)
    problems = []
    for name, by_entry in said.items():
        if len(by_entry) > 1:
            each = "; ".join(f"{processes_text(p)}: {entry}" for entry, p in by_entry.items())
            problems.append(f"{name}: {each}.")
    return json.dumps(problems) if problems else ""


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


def _everyone() -> tuple[int, ...]:
    return tuple(range(jax.process_count()))


def _failures(doing: str, error: Exception | None) -> dict[str, str]:
    """What each process that failed failed with: kind, number and message, by process."""
    text = ""
    if error is not None:
        text = f"{type(error).__name__}:{getattr(error, 'errno', None) or 0}:{error}"

    def decide(texts: Sequence[str]) -> str:
        return json.dumps({str(number): text for number, text in enumerate(texts) if text})

    answer = _decided(doing, text, decide, _everyone(), failed=error is not None)
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


def _decided(
    said_in: str,
    text: str,
    decide: Callable[[Sequence[str]], str],
    processes: tuple[int, ...],
    *,
    failed: bool = False,
) -> str:
    """What the first of some processes decides from what each of them says.

    Args:
        said_in: The call that this belongs to, the same in all of them.
        text: What this process says.
        decide: Gives the decision for the texts in the order of the processes.
        processes: Those that take part; this one is one of them.
        failed: Whether this process says that the innermost block that it is in has failed.

    Raises:
        ShardingError: Some process is in another call, or in none for a long time.
        Exception: Some process has failed in a block that this one is in too.
    """
    for block in _open.blocks:
        if block.failure is not None:
            raise block.failure  # The others have left the block.
    thread = threading.current_thread().name
    with _lock:
        number = _rounds[thread, processes]
        _rounds[thread, processes] += 1
    topic = f"penzai_shard/{thread}/{'-'.join(map(str, processes))}"
    first, me = processes[0], jax.process_index()
    mine = json.dumps([said_in, text, [block.doing for block in _open.blocks], failed])
    if me != first:
        send_message(f"{topic}/{number}/{me}", mine)
        # The first one waits as long for all others.
        answer = receive_message(f"{topic}/{number}/decision", PATIENCE_SECONDS + 10)
        if answer is None:
            raise ShardingError(_absent(first, said_in))
        return _read(answer, processes)
    said = {me: mine}
    answer = None
    for other in processes[1:]:
        message = receive_message(f"{topic}/{number}/{other}", PATIENCE_SECONDS)
        if message is None:
            answer = json.dumps(["error", _absent(other, said_in)])
            break
        said[other] = message
        forget_message(f"{topic}/{number}/{other}")
    send_message(f"{topic}/{number}/decision", answer := answer or _decision(said, decide))
    if number:
        # All have said something in this round, so that nobody waits for the round before.
        forget_message(f"{topic}/{number - 1}/decision")
    return _read(answer, processes)


def _decision(said: Mapping[int, str], decide: Callable[[Sequence[str]], str]) -> str:
    calls: dict[str, list[int]] = {}
    texts = {}
    blocks = {}
    failed = []
    for process, message in said.items():
        call, texts[process], blocks[process], has_failed = json.loads(message)
        calls.setdefault(call, []).append(process)
        if has_failed:
            failed.append(process)
    if failed and (len(calls) > 1 or any(blocks[p] != blocks[failed[0]] for p in blocks)):
        # Some wait within a block that others have left by an error.
        outermost = min((blocks[process] for process in failed), key=len)
        if all(inside[: len(outermost)] == outermost for inside in blocks.values()):
            failures = {str(p): texts[p] for p in failed if blocks[p] == outermost}
            return json.dumps(["failed", json.dumps([len(outermost), failures])])
    if len(calls) > 1:
        where = ", ".join(f"{processes_text(them)} in {call}" for call, them in calls.items())
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
        raise _leaving(_open.blocks if processes == _everyone() else [], error)
    return str(text)


def _leaving(blocks: Sequence[_Block], failure: Exception) -> Exception:
    for block in blocks:
        block.failure = failure
    return failure


def _absent(process: int, said_in: str) -> str:
    return (
        f"process {process} of {jax.process_count()} has not come to {said_in} within "
        f"{PATIENCE_SECONDS:.0f} s. Every process must make the same calls in the same order."
    )
