"""Says what no compilation of a layout can beat: the seconds of a step, by the prices of ``cost``.

Each term is what every program must do that makes the step in that layout, however XLA lays out
what the layout leaves to it; what it only may have to do is left out.

- *Operations*: those of the step on one device, in equal parts. Without products that sum over
  examples alone, as gradients of weights do, where a device has one example at a time: these are
  multiplications then.
- *Gradients*: each device has a sum over its own examples. Over the mesh axes of the batch these
  are summed and scattered at least, and what is not stored split over them is gathered. Both are an
  all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). Where they are
  scattered, devices that have the same sum over a mesh axis may send a part of it each.
- *Parameters* that the layout gathers, block by block or in front of the loss, once. Others may
  stay where they are, and activations be moved instead, which is less for few examples; over the
  mesh axes by which they are stored split, nothing is certain.
- *Tables*: of rows that are looked up, XLA sends the rows and not the gradient of the table where
  table or statistics are split, unless it is gathered, which says how the gradient lies.
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
from penzai_shard.choosing.spmd import DeviceProgram
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
    flops = step.flops - (step.over_examples if examples == candidate.microbatches else 0)
    sent = tuple(_find_sent(problem, candidate))
    held = {"optimizer": stored_bytes(problem, candidate, ["optimizer"])}
    return step_time(StepCost(flops / hardware.device_count, sent, held), sizes, hardware).bound


def _find_sent(problem: Problem, candidate: Candidate) -> Iterator[Sent]:
    """What is sent for each parameter."""
    sizes = dict(candidate.mesh_sizes)
    step, tables = _read_step(problem), read_tables(problem, candidate)
    in_use = {axis for axis, size in sizes.items() if size > 1}
    batch = in_use & {*mesh_axes_of("batch", [candidate.layout.compute])}
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
        # Where a mesh axis does not split the batch, GatherParameters pins gradients as well.
        is_pinned = is_gathered and stored != used and in_use != batch
        is_scattered = not is_pinned and not batch.isdisjoint(stored | updated)
        is_table = (array.names, array.sizes) in step.tables
        # Mesh axes, and those by which an array is split of which each device has a part.
        terms = [(batch - stored, stored)]
        if is_gathered:
            terms += [(stored - used, used)]
        if not (is_table and is_scattered):
            axes, kept = (batch, used) if is_gathered else (batch - stored, stored)
            terms += [(axes, kept | (in_use - batch) if is_scattered else kept)]
        for axes, kept in terms:
            parts, left = part_count(axes, sizes), size / part_count(kept, sizes)
            ordered = tuple(axis for axis in sizes if axis in axes)
            yield Sent("", array.names, ordered, left * (parts - 1) / parts)


class _Step(NamedTuple):
    """What is known of a step whatever its layout; parameters by names and shape.

    Attributes:
        flops: Its operations on one device, where nothing is computed again.
        over_examples: Those of products that sum as many elements as there are examples.
        gathered: The parameters that are gathered where layers use them.
        tables: Those that are looked up, and are not in products too; with all that look alike.
    """

    flops: float
    over_examples: float
    gathered: set[Any]
    tables: set[Any]


@functools.lru_cache(maxsize=4)
def _read_step(problem: Problem) -> _Step:
    cut = cut_model(problem)
    model, blocks = (problem.model, 1) if cut is None else (cut.one, cut.blocks)
    options: dict[str, Any] = {"names": problem.names, "blocks": problem.blocks}
    one = Candidate((("data", 1),), Layout(parameters={}, compute={}, **options))
    prices = Prices(problem)
    flops = prices.price(one).flops

    mesh = make_mesh({"data": 2}, abstract=True)
    with warnings.catch_warnings():
        # Of models that pin their own activations nothing is gathered.
        warnings.simplefilter("ignore", ShardingWarning)
        layout = Layout.fully_sharded(min_size=0, **options)
        edited = layout.recipe(model, mesh).apply(model)
    gathering = [match.before for match in find_matches(edited, GatherParameters)]
    if layout.gathering(model, mesh) is not None:
        gathering.append(model)
    inside = [leaf for each in gathering for leaf in leaves_of(each)]
    paths = {leaf.path for leaf in inside}
    outside = {(leaf.names, leaf.shape) for leaf in leaves_of(edited) if leaf.path not in paths}
    gathered = {(leaf.names, leaf.shape) for leaf in inside} - outside
    program = prices.steps[0].place(one)
    # There is one such product for each weight at most, beside others of as many operations.
    over_examples = blocks * _count_over(program, problem.sizes[problem.batch_axis])
    return _Step(flops, min(over_examples, flops / 2), gathered, set(_find_tables(program)))


def _count_over(program: DeviceProgram, examples: int) -> float:
    """The operations of products that sum so many elements, on one device."""
    found = 0.0
    for each in program.operations:
        if each.kind == _PRODUCT and each.rule is not None:
            made = {factor for factors in each.rule.results[0] for factor in factors}
            dims = zip(program.shapes[each.operands[1]], each.rule.operands[1], strict=True)
            summed = math.prod(length for length, factors in dims if made.isdisjoint(factors))
            size = math.prod(program.shapes[each.results[0]])
            found += 2 * size * summed * (each.times or 1) * (summed == examples)
    return found


def _find_tables(program: DeviceProgram) -> Iterator[Any]:
    for argument, leaf in program.arguments.items():
        values, uses = [argument], set()
        for value in values:
            for user in program.users[value]:
                if user.kind in _FORM:
                    values += user.results
                elif user.kind == _PRODUCT or (user.kind == _LOOKUP and user.operands[0] == value):
                    uses.add(user.kind)
        if uses == {_LOOKUP}:
            yield leaf.names, leaf.shape
