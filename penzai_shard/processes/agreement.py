"""Has all processes of a job agree: that a call failed, what the first one found, when to stop.

An agreement is a round: each process says something, and the first one tells all what was said, or
what is wrong, in about two milliseconds. Rounds are counted for each thread name, so that the
thread that makes batches and the one that trains do not mix.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from penzai_shard import errors
from penzai_shard.errors import Problem, Problems, ShardingError
from penzai_shard.jax_internals import messages
from penzai_shard.paths import fold_paths

PATIENCE_SECONDS = 600.0
"""How long a process waits for the others, which may be reading data or compiling."""

_SAME_CALLS = "Make the same calls in the same order in every process."
_SAME_VALUES = "Give every process the same, made from the same seed, file or configuration."
# Set on errors that all processes have raised, which no enclosing block has to report again.
_IS_SHARED = "_penzai_shard_is_shared"

_rounds: collections.defaultdict[str, Iterator[int]] = collections.defaultdict(itertools.count)


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """A block that fails in every process of the job if it fails in one of them.

    Without it the others go on, and wait for good in their next collective operation. Blocks may be
    nested, and hold other agreements: processes that wait there for one that failed fail too.

    Args:
        what: What is being done, the same text in all processes.

    Raises:
        Exception: The block's own error where it failed. In the other processes one that names the
            process: of the same class, with the same problems, if that class is in
            ``penzai_shard.errors``; else ``ShardingError``.
        ShardingError: A process does something else, or does not come in ten minutes.

    >>> with together("saving"):
    ...     pass
    """
    try:
        yield
    except Exception as error:
        if not _is_shared(error):
            _agree(what, error=error)
        raise
    _agree(what)


def on_first(what: str, function: Callable[[], Any]) -> Any:
    """Runs a function in the first process; its result, or its error, comes to all.

    Args:
        what: What is being done, the same text in all processes.
        function: Its result must be what JSON can hold. It is read back from JSON also where there
            is one process, so that a tuple is a list in both cases.

    Raises:
        Exception: As for ``together``.

    >>> on_first("naming the run", lambda: {"name": "may", "steps": (1, 2)})
    {'name': 'may', 'steps': [1, 2]}
    """
    text = ""
    with together(what):
        if jax.process_index() == 0:
            text = json.dumps(function())
    return json.loads(_agree(what, text)[0])


def any_process(flag: bool, asked: str = "any_process") -> bool:
    """Whether any process says so; all must ask, and all get the same answer.

    For what must happen everywhere at the same step: a signal to stop that reached one process, or
    a data set that ended in one. It waits for no device.

    Args:
        flag: What this process says.
        asked: What is asked, the same text in all processes.

    Raises:
        ShardingError: A process does something else, or does not come in ten minutes.

    >>> any_process(False), any_process(True)
    (False, True)
    """
    return any(_agree(asked, bool(flag)))


def gather(asked: str, value: Any) -> list[Any]:
    """What each process says, in their order; all must ask, and all get the same list.

    Args:
        asked: What is asked, the same text in all processes.
        value: What this process says; JSON holds it.

    Raises:
        ShardingError: A process does something else, or does not come in ten minutes.

    >>> gather("asking where batches end", 7)
    [7]
    """
    return _agree(asked, value)


def refuse_differences(what: str, texts: Mapping[str, str]) -> None:
    """Refuses texts that differ between processes, or that some processes do not have.

    Args:
        what: What is being done, the same text in all processes.
        texts: What must be equal, such as the shape of an array by its path.

    Raises:
        ShardingError: With a problem for every text that differs; in all processes. Or a process
            does something else, or does not come in ten minutes.

    >>> refuse_differences("place", {"w": "float32[2]"})
    """
    # Texts of thousands of arrays are sent only if they differ.
    digest = hashlib.blake2b(json.dumps(dict(texts), sort_keys=True).encode()).hexdigest()
    if len({*_agree(what, digest)}) == 1:
        return
    said = _agree(what, dict(texts))
    problems = Problems(f"{what} got what differs between processes:")
    for key in dict.fromkeys(key for texts in said for key in texts):
        processes_of: dict[str | None, list[str]] = {}
        for process, own in enumerate(said):
            processes_of.setdefault(own.get(key), []).append(f"process {process}")
        if len(processes_of) > 1:
            views = [
                f"{fold_paths(processes)} has {'nothing' if text is None else f'{text!r:.120}'}"
                for text, processes in processes_of.items()
            ]
            problems.add(key, ", ".join(views), _SAME_VALUES)
    problems.raise_if_any(ShardingError)


# A round


def _agree(what: str, said: Any = None, error: Exception | None = None) -> list[Any]:
    """What each process says, in their order.

    Args:
        what: The name of the call, the same in all processes.
        said: What this process says; JSON holds it.
        error: What this process failed with, which the caller then raises.

    Raises:
        Exception: Another process failed, does something else, or does not come.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [said]
    thread = f"penzai_shard/{threading.current_thread().name}"
    number = next(_rounds[thread])
    topic = f"{thread}/{number}"
    mine = {"what": what, "said": said, "failure": error and _describe_error(error)}
    messages.send(f"{topic}/{me}", json.dumps(mine))

    if me == 0:
        heard: list[dict[str, Any] | None] = [mine]
        end = time.monotonic() + PATIENCE_SECONDS
        for process in range(1, count):
            text = messages.receive(f"{topic}/{process}", end - time.monotonic())
            heard.append(None if text is None else json.loads(text))
        decision = _decide(what, heard)
        messages.send(f"{topic}/decision", json.dumps(decision))
        if number and None not in heard:
            # Whoever is in this round has read the decision of the one before.
            messages.forget(f"{thread}/{number - 1}")
    else:
        text = messages.receive(f"{topic}/0", PATIENCE_SECONDS)
        # The first process may be late itself, and then wait as long for the others.
        text = text and messages.receive(f"{topic}/decision", PATIENCE_SECONDS + 10)
        decision = json.loads(text) if text else _decide(what, [None])

    # All processes raise now: their own error, or that of another.
    if error is not None:
        vars(error)[_IS_SHARED] = True
    elif "failure" in decision:
        error_elsewhere = _make_error(decision["failure"])
        vars(error_elsewhere)[_IS_SHARED] = True
        raise error_elsewhere
    return list(decision.get("said", ()))


