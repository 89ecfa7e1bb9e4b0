"""Says what no compilation of a layout can beat: the seconds of a step, by the prices of ``cost``.

Each term is what every program must do that makes the step in that layout, however XLA lays out
what the layout leaves to it; what it only may have to do is left out.

- *Operations*: those of the step on one device, in equal parts. Products that sum over one element
  become multiplications, so they are not counted; nor what may be such a product on one device.
- *Gradients* that are sums over examples, as Shardy propagates them: each device has its own part.
  Over the mesh axes of the batch these are summed and scattered at least, and what is not stored
  split over them is gathered. Both are an all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal
  all-reduce algorithms"). Where they are scattered, devices that have the same sum over a mesh axis
  may send a part of it each.
- *Parameters* that the layout gathers and the loss uses, block by block or in front of the loss,
  once. Others may stay where they are, and activations be moved instead, which is less for few
  examples; over the mesh axes by which they are stored split, nothing is certain.
- *Tables*: of rows that are looked up, XLA sends the rows and not the gradient of the table where
  table or statistics are split, unless it is gathered, which says how the gradient lies.
- *Statistics* of the optimizer are read once and written once.

What is cast on the way counts in the narrowest dtype. Activations are not counted, and microbatches
and what is gathered again send more than this.
"""

import collections
import functools
import math
import statistics
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from penzai_shard.arrays.kinds import itemsize
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.candidates import Candidate, read_tables, stored_arrays, stored_bytes
from penzai_shard.choosing.cost import FORM, Prices, StepCost, count_flops
from penzai_shard.choosing.device_program import DeviceProgram
from penzai_shard.choosing.hardware import Hardware, step_time
from penzai_shard.choosing.shallow import cut_model
from penzai_shard.choosing.workload import Workload
from penzai_shard.errors import ShardingWarning
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layouts.axis_roles import mesh_axes_of
from penzai_shard.layouts.layout import Layout
from penzai_shard.layouts.presets import MIN_SIZE
from penzai_shard.meshes import make_mesh
from penzai_shard.programs import OPTIMIZER
from penzai_shard.propagation.flat import BARRIER, LOOP, Operation
from penzai_shard.specs import part_count
from penzai_shard.surgery.edits import find_matches

_LOOKUP, _PRODUCT = "stablehlo.gather", "stablehlo.dot_general"
# What sums over examples.
_SUMS = (_PRODUCT, "stablehlo.convolution", "stablehlo.scatter", "stablehlo.reduce")


def bound(workload: Workload, candidate: Candidate, hardware: Hardware) -> float:
    """The seconds of a step that no compilation of a layout can beat.

    Args:
        workload: The step.
        candidate: The layout.
        hardware: The devices.
    """
    sizes, step = dict(candidate.mesh_sizes), _read_step(workload)
    examples = workload.sizes[workload.batch_axis]
    parts = part_count(mesh_axes_of("batch", [candidate.layout.compute]), sizes)
    is_one = examples == candidate.microbatches * parts
    summed = step.by_length.items()
    gone = [n for length, n in summed if length <= candidate.mesh.size]
    gone += [n for length, n in summed if is_one and length == examples > candidate.mesh.size]
    flops = step.flops - sum(gone)
    sent = collections.defaultdict[Any, float](float)
    for mesh_axes, count in _find_sent(workload, candidate):
        sent["", mesh_axes] += count
    held = {"optimizer": stored_bytes(workload, candidate, ["optimizer"])}
    return step_time(StepCost(flops / hardware.device_count, sent, held), sizes, hardware).bound


