"""Adds up what a step needs of the memory of one device, and says what would save most.

What is there between steps is summed from the sizes of the arrays' parts; the other items are the
compiler's own figures. What is in memory at the moment of most is an estimate: compilers do not
say what they put where, so it is read from the order of the program's instructions. Arrays that a
rule could split are findings of ``lint``, which plans each rule that it offers.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penzai_shard.inspection.collectives import UNATTRIBUTED
from penzai_shard.inspection.hlo import Program
from penzai_shard.inspection.liveness import read_peak
from penzai_shard.inspection.topologies import find_figures
from penzai_shard.jax_internals.compiler import MemoryFigures, kept_arguments
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import fold_key, paths_text
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


class Suggestion(NamedTuple):
    """What would make a step need less.

    Attributes:
        saves: By how many bytes what each device holds gets smaller. The total may get smaller by
            more, as gradients are split with their parameters, or by less, where temporaries had
            the memory of results.
        text: What to write.
    """

    saves: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MemoryReport(HasReport):
    """What a step needs of the memory of one device: items in bytes, and what they are made of.

    Attributes:
        parameters: The model's parameters.
        optimizer_state: What the optimizer keeps.
        state_variables: What else a step carries to the next.
        constants: The model's arrays that are no parameters.
        inputs: What comes in for this step: the batch, for instance.
        unused: The part of these that the program does not use. It is there all the same.
        padding: What the compiler counts for arguments beyond those: TPUs fill up tiles, and
            on CPUs the memory of the host is that of the devices.
        outputs: What comes out, with what takes the memory of donated arguments.
        donated: The part of the outputs that takes the memory of donated arguments.
        temporaries: What is there while the step runs: activations and gradients.
        generated_code: The program itself; 0 where the compiler does not say.
        total: What the compiler says of all; all items above but ``unused`` and ``donated``, which
            are taken off.
        resident: What is there between steps: the first four items.
        host: What is in the host's memory, for each device.
        step: The step.
        device_kind: What the devices are.
        limit: What programs can have of a device's memory; None if not known.
        peak: The temporaries at the moment of most, by layer and phase, the largest first: an
            estimate. Empty where that does not explain the compiler's figure.
        suggestions: What would save most, the largest saving first. Each is for the step as it is:
            two together may save less than their sum.
    """

    parameters: int
    optimizer_state: int
    state_variables: int
    constants: int
    inputs: int
    unused: int
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
    suggestions: tuple[Suggestion, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the total and unused arrays are within the limit; None if that is not known."""
        return None if self.limit is None else self.total + self.unused <= self.limit

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
        for name in ("unused", "padding", "outputs", "donated", "temporaries", "generated_code"):
            if size := getattr(self, name):
                is_taken_off = name in ("unused", "donated")
                rows.append((name.replace("_", " "), "", "", -size if is_taken_off else size, None))
        for row in self.peak:
            rows.append((row.layer, f"temporaries {row.phase}".strip(), "", None, row.bytes))
        others = ("step", "peak", "suggestions")
        facts = {name: value for name, value in vars(self).items() if name not in others}
        notes = [*self._notes()]
        report = Report("Memory", self._verdict(), columns, rows, notes, self.fits, facts)
        return dataclasses.replace(report, key=("memory", "part"))

    def _verdict(self) -> str:
        need, held = bytes_text(self.total), bytes_text(self.total + self.unused)
        if held != need:
            need += f" ({held} with arrays that it does not use)"
        mesh = self.step.mesh
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
        for each in self.suggestions:
            yield f"to hold about {bytes_text(each.saves)} less: {each.text}"
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
    peak: Sequence[PeakRow] = ()
    suggestions = [_suggest_donation(step)]
    if program is not None:
        peak = _read_peak_rows(step, program, figures.temporaries)
        # A step that computes something again has made its choice.
        if not any("checkpoint" in one.op_name.split("/") for one in program):
            suggestions += _suggest_remat(step, peak, device_kind)
    # What saves less is not worth a sentence.
    worth = [each for each in suggestions if each.saves > 0.01 * figures.total]
    return MemoryReport(
        **_read_items(step, figures),
        step=step,
        device_kind=device_kind,
        limit=memory_limit,
        peak=tuple(peak),
        suggestions=tuple(sorted(worth, reverse=True)),
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
        "unused": unused,
        "padding": figures.arguments - (sum(items.values()) - unused),
        "outputs": figures.outputs,
        "donated": figures.aliased,
        "temporaries": figures.temporaries,
        "generated_code": figures.generated_code,
        "total": figures.total,
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


# Suggestions


def _suggest_donation(step: "LoweredStep") -> Suggestion:
    """Arguments whose next value could take their memory."""
    saves = 0
    for number, result in step.next_arguments.items():
        now, following = step.arguments[number], step.results[result]
        is_equal = now.shard_shape == following.shard_shape and now.dtype == following.dtype
        if is_equal and not now.donated and not now.is_on_host:
            saves += now.bytes_per_device
    write = "donate_params_and_state=True of build_train_step_fn, or donate_argnums of jax.jit"
    return Suggestion(saves, f"donate the state, whose memory the next one then takes: {write}")


def _suggest_remat(
    step: "LoweredStep", peak: Sequence[PeakRow], device_kind: str
) -> Iterator[Suggestion]:
    """The blocks of a model whose activations wait for the backward pass."""
    if not any(row.phase == "backward" for row in peak):
        return
    blocks = collections.Counter[str]()
    for row in peak:
        # Blocks are the outermost layers that are numbered.
        pieces = row.layer.split("/")
        depths = [i for i, piece in enumerate(pieces, 1) if fold_key(piece) != piece]
        if row.phase == "forward" and row.layer in step.layers.order and depths:
            blocks["/".join(pieces[: depths[0]])] += row.bytes
    if blocks:
        # While one of them is computed again, its activations are there.
        saves = blocks.total() - max(blocks.values())
        text = f"compute each of {paths_text(blocks, 4)} again in the backward pass, by "
        text += "jax.checkpoint or, around a layer, pzs.Checkpointed"
        if device_kind == "cpu":
            text += " (the compiler for CPUs may keep the activations all the same)"
        yield Suggestion(saves, text)