def _decide(what: str, heard: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """What all have said, or the failure that all processes are to raise."""
    # Others may wait for one that failed in another call, within the block that it has left.
    for process, message in enumerate(heard):
        if message and message["failure"]:
            failure = message["failure"]
            text = f"process {process} failed in {message['what']!r}: {failure['text']}"
            return {"failure": failure | {"text": text}}

    problems = Problems("the processes of this job have not come to the same call:")
    calls = {message["what"] for message in heard if message}
    for process, message in enumerate(heard):
        if message is None:
            fact = f"has not come to {what!r} in {PATIENCE_SECONDS:.0f} s"
            problems.add(f"process {process}", fact, _SAME_CALLS)
        elif len(calls) > 1:
            problems.add(f"process {process}", f"is in {message['what']!r}", _SAME_CALLS)
    if problems:
        return {"failure": _describe_error(ShardingError(problems.headline, problems))}
    return {"said": [message["said"] for message in heard if message]}


# Errors on their way to other processes


def _is_shared(error: BaseException | None) -> bool:
    """Whether all processes have raised an error, or the one that it was raised from."""
    while error is not None and _IS_SHARED not in vars(error):
        error = error.__cause__
    return error is not None


def _describe_error(error: Exception) -> dict[str, Any]:
    """What ``_make_error`` needs, as JSON holds it."""
    described: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, ShardingError):
        problems = [dataclasses.astuple(problem) for problem in error.problems]
        described |= {"text": error.args[0], "problems": problems}
    return described


def _make_error(described: Mapping[str, Any]) -> Exception:
    """An error like the one that was described, of the same class if it is one of ours."""
    kind, text = described["kind"], described["text"]
    ours = getattr(errors, kind, None)
    if "problems" in described:
        return (ours or ShardingError)(text, [Problem(*fields) for fields in described["problems"]])
    return ours(text) if ours else ShardingError(f"{text} ({kind})")
