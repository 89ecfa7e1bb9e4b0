"""Keeps what a step is like in a small file, so that a later change of it is noticed.

A lock is a report that is written to a file: a row for each array with its layout, for what each
layer communicates, for the memory of one device. Two locks are compared as any two reports are.
Nothing in it depends on a run: equal steps give the same bytes.
"""

import collections
import dataclasses
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from penzai_shard.errors import LockError, Problem
from penzai_shard.inspection.attribution import Collective
from penzai_shard.inspection.collectives import UNATTRIBUTED, wire_bytes
from penzai_shard.inspection.compiling import CompiledStep, compile_step
from penzai_shard.inspection.step_arrays import StepArray
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import group_paths
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, HasReport, Report

VERSION = 1
MESH = ("mesh", "sizes")
RECOMPILATION = "compiles again in step 2"
_FIX = "Write it with pytest --update-sharding-locks, or with penzai-shard price --json."


class LockRow(NamedTuple):
    """What a lock says of one array, of one kind of collective in a layer, or of memory.

    Attributes:
        path: The array, where it is a parameter or belongs to one without ``params/``; the layer.
        item: What it is: ``"parameters"``, ``"optimizer state mu"``, ``"all-gather over data,
            forward"``.
        spec: The layout of an array.
        type: Its dtype and shape.
        donated: Whether it is, ``"yes"`` or ``"no"``.
        memory: The bytes of it on one device.
        times: How often a collective runs in one step.
        sent: The bytes that one device sends.
    """

    path: str
    item: str
    spec: str | None = None
    type: str | None = None
    donated: str | None = None
    memory: int | None = None
    times: int | None = None
    sent: int | None = None


