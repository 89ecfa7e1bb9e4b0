"""Says why each collective of a compiled step is there, and what each rule costs and saves.

A compiler moves data where an operation has an operand in a layout in which it cannot go on: where
a mesh axis is lost, or where what is summed is split. Both are known of each operation, by the name
that JAX gave it, and a collective bears the name of the operation that asked for it. So operation
and mesh axis join the two; what they do not join is left open.
"""

import collections
import dataclasses
from typing import NamedTuple

from jax.sharding import PartitionSpec

from penzai_shard import specs
from penzai_shard.causes.ways import Loss, base
from penzai_shard.causes.words import StepWords, WhyCause, WhyLoss, fold_blocks, rule_text
from penzai_shard.inspection.attribution import Collective, Part
from penzai_shard.inspection.collectives import UNATTRIBUTED, add_up_part
from penzai_shard.inspection.compiling import CompiledStep
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, HasReport, Report


class Explained(NamedTuple):
    """A collective, or one of the arrays that it moves, and why it is there.

    Attributes:
        collective: The collective.
        part: The array.
        because: For each mesh axis what gets lost or is summed; empty if that is not known.
    """

    collective: Collective
    part: Part
    because: tuple[WhyLoss, ...]

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that ask for it; where an axis has no name, what lays it out."""
        return tuple(dict.fromkeys(x.cause.rule or x.cause.source for x in self.because))

    @property
    def bytes(self) -> float:
        """What one device sends in one step; 0 where it is not known how often it runs."""
        return add_up_part(self.collective, self.part.payload_bytes).wire_bytes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BecauseReport(HasReport):
    """Why the collectives of a step are there.

    Attributes:
        rows: Each array that a collective moves, in the order of the program.
        compiled: The compiled step.
    """

    rows: tuple[Explained, ...]
    compiled: CompiledStep

    def report(self) -> Report:
        """A row for each layer, kind, mesh axis, phase and reason, the largest first."""
        moves = map(Column, ("collective", "mesh axes", "phase"))
        sizes = Column("times", "count"), Column("sent", "bytes")
        columns = Column("layer", "path"), *moves, Column("because", "detail"), *sizes
        keys = []
        for row in self.rows:
            one, path = row.collective, " + ".join(row.part.layers) or UNATTRIBUTED
            text = ". ".join(x.text if x.layer == path else str(x) for x in row.because)
            keys.append((path, one.kind, one.axes_text, row.part.phase or "", text))
        sums = dict.fromkeys(folded := fold_blocks(keys), (0, 0.0))
        for key, row in zip(folded, self.rows, strict=True):
            times, sent = sums[key]
            sums[key] = times + (row.collective.times or 0), sent + row.bytes
        rows = sorted(((*key, *sums[key]) for key in sums), key=lambda row: -row[-1])
        known = sum(bool(row.because) for row in self.rows)
        verdict = f"{known} of {len(self.rows)} arrays in collectives have a reason"
        return Report("Because", verdict, columns, rows, notes=self.compiled.step.notes)

    def by_rule(self) -> Report:
        """What each rule costs and saves: bytes that each device sends in a step, and of memory.

        A collective for which several rules ask is divided among them.
        """
        sent, saved = collections.defaultdict[str, float](float), collections.Counter[str]()
        for row in self.rows:
            for rule in row.rules or ("unknown",):
                sent[rule] += row.bytes / max(len(row.rules), 1)
        for array in self.compiled.step.arguments:
            axes = specs.mesh_axes(array.spec or PartitionSpec(), len(array.shape))
            for name, over in zip(array.names or (), axes, strict=False):
                for axis in over if name is not None else ():
                    size = self.compiled.collectives.mesh_sizes[axis]
                    saved[rule_text(name, axis)] += (size - 1) * array.bytes_per_device
        sums = (Column(name, "bytes") for name in ("sends in a step", "saves of memory"))
        rules = sorted(dict.fromkeys([*sent, *saved]), key=lambda rule: (-sent[rule], -saved[rule]))
        rows = [(rule, sent[rule], saved[rule]) for rule in rules]
        verdict = f"each device sends {bytes_text(sum(sent.values()))} in a step"
        notes = ["memory is that of the step's arguments, which would be whole without the rule"]
        return Report("Rules", verdict, [Column("rule"), *sums], rows, notes)


def explain_collectives(words: StepWords, compiled: CompiledStep) -> BecauseReport:
    """Why each collective of a step is there.

    Args:
        words: The words of the step.
        compiled: The step, compiled.
    """
    # By name of an operation or path of an array, and mesh axis.
    losses: dict[tuple[str, str], list[Loss]] = collections.defaultdict(list)
    for loss in words.ways.losses:
        keys = {one.name for one in (loss.operation, loss.pinned_by) if one is not None}
        if loss.reason != "reduced" and (array := words.find_argument(loss.operand)):
            keys.add(array.path)
        for key in keys - {""}:
            losses[key, base(loss.mesh_axis)].append(loss)
    arrays = [(array.path, value) for value, array in words.results.items()]
    for path, value in (*words.gradients.items(), *arrays):
        for loss in words.ways.lost(value):
            losses[path, base(loss.mesh_axis)].append(loss)
    rows = []
    for one in compiled.collectives.collectives:
        is_sum = one.kind in ("all-reduce", "reduce-scatter")
        # One operation may gather what it takes, and leave a sum behind.
        ends = ("reduced", "used", "conflict") if is_sum else ()
        for part in one.parts:
            because, path = [], part.moves.rpartition(" of ")[2]
            # Some are named after what they move, and some not at all.
            candidates = *part.names, path
            for axis in one.mesh_axes or ():
                found = (x for key in candidates for x in losses.get((key, axis), ()))
                fitting = (x for x in found if (x.result is None and x.reason in ends) == is_sum)
                told = [words.loss(loss, is_sum) for loss in fitting]
                # Of several under one name, that of what is moved.
                own = [x for x in told if part.moves in (x.cause.path, f"params/{x.gathered}")]
                because += (own or told)[:1]
            if not because and any("/shard_map/" in name for name in part.names):
                layer = " + ".join(part.layers)
                cause, text = WhyCause(one.axes_text, "shard_map", layer), "a shard_map asks for it"
                because.append(WhyLoss("asked", cause, "a shard_map", layer, text))
            rows.append(Explained(one, part, tuple(because)))
    return BecauseReport(tuple(rows), compiled)
