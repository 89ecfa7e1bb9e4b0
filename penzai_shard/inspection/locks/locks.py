"""Sharding locks: what a step's program is like, kept in a file, so that a change is noticed."""

import collections
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax

from penzai_shard.compiled_programs import unknown_communication
from penzai_shard.errors import LockError
from penzai_shard.inspection.locks.lock_comparison import Improvements, LockReport, compared
from penzai_shard.inspection.locks.lock_content import (
    CollectiveCount,
    CollectiveGroup,
    LockContent,
    locked_arrays,
    summed,
)
from penzai_shard.inspection.locks.lock_files import lock_from_text, lock_to_text
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.steps.programs import compiled_program
from penzai_shard.inspection.traffic.collective_records import Collective
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.meshes import mesh_text
from penzai_shard.whole_files import refuse_unwritable, write_whole

# What turns a step into a program. XLA is a part of jaxlib, or of the accelerator's own package.
_MAKERS = ("jax", "jaxlib")
_MAKERS_BY_KIND = {"TPU": ("libtpu",), "NVIDIA": ("jax-cuda12-pjrt", "jax-cuda13-pjrt")}


@dataclasses.dataclass(frozen=True)
class ShardingLock:
    """What a step's program is like: its layouts, its collectives, its memory.

    Kept in a file beside the tests, it lets a test fail when a change adds a gather; the file's
    difference in a pull request shows what a change costs. The pytest plugin does both:
    ``assert_sharding_lock("train_step", step, state, tokens=tokens)``.

    Specs, shapes (stored and true ones, where arrays are padded), dtypes and counts of collectives
    are compared exactly, bytes within a tolerance.
    The values of arrays and the names of functions are no part of it.

    Attributes:
        content: All that it holds.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> step = jax.jit(lambda x: x.sum())
    >>> lock = ShardingLock.of(step, jnp.ones(8))
    >>> bool(lock.check(step, jnp.zeros(8)))
    True
    >>> print(lock.check(step, jnp.zeros(9)).differences[0])
    x: was float32[8], is now float32[9]
    """

    content: LockContent

    @classmethod
    def of(cls, step: Any, /, *args: Any, **kwargs: Any) -> "ShardingLock":
        """The lock of a step, which is compiled and not run.

        Args:
            step: A train step, a function under ``jax.jit``, or a layer; or a program of
                ``compile_step``, without arguments.
            *args: What it is called with, concrete or abstract.
            **kwargs: The same by keyword.
        """
        program = compiled_program(step, args, kwargs)
        mesh = program.step.mesh
        collectives = CollectiveReport.of(program).collectives
        # Without the instructions' names, which say nothing from run to run.
        unknown = (text.partition(": ")[2] for text in unknown_communication(program.module))
        return cls(
            LockContent(
                mesh=() if mesh is None else tuple(mesh.shape.items()),
                device_kind=program.device_kind,
                made_with=dict(_makers(program.device_kind)),
                arrays=locked_arrays(program.step.arguments.values()),
                collectives=summed(map(_counted, collectives)),
                not_counted=collections.Counter(unknown),
                memory=dict(_memory_items(MemoryReport.of(program))),
            )
        )

    def check(
        self,
        step: Any,
        /,
        *args: Any,
        tolerance: float = 0.05,
        improvements: Improvements = "fail",
        **kwargs: Any,
    ) -> LockReport:
        """Whether a step is as this lock says; it is compiled and not run.

        What became better fails too by default, as a snapshot does: a lock that stays looser than
        the step would let a later change make it as bad again.

        Args:
            step: As for ``of``.
            *args: What it is called with, concrete or abstract.
            tolerance: How far bytes may be from those of the lock, as a share of them. Counts and
                specs are exact.
            improvements: ``"pass"`` to accept what became better: fewer collectives, fewer bytes.
            **kwargs: What the step is called with by keyword. One with an input of the name of an
                option is given as ``compile_step(step, ...)``.

        Returns:
            A report that is true if the step is as locked. It prints the differences.

        Raises:
            LockError: The lock is of another mesh, or another kind of devices.
        """
        now = ShardingLock.of(step, *args, **kwargs)
        return self.check_lock(now, tolerance=tolerance, improvements=improvements)

    def check_lock(
        self,
        now: "ShardingLock",
        *,
        tolerance: float = 0.05,
        improvements: Improvements = "fail",
    ) -> LockReport:
        """``check`` for the lock of what is to be compared with this one."""
        return compared(self.content, now.content, tolerance, improvements)

    def to_json(self) -> str:
        """All of it as JSON text, for people too: a line for each array or group of equal ones.

        Equal locks have the same text, in any process.
        """
        return lock_to_text(self.content)

    @classmethod
    def from_json(cls, text: str) -> "ShardingLock":
        """Reads the text of ``to_json``.

        Raises:
            LockError: It is something else, or was changed by hand; all places are named.
        """
        return cls(lock_from_text(text))

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes it to a file, in the place of one that is there.

        Args:
            path: The file; its folder is made if there is none.

        Returns:
            The file.

        Raises:
            RuleTypeError: A folder is there.
        """
        refuse_unwritable(path, "path=", "lock.json", "lock")
        return write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ShardingLock":
        """Reads a file that ``save`` wrote.

        Raises:
            LockError: There is none, or it is not as it was written.
        """
        path = pathlib.Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise LockError(
                f"there is no sharding lock at {path}. "
                f"ShardingLock.of(step, ...).save({str(path)!r}) writes one."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise LockError(f"{path} cannot be read as a sharding lock: {error}") from error
        try:
            return cls.from_json(text)
        except LockError as error:
            headline, *_ = str(error).split("\n")
            raise LockError(f"{path}: {headline}", error.problems) from None

    def __repr__(self) -> str:
        content = self.content
        count = sum(count.count for count in content.collectives.values())
        return (
            f"ShardingLock({len(content.arrays)} arrays, {count} collectives, "
            f"mesh ({mesh_text(dict(content.mesh))}), {content.device_kind})"
        )


def _counted(one: Collective) -> tuple[CollectiveGroup, CollectiveCount]:
    # Who merged them first is the compiler's affair.
    layers = tuple(sorted(set(one.labels)))
    group = CollectiveGroup(layers, one.phase or "", one.kind, one.axes_text)
    if one.times is None:
        return group, CollectiveCount(1, one.payload_bytes, 1)
    return group, CollectiveCount(one.times, one.times * one.payload_bytes)


def _memory_items(report: MemoryReport) -> Iterator[tuple[str, int]]:
    """The items that a change of the program may change; what follows from others is left out."""
    for name, count in (report.items() | {"host": report.host}).items():
        if name not in ("padding", "resident", "unused"):
            yield name.replace("_", " "), count


def _makers(device_kind: str) -> Iterator[tuple[str, str]]:
    """What a program depends on besides the step: packages with their versions, and settings."""
    names = [*_MAKERS, *_MAKERS_BY_KIND.get(device_kind.partition(" ")[0], ())]
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    if jax.config.read("jax_disable_most_optimizations"):
        yield "optimizations", "few"
    flags = os.environ.get("XLA_FLAGS", "").split()
    # How many devices are simulated is in the mesh; where files are written is nobody else's.
    if flags := [flag for flag in flags if not re.search("_device_count=|dump|/", flag)]:
        yield "XLA_FLAGS", " ".join(sorted(flags))
