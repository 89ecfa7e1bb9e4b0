"""What the processes of a job must agree on before they save or restore one checkpoint together.

A checkpoint of several processes is one directory, that all of them write to or read from. Whoever
does not take part, or does something else, is found here, before anything is written or read.
"""

import os
import secrets
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.errors import CheckpointWriteError
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.processes import (
    begin_together,
    checksum_of,
    failing_together,
    is_on_this_process,
    layout_text,
    processes_of,
    refuse_differences,
    said_by_first,
)

# What another machine has made in a shared directory is seen by this one at once, or after a while.
_SECONDS_TO_SEE = 10.0


def save_together(where: str, kind: str, leaves: Mapping[str, NamedLeaf], overwrite: bool) -> None:
    """The beginning of a save, in all processes.

    Raises:
        ShardingError: Some process does not come, or saves something else.
    """
    if jax.process_count() == 1:
        return
    # How far each process is with its program shows only once what it has begun is done.
    arrays = [leaf.array for leaf in leaves.values()]
    jax.block_until_ready([x for x in arrays if isinstance(x, jax.Array) and not x.is_deleted()])
    all_save(where, {"overwrite": str(overwrite), "what is saved": kind})


def all_save(where: str, given: Mapping[str, str] = MappingProxyType({})) -> None:
    """Has all processes come to a save to one path, with whatever else they are given.

    Raises:
        ShardingError: Some process does not come, or saves something else.
    """
    begin_together(
        "saving a checkpoint",
        where,
        "the processes of this job do not save the same checkpoint:",
        {"path": where, **given},
        "All processes save one checkpoint together: give the same in each, and a path that does "
        "not depend on the process or the time.",
    )


def all_restore(where: str, given: Mapping[str, str] = MappingProxyType({})) -> None:
    """Has all processes come to a restore, with whatever else must be the same in all of them.

    Raises:
        ShardingError: Some process does not come, or restores something else.
    """
    begin_together(
        "restoring a checkpoint",
        where,
        "the processes of this job do not restore the same onto devices of several of them:",
        given,
        "Give the same path, model, mesh, rules and options in every process; or, for models of "
        "its own in each, a mesh of jax.local_devices().",
    )


def refuse_other_arrays_elsewhere(
    where: str, leaves: Mapping[str, NamedLeaf], records: Mapping[str, ArrayRecord]
) -> None:
    """Refuses arrays of several processes that differ: all save one checkpoint together.

    Raises:
        ShardingError: Some differ.
    """
    if jax.process_count() == 1:
        return
    entries = {"names": ", ".join(leaves)}
    for name, leaf in leaves.items():
        entries[name] = f"{records[name].dtype}{records[name]}"
        if is_on_this_process(leaf.array):
            entries[name] += f" with checksum {checksum_of(leaf.array)}"
        else:
            entries[name] += f" laid out as {layout_text(leaf.array.sharding)}"
    refuse_differences(
        "saving a checkpoint",
        f"cannot save to {where}: these arrays differ between processes:",
        entries,
        "Put the model on a mesh of all processes, or save to a path for each process from a "
        "process of its own.",
    )


def refuse_unshared(directory: str, where: str) -> None:
    """Refuses a directory of the first process that the others do not see.

    Args:
        directory: The directory, which the first process has made.
        where: The path that is saved to, for messages.

    Raises:
        CheckpointWriteError: Some process does not see it.
    """
    if jax.process_count() == 1:
        return
    name = said_by_first("beginning a save", f"seen-by-all-{secrets.token_hex(8)}")
    path = os.path.join(directory, name)
    with failing_together("looking for the directory of a save"):
        if jax.process_index() == 0:
            with open(path, "x", encoding="utf-8"):
                pass
        elif not _appears(path):
            raise CheckpointWriteError(
                f"cannot save to {where}: process {jax.process_index()} does not see what process "
                "0 writes there. All processes of a job save one checkpoint together: give a path "
                "on a file system that they share, or in an object store."
            )
    if jax.process_index() == 0:
        os.remove(path)


def _appears(path: str) -> bool:
    ends = time.monotonic() + _SECONDS_TO_SEE
    while not os.path.exists(path):
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
        if os.path.isdir(os.path.dirname(path)):
            # Has file systems of a network look again.
            os.listdir(os.path.dirname(path))
    return True


def restore_together(
    where: str,
    kind: str,
    records: Mapping[str, ArrayRecord],
    shardings: Mapping[str, Any],
    options: str,
) -> None:
    """The beginning of a restore, in all processes.

    What each process puts on devices of its own may differ; arrays over several may not.

    Args:
        where: The path that is restored from.
        kind: What is restored.
        records: By name, what each array is to be.
        shardings: By name, how each is to be laid out.
        options: What else the call was given, in words.

    Raises:
        ShardingError: Some process does not come, or restores something else.
    """
    if jax.process_count() == 1:
        return
    texts = {name: f"{record.dtype}{record}" for name, record in records.items()}
    entries = layouts_over_processes(texts, shardings)
    if entries:
        entries |= {"path": where, "options": options, "what is restored": kind}
    all_restore(where, entries)


def layouts_over_processes(
    texts: Mapping[str, str], shardings: Mapping[str, Any]
) -> dict[str, str]:
    """What arrays are and how they are laid out, by name, of those on devices of several processes.

    Args:
        texts: What each array is, in words.
        shardings: By name, how each is laid out.

    Returns:
        What must be the same in all processes, for ``refuse_differences``.

    >>> layouts_over_processes({"w": "float32"}, {"w": jax.numpy.ones(2).sharding})
    {}
    """
    everyone = tuple(range(jax.process_count()))
    entries = {}
    are_everywhere = True
    for name, text in texts.items():
        sharding = shardings[name]
        if sharding is not None and not sharding.is_fully_addressable:
            are_everywhere = are_everywhere and processes_of(sharding) == everyone
            entries[name] = f"{text} laid out as {layout_text(sharding)}"
    if entries and are_everywhere:
        entries["names"] = ", ".join(entries)
    return entries