def _find_sent(workload: Workload, candidate: Candidate) -> Iterator[tuple[tuple[str, ...], float]]:
    """The bytes that are sent for each parameter, and the mesh axes."""
    sizes = dict(candidate.mesh_sizes)
    step, tables = _read_step(workload), read_tables(workload, candidate)
    in_use = {axis for axis, size in sizes.items() if size > 1}
    batch = in_use & {*mesh_axes_of("batch", [candidate.layout.compute])}
    for array, count in stored_arrays(workload).items():
        # Small arrays, such as the scale of a norm, may be outside of all layers that are edited.
        if array.part != "parameters" or math.prod(array.sizes) < MIN_SIZE:
            continue
        stored, used, updated = (
            array.find_axes(tables[table], candidate.mesh_sizes)
            for table in ("parameters", "compute", "optimizer")
        )
        size, key = count * array.bytes, (array.names, array.sizes)
        is_gathered = key in step.gathered
        # Where a mesh axis does not split the batch, GatherParameters pins gradients as well.
        is_pinned = is_gathered and stored != used and in_use != batch
        is_scattered = not is_pinned and not batch.isdisjoint(stored | updated)
        use, gradient = step.shares.get(key, (0.0, 0.0))
        # How much of it; the mesh axes; those by which an array is split of which each device has a
        # part.
        terms = [(gradient, batch - stored, stored)]
        if is_gathered:
            terms += [(use, stored - used, used)]
        if not (key in step.tables and is_scattered):
            axes, kept = (batch, used) if is_gathered else (batch - stored, stored)
            terms += [(gradient, axes, kept | (in_use - batch) if is_scattered else kept)]
        for share, axes, kept in terms:
            parts, left = part_count(axes, sizes), share * size / part_count(kept, sizes)
            ordered = tuple(axis for axis in sizes if axis in axes)
            if ordered:
                yield ordered, left * (parts - 1) / parts


class _Step(NamedTuple):
    """What is known of a step whatever its layout; parameters by names and shape.

    Attributes:
        flops: Its operations on one device, where nothing is computed again.
        by_length: Those of products, by the number of elements that these sum.
        gathered: The parameters that are gathered where layers use them.
        tables: Those that are looked up, and are not in products too; with all that look alike.
        shares: Which part of its bytes a parameter has where the loss uses it, and its gradient
            where that is made, in the mean of all that look alike.
    """

    flops: float
    by_length: Mapping[int, float]
    gathered: set[Any]
    tables: set[Any]
    shares: Mapping[Any, tuple[float, float]]


@functools.lru_cache(maxsize=4)
def _read_step(workload: Workload) -> _Step:
    (model, *_), blocks = cut_model(workload)
    options: dict[str, Any] = {"names": workload.names, "blocks": workload.blocks}
    one = Candidate((("data", 1),), Layout(parameters={}, compute={}, **options))
    prices = Prices(workload)
    flops, programs = prices.price(one).flops, [steps.place(one) for steps in prices.steps]

    mesh = make_mesh({"data": 2}, abstract=True)
    # Of models that pin their own activations nothing is gathered.
    with warnings.catch_warnings(action="ignore", category=ShardingWarning):
        layout = Layout.fully_sharded(min_size=0, **options)
        edited = layout.recipe(model, mesh).apply(model)
    gathering = [match.before for match in find_matches(edited, GatherParameters)]
    if layout.gathering(model, mesh) is not None:
        gathering.append(model)
    inside = [leaf for each in gathering for leaf in leaves_of(each)]
    paths = {leaf.path for leaf in inside}
    outside = {(leaf.names, leaf.shape) for leaf in leaves_of(edited) if leaf.path not in paths}
    gathered = {(leaf.names, leaf.shape) for leaf in inside} - outside
    # Where the batch is split and nothing else is, gradients are summed that come of all examples.
    examples = workload.sizes[workload.batch_axis]
    parts = next((n for n in range(2, examples) if examples % n == 0), examples)
    split = Layout(parameters={}, compute={"batch": "data"}, **options)
    parallel = prices.steps[0].place(Candidate((("data", parts),), split))
    tables = set(_find_tables(programs[0]))
    by_length = _count_by_length(programs[0])
    for length, n in _count_by_length(programs[-1]).items():
        by_length[length] += (blocks - 1) * (n - by_length[length])
    return _Step(flops, by_length, gathered, tables, _find_shares(parallel, model, examples))


