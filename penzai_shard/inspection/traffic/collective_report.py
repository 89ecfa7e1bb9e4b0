"""What a step moves between devices, over which mesh axes, and which layer asks for it."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from penzai_shard.compiled_programs import (
    ArrayType,
    CollectiveOperation,
    kept_slice_bytes,
    read_collectives,
    unknown_communication,
)
from penzai_shard.errors import SelectionError
from penzai_shard.inspection.steps.layer_groups import OTHER_OWNERS
from penzai_shard.inspection.steps.programs import StepProgram, compiled_program
from penzai_shard.inspection.traffic.attribution import Attribution, attribute
from penzai_shard.inspection.traffic.collective_records import (
    Collective,
    CollectivePart,
    CollectiveTotal,
    ring_bytes,
)
from penzai_shard.inspection.traffic.collective_table import (
    CollectiveTable,
    collective_rows,
    owner_groups,
    owners_of,
)
from penzai_shard.inspection.traffic.sent_rows import sent_rows
from penzai_shard.inspection.traffic.transfer_time import least_time
from penzai_shard.meshes import mesh_text
from penzai_shard.path_folding import paths_in_ranges
from penzai_shard.report_trees import ReportTree, bytes_text, share_text, tree_of
from penzai_shard.rule_kinds import did_you_mean
from penzai_shard.text_tables import Report
from penzai_shard.tree_paths import is_inside

_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CollectiveReport(Report):
    """The collectives of a compiled step, as ``collectives`` found them.

    It prints as a table of what one device sends in one step, what costs most first.

    Attributes:
        collectives: One record for each place in the program, in the order in which they run.
        mesh_shape: The sizes of the mesh axes by name; empty without a mesh.
        notes: What else there is to know, in sentences.
        device_kind: What the program is for, such as ``"cpu"`` or ``"TPU v5 lite"``.
        known_owners: The paths and labels of all that could own one; empty if they are not known.
    """

    collectives: tuple[Collective, ...]
    mesh_shape: Mapping[str, int]
    notes: tuple[str, ...] = ()
    device_kind: str = ""
    known_owners: frozenset[str] = frozenset()

    @functools.cached_property
    def total(self) -> CollectiveTotal:
        """The total of all collectives."""
        return CollectiveTotal.of(self.collectives)

    @property
    def wire_bytes(self) -> float:
        """What one device sends in one step, in bytes; without what runs an unknown number of
        times, see ``total``."""
        return self.total.wire_bytes

    @property
    def wire_bytes_as_meant(self) -> float:
        """What one device would send with a reduce-scatter for each that is written as an
        all-reduce, in bytes.

        The compiler for CPUs writes them so; those for GPUs and TPUs do not.
        """
        saved = (
            (one.times or 0) * (one.wire_bytes - one.wire_bytes_as_meant)
            for one in self.collectives
        )
        return self.wire_bytes - sum(saved)

    @property
    def unattributed(self) -> tuple[Collective, ...]:
        """Those of which it is not known whose they are."""
        return tuple(one for one in self.collectives if not one.layers)

    def by_layer(self) -> dict[str, CollectiveTotal]:
        """Totals by owner, as ``CollectivePart.owner`` names it, the costliest first.

        What the compiler merged is divided among its owners: the bytes of all owners add up to
        those of the report, and a collective counts for each of its owners.
        """
        return self._totals(lambda _, part: part.owner)

    def by_kind(self) -> dict[str, CollectiveTotal]:
        """Totals by kind, the costliest first."""
        return self._totals(lambda one, _: one.kind)

    def by_mesh_axis(self) -> dict[str, CollectiveTotal]:
        """Totals by mesh axes, as ``Collective.axes_text`` names them, the costliest first."""
        return self._totals(lambda one, _: one.axes_text)

    def by_phase(self) -> dict[str, CollectiveTotal]:
        """Totals by phase, ``"unknown"`` for none, divided as ``by_layer``, the costliest first."""
        return self._totals(lambda _, part: part.phase or "unknown")

    def _totals(
        self, key: Callable[[Collective, CollectivePart], str]
    ) -> dict[str, CollectiveTotal]:
        totals = {
            name: CollectiveTotal.of_parts(members) for name, members in self._grouped(key).items()
        }
        return dict(sorted(totals.items(), key=lambda item: -item[1].wire_bytes))

    def _grouped(
        self, key: Callable[[Collective, CollectivePart], _Key]
    ) -> dict[_Key, list[tuple[Collective, CollectivePart]]]:
        groups: dict[_Key, list[tuple[Collective, CollectivePart]]] = {}
        for one in self.collectives:
            for part in one.parts:
                groups.setdefault(key(one, part), []).append((one, part))
        return groups

    def owned_by(self, path: str) -> tuple[Collective, ...]:
        """The collectives that a layer or one inside it owns, alone or with others.

        Args:
            path: The layer's path or label, ``"loss"`` or ``"optimizer"``; or equal blocks as the
                table has them, ``"lm/block_{0-1}/mlp"``.

        Raises:
            SelectionError: The step has nothing of this name.
        """

        paths = {path}
        with contextlib.suppress(ValueError):
            paths.update(paths_in_ranges(path))

        def is_meant(owner: str) -> bool:
            return any(owner == one or is_inside(owner, one) for one in paths)

        found = tuple(
            one for one in self.collectives if any(map(is_meant, (*one.layers, *one.labels)))
        )
        if not found and self.known_owners and not any(map(is_meant, self.known_owners)):
            meant = did_you_mean(path, self.known_owners)
            raise SelectionError(
                f"the step has no layer {path!r}.{meant} report.by_layer() names those that own "
                "collectives; several equal ones are written block_{0-1}/mlp."
            )
        return found

    def time(self, bandwidth: Mapping[str, float]) -> float:
        """A lower bound of the time that the collectives take in one step, in seconds.

        It holds for perfect overlap: all collectives may run at the same time, with each other and
        with what is computed, and so may the links of different mesh axes. What goes over several
        mesh axes uses the links of all of them. Latency does not count, and what runs an unknown
        number of times, or in a branch of a condition, counts as not run. It is the bound of this
        program: one for CPUs may send more than one for other devices, as its notes say.

        Args:
            bandwidth: For each mesh axis how many bytes one device can send over its links in a
                second, in both directions of a ring together:
                ``{"data": 25e9, "model": 450e9}``.

        Raises:
            MeshError: A mesh axis that data goes over has no bandwidth, one is not of the mesh, or
                a bandwidth is not a positive number.
        """
        return least_time(self.collectives, self.mesh_shape, bandwidth)

    def table(self, *, collapse: bool = True) -> CollectiveTable:
        """The collectives as a table, what costs most first.

        Args:
            collapse: Show those of equal blocks and of layers side by side in one row, and the many
                small ones in one at the end.
        """
        rows = collective_rows(self.collectives, collapse)
        return CollectiveTable(rows, self._verdict(), (*self._sums(), *self.notes))

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The report as a tree: what each layer asks for, then each kind of collective in it.

        Args:
            collapse: Show equal blocks as one.
        """
        return tree_of(
            "CollectiveReport",
            self._verdict(),
            sent_rows(self.collectives),
            notes=(*self._sums(), *self.notes),
            collapse=collapse,
        )

    def _verdict(self) -> str:
        if not self.collectives:
            return "no collectives: the step moves nothing between devices"
        total = self.total
        sent = (
            f"{total.executed_text(' in one step')}: on mesh ({mesh_text(self.mesh_shape)}) each "
            f"device sends {bytes_text(round(total.wire_bytes))}"
        )
        if not total.wire_bytes:
            return sent
        (what, most), *_ = self._totals(lambda one, _: f"{one.kind} over {one.axes_text}").items()
        parts = [part for one in self.collectives for part in one.parts]
        group_of = dict(zip(parts, owner_groups(parts), strict=True))
        groups = self._grouped(lambda _, part: group_of[part])
        owners, owned = max(
            ((members, CollectiveTotal.of_parts(members)) for members in groups.values()),
            key=lambda group: group[1].wire_bytes,
        )
        return (
            f"{sent}, {share_text(most.wire_bytes, total.wire_bytes)} of it by {what}, "
            f"{share_text(owned.wire_bytes, total.wire_bytes)} for "
            f"{owners_of(part for _, part in owners)}"
        )

    def _sums(self) -> list[str]:
        lines = []
        if len(axes := self.by_mesh_axis()) > 1:
            lines.append("by mesh axes: " + _totals_text(axes))
        if len(phases := self.by_phase()) > 1:
            lines.append("by phase: " + _totals_text(phases))
        meant = self.wire_bytes_as_meant
        if self.device_kind == "cpu" and meant < self.wire_bytes:
            lines.append(
                "some all-reduces are reduce-scatters, which the compiler for CPUs does not write: "
                f"with those, as on GPUs and TPUs, each device sends {bytes_text(round(meant))}"
            )
        if maybe := sum(one.at_most for one in self.collectives):
            what = "1 place is in a branch of a condition, and counts"
            if maybe > 1:
                what = f"{maybe} places are in branches of a condition, and count"
            lines.append(f"{what} as always run")
        if unattributed := self.unattributed:
            sent = CollectiveTotal.of(unattributed).wire_bytes
            lines.append(
                f"{len(unattributed)} of {len(self.collectives)} places are of unknown origin, "
                f"with {share_text(sent, self.wire_bytes)} of the bytes: see report.unattributed"
            )
        return lines

    def to_json(self) -> str:
        """All of it as JSON text: mesh, totals, and one object per collective."""
        totals = {
            "by_layer": self.by_layer(),
            "by_kind": self.by_kind(),
            "by_mesh_axis": self.by_mesh_axis(),
            "by_phase": self.by_phase(),
        }
        return json.dumps(
            {
                "mesh": dict(self.mesh_shape),
                "device_kind": self.device_kind,
                "total": dataclasses.asdict(self.total),
                "wire_bytes_as_meant": self.wire_bytes_as_meant,
                **{
                    name: {key: dataclasses.asdict(total) for key, total in each.items()}
                    for name, each in totals.items()
                },
                "collectives": [dataclasses.asdict(one) for one in self.collectives],
                "notes": list(self.notes),
            },
            indent=2,
        )

    @classmethod
    def of(cls, program: StepProgram) -> "CollectiveReport":
        """The collectives of a program that is already compiled."""
        mesh_shape = {} if program.step.mesh is None else dict(program.step.mesh.shape)
        notes = tuple(_notes(program))
        if program.device_count == 1:
            where = "on a mesh of one device" if mesh_shape else "without a mesh, so on one device"
            notes = (f"the step runs {where}", *notes)
            return cls((), mesh_shape, notes, program.device_kind, _known_owners(program))
        notes = (*notes, *unknown_communication(program.module))
        operations = read_collectives(program.module, program.device_count, program.slice_of)
        moving = [one for one in operations if _moves_data(one)]
        if still := len(operations) - len(moving):
            which = "1 collective" if still == 1 else f"{still} collectives"
            notes = (f"left out, since its groups are of one device each: {which}", *notes)
        found = tuple(
            _record(program, one, whose, mesh_shape)
            for one, whose in zip(moving, attribute(program, moving), strict=True)
        )
        return cls(found, mesh_shape, notes, program.device_kind, _known_owners(program))


