"""Tells which layout each array of a step gets, where it comes from, and where one got lost.

The step is lowered, and Shardy propagates its layouts; nothing is compiled, run or moved. What a
layer gives is the last value of the forward pass that its operations make, that
others use, and that has the shape of what the layer gave while it was traced.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from penzai_shard import specs
from penzai_shard.causes.collectives import BecauseReport, explain_collectives
from penzai_shard.causes.ways import Loss, Ways
from penzai_shard.causes.words import StepWords, WhyCause, WhyLoss, fold_blocks
from penzai_shard.errors import Problem, SelectionError, check_arguments
from penzai_shard.inspection.compiling import CompiledStep, compile_lowered
from penzai_shard.inspection.lowering import lower_step
from penzai_shard.inspection.step_arrays import StepArray
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import join_paths, matches, nearest
from penzai_shard.planning.plan import write_axes
from penzai_shard.propagation.flat import FLOW, propagate_lowered
from penzai_shard.reports.report import Column, HasReport, Report

RowKind = Literal["output", "gradient", "parameter", "result"]
# What loops keep for the backward pass is written into large arrays.
_STORE = "stablehlo.dynamic_update_slice"
_PLAIN = "parameters as placed, gradients as their parameters, outputs of layers without parameters"
_PASSES = frozenset({"stablehlo.reshape", "stablehlo.broadcast_in_dim", FLOW})


@dataclasses.dataclass(frozen=True)
class WhyRow:
    """The layout of one array, and why it has it.

    Attributes:
        kind: Whether it is what a layer gives, a gradient, a parameter or a result.
        path: The label of the layer that gives it, or its path.
        names: Its logical axes, as in a plan.
        shape: Its shape.
        spec: Its canonical spec, of mesh axes and parts of them.
        causes: Where each mesh axis of it comes from.
        losses: What got lost on the way to it; parameters gathered for use do not count.
        is_plain: Whether tables leave it out: a parameter that lies as it was placed, a gradient
            that lies as its parameter, the output of a layer without parameters.
    """

    kind: RowKind
    path: str
    names: tuple[Any, ...] | None
    shape: tuple[int, ...]
    spec: PartitionSpec
    causes: tuple[WhyCause, ...]
    losses: tuple[WhyLoss, ...]
    is_plain: bool


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class WhyReport(HasReport):
    """Which layouts the arrays of a step get, and why.

    Attributes:
        rows: Outputs of layers in the order of the program, gradients, parameters, results.
        losses: Where the forward pass loses mesh axes, what costs most first. An output may have
            got its mesh axis back behind the loss.
        words: What says causes and losses of the step.
        compiled: The compiled step, if that is what was asked about.
        at: What the rows are narrowed to; empty for all.
    """

    rows: tuple[WhyRow, ...]
    losses: tuple[WhyLoss, ...]
    words: StepWords
    compiled: CompiledStep | None = None
    at: str = ""

    @property
    def lost(self) -> tuple[WhyRow, ...]:
        """The rows on whose way a mesh axis got lost."""
        return tuple(row for row in self.rows if row.losses)

    def of_kind(self, kind: RowKind) -> tuple[WhyRow, ...]:
        """The rows of one kind."""
        return tuple(row for row in self.rows if row.kind == kind)

    def collectives(self) -> BecauseReport:
        """Why each collective of the step is there; this compiles the step, unless it is."""
        compiled = self.compiled or compile_lowered(self.words.step, "why")
        return explain_collectives(self.words, compiled)

    def report(self) -> Report:
        """A row for each loss, then for each array that is not plain; with ``at`` for all.

        In rows of equal blocks ``*`` stands for the number of the block.
        """
        where = Column("array", "path"), Column("is"), Column("axes")
        columns = *where, Column("at most", "bytes"), Column("because", "detail")
        shown = [row for row in self.rows if self.at or not row.is_plain]
        lost = [(x.layer or "no layer", "loss", None, x.bytes, x.text) for x in self.losses]
        rows = fold_blocks([*lost, *map(self._write, shown)])
        notes = [*self.words.step.notes]
        if self.losses:
            notes.append("at most: bytes that a device receives to have again what is lost")
        if hidden := len(self.rows) - len(shown):
            notes.append(f"more rows with at='**' ({hidden}): {_PLAIN}")
        facts = {"losses": [*map(dataclasses.asdict, self.losses)]}
        facts["arrays"] = [*map(dataclasses.asdict, self.rows)]
        key = "array", "is", "because"
        return Report("Why", self._verdict(), columns, rows, notes, facts=facts, key=key)

    def _write(self, row: WhyRow) -> tuple[Any, ...]:
        path = row.path.removeprefix("params/")
        where = "; ".join(map(str, row.causes)).replace(f"parameter {path}.", "its parameter ")
        lost = dict.fromkeys(f"{loss.cause.mesh_axis} lost at {loss.place}" for loss in row.losses)
        axes = write_axes(row.names, row.shape, row.spec)
        return path, row.kind, axes, None, "; ".join([where or "whole", *lost])

    def _verdict(self) -> str:
        mesh = self.words.step.mesh
        if mesh is None:
            return "no argument lies over a mesh: nothing is split"
        split = sum(bool(row.causes) for row in self.rows)
        verdict = f"on mesh ({mesh_text(mesh)}) {split} of {len(self.rows)} arrays are split"
        places = {(loss.place, loss.cause.mesh_axis) for loss in self.losses}
        return verdict + f"; places where mesh axes get lost: {len(places)}" * bool(places)


def why(step: Any, /, *args: Any, at: str | None = None, **kwargs: Any) -> WhyReport:
    """Which layout each array of a step gets, where that comes from, and where one got lost.

    Args:
        step: As for ``compile_step``, or what that gives. Nothing is compiled, and any mesh does,
            also an abstract one. On an Explicit mesh each operation has its layout by its type, so
            the causes are lines of code.
        *args: As for ``compile_step``.
        at: What to narrow the report to: the label of a layer, the path of a parameter or a result,
            a part of one, or a pattern, as ``"block_3/mlp"`` or ``"block_*/up"``.
        **kwargs: As for ``compile_step``.

    Returns:
        A report with a row for each output of a layer, gradient, parameter and result.

    Raises:
        PropagationError: This jaxlib cannot propagate layouts without devices, or not these.
        SelectionError: The step has nothing that fits ``at``.
        RuleTypeError: It is no step.
        ShardingError: Arrays are deleted, traced, no arrays, or do not divide over the mesh.
        MeshError: They lie over different devices.

    >>> import jax
    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 4, "model": 2})
    >>> up = pz.nn.Linear.from_config("up", jax.random.key(0), {"a": 8}, {"b": 8})
    >>> x = pzs.place(pz.nx.ones({"batch": 4, "a": 8}), mesh, {"batch": "data"})
    >>> report = why(pzs.place(up, mesh, {"b": "model"}), x)
    >>> [str(cause) for cause in report.of_kind("output")[0].causes]
    ['data from input argument (batch)', 'model from parameter model/up.weights (b)']
    """
    check_arguments("why", {"at": (at, isinstance(at, str | None), "at='**/mlp'")})
    compiled = step if isinstance(step, CompiledStep) else None
    lowered = lower_step(step, args, kwargs, "why") if compiled is None else compiled.step
    words = StepWords(Ways(propagate_lowered(lowered.lowered)), lowered)
    # The backward pass repeats what the forward pass loses.
    forward = [x for x in words.ways.losses if lowered.layers.phase(x.operation.name) == "forward"]
    losses = tuple(sorted(_say_losses(words, forward), key=lambda loss: -loss.bytes))
    rows = tuple(_find_rows(words))
    if at is not None:
        rows = _select(rows, at)
        behind = {loss for row in rows for loss in row.losses}
        losses = tuple(loss for loss in losses if loss in behind or _fits(loss.layer, at))
    return WhyReport(rows, losses, words, compiled, at or "")


def _select(rows: Sequence[WhyRow], at: str) -> tuple[WhyRow, ...]:
    """The rows about what fits a pattern, and about all that is in it."""
    found = tuple(row for row in rows if _fits(row.path, at))
    if not found:
        near = nearest(at, [x for row in rows for x in (row.path, *row.path.split("/"))])
        fix = f"Write at={near!r}." if near else "All names are in why(...).rows."
        problem = Problem("", f"no layer, parameter or result fits at={at!r}", fix, "unknown")
        raise SelectionError("why:", [problem])
    return found


def _fits(path: str, at: str) -> bool:
    at = at.strip("/")
    return matches(f"{at}/**", path) or matches(f"**/{at}/**", path)


def _say_losses(words: StepWords, losses: Iterable[Loss]) -> tuple[WhyLoss, ...]:
    told = (words.loss(loss) for loss in losses if loss.reason != "reduced")
    return tuple(dict.fromkeys(loss for loss in told if not loss.gathered))


# Rows


def _find_rows(words: StepWords) -> Iterator[WhyRow]:
    """The rows of a step."""
    step = words.step
    parameters = {v: array for v, array in words.arguments.items() if array.part == "parameters"}
    holders = {x for array in parameters.values() for x in step.layers.holders(array.path)}
    with_parameters = {y for x in holders for y in itertools.accumulate(x.split("/"), join_paths)}
    for array, value in _find_outputs(words).items():
        row, is_plain = _make_row(words, "output", array, value), array.path not in with_parameters
        yield dataclasses.replace(row, is_plain=is_plain)
    for array in parameters.values():
        if array.path in words.gradients:
            yield _make_row(words, "gradient", array, words.gradients[array.path])
    for value, array in parameters.items():
        yield _make_row(words, "parameter", array, value)
    following = {*step.next_arguments.values()}
    for number, (value, array) in enumerate(words.results.items()):
        if number not in following:
            yield _make_row(words, "result", array, value)


def _make_row(words: StepWords, kind: RowKind, array: StepArray, value: int) -> WhyRow:
    known, causes = words.ways.values[value], words.causes(value)
    # What has the mesh axis again, on another dimension, did not lose it. A gradient is brought to
    # its layout, whatever was lost before.
    has = {axis for axes in known.spec for axis in axes}
    lost = [x for x in words.ways.lost(value) if x.mesh_axis not in has and kind != "gradient"]
    is_own = all((one.kind, one.path) == ("parameter", array.path) for one in causes)
    found = array.names, known.shape, specs.canonical(known.spec), causes
    is_plain = is_own and kind in ("gradient", "parameter")
    return WhyRow(kind, array.path, *found, _say_losses(words, lost), is_plain)


def _find_outputs(words: StepWords) -> dict[StepArray, int]:
    """What layers give, in the order of the program: an array that goes by the layer's label."""
    layers = words.step.layers
    # Of layers that are called the same, the outermost.
    firsts = {layer.label: mark for mark, layer in reversed([*enumerate(layers.marked)])}
    found: dict[StepArray, int] = {}
    for operation in words.ways.program.operations:
        marks = {*layers.find_marks(operation.name)}.intersection(firsts.values())
        if layers.phase(operation.name) != "forward":
            continue
        for value, mark in itertools.product(operation.results, sorted(marks, reverse=True)):
            label, *_, outputs = layers.marked[mark]
            shape = words.ways.values[value].shape
            array = next((x for x in outputs if x.shape == shape), None)
            if array is not None and _is_used(words, value, mark):
                array = dataclasses.replace(array, path=label)
                found.pop(array, None)
                found[array] = value
    return found


def _is_used(words: StepWords, value: int, mark: int) -> bool:
    """Whether others than a layer use a value for more than to keep it."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if value in words.results:
            return True
        seen.add(value)
        for user in words.ways.users.get(value, ()):
            is_other = mark not in words.step.layers.find_marks(user.name)
            if is_other and user.kind in _PASSES:
                waiting += [result for result in user.results if result not in seen]
            elif is_other and user.kind != _STORE:
                return True
    return False
