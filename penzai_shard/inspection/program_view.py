"""A compiled step layer by layer: what each holds of a device's memory, and what it sends."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.memory.memory_rows import MEMORY, TEMPORARIES, model_order
from penzai_shard.inspection.steps.programs import StepProgram, compiled_program
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.inspection.traffic.sent_rows import SENT, sent_rows
from penzai_shard.report_trees import ReportTree, TreeNode, bytes_text, tree_of
from penzai_shard.text_tables import PreparedTable, Report

_FIGURES = (MEMORY, TEMPORARIES, SENT)


class ProgramTable(PreparedTable):
    """A compiled step layer by layer; ``print`` and notebooks show it."""

    headings = ("layer", "count", *_FIGURES)
    right_aligned = frozenset({"count", *_FIGURES})
    paths = frozenset({"layer"})


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledProgram(StepProgram, Report):
    """A step compiled for devices, present or absent.

    It shows itself layer by layer, as a tree in treescope and else as a table: what each layer
    holds of a device's memory, and what it sends.
    """

    @functools.cached_property
    def _memory(self) -> MemoryReport:
        return MemoryReport.of(self)

    @functools.cached_property
    def _collectives(self) -> CollectiveReport:
        return CollectiveReport.of(self)

    @functools.cached_property
    def _verdict(self) -> str:
        total = self._collectives.total
        sent = bytes_text(round(total.wire_bytes))
        sends = f"sends {sent} in {total.executed_text(' in one step')}"
        if not self._collectives.collectives:
            sends = "sends nothing in one step"
        return f"{self._memory.table().verdict}; {sends}"

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """Every layer in the order of the model, with its memory and its traffic.

        The figures named ``"memory"`` add up to what ``device_memory`` finds in all, those named
        ``"sent"`` to what ``collectives`` finds.

        Args:
            collapse: Show equal blocks as one, and all scalars of a part.
        """
        return tree_of(
            "CompiledProgram",
            self._verdict,
            [*self._memory.tree_rows(collapse=collapse), *sent_rows(self._collectives.collectives)],
            ok=self._memory.fits,
            notes=self._collectives.notes,
            wholes=self._memory.tree_wholes(),
            order=model_order(self.step.scopes),
            collapse=collapse,
        )

    def table(self, *, collapse: bool = True) -> ProgramTable:
        """The same as a table, without what is in the innermost layers.

        Args:
            collapse: Show equal blocks as one.
        """
        rows = tuple(
            (_name(node), f"{node.count:,}", *_cells(node))
            for node in _layers(self.tree(collapse=collapse))
        )
        notes = ("device_memory(program) and collectives(program) say more of each",)
        return ProgramTable(rows, self._verdict, (*self._collectives.notes, *notes))

    def to_json(self) -> str:
        """Both reports and every layer's figures as JSON text."""
        return json.dumps(
            {
                "layers": list(map(_data, _layers(self.tree(collapse=False)))),
                "memory": json.loads(self._memory.to_json()),
                "collectives": json.loads(self._collectives.to_json()),
            },
            indent=2,
        )


def compile_step(step: Any, /, *args: Any, **kwargs: Any) -> CompiledProgram:
    """Compiles a step for the devices of its arguments, without running it.

    JAX' persistent cache is not asked, since it takes programs for the same that differ in the
    names of their operations alone.

    ``device_memory``, ``collectives`` and ``ShardingLock.of`` take the program in place of a step
    with its arguments, so that for several of them it is compiled once.

    Args:
        step: A train step, a function under ``jax.jit``, or a layer; or a program that is compiled
            already, which comes back as it is.
        *args: What it is called with, concrete or abstract.
        **kwargs: The same by keyword.

    Returns:
        The program. On an abstract mesh it is that of as many simulated CPU devices, compiled in
        a process of its own if there are not as many here.

    Raises:
        MeshError: The arrays are on several meshes, or some are on other devices.
        RuleTypeError: It is not a step, or these are not its arguments.

    >>> import jax
    >>> from penzai_shard import collectives, device_memory
    >>> program = compile_step(jax.numpy.dot, jax.numpy.ones((4, 4)), jax.numpy.ones((4, 4)))
    >>> device_memory(program).total, len(collectives(program).collectives)
    (192, 0)
    """
    program = compiled_program(step, args, kwargs)
    if isinstance(program, CompiledProgram):
        return program
    fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    return CompiledProgram(**fields)


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
