"""Says what no compilation of a layout can beat: the seconds of a step, by the prices of ``cost``.

Each term is what every program must do that makes the step in that layout, however XLA lays out
what the layout leaves to it; what it only may have to do is left out.

- *Operations*: those of the step on one device, in equal parts. With one example on a device at a
  time it may be half: products that give gradients of weights are multiplications then, and there
  are no more of them than others.
- *Gradients*: each device has a sum over its own examples. Over the mesh axes of the batch these
  are summed and scattered at least, and what is not stored split over them is gathered. Both are an
  all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
- *Parameters* that ``GatherParameters`` gathers, once. Others may stay where they are, and
  activations be moved instead, which is less for few examples; over the mesh axes by which they are
  stored split, nothing is certain.
- *Tables*: of rows that are looked up, XLA sends the rows and not the table where table or
  statistics are split. Elsewhere their gradient is summed as a whole.
- *Statistics* of the optimizer are read once and written once.

Activations are not counted, and microbatches and what is gathered again send more than this.
"""

import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.candidates import Candidate, read_tables, stored_arrays, stored_bytes
from penzai_shard.choosing.cost import Prices, Sent, StepCost
from penzai_shard.choosing.hardware import Hardware, step_time
from penzai_shard.choosing.problem import Problem
from penzai_shard.choosing.shallow import cut_model
from penzai_shard.choosing.spmd import DeviceProgram, MarkedSteps
from penzai_shard.errors import ShardingWarning
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layouts.axis_roles import mesh_axes_of
from penzai_shard.layouts.layout import Layout
from penzai_shard.layouts.presets import MIN_SIZE
from penzai_shard.meshes import make_mesh
from penzai_shard.specs import part_count
from penzai_shard.surgery.edits import find_matches

_FORM = ("flow", "stablehlo.convert", "stablehlo.reshape", "stablehlo.transpose", "sdy.reshard")
_LOOKUP, _PRODUCT = "stablehlo.gather", "stablehlo.dot_general"


def bound(problem: Problem, candidate: Candidate, hardware: Hardware) -> float:
    """The seconds of a step that no compilation of a layout can beat.

    Args:
        problem: The step.
        candidate: The layout.
        hardware: The devices.
    """
    sizes, step = dict(candidate.mesh_sizes), _read_step(problem)
    batch = mesh_axes_of("batch", [candidate.layout.compute])
    examples = problem.sizes[problem.batch_axis] // part_count(batch, sizes)
    flops = step.flops / hardware.device_count / (2 if examples == candidate.microbatches else 1)
    sent = tuple(_find_sent(problem, candidate))
    held = {"optimizer": stored_bytes(problem, candidate, ["optimizer"])}
    return step_time(StepCost(flops, sent, held), sizes, hardware).bound


def _find_sent(problem: Problem, candidate: Candidate) -> Iterator[Sent]:
    """What is sent for each parameter."""
    sizes = dict(candidate.mesh_sizes)
    step, tables = _read_step(problem), read_tables(problem, candidate)
    batch = {axis for axis in mesh_axes_of("batch", [candidate.layout.compute]) if sizes[axis] > 1}
    for array, count in stored_arrays(problem).items():
        # Small arrays, such as the scale of a norm, may be outside of all layers that are edited.
        if array.part != "parameters" or math.prod(array.sizes) < MIN_SIZE:
            continue
        stored, used, updated = (
            array.find_axes(tables[table], candidate.mesh_sizes)
            for table in ("parameters", "compute", "optimizer")
        )
        size = count * array.bytes
        is_gathered = (array.names, array.sizes) in step.gathered
        is_table = (array.names, array.sizes) in step.tables and bool(batch & (stored | updated))
        # Mesh axes, and those by which an array is split of which each device has a part.
        terms = [(batch - stored, stored)]
        if is_gathered:
            terms += [(stored - used, used)]
        if not is_table:
            terms += [(batch, used) if is_gathered else (batch - stored, stored)]
        for axes, kept in terms:
            parts, left = part_count(axes, sizes), size / part_count(kept, sizes)
            ordered = tuple(axis for axis in sizes if axis in axes)
            yield Sent("", array.names, ordered, left * (parts - 1) / parts)


class _Step(NamedTuple):
    """What is known of a step whatever its layout; parameters by names and shape.

    Attributes:
        flops: Its operations on one device, where nothing is computed again.
        gathered: The parameters that are gathered where layers use them.
        tables: Those that are looked up, and are not in products too.
    """

    flops: float
    gathered: set[Any]
    tables: set[Any]


@functools.lru_cache(maxsize=4)
def _read_step(problem: Problem) -> _Step:
    cut = cut_model(problem)
    model = problem.model if cut is None else cut.one
    options: dict[str, Any] = {"names": problem.names, "blocks": problem.blocks}
    one = Candidate((("data", 1),), Layout(parameters={}, compute={}, **options))
    flops = Prices(problem).price(one).flops

    mesh = make_mesh({"data": 2}, abstract=True)
    with warnings.catch_warnings():
        # Of models whose layers are not known nothing is gathered.
        warnings.simplefilter("ignore", ShardingWarning)
        layout = Layout.fully_sharded(min_size=0, **options)
        edited = layout.recipe(model, mesh).apply(model)
    inside = [leaf for x in find_matches(edited, GatherParameters) for leaf in leaves_of(x.before)]
    paths = {leaf.path for leaf in inside}
    outside = {(leaf.names, leaf.shape) for leaf in leaves_of(edited) if leaf.path not in paths}
    gathered = {(leaf.names, leaf.shape) for leaf in inside} - outside
    return _Step(flops, gathered, _find_tables(MarkedSteps(problem, model).place(one)))


def _find_tables(program: DeviceProgram) -> set[Any]:
    uses: dict[str, set[Any]] = {_LOOKUP: set(), _PRODUCT: set()}
    for argument, leaf in program.arguments.items():
        values = [argument]
        for value in values:
            for user in program.users[value]:
                if user.kind in _FORM:
                    values += user.results
                elif user.kind == _PRODUCT or (user.kind == _LOOKUP and user.operands[0] == value):
                    uses[user.kind].add((leaf.names, leaf.shape))
    return uses[_LOOKUP] - uses[_PRODUCT]
