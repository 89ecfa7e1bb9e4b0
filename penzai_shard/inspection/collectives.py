"""Adds up what a compiled step moves between devices: by layer, kind, mesh axis and phase.

Where the compiler has merged the arrays of several layers into one collective, its bytes are
divided among them, so that the sums of all layers are those of the program. A collective in a loop
of which the program does not say how often it runs is in no sum; it is listed.
"""

import dataclasses
import functools
import posixpath
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from penzai_shard.errors import Problem, SelectionError
from penzai_shard.inspection.attribution import Collective, Part, read_collectives
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import matches, nearest
from penzai_shard.programs import LOSS, OPTIMIZER
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, HasReport, Report

if TYPE_CHECKING:
    from penzai_shard.inspection.compiling import CompiledStep

UNATTRIBUTED = "unattributed"
# The words of a table for what a part moves; the first whose beginning fits.
_MOVES = {
    "gradient of activation ": "gradients of activations",
    "gradient of ": "gradients",
    "activation ": "activations",
    "new value of ": "new values",
    "params/": "parameters",
    "opt_state/": "optimizer state",
}
_Key = TypeVar("_Key", bound=Hashable)


def wire_bytes(kind: str, payload_bytes: float, group_size: int) -> float:
    """The bytes that one device sends in one collective, by a ring algorithm.

    Of n devices, with P the payload: (n - 1) / n P in an all-gather, a reduce-scatter and an
    all-to-all, twice that in an all-reduce, P in a permute or a broadcast. No algorithm sends less
    in the first three and in an all-reduce. Sources: Thakur, Rabenseifner and Gropp, "Optimization
    of Collective Communication Operations in MPICH" (2005); Chan et al., "Collective communication:
    theory, practice, and experience" (2007).

    Args:
        kind: The kind of collective.
        payload_bytes: The larger of what goes in and what comes out on one device.
        group_size: How many devices exchange with each other.

    >>> wire_bytes("all-gather", 1024, 4), wire_bytes("all-reduce", 1024, 4)
    (768.0, 1536.0)
    """
    if group_size == 1:
        return 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload_bytes)
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (group_size - 1) * payload_bytes / group_size


@dataclasses.dataclass(frozen=True)
class Total:
    """What some collectives come to in one step.

    Attributes:
        count: How often they are executed.
        payload_bytes: Their payloads on one device, over all executions.
        wire_bytes: What one device sends, over all executions.
    """

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0

    def plus(self, other: "Total") -> "Total":
        """The total of both."""
        return Total(
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
        )


