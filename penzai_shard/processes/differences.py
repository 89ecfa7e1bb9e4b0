"""Whether all processes of a job were given the same."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import jax

from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.processes.agreement import Call, decided, everyone, processes_text
from penzai_shard.processes.job import joined

# Texts longer than this are compared by their checksums first.
_LONGEST_AT_ONCE = 2000


def begin_together(
    doing: str, to: str, headline: str, entries: Mapping[str, str], fix: str
) -> None:
    """The beginning of what all processes do, such as a save.

    Those that come wait a short time for the others, as one that does not come would have them
    wait for good: 20 seconds, or what ``several_processes`` was given.

    Args:
        doing: What is being done, the same in all processes.
        to: With what, for messages: a path, for instance.
        headline: What must be the same, and is not.
        entries: As for ``refuse_differences``.
        fix: What to do about it.

    Raises:
        ShardingError: Some process does not come, or does something else; or entries differ.

    >>> begin_together("saving", "/runs", "these differ:", {"path": "/runs"}, "Give one path.")
    """
    if jax.process_count() > 1:
        patience = joined().patience
        _refuse_differences(Call(doing, to, patience), headline, entries, fix, everyone())


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
    processes = everyone() if processes is None else tuple(processes)
    if len(processes) > 1:
        _refuse_differences(Call(called), headline, entries, fix, processes)


def _refuse_differences(
    called: Call,
    headline: str,
    entries: Mapping[str, str],
    fix: str,
    processes: tuple[int, ...],
) -> None:
    full = json.dumps(dict(entries))
    digest = hashlib.blake2b(full.encode(), digest_size=16).hexdigest()
    short = full if len(full) <= _LONGEST_AT_ONCE else digest
    answer = decided(called, short, lambda texts: _compared(processes, texts), processes)
    if answer == _MORE:
        answer = decided(called, full, lambda texts: _compared(processes, texts), processes)
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