def collectives(step: Any, *args: Any, **kwargs: Any) -> CollectiveReport:
    """What a step moves between devices, found out without running it.

    The step is compiled, with its layers marked, and what the compiler made of it is read.

    Args:
        step: A train step, a function under ``jax.jit``, or a layer.
        *args: What it is called with, concrete or abstract.
        **kwargs: The same by keyword.

    Returns:
        A report with one record for each collective of the program. It prints as a table.

    Raises:
        MeshError: The arrays are on several meshes.
        ProgramError: The program has collectives that cannot be read; the message names them.

    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from penzai_shard import make_mesh
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> by_columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    >>> by_rows = NamedSharding(mesh, PartitionSpec("model"))
    >>> a = jax.ShapeDtypeStruct((64, 128), "float32", sharding=by_columns)
    >>> b = jax.ShapeDtypeStruct((128, 32), "float32", sharding=by_rows)
    >>> replicated = NamedSharding(mesh, PartitionSpec())
    >>> report = collectives(jax.jit(lambda a, b: a @ b, out_shardings=replicated), a, b)
    >>> [(one.kind, one.mesh_axes, one.payload_bytes, one.times) for one in report.collectives]
    [('all-reduce', ('model',), 8192, 1)]
    >>> report.wire_bytes, report.time({"model": 8192e6})
    (8192.0, 1e-06)
    """
    return CollectiveReport.of(compiled_program(step, args, kwargs))


