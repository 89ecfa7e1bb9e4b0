"""A compiled step layer by layer: what each holds of a device's memory, and what it sends."""

import functools
import json
from collections.abc import Iterable, Iterator

from penzai_shard.inspection.collective_report import CollectiveReport
from penzai_shard.inspection.memory_report import MemoryReport
from penzai_shard.inspection.memory_rows import MEMORY, TEMPORARIES, model_order
from penzai_shard.inspection.programs import CompiledProgram
from penzai_shard.inspection.sent_rows import SENT, sent_rows
from penzai_shard.report_trees import ReportTree, TreeNode, bytes_text, tree_of
from penzai_shard.text_tables import PreparedTable

_FIGURES = (MEMORY, TEMPORARIES, SENT)


class ProgramTable(PreparedTable):
    """A compiled step layer by layer; ``print`` and notebooks show it."""

    headings = ("layer", "count", *_FIGURES)
    right_aligned = frozenset({"count", *_FIGURES})
    paths = frozenset({"layer"})


class ProgramView:
    """Both reports of a program, and what they say of each layer together."""

    def __init__(self, program: CompiledProgram) -> None:
        self._scopes = program.step.scopes
        self.memory = MemoryReport.of(program)
        self.collectives = CollectiveReport.of(program)

    @functools.cached_property
    def _verdict(self) -> str:
        total = self.collectives.total
        sent = bytes_text(round(total.wire_bytes))
        sends = f"sends {sent} in {total.executed_text(' in one step')}"
        if not self.collectives.collectives:
            sends = "sends nothing in one step"
        return f"{self.memory.table().verdict}; {sends}"

    def tree(self, collapse: bool) -> ReportTree:
        """Every layer with its memory, its temporaries and what it sends."""
        return tree_of(
            "CompiledProgram",
            self._verdict,
            [*self.memory.tree_rows(collapse=collapse), *sent_rows(self.collectives.collectives)],
            ok=self.memory.fits,
            notes=self.collectives.notes,
            wholes=self.memory.tree_wholes(),
            order=model_order(self._scopes),
            collapse=collapse,
        )

    def table(self, collapse: bool) -> ProgramTable:
        """The same without what is in the innermost layers."""
        rows = tuple(
            (_name(node), f"{node.count:,}", *_cells(node)) for node in _layers(self.tree(collapse))
        )
        notes = ("device_memory(program) and collectives(program) say more of each",)
        return ProgramTable(rows, self._verdict, (*self.collectives.notes, *notes))

    def to_json(self) -> str:
        """Both reports and every layer's figures as JSON text."""
        return json.dumps(
            {
                "layers": list(map(_data, _layers(self.tree(False)))),
                "memory": json.loads(self.memory.to_json()),
                "collectives": json.loads(self.collectives.to_json()),
            },
            indent=2,
        )


def _layers(tree: ReportTree) -> Iterator[TreeNode]:
    """The outermost nodes, and below them those with others in them, which are layers."""
    for outermost in tree.children:
        yield outermost
        yield from (node for node in outermost.walk() if node.children and node is not outermost)


def _name(node: TreeNode) -> str:
    """Where it is; parts of a step beside its layers are no paths."""
    return node.path or node.label


def _cells(node: TreeNode) -> Iterable[str]:
    figures = map(node.figure, _FIGURES)
    return ("" if figure is None else figure.text for figure in figures)


def _data(node: TreeNode) -> dict[str, str | float]:
    return {"path": _name(node), **{figure.name: figure.value for figure in node.figures}}