def add_up_part(one: Collective, payload_bytes: int) -> Total:
    """What a part of a collective comes to; nothing where its number of executions is unknown."""
    times = one.times or 0
    sent = wire_bytes(one.kind, payload_bytes, one.group_size)
    return Total(times, times * payload_bytes, times * sent)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CollectiveReport(HasReport):
    """What a step moves between devices, as its compiled program says.

    Attributes:
        collectives: Each place in the program where devices exchange data, in its order.
        mesh_sizes: The size of each mesh axis; empty without a mesh.
        layers: The labels of the step's layers, in the model's order.
        device_kind: What the program is for: ``"cpu"`` or ``"TPU v5 lite"``.
        remarks: What else a reader should know.
    """

    collectives: tuple[Collective, ...]
    mesh_sizes: Mapping[str, int]
    layers: tuple[str, ...] = ()
    device_kind: str = ""
    remarks: tuple[str, ...] = ()

    @functools.cached_property
    def total(self) -> Total:
        """The total of all collectives."""
        return self._add_up(lambda one, part: None).get(None, Total())

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends in one step."""
        return self.total.wire_bytes

    @property
    def wire_bytes_with_reduce_scatters(self) -> float:
        """The same if each all-reduce of which a device keeps its slice were a reduce-scatter.

        The compiler for CPUs writes reduce-scatters as all-reduces; those for GPUs and TPUs write
        them as they are.
        """
        pairs = ((one, part) for one in self.collectives for part in one.parts)
        slices = (add_up_part(one, x.payload_bytes) for one, x in pairs if x.keeps_slice)
        return self.wire_bytes - sum(each.wire_bytes / 2 for each in slices)

    @property
    def unattributed(self) -> tuple[Collective, ...]:
        """The collectives with a part of which the program does not say whose it is."""
        return tuple(c for c in self.collectives if not all(part.layers for part in c.parts))

    @property
    def unknown_times(self) -> tuple[Collective, ...]:
        """The collectives of which the program does not say how often they run."""
        return tuple(one for one in self.collectives if one.times is None)

    def by_layer(self) -> dict[str, Total]:
        """Totals by layer, the largest first.

        Owners are labels of layers, several joined by `` + `` where a part is of all of them;
        ``"loss"``, ``"optimizer"`` and ``"unattributed"``. What was merged is divided; a collective
        counts for each of its owners.
        """
        return self._add_up(lambda one, part: " + ".join(part.layers) or UNATTRIBUTED)

    def by_kind(self) -> dict[str, Total]:
        """Totals by kind (``"all-gather"``), the largest first."""
        return self._add_up(lambda one, part: one.kind)

    def by_mesh_axis(self) -> dict[str, Total]:
        """Totals by the text of the mesh axes (``"data+model"``), the largest first."""
        return self._add_up(lambda one, part: one.axes_text)

    def by_phase(self) -> dict[str, Total]:
        """Totals by phase, ``"unknown"`` where the program does not say, the largest first."""
        return self._add_up(lambda one, part: part.phase or "unknown")

    def _add_up(self, key: Callable[[Collective, Part], _Key]) -> dict[_Key, Total]:
        totals: dict[_Key, Total] = {}
        for one in self.collectives:
            # Several arrays of one owner in one collective are executed together.
            payloads: dict[_Key, int] = {}
            for part in one.parts:
                own = key(one, part)
                payloads[own] = payloads.get(own, 0) + part.payload_bytes
            for own, payload in payloads.items():
                totals[own] = totals.get(own, Total()).plus(add_up_part(one, payload))
        return dict(sorted(totals.items(), key=lambda item: -item[1].wire_bytes))

    def owned_by(self, pattern: str) -> tuple[Collective, ...]:
        """The collectives with a part that a layer owns, or a layer inside of it.

        Args:
            pattern: A label, ``"loss"``, ``"optimizer"`` or ``"unattributed"``, with ``*`` and
                ``**`` as in all patterns: ``"transformer/block_*/mlp"``.

        Raises:
            SelectionError: The step has no layer of that name.
        """
        known = [*self.layers, LOSS, OPTIMIZER, UNATTRIBUTED]
        inside = {owner for owner in known if matches(f"{pattern}/**", owner)}
        if not inside:
            fix = f"Write for instance {nearest(pattern, known) or LOSS!r}."
            problem = Problem("", f"the step has no layer {pattern!r}", fix, "unused")
            raise SelectionError("owned_by:", [problem])
        return tuple(
            one
            for one in self.collectives
            if any(inside.intersection(part.layers or (UNATTRIBUTED,)) for part in one.parts)
        )

    def report(self) -> Report:
        """The collectives as a table: a row for each layer, kind, mesh axis and phase."""
        key = ("layer", "collective", "mesh axes", "phase")
        where = Column("layer", "path"), *map(Column, (*key[1:], "moves"))
        sizes = Column("times", "count"), Column("payload", "bytes"), Column("sent", "bytes")
        columns = *where, *sizes, Column("remark", "detail")
        rows = [
            (*cells, *(dataclasses.astuple(total) if total.count else (None,) * 3), remark)
            for (*cells, remark), total in self._add_up(_row_key).items()
        ]
        facts = {
            "mesh": dict(self.mesh_sizes),
            "device_kind": self.device_kind,
            "wire_bytes": self.wire_bytes,
            "wire_bytes_with_reduce_scatters": self.wire_bytes_with_reduce_scatters,
            "unknown_times": len(self.unknown_times),
        }
        report = Report("Collectives", "", columns, rows, [*self._notes()], facts=facts, key=key)
        return dataclasses.replace(report, verdict=self._verdict(report))

    def _verdict(self, report: Report) -> str:
        if not self.collectives:
            return "no collectives: the step moves nothing between devices"
        count, more = self.total.count, len(self.unknown_times)
        verdict = f"{count:,} collective{'s' * (count != 1)} in one step"
        if more:
            verdict += f", without {more:,} that run an unknown number of times"
        verdict += f": on mesh ({mesh_text(self.mesh_sizes)}) each device sends "
        verdict += bytes_text(self.wire_bytes)
        if self.wire_bytes:
            row = report.largest("sent", 1).to_data()["rows"][0]
            verdict += f", {row['sent'] / self.wire_bytes:.0%} of it in {row['collective']}"
            verdict += f" over {row['mesh axes']} for {row['layer']}"
        return verdict

    def _notes(self) -> Iterator[str]:
        for name, totals in (("mesh axes", self.by_mesh_axis()), ("phase", self.by_phase())):
            if len(totals) > 1:
                texts = (f"{key} {bytes_text(t.wire_bytes)}" for key, t in totals.items())
                yield f"by {name}: {', '.join(texts)}"
        sent = self.wire_bytes_with_reduce_scatters
        if self.device_kind == "cpu" and sent < self.wire_bytes:
            yield (
                "the compiler for CPUs writes reduce-scatters as all-reduces; with those of GPUs "
                f"and TPUs each device sends {bytes_text(sent)}"
            )
        if maybe := sum(one.is_upper_bound for one in self.collectives):
            yield f"collectives in a branch of a condition count as always run: {maybe:,}"
        if unknown := len(self.unattributed):
            yield f"collectives with a part of unknown origin, in .unattributed: {unknown:,}"
        yield from self.remarks


def _row_key(one: Collective, part: Part) -> tuple[str, ...]:
    """What is one row of the table: all cells but the quantities, the remark last."""
    path, remarks = "".join(part.layers) or UNATTRIBUTED, []
    if len(part.layers) > 1:
        # The innermost layer around all of them.
        path = posixpath.commonpath(part.layers) or "several layers"
        names = [layer.removeprefix(f"{path}/") for layer in part.layers]
        remarks.append(f"for {', '.join(names)}")
    if one.times is None:
        sent = bytes_text(wire_bytes(one.kind, part.payload_bytes, one.group_size))
        remarks.append(f"runs an unknown number of times, and sends {sent} each time")
    fitting = (word for start, word in _MOVES.items() if part.moves.startswith(start))
    moves = next(fitting, "arguments" if part.moves else "")
    return path, one.kind, one.axes_text, part.phase or "", moves, "; ".join(remarks)


def make_collective_report(compiled: "CompiledStep") -> CollectiveReport:
    """The collectives of a compiled step.

    Raises:
        ProgramError: A collective is written in a form that is not known.
    """
    step, kind = compiled.step, compiled.device_kind
    notes, sizes = [*step.notes], {} if step.mesh is None else dict(step.mesh.shape)
    found = read_collectives(compiled.program, step)
    if found and kind == "cpu":
        dtypes = {array.dtype for one in compiled.program for array in one.results}
        if "bf16" in dtypes:
            notes.append(
                "the compiler for CPUs moves bfloat16 as float32; with those of GPUs and TPUs it "
                "is half the bytes"
            )
    return CollectiveReport(found, sizes, tuple(step.layers.order), kind, tuple(notes))