def _totals_text(totals: Mapping[str, CollectiveTotal]) -> str:
    return ", ".join(
        f"{name} {bytes_text(round(total.wire_bytes))}" for name, total in totals.items()
    )


def _known_owners(program: StepProgram) -> frozenset[str]:
    """What could own a collective: layers, or else arrays and their groups, and parts of steps."""
    scopes = program.step.scopes
    arrays = () if scopes.paths else program.step.arguments.values()
    return frozenset(
        (*scopes.paths, *scopes.labels.values(), *(a.path for a in arrays), *OTHER_OWNERS)
    )


def _notes(program: StepProgram) -> Iterator[str]:
    yield from program.step.notes
    has_bfloat16 = any(
        one.opcode in ("parameter", "convert") and "bf16[" in one.text for one in program.module
    )
    if program.device_kind == "cpu" and has_bfloat16:
        yield (
            "the compiler for CPUs moves bfloat16 as float32: on GPUs and TPUs that is half the "
            "bytes"
        )


def _moves_data(operation: CollectiveOperation) -> bool:
    """Whether anything goes from one device to another."""
    return any(len(set(group)) > 1 for group in operation.groups)


def _record(
    program: StepProgram,
    operation: CollectiveOperation,
    whose: Attribution,
    mesh_shape: Mapping[str, int],
) -> Collective:
    axes = operation.axes(mesh_shape)
    group_size = len(operation.groups[0])
    payload = operation.payload_bytes
    scopes = program.step.scopes

    def labels_of(layers: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(scopes.label, layers)))

    larger = max(operation.results, operation.operands, key=lambda side: sum(a.bytes for a in side))
    return Collective(
        kind=operation.kind,
        mesh_axes=axes.mesh_axes if axes else None,
        axes_text=axes.text if axes else f"groups of {group_size}, not along mesh axes",
        group_size=group_size,
        payload_bytes=payload,
        wire_bytes=ring_bytes(operation.kind, payload, group_size),
        times=operation.times,
        phase=whose.phase,
        layers=whose.layers,
        labels=labels_of(whose.layers),
        moves=whose.moves,
        arrays=tuple(map(str, larger)),
        name=operation.name,
        parts=_parts(operation, whose, larger, labels_of),
        op_names=tuple(map(scopes.with_paths, operation.op_names)),
        at_most=operation.at_most,
        scattered_bytes=kept_slice_bytes(program.module, operation),
    )


def _parts(
    operation: CollectiveOperation,
    whose: Attribution,
    arrays: Sequence[ArrayType],
    labels_of: Callable[[Sequence[str]], tuple[str, ...]],
) -> tuple[CollectivePart, ...]:
    """What of a collective's payload is whose, if the program says so of each array."""
    if not len(whose.parts) == len(operation.operands) == len(arrays):
        moves = whose.moves[0] if len(whose.moves) == 1 else ""
        whole = operation.payload_bytes
        return (CollectivePart(whose.layers, labels_of(whose.layers), whose.phase, moves, whole),)
    return tuple(
        CollectivePart(part.owners, labels_of(part.owners), part.phase, part.moves, array.bytes)
        for part, array in zip(whose.parts, arrays, strict=True)
    )
