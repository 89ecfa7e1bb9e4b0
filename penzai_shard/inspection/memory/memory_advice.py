"""What would make a step need less memory, with what to write for it and how much it saves."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from penzai_shard.inspection.memory.temporaries import TemporaryGroup
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.inspection.steps.step_arrays import StepArray
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.training.gradient_step import OPTIMIZER_SCOPE

# What saves less than this share of the total is not worth saying.
_LEAST = 0.01
_KEPT = "kept for the backward pass"
_STACKED = "stacked_sublayers"
_BATCH = "batch"

AdviceKind = Literal[
    "donate",
    "shard parameters",
    "shard optimizer state",
    "shard batch",
    "rematerialise",
    "microbatches",
]


@dataclasses.dataclass(frozen=True)
class MemoryAdvice:
    """Something that would make a step need less memory.

    Attributes:
        kind: What it is.
        saves: What it saves on each device, in bytes: at most, where ``is_bound`` says so.
        is_bound: Whether it may save less, since the compiler decides on the rest.
        text: What to write.
        rules: For ``"shard ..."`` the rules to add.
    """

    kind: AdviceKind
    saves: int
    is_bound: bool
    text: str
    rules: Mapping[LogicalAxis, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)


def memory_advice(
    program: StepProgram, temporaries: Sequence[TemporaryGroup], total: int
) -> tuple[MemoryAdvice, ...]:
    """What would make a step need less memory, the largest saving first.

    Each is computed for the step as it is: two of them together may save less than their sum.

    Args:
        program: The program.
        temporaries: What its temporaries are, as far as that is known.
        total: What it needs.
    """
    kept = sum(group.bytes for group in temporaries if group.kind == _KEPT)
    found = [
        *_donation(program),
        *_sharding(program),
        *_batch(program, kept),
        *_rematerialisation(program, temporaries),
        *_microbatches(program, kept),
    ]
    worth = [advice for advice in found if advice.saves >= max(_LEAST * total, 1)]
    return tuple(sorted(worth, key=lambda advice: -advice.saves))


def _is_train_step(program: StepProgram) -> bool:
    return OPTIMIZER_SCOPE in program.step.scopes.of_step


def _carried(program: StepProgram) -> list[StepArray]:
    """The arrays that a step takes from the one before."""
    return [
        array
        for array in program.step.arguments.values()
        if array.part in ("parameters", "optimizer state", "state variables")
        and not array.is_on_host
    ]


def _donation(program: StepProgram) -> Iterator[MemoryAdvice]:
    """Results that could take the memory of arguments."""

    def form(array: StepArray) -> tuple[Any, ...]:
        return (array.shape, str(array.dtype), array.shard_shape)

    results = collections.Counter(map(form, program.step.results))
    arguments = program.step.arguments.values()
    results -= collections.Counter(form(array) for array in arguments if array.donated)
    saves = 0
    for array in _carried(program):
        if array.shape and not array.donated and results[form(array)] > 0:
            results[form(array)] -= 1
            saves += array.bytes_per_device
    if not saves:
        return
    write = (
        "build_train_step_fn(..., donate_params_and_state=True)"
        if _is_train_step(program)
        else "jax.jit(..., donate_argnums=...) of the state"
    )
    yield MemoryAdvice(
        "donate", saves, True, f"donate the state, which the new one then replaces: {write}"
    )


def _sharding(program: StepProgram) -> Iterator[MemoryAdvice]:
    """Logical axes that could be split over a mesh axis which their arrays do not use yet."""
    if program.step.mesh is None:
        return
    # A loop over layers would gather all of them for each.
    without = program.step.scopes.stack_axes
    carried = _carried(program)
    of_optimizer = [array for array in carried if array.part == "optimizer state"]
    everything = _best_rule(program.step.mesh.shape, carried, without)
    if everything is not None:
        axis, mesh_axis, saves = everything
        text = f"shard logical axis {axis!r} over mesh axis {mesh_axis!r}: add the rule "
        text += f"{{{axis!r}: {mesh_axis!r}}} to those of the parameters"
        yield MemoryAdvice("shard parameters", saves, False, text, {axis: mesh_axis})
    alone = _best_rule(program.step.mesh.shape, of_optimizer, without)
    if alone is not None:
        axis, mesh_axis, saves = alone
        text = "shard the optimizer's state alone, as stage 1 of ZeRO: "
        text += f"optimizer_rules={{{axis!r}: {mesh_axis!r}, ...}} of train_state_sharding, with "
        text += "the rules of the parameters"
        yield MemoryAdvice("shard optimizer state", saves, False, text, {axis: mesh_axis})


def _best_rule(
    mesh_shape: Mapping[str, int], arrays: Sequence[StepArray], without: Collection[LogicalAxis]
) -> tuple[LogicalAxis, str, int] | None:
    """The rule from one logical to one mesh axis that saves most, and what it saves."""
    axes = dict.fromkeys(name for array in arrays for name in array.names or () if name is not None)
    best = None
    for axis in axes:
        if axis in without:
            continue
        having = [array for array in arrays if axis in (array.names or ())]
        for mesh_axis, size in mesh_shape.items():
            if size > 1 and all(_can_split(array, axis, mesh_axis, size) for array in having):
                saves = sum(_saved(array.bytes_per_device, size) for array in having)
                if best is None or saves > best[2]:
                    best = (axis, mesh_axis, saves)
    return best


def _can_split(array: StepArray, axis: LogicalAxis, mesh_axis: str, size: int) -> bool:
    """Whether a mesh axis is free for a dimension, which is whole and divides."""
    assert array.names is not None
    dimension = array.names.index(axis)
    used = mesh_axes_by_dimension(array.spec, len(array.shape))
    free = all(mesh_axis not in axes for axes in used)
    return free and not used[dimension] and array.shape[dimension] % size == 0


def _batch(program: StepProgram, kept: int) -> list[MemoryAdvice]:
    """The largest mesh axis along which every device does the same, and could split the batch."""
    mesh = program.step.mesh
    if mesh is None:
        return []
    found = []
    arguments = program.step.arguments.values()
    used = {
        mesh_axis
        for array in arguments
        for axes in mesh_axes_by_dimension(array.spec, len(array.shape))
        for mesh_axis in axes
    }
    inputs = _split_inputs(program)
    parts = program.step.microbatches
    for mesh_axis, size in mesh.shape.items():
        # Every microbatch is split in the same way.
        indivisible = any(
            array.shard_shape[_batch_dimension(array)] % (size * parts) for array in inputs
        )
        if size == 1 or mesh_axis in used or indivisible or not inputs:
            continue
        rules = _rules_of_batch(inputs, mesh_axis)
        dimension = _batch_dimension(inputs[0])
        over = mesh_axes_by_dimension(inputs[0].spec, len(inputs[0].shape))[dimension]
        write = (
            f"shard_batch(batch, mesh, {rules!r})"
            if rules
            else f"NamedSharding(mesh, PartitionSpec({_entry((*over, mesh_axis))!r})) for each "
            "input"
        )
        saves = _saved(kept + sum(array.bytes_per_device for array in inputs), size)
        if not over:
            # The first split has gradients summed over devices, all of them at once.
            saves -= _gradients(program)
        text = f"mesh axis {mesh_axis!r} splits nothing; split the batch over it: {write}"
        found.append(MemoryAdvice("shard batch", saves, True, text, rules))
    return sorted(found, key=lambda advice: -advice.saves)[:1]


def _split_inputs(program: StepProgram) -> list[StepArray]:
    """The inputs that have the batch axis; all of them if none says that it has."""
    inputs = [
        array
        for array in program.step.arguments.values()
        if array.part == "inputs" and array.shape and not array.is_on_host
    ]
    return [array for array in inputs if _BATCH in (array.names or ())] or inputs


def _batch_dimension(array: StepArray) -> int:
    return array.names.index(_BATCH) if array.names and _BATCH in array.names else 0


def _rules_of_batch(
    inputs: Sequence[StepArray], mesh_axis: str
) -> dict[LogicalAxis, str | tuple[str, ...]]:
    """How named inputs are split now, and their batch over a further mesh axis."""
    split: dict[LogicalAxis, tuple[str, ...]] = {}
    batch: LogicalAxis | None = None
    for array in inputs:
        names = array.names or ()
        over = mesh_axes_by_dimension(array.spec, len(array.shape))
        split |= {
            name: axes for name, axes in zip(names, over, strict=False) if name is not None and axes
        }
        if batch is None and names:
            batch = names[_batch_dimension(array)]
    if batch is None:
        return {}
    split[batch] = (*split.get(batch, ()), mesh_axis)
    return {name: _entry(axes) for name, axes in split.items()}


def _gradients(program: StepProgram) -> int:
    """What the gradients of all parameters take; none where nothing is trained."""
    if not _is_train_step(program):
        return 0
    return sum(array.bytes_per_device for array in _carried(program) if array.part == "parameters")


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes if len(axes) > 1 else axes[0]


def _rematerialisation(
    program: StepProgram, temporaries: Sequence[TemporaryGroup]
) -> Iterator[MemoryAdvice]:
    """Layers whose intermediates could be computed again in the backward pass."""
    kept = [group for group in temporaries if group.kind == _KEPT]
    if not kept or any("rematted_computation" in one.op_name for one in program.module):
        return
    if any(_STACKED in path.split("/") for path in program.step.scopes.paths):
        # What the turns of a loop keep is made outside of it, by no layer.
        saves = sum(group.bytes for group in kept)
        write = 'roll_layer_stacks(policy="carries")'
        text = f"compute the layers of the stack again in the backward pass: {write}"
    else:
        pattern, saves = _blocks(kept)
        write = f"rematerialise_blocks({pattern!r})"
        text = f"compute {pattern} again in the backward pass: {write}"
        if program.device_kind == "cpu":
            text += "; only compilers for accelerators save that, not that of simulated devices"
    if saves:
        yield MemoryAdvice("rematerialise", saves, True, text)


def _blocks(kept: Iterable[TemporaryGroup]) -> tuple[str, int]:
    """The pattern of the blocks that keep most of their insides, and how much that is."""
    sizes: collections.Counter[str] = collections.Counter()
    for group in kept:
        head, star, inside = group.layer.partition("*")
        # What a layer of one operation keeps is its input, which it needs again.
        if star and inside:
            sizes[head + star] += group.bytes
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def _microbatches(program: StepProgram, kept: int) -> Iterator[MemoryAdvice]:
    """Half of the batch at a time."""
    inputs = [array for array in _split_inputs(program) if _BATCH in (array.names or ())]
    if not _is_train_step(program) or not inputs:
        return
    parts = program.step.microbatches
    if any(array.shard_shape[_batch_dimension(array)] % (2 * parts) for array in inputs):
        return
    # The first split needs room to add up gradients in.
    saves = kept // 2 - (_gradients(program) if parts == 1 else 0)
    write = f"build_train_step_fn(..., accumulate_steps={2 * parts})"
    text = f"half as many examples at a time: {write}; or a smaller batch"
    yield MemoryAdvice("microbatches", saves, True, text)


def _saved(held: int, devices: int) -> int:
    return held - held // devices
