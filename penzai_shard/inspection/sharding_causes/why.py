"""``why``: where the layouts of a step come from."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penzai_shard.errors import RuleTypeError
from penzai_shard.inspection.sharding_causes.cause_finding import CauseFinder
from penzai_shard.inspection.sharding_causes.found_arrays import FoundArray, found_arrays
from penzai_shard.inspection.sharding_causes.loss_telling import LossTeller
from penzai_shard.inspection.sharding_causes.records import ShardingCause, ShardingLoss, WhyRow
from penzai_shard.inspection.sharding_causes.report import WhyReport
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.sharding_propagation import PropagatedProgram
from penzai_shard.sharding_propagation.mesh_axis_parts import part_text

_WITHOUT_A_MESH = (
    "no argument has a layout on a mesh, so that nothing is split; place(model, mesh, rules) or "
    "its plan's restore_structs(), and shard_batch(batch, mesh, rules), give arguments with one"
)


def why(step: Any, /, *args: Any, at: str | None = None, **kwargs: Any) -> WhyReport:
    """Which layout each layer's output and each gradient of a step gets, and where it comes from.

    The step is lowered, not compiled and not run, and Shardy, the part of XLA that propagates
    layouts, says of each value where its layout comes from. Any mesh does, also an abstract one of
    any size.

    Args:
        step: A train step, a function under ``jax.jit``, or a layer; or a ``LoweredStep``.
        *args: What it is called with, concrete or abstract.
        at: A layer, a parameter or a result to narrow the report to, by its label or path or by a
            pattern: ``"blocks/3/mlp"``, ``"**/mlp"``. The report then says the whole way.
        **kwargs: The same as ``args``, by keyword.

    Returns:
        A report with a row for each output of a layer, gradient of a parameter, and result. It
        prints as a table. Layers without operations of their own, which give what they get, have
        no row.

    Raises:
        PropagationError: This jaxlib does not offer Shardy's propagation.
        MeshError: The arrays are on several meshes.
        RuleTypeError: It is not a step, or these are not its arguments.
        SelectionError: There is nothing that ``at`` names.

    >>> import jax
    >>> from penzai import pz
    >>> from penzai_shard import make_mesh, place
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> up = pz.nn.Linear.from_config("up", jax.random.key(0), {"a": 8}, {"b": 8})
    >>> x = place(pz.nx.ones({"batch": 4, "a": 8}), mesh, {"batch": "data"})
    >>> report = why(place(up, mesh, {"b": "model"}), x, at="up")
    >>> [(cause.mesh_axis, cause.kind, cause.path) for cause in report.rows[0].causes]
    [('data', 'input', 'argument'), ('model', 'parameter', 'model/up.weights')]
    """
    lowered = _lowered(step, args, kwargs)
    program = PropagatedProgram.of(lowered.lowered)
    finder = CauseFinder(program, lowered)
    teller = LossTeller(program, finder)
    rows = _distinct(
        _row(found, program, finder, teller) for found in found_arrays(program, lowered, finder)
    )
    report = WhyReport(
        rows=tuple(_told_apart(rows, lowered.scopes.labels)),
        mesh_shape={} if lowered.mesh is None else dict(lowered.mesh.shape),
        notes=(
            *lowered.notes,
            *(_part_notes(rows) if lowered.mesh is not None else [_WITHOUT_A_MESH]),
        ),
        known=frozenset((*lowered.scopes.paths, *lowered.scopes.labels.values())),
    )
    return report if at is None else report.narrowed(at)


def _lowered(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoweredStep:
    if isinstance(step, StepProgram):
        step = step.step
    if not isinstance(step, LoweredStep):
        return lower_step(step, args, kwargs, called="why(")
    if args or kwargs:
        raise RuleTypeError(
            "this step is lowered already, for the arguments that it was lowered for, and takes no "
            "others. Leave the arguments out, or give the step itself."
        )
    return step


def _row(
    found: FoundArray, program: PropagatedProgram, finder: CauseFinder, teller: LossTeller
) -> WhyRow:
    value = program.values[found.value]
    losses: tuple[ShardingLoss, ...] = ()
    if found.kind != "gradient":
        # A gradient is brought to its layout, whatever was lost before.
        layer = found.label if found.kind == "output" else None
        losses = teller.of_value(found.value, layer)
    is_whole = not any(value.spec or ()) and not losses
    return WhyRow(
        kind=found.kind,
        path=found.path,
        label=found.label,
        names=found.array.names,
        shape=value.shape,
        dtype=value.dtype,
        spec=value.spec or ((),) * len(value.shape),
        causes=finder.of_value(found.value),
        losses=losses,
        whole_because=teller.why_whole(found.value) if is_whole else "",
    )


def _part_notes(rows: Iterable[WhyRow]) -> list[str]:
    """What the parts of mesh axes are that the rows name."""
    named = {axis for row in rows for axes in row.spec for axis in axes}
    named |= {loss.mesh_axis for row in rows for loss in row.losses}
    return [text for axis in sorted(named) if (text := part_text(axis))]


def _distinct(rows: Any) -> list[WhyRow]:
    """Rows that say the same once, as of a layer and of the only one in it."""

    def without_way(cause: ShardingCause) -> ShardingCause:
        return dataclasses.replace(cause, way=())

    found: dict[WhyRow, WhyRow] = {}
    for row in rows:
        causes = tuple(map(without_way, row.causes))
        key = dataclasses.replace(row, path=row.label, causes=causes)
        # The outermost layer, in whose place in the program it is first made.
        found[key] = min(row, found.get(key, row), key=lambda each: len(each.path))
    return list(found.values())


def _told_apart(rows: Sequence[WhyRow], labels: Mapping[str, str]) -> Iterator[WhyRow]:
    """Rows of layers in others of the same label, with their places in those at its end."""
    outermost: dict[str, str] = {}
    for path, label in labels.items():
        outermost[label] = min(path, outermost.get(label, path), key=len)
    many = collections.Counter(row.label for row in rows if row.kind == "output")
    for row in rows:
        around = outermost.get(row.label, row.path)
        if many[row.label] > 1 and row.kind == "output" and row.path.startswith(f"{around}/"):
            place = row.path.removeprefix(around)
            yield dataclasses.replace(row, label=row.label + place)
        else:
            yield row
