"""Tells which layout each array of a step gets, where it comes from, and where one got lost.

The step is lowered, and Shardy propagates its layouts; nothing is compiled, run or moved. What a
layer gives is the last value of the forward pass that its operations make, that
others use, and that has the shape of what the layer gave while it was traced.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from jax.sharding import PartitionSpec

from penzai_shard import specs
from penzai_shard.causes.collectives import BecauseReport, explain_collectives
from penzai_shard.causes.ways import Ways
from penzai_shard.causes.words import StepWords, WhyCause, WhyLoss, fold_blocks
from penzai_shard.errors import Problem, RuleTypeError, SelectionError
from penzai_shard.inspection.compiling import CompiledStep, compile_lowered
from penzai_shard.inspection.lowering import lower_step
from penzai_shard.inspection.step_arrays import StepArray
from penzai_shard.meshes import mesh_text
from penzai_shard.paths import fold_key, join_paths, matches, nearest
from penzai_shard.planning.plan import LeafPlan
from penzai_shard.propagation.flat import FLOW, propagate_lowered
from penzai_shard.reports.report import Column, HasReport, Report

RowKind = Literal["output", "gradient", "parameter", "result"]
# What loops keep for the backward pass is written into large arrays.
_STORE = "stablehlo.dynamic_update_slice"
_PLAIN = (
    "parameters as they were placed, gradients as their parameters, outputs of layers without any"
)
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
        losses: What got lost on the way to it.
        summed: The mesh axes over which devices sum up what they have of it.
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
    summed: tuple[str, ...]
    is_plain: bool


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class WhyReport(HasReport):
    """Which layouts the arrays of a step get, and why.

    Attributes:
        rows: Outputs of layers in the order of the program, gradients, parameters, results.
        words: What says causes and losses of the step.
        at: What the rows are narrowed to; empty for all.
    """

    rows: tuple[WhyRow, ...]
    words: StepWords
    at: str = ""

    @property
    def lost(self) -> tuple[WhyRow, ...]:
        """The rows on whose way a mesh axis got lost; gathered parameters do not count."""
        return tuple(row for row in self.rows if not all(loss.gathered for loss in row.losses))

    def of_kind(self, kind: RowKind) -> tuple[WhyRow, ...]:
        """The rows of one kind."""
        return tuple(row for row in self.rows if row.kind == kind)

    def collectives(self) -> BecauseReport:
        """Why each collective of the step is there; this compiles the step."""
        return explain_collectives(self.words, compile_lowered(self.words.step, "why"))

    def report(self) -> Report:
        """A row for each array that is not plain; with ``at`` for each, and with the ways.

        In rows of equal blocks ``*`` stands for the number of the block.
        """
        columns = (
            Column("array", "path"),
            Column("is"),
            Column("axes"),
            Column("where it comes from", "detail"),
            Column("lost", "detail"),
        )
        shown = [row for row in self.rows if self.at or not row.is_plain]
        data: dict[str, Any] = {"facts": {"arrays": [*map(dataclasses.asdict, self.rows)]}}
        notes = [*self.words.step.notes]
        if hidden := len(self.rows) - len(shown):
            notes.append(f"what one expects has no row without at= ({hidden}): {_PLAIN}")
        exact = [self._write(row) for row in shown]
        folded = [(*x[:3], *(fold_blocks(x[0], text) for text in x[3:])) for x in exact]
        keys = [(fold_key(x[0]), *x[1:]) for x in folded]
        counts = collections.Counter(keys)
        found = zip(exact, folded, keys, strict=True)
        rows = [many if counts[key] > 1 else one for one, many, key in found]
        return Report("Why", self._verdict(), columns, rows, notes, key=("array", "is"), **data)

    def _write(self, row: WhyRow) -> tuple[Any, ...]:
        path = row.path.removeprefix("params/")
        ways = (f" through {', then '.join(x.way)}" * bool(self.at and x.way) for x in row.causes)
        where = "; ".join(map("{}{}".format, row.causes, ways))
        # What is of the layer itself goes by its name there.
        where = re.sub(rf"\b{re.escape(row.path)}[./]", "", where)
        if not row.causes:
            where = "whole" + f", summed over {', '.join(row.summed)}" * bool(row.summed)
        lost = ". ".join(map(str, row.losses))
        leaf = LeafPlan(path, row.names, row.shape, None, row.spec, None, "", 0)
        return path, row.kind, leaf.axes_text, where, lost

    def _verdict(self) -> str:
        mesh = self.words.step.mesh
        if mesh is None:
            return "no argument lies over a mesh: nothing is split"
        kinds = {kind: self.of_kind(kind) for kind in get_args(RowKind)}
        counts = (
            f"{sum(bool(row.causes) for row in rows)} of {len(rows)} {kind}{'s' * (len(rows) > 1)}"
            for kind, rows in kinds.items()
            if rows
        )
        verdict = f"on mesh ({mesh_text(mesh)}) are split: {', '.join(counts)}"
        losses = {loss for row in self.rows for loss in row.losses if not loss.gathered}
        places = {(loss.place, loss.cause.mesh_axis) for loss in losses}
        return verdict + f"; places where mesh axes got lost: {len(places)}" * bool(places)


def why(step: Any, /, *args: Any, at: str | None = None, **kwargs: Any) -> WhyReport:
    """Which layout each array of a step gets, where that comes from, and where one got lost.

    Args:
        step: As for ``compile_step``, or what that gives. Nothing is compiled, and any mesh does,
            also an abstract one.
        *args: As for ``compile_step``.
        at: What to narrow the report to: the label of a layer, the path of a parameter or a result,
            a part of one, or a pattern, as ``"block_3/mlp"`` or ``"block_*/up"``. The report then
            says through which operations a mesh axis came.
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
    if not isinstance(at, str | None):
        problem = Problem("", f"at is {at!r}", "Write at='**/mlp'.")
        raise RuleTypeError("why:", [problem])
    is_compiled = isinstance(step, CompiledStep)
    lowered = step.step if is_compiled else lower_step(step, args, kwargs, "why")
    words = StepWords(Ways(propagate_lowered(lowered.lowered)), lowered)
    rows = tuple(_find_rows(words))
    return WhyReport(rows if at is None else _select(rows, at.strip("/")), words, at or "")