_KINDS: dict[str, Any] = {"path": "path", "memory": "bytes", "times": "count", "sent": "bytes"}
_COLUMNS = [Column(name, _KINDS.get(name, "text")) for name in LockRow._fields]


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingLock(HasReport):
    """What a step is like: layouts, donation, collectives, memory.

    Committed with a test, it makes the test fail when a change adds a gather or loses a donation,
    and the difference of the file shows reviewers what the change costs. The pytest fixture does
    both: ``assert_sharding_lock("train_step", step, state, tokens=tokens)``.

    Attributes:
        made_by: The kind of device, and the versions of what compiled the step.
        rows: What it holds, sorted by path and item.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> step = jax.jit(lambda x: x.sum())
    >>> lock = ShardingLock.of(step, jnp.ones(8))
    >>> bool(lock.check(step, jnp.zeros(8))), bool(lock.check(step, jnp.zeros(9)))
    (True, False)
    """

    made_by: Mapping[str, str]
    rows: tuple[LockRow, ...]

    @classmethod
    def of(cls, step: Any, /, *args: Any, **kwargs: Any) -> "ShardingLock":
        """The lock of a step, which is compiled and not run.

        Args:
            step: As for ``compile_step``, or what that or ``compile_ahead`` gives.
            *args: What it is called with, concrete or abstract.
            **kwargs: The same by keyword.

        Raises:
            ProgramError: The step was compiled ahead, and is too large to have a program. Else as
                ``compile_step``.
        """
        compiled = compile_step(step, *args, **kwargs)
        # XLA is a part of jaxlib; for TPUs it is in a package of its own.
        compilers = ("jax", "jaxlib", *(["libtpu"] if "TPU" in compiled.device_kind else []))
        made_by = {name: importlib.metadata.version(name) for name in compilers}
        return cls({"device": compiled.device_kind, **made_by}, _sort(_read_rows(compiled)))

    def check(
        self,
        step: Any,
        /,
        *args: Any,
        tolerance: float = 0.05,
        improvements: Literal["fail", "pass"] = "fail",
        **kwargs: Any,
    ) -> Report:
        """Whether a step is as this lock says; it is compiled and not run.

        What became better fails too by default: a lock that stays looser than the step lets a later
        change make it as bad again.

        Args:
            step: As for ``of``.
            *args: What it is called with, concrete or abstract.
            tolerance: By which fraction bytes may differ. Specs and counts are exact.
            improvements: ``"pass"`` to accept fewer bytes and fewer collectives.
            **kwargs: What the step is called with by keyword. One that has an input with the name
                of an option is compiled first: ``lock.check(compile_step(step, ...))``.

        Returns:
            A report that is true if the step is as locked, with a row for each difference.
        """
        report = ShardingLock.of(step, *args, **kwargs).compare(self, tolerance=tolerance)
        is_ok = all(row[-1] and improvements == "pass" for row in report.rows)
        return dataclasses.replace(report, ok=is_ok)

    def compare(self, before: HasReport, *, tolerance: float = 0.0) -> Report:
        """What differs from an earlier lock; see ``HasReport.compare``.

        Programs for another kind of device, or by another compiler, differ anyway: then only the
        layouts are compared, and a note says so.
        """
        if not isinstance(before, ShardingLock) or self.made_by == before.made_by:
            return super().compare(before, tolerance=tolerance)
        was, now = (
            dataclasses.replace(lock.report(), rows=[row for row in lock.rows if row.spec])
            for lock in (before, self)
        )
        compilers = (", ".join(map(" ".join, lock.made_by.items())) for lock in (before, self))
        note = "only layouts are compared: one is of {}, the other of {}"
        report = now.compare(was, tolerance=tolerance)
        return dataclasses.replace(report, notes=[note.format(*compilers)])

    def report(self) -> Report:
        """The mesh, every array, what each layer communicates, the memory of one device."""
        memory, sent = (bytes_text(self.total(name)) for name in ("memory", "sent"))
        device, facts = self.made_by["device"], {"made_by": self.made_by}
        verdict = f"each device ({device}) holds {memory} and sends {sent} in a step"
        key = ("path", "item")
        return Report("Sharding lock", verdict, _COLUMNS, self.rows, facts=facts, key=key)

    def total(self, name: str) -> int:
        """The sum of all rows: of their ``memory``, or of the bytes ``sent``."""
        return sum(getattr(row, name) or 0 for row in self.rows)

    # Files

    def to_json(self) -> str:
        """The lock as text: a line for each row, and one for equal rows of equal blocks."""
        head = json.dumps({"version": VERSION, "made_by": self.made_by})[:-1]
        lines = ",\n".join(map(json.dumps, _fold(self.rows)))
        return f'{head}, "rows": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, path: str = "") -> "ShardingLock":
        """Reads what ``to_json`` wrote.

        Args:
            text: The text.
            path: What an error calls it.

        Raises:
            LockError: It is no lock, or one of another version.
        """
        try:
            data = json.loads(text)
            if data["version"] == VERSION:
                return cls(data["made_by"], _sort(_unfold(data["rows"])))
            what = f"is a lock of version {data['version']}, and this library reads {VERSION}"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"is no sharding lock ({type(error).__name__}: {error})"
        raise LockError("cannot read a lock:", [Problem(path, what, _FIX)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the lock to a file, whose folder is made if it is not there."""
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.to_json(), encoding="utf-8", newline="\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ShardingLock":
        """Reads a file that ``save`` wrote.

        Raises:
            LockError: There is no such file, it is no lock, or it is one of another version.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = Problem(str(path), f"cannot be read ({type(error).__name__})", _FIX)
            raise LockError("cannot read a lock:", [problem]) from error
        return cls.from_json(text, str(path))


def _sort(rows: Iterable[LockRow]) -> tuple[LockRow, ...]:
    return tuple(sorted(rows, key=lambda row: (row.path, row.item)))


# What a lock holds


def _read_rows(compiled: CompiledStep) -> Iterator[LockRow]:
    step, memory = compiled.step, compiled.memory
    yield LockRow(*MESH, "none" if step.mesh is None else mesh_text(step.mesh))
    for array in step.arguments:
        # Constants go by where they stand in the code, and nobody lays them out.
        if array.part != "constants":
            yield _read_array(array)
    for path, before, after in compiled.recompilation:
        yield LockRow(path, RECOMPILATION, f"{before} -> {after}", times=1)

    yield from _read_collectives(compiled.collectives.collectives)
    constants = (x for x in step.arguments if x.part == "constants" and x.shape)
    others = {
        "constants": sum(x.bytes_per_device for x in constants),
        "padding": memory.padding,
        "outputs in new memory": memory.outputs - memory.donated,
        "temporaries": memory.temporaries,
    }
    for item, size in others.items():
        # What is less is noise: one more number that a step returns, for instance.
        if size > memory.total / 100:
            yield LockRow("memory", item, memory=size)


def _read_array(array: StepArray) -> LockRow:
    path, item = array.parameter or array.path, array.part
    if item == "optimizer state":
        # What is kept of a parameter stands with it, by its name: transformations can be nested in
        # many ways.
        own = array.path.removesuffix(array.parameter.partition("/")[2])
        names = [piece for piece in own.split("/") if piece and not piece.isdigit()]
        path = array.parameter or names[0]
        item = " ".join([item, *names[1:][-1:]])
    spec = "left to JAX" if array.spec is None else f"P({', '.join(map(repr, array.spec))})"
    return LockRow(
        path.removeprefix("params/"),
        item,
        spec=spec + " in host memory" * array.is_on_host,
        type=f"{array.dtype}[{','.join(map(str, array.shape))}]",
        donated="yes" if array.donated else "no",
        memory=None if array.is_on_host else array.bytes_per_device,
    )


def _read_collectives(found: Iterable[Collective]) -> Iterator[LockRow]:
    """What each layer sends by each kind of collective, with each array counted.

    How many arrays one collective carries is the compiler's affair, and changes with any other
    collective of the program.
    """
    times = collections.Counter[tuple[str, str]]()
    sent = collections.defaultdict[tuple[str, str], float](float)
    for one in found:
        for part in one.parts:
            # XLA:CPU has no reduce-scatter, and keeps a slice of an all-reduce.
            kind = "reduce-scatter" if part.keeps_slice else one.kind
            item = ", ".join(filter(None, [f"{kind} over {one.axes_text}", part.phase]))
            item += "" if one.times is not None else ", unknown number of times"
            place = " + ".join(part.layers) or UNATTRIBUTED, item
            own = 1 if one.times is None else one.times
            times[place] += own
            sent[place] += own * wire_bytes(kind, part.payload_bytes, one.group_size)
    for place in times:
        yield LockRow(*place, times=times[place], sent=round(sent[place]))


# Equal blocks in a file


def _fold(rows: Sequence[LockRow]) -> Iterator[dict[str, Any]]:
    """Each row without what is None; equal rows of equal blocks as one, with all their paths."""
    for members in group_paths((row.path, row[1:]) for row in rows):
        block = [rows[i] for i in members]
        cells = {name: cell for name, cell in block[0]._asdict().items() if cell is not None}
        paths = [row.path for row in block]
        yield cells | {"path": paths if len(paths) > 1 else paths[0]}


def _unfold(lines: Iterable[dict[str, Any]]) -> Iterator[LockRow]:
    for line in lines:
        paths = [line["path"]] if isinstance(line["path"], str) else line["path"]
        yield from (LockRow(**line | {"path": path}) for path in paths)