def _count_by_length(program: DeviceProgram) -> dict[int, float]:
    """The operations of products by how many elements they sum, on one device."""
    found = collections.defaultdict[int, float](float)
    for each in program.operations:
        if each.kind == _PRODUCT:
            found[_count_summed(program, each)] += count_flops(program, each) * (each.times or 1)
    return found


def _count_summed(program: DeviceProgram, product: Operation) -> int:
    """How many elements a product sums, on all devices."""
    assert product.rule is not None
    made = {factor for factors in product.rule.results[0] for factor in factors}
    shape = program.values[product.operands[1]].shape
    dims = zip(shape, product.rule.operands[1], strict=True)
    return math.prod(length for length, factors in dims if made.isdisjoint(factors))


def _find_shares(
    program: DeviceProgram, model: Any, examples: int
) -> dict[Any, tuple[float, float]]:
    """See ``_Step.shares``."""
    of_inputs = {value for value, x in program.arguments.items() if x.path.startswith("inputs/")}
    for each in program.operations:
        if not of_inputs.isdisjoint(each.operands):
            of_inputs |= {*each.results}
    values = {leaf.path: value for value, leaf in program.arguments.items()}
    found = collections.defaultdict[Any, list[tuple[float, float]]](list)
    for leaf in leaves_of(model):
        path, whole = f"params/{leaf.path}", math.prod(leaf.shape) * itemsize(leaf.dtype) or 1
        use = gradient = 0.0
        if (value := values.get(path)) is not None:
            use = _find_use(program, value, of_inputs) / whole
        if (value := program.updated.get(path)) is not None:
            gradient = _find_gradient(program, value, examples) / whole
        found[leaf.names, leaf.shape].append((min(use, 1.0), min(gradient, 1.0)))
    return {
        key: (statistics.fmean(uses), statistics.fmean(gradients))
        for key, rows in found.items()
        for uses, gradients in [zip(*rows, strict=True)]
    }


def _find_use(program: DeviceProgram, argument: int, of_inputs: set[int]) -> float:
    """The bytes of a parameter that inputs meet, in the narrowest form; 0 if none does."""
    values, elements = [argument], 0
    for value in values:
        for user in program.users[value]:
            if user.kind in {*FORM, "stablehlo.dynamic_slice", "stablehlo.slice"}:
                values += user.results
            elif OPTIMIZER not in user.name.split("/") and not of_inputs.isdisjoint(user.results):
                elements = max(elements, math.prod(program.shapes[value]) * (user.times or 1))
    return min(map(program.itemsize, values)) * elements


def _find_gradient(program: DeviceProgram, updated: int, examples: int) -> float:
    """The same of its gradient, where that is summed over devices."""
    values, sizes, elements = [updated], list[int](), 0
    for value in values:
        maker = program.makers.get(value)
        if maker is None or not program.shapes[value]:
            # Other parameters have a part in an update by single numbers only, such as a norm.
            continue
        is_update = not maker.name or OPTIMIZER in maker.name.split("/")
        if not is_update:
            sizes.append(program.itemsize(value))
        if maker.kind in (LOOP, BARRIER):
            values.append(maker.operands[maker.results.index(value)])
        elif maker.kind == "sdy.all_reduce":
            source = program.makers.get(maker.operands[0])
            is_product = source is not None and source.kind == _PRODUCT
            # A loss may leave examples out, and not all devices have a part then.
            if not (source and is_product and _count_summed(program, source) < examples):
                elements = max(elements, math.prod(program.shapes[value]) * (maker.times or 1))
        elif is_update or maker.kind not in _SUMS:
            values += [operand for operand in maker.operands if operand not in values]
    return min(sizes, default=0) * elements


def _find_tables(program: DeviceProgram) -> Iterator[Any]:
    for argument, leaf in program.arguments.items():
        values, uses = [argument], set()
        for value in values:
            for user in program.users[value]:
                if user.kind in FORM:
                    values += user.results
                elif user.kind == _PRODUCT or (user.kind == _LOOKUP and user.operands[0] == value):
                    uses.add(user.kind)
        if uses == {_LOOKUP}:
            yield leaf.names, leaf.shape
