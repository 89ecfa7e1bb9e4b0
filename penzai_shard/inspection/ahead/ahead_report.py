"""What is known of a step on devices that are not there."""

import dataclasses
import json
from collections.abc import Iterator

from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.program_view import CompiledProgram
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.report_trees import ReportTree, bytes_text
from penzai_shard.text_tables import PreparedTable, Report

OTHER_DEVICES = (
    "all of it for other devices, whose compilers plan memory and merge collectives in their own "
    "ways"
)
_TIME = "how long a step takes, which collectives.time(bandwidth=...) bounds from below"


class AheadTable(PreparedTable):
    """A step on absent devices; ``print`` and notebooks show it."""

    headings = ("what", "on these devices")
    unwrapped = frozenset({"what"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AheadReport(Report):
    """A step compiled for devices that are not there, as ``compile_ahead`` found it.

    Attributes:
        topology: The devices.
        device_kind: What they are, as JAX names it: ``"TPU v5 lite"``.
        compiler: What compiled, with its version: ``"libtpu 0.0.42.1"``.
        seconds: How long that took.
        memory: What the step needs of each device. Of a step that is too large, the compiler says
            only the total: what does not come in is in ``temporaries``.
        collectives: What it moves; None of a step that is too large, of which the compiler gives no
            program.
        program: What was compiled; None of a step that is too large.
        notes: What else there is to know, in sentences.
    """

    topology: Topology
    device_kind: str
    compiler: str
    seconds: float
    memory: MemoryReport
    collectives: CollectiveReport | None
    program: CompiledProgram | None
    notes: tuple[str, ...] = ()

    @property
    def device_count(self) -> int:
        """How many devices there are, as JAX counts them."""
        return self.topology.device_count

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the devices' memory; None if that is not known."""
        return False if self.program is None else self.memory.fits

    @property
    def exact(self) -> tuple[str, ...]:
        """What of it is as in a run on these devices with the same versions of JAX and compiler."""
        if self.program is None:
            return ("what the step needs and has of each device's memory",)
        if self.topology.platform == "cpu":
            return ("program, memory and collectives on as many CPU devices",)
        if self.topology.platform == "cuda":
            return ("the collectives", "memory, but for what chosen kernels need")
        return ("program", "memory", "collectives")

    @property
    def estimated(self) -> tuple[str, ...]:
        """What of it is an estimate."""
        if self.topology.platform == "cpu":
            return (OTHER_DEVICES, _TIME)
        if self.topology.platform == "cuda":
            return ("which kernels run, since they are chosen by timing them on a GPU", _TIME)
        return (_TIME,)

    def table(self, *, collapse: bool = True) -> AheadTable:
        """What was found, in a few lines; ``memory`` and ``collectives`` are tables of their own.

        Args:
            collapse: As of other reports; there is nothing to fold in this one.
        """
        rows = tuple(self._rows())
        return AheadTable(rows, self.memory.table().verdict, tuple(self._remarks()))

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """What each layer holds and sends; of a step that is too large, what it would hold.

        Args:
            collapse: Show equal blocks as one.
        """
        found = self.memory if self.program is None else self.program
        notes = (*(f"{what}: {text}" for what, text in self._rows()), *self._remarks())
        return dataclasses.replace(
            found.tree(collapse=collapse), kind="AheadReport", ok=self.fits, notes=notes
        )

    def _remarks(self) -> Iterator[str]:
        yield f"exact: {'; '.join(self.exact)}"
        yield f"estimated: {'; '.join(self.estimated)}"
        yield from self.notes

    def _rows(self) -> Iterator[tuple[str, str]]:
        count = f"{self.device_count:,}"
        if self.memory.program.step.mesh is None and self.device_count > 1:
            count = f"1 of {count}"
        yield "devices", f"{count} x {self.device_kind} ({self.topology.name})"
        if self.topology.slices > 1:
            yield "slices", self._slices_text()
        yield "between steps", bytes_text(self.memory.resident)
        yield "while it runs", bytes_text(self.memory.total)
        if self.collectives is not None:
            total = self.collectives.total
            sent = bytes_text(round(total.wire_bytes))
            yield "sent in a step", f"{sent}, in {total.executed_text()}"
        yield "compiled by", f"{self.compiler}, in {self.seconds:.1f} s"

    def _slices_text(self) -> str:
        mesh = self.memory.program.step.mesh
        assert mesh is not None
        slices = self.topology.slices_of_axes(mesh.shape)
        over = [f"{n} along {name!r}" for name, n in zip(mesh.shape, slices, strict=True) if n > 1]
        return f"{self.topology.slices}: {', '.join(over)}"

    def to_json(self) -> str:
        """All of it as JSON text."""
        collectives = None if self.collectives is None else json.loads(self.collectives.to_json())
        return json.dumps(
            {
                "topology": self.topology.name,
                "device_kind": self.device_kind,
                "device_count": self.device_count,
                "compiler": self.compiler,
                "seconds": self.seconds,
                "fits": self.fits,
                "exact": self.exact,
                "estimated": self.estimated,
                "memory": json.loads(self.memory.to_json()),
                "collectives": collectives,
                "notes": self.notes,
            },
            indent=2,
        )
