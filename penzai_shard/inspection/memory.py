"""Adds up what a step needs of the memory of one device.

What is there between steps is summed from the sizes of the arrays' parts; the other items are the
compiler's own figures. What is in memory at the moment of most is an estimate: compilers do not
say what they put where, so it is read from the order of the program's instructions. Arrays that a
rule could split are findings of ``lint``, which plans each rule that it offers.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from penzai_shard.inspection.collectives import UNATTRIBUTED
from penzai_shard.inspection.hlo import Program
from penzai_shard.inspection.liveness import read_peak
from penzai_shard.inspection.topologies import find_figures
from penzai_shard.jax_internals.compiler import MemoryFigures, kept_arguments
from penzai_shard.meshes import mesh_text
from penzai_shard.planning.plan import write_axes
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, HasReport, Report

if TYPE_CHECKING:
    from penzai_shard.inspection.lowering import LoweredStep

_PARTS = ("parameters", "optimizer state", "state variables", "constants")


class PeakRow(NamedTuple):
    """Temporaries of one layer at the moment at which most of them are there.

    Attributes:
        layer: Its label; ``"loss"``, ``"optimizer"`` or ``"unattributed"``.
        phase: In which phase they were made; ``""`` where that is not known.
        bytes: Their size on one device.
    """

    layer: str
    phase: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MemoryReport(HasReport):
    """What a step needs of the memory of one device: items in bytes, and what they are made of.

    Attributes:
        parameters: The model's parameters.
        optimizer_state: What the optimizer keeps.
        state_variables: What else a step carries to the next.
        constants: The model's arrays that are no parameters.
        inputs: What comes in for this step: the batch, for instance.
        padding: What the compiler counts for arguments beyond those: TPUs fill up tiles, and
            on CPUs the memory of the host is that of the devices.
        outputs: What comes out, with what takes the memory of donated arguments.
        donated: The part of the outputs that takes the memory of donated arguments.
        temporaries: What is there while the step runs: activations and gradients.
        generated_code: The program itself; 0 where the compiler does not say.
        total: All items above but ``donated``, which is taken off: what the compiler says of all,
            and arguments that the program does not use, which are there all the same.
        resident: What is there between steps: the first four items.
        host: What is in the host's memory, for each device.
        step: The step.
        device_kind: What the devices are.
        limit: What programs can have of a device's memory; None if not known.
        peak: The temporaries at the moment of most, by layer and phase, the largest first: an
            estimate. Empty where that does not explain the compiler's figure.
        donatable: The memory of arguments that their next values could take, were they donated.
    """

    parameters: int
    optimizer_state: int
    state_variables: int
    constants: int
    inputs: int
    padding: int
    outputs: int
    donated: int
    temporaries: int
    generated_code: int
    total: int
    resident: int
    host: int
    step: "LoweredStep"
    device_kind: str
    limit: int | None
    peak: tuple[PeakRow, ...]
    donatable: int

    @property
    def fits(self) -> bool | None:
        """Whether the total is within the limit; None if that is not known."""
        return None if self.limit is None else self.total <= self.limit

    def report(self) -> Report:
        """The memory as a table: a row for each array, then what the program needs besides."""
        sizes = Column("per device", "bytes"), Column("at the peak", "bytes")
        columns = Column("memory", "path"), Column("part"), Column("axes"), *sizes
        sums: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for array in self.step.arguments:
            if not array.is_on_host:
                # What an optimizer keeps of a parameter stands with it: a row for each layout.
                path = (array.parameter or array.path).removeprefix("params/")
                axes = write_axes(array.names, array.shape, array.spec)
                sums[path, array.part, f"{axes} {array.dtype}".strip()] += array.bytes_per_device
        rows: list[tuple[Any, ...]] = [(*key, size, None) for key, size in sums.items()]
        for name in ("padding", "outputs", "donated", "temporaries", "generated_code"):
            if size := getattr(self, name):
                size = -size if name == "donated" else size
                rows.append((name.replace("_", " "), "", "", size, None))
        for row in self.peak:
            rows.append((row.layer, f"temporaries {row.phase}".strip(), "", None, row.bytes))
        facts = {k: value for k, value in vars(self).items() if k not in ("step", "peak")}
        notes = [*self._notes()]
        report = Report("Memory", self._verdict(), columns, rows, notes, self.fits, facts)
        return dataclasses.replace(report, key=("memory", "part"))

    def _verdict(self) -> str:
        need, mesh = bytes_text(self.total), self.step.mesh
        where = "one device" if mesh is None else f"each device of mesh ({mesh_text(mesh)})"
        kind = f" ({self.device_kind})" if self.device_kind else ""
        if self.limit is None:
            return f"needs {need} on {where}{kind}, whose memory is not known"
        answer = "fits" if self.fits else "does not fit"
        return f"needs {need} of {bytes_text(self.limit)}: {answer}, on {where}{kind}"

    def _notes(self) -> Iterator[str]:
        parts = [(part, getattr(self, part.replace(" ", "_"))) for part in _PARTS]
        if self.resident:
            texts = ", ".join(f"{part} {bytes_text(size)}" for part, size in parts if size)
            yield f"between steps there are {bytes_text(self.resident)}: {texts}"
        if self.host:
            yield f"the memory of the host holds {bytes_text(self.host)} for each device"
        if self.peak:
            explained = bytes_text(sum(row.bytes for row in self.peak))
            yield (
                f"at the peak is an estimate: it finds {explained} of temporaries, and the "
                f"compiler counts {bytes_text(self.temporaries)}"
            )
        # What saves less is not worth a sentence.
        if self.donatable > 0.01 * self.total:
            yield (
                f"to hold about {bytes_text(self.donatable)} less, donate the state, whose memory "
                "the next one then takes: donate_params_and_state=True of build_train_step_fn, or "
                "donate_argnums of jax.jit"
            )
        yield from self.step.notes


def make_memory_report(
    step: "LoweredStep",
    figures: MemoryFigures,
    program: Program | None,
    memory_limit: int | None = None,
    *,
    device_kind: str = "",
) -> MemoryReport:
    """What a compiled step needs of one device.

    Args:
        step: The step.
        figures: What the compiler says of its program.
        program: The program; None of a step that the compiler refused as too large.
        memory_limit: The bytes that programs can have on a device. By default those that are
            published of the kind of device.
        device_kind: What the devices are.
    """
    published = find_figures(device_kind)
    if memory_limit is None and published is not None:
        memory_limit = int(published.memory)
    peak = () if program is None else _read_peak_rows(step, program, figures.temporaries)
    return MemoryReport(
        **_read_items(step, figures),
        step=step,
        device_kind=device_kind,
        limit=memory_limit,
        peak=tuple(peak),
        donatable=_count_donatable(step),
    )


def _read_items(step: "LoweredStep", figures: MemoryFigures) -> dict[str, int]:
    sums: collections.Counter[str] = collections.Counter()
    used, unused = kept_arguments(step.lowered), 0
    for number, array in enumerate(step.arguments):
        sums["host" if array.is_on_host else array.part] += array.bytes_per_device
        if number not in used and not array.is_on_host:
            unused += array.bytes_per_device
    items = {part.replace(" ", "_"): sums[part] for part in (*_PARTS, "inputs")}
    return {
        **items,
        "padding": figures.arguments - (sum(items.values()) - unused),
        "outputs": figures.outputs,
        "donated": figures.aliased,
        "temporaries": figures.temporaries,
        "generated_code": figures.generated_code,
        "total": figures.total + unused,
        "resident": sum(sums[part] for part in _PARTS),
        "host": max(sums["host"], figures.host),
    }


def _read_peak_rows(step: "LoweredStep", program: Program, temporary_bytes: int) -> list[PeakRow]:
    """What is in memory at the moment of most, by layer and phase."""
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for value in read_peak(program, temporary_bytes):
        owner, phase = step.layers.owner(value.op_name), step.layers.phase(value.op_name)
        sums[owner or UNATTRIBUTED, phase or ""] += value.bytes
    return [PeakRow(*key, size) for key, size in sums.most_common() if size]


def _count_donatable(step: "LoweredStep") -> int:
    """The bytes of arguments whose next value could take their memory."""
    size = 0
    for number, result in step.next_arguments.items():
        now, following = step.arguments[number], step.results[result]
        is_equal = now.shard_shape == following.shard_shape and now.dtype == following.dtype
        if is_equal and not now.donated and not now.is_on_host:
            size += now.bytes_per_device
    return size