def _select(rows: Sequence[WhyRow], at: str) -> tuple[WhyRow, ...]:
    """The rows about what fits a pattern, and about all that is in it."""
    patterns = f"{at}/**", f"**/{at}/**"
    found = tuple(row for row in rows if any(matches(p, row.path) for p in patterns))
    if not found:
        # A name may begin with any of its pieces.
        known = [row.path for row in rows]
        ends = ["/".join(name.split("/")[-1 - at.count("/") :]) for name in known]
        near = nearest(at, [*known, *ends])
        fix = f"Write at={near!r}." if near else "All names are in why(...).rows."
        problem = Problem("", f"no layer, parameter or result fits at={at!r}", fix, "unknown")
        raise SelectionError("why:", [problem])
    return found


# Rows


def _find_rows(words: StepWords) -> Iterator[WhyRow]:
    """The rows of a step."""
    step = words.step
    parameters = {v: array for v, array in words.arguments.items() if array.part == "parameters"}
    holders = {x for array in parameters.values() for x in step.layers.holders(array.path)}
    with_parameters = {y for x in holders for y in itertools.accumulate(x.split("/"), join_paths)}
    for array, value in _find_outputs(words).items():
        row = _make_row(words, "output", array, value)
        is_loser = any(loss.layer == row.path and not loss.gathered for loss in row.losses)
        is_plain = row.path not in with_parameters and not is_loser
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
    known, lost = words.ways.values[value], words.ways.lost(value)
    has = {axis for axes in known.spec or () for axis in axes}
    summed = tuple(dict.fromkeys(loss.mesh_axis for loss in lost if loss.reason == "reduced"))
    told: dict[WhyLoss, None] = {}
    # A gradient is brought to its layout, whatever was lost before.
    for loss in lost if kind != "gradient" else ():
        said = words.loss(loss)
        is_here = loss.reason in ("used", "conflict") and said.layer == array.path
        # What has the mesh axis again, on another dimension, did not lose it.
        is_back = loss.mesh_axis in has and (kind == "output" or loss.result is None)
        if loss.reason != "reduced" and (is_here or not (is_back or said.gathered)):
            told[said] = None
    causes, spec, path = words.causes(value), specs.canonical(known.spec or ()), array.path
    is_own = all((one.kind, one.path) == ("parameter", path) for one in causes)
    found = path, array.names, known.shape, spec, causes, tuple(told), summed
    return WhyRow(kind, *found, is_plain=is_own and kind in ("gradient", "parameter"))


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
    waiting, seen = [value], {value}
    while waiting:
        value = waiting.pop()
        if value in words.results:
            return True
        for user in words.ways.users.get(value, ()):
            if mark in words.step.layers.find_marks(user.name):
                continue
            if user.kind not in (*_PASSES, _STORE):
                return True
            if user.kind != _STORE:
                waiting += [result for result in user.results if result not in seen]
                seen.update(user.results)
    return False
