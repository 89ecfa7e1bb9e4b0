"""A step as the compiler gets it, and what is known of each array in it: no device is touched."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from penzai_shard.array_kinds import is_abstract
from penzai_shard.errors import MeshError
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from penzai_shard.inspection.steps.step_arguments import (
    check_arrays,
    check_inputs,
    one_mesh,
    refuse_constraints_alone,
)
from penzai_shard.inspection.steps.step_arrays import StepArray, abstract_leaf, read_in
from penzai_shard.inspection.steps.step_parts import StepPart, part_of_field
from penzai_shard.inspection.steps.traced_functions import (
    arguments_of,
    notes_on,
    results_of,
    traced_function,
    with_marks,
)
from penzai_shard.library_apis.compiler_api import shardings_of, traced_arguments
from penzai_shard.meshes import AnyMesh, auto_context
from penzai_shard.placement import described_array
from penzai_shard.readers import without_bare_arrays
from penzai_shard.report_trees import count_text
from penzai_shard.training.compiled_step import CompiledStep, flat_of
from penzai_shard.training.gradient_step import LOSS_SCOPE, OPTIMIZER_SCOPE
from penzai_shard.training.stateful_trainer import StatefulTrainer
from penzai_shard.training.step_failures import refuse_inputs, refuse_positional
from penzai_shard.training.train_step import TrainStep
from penzai_shard.tree_paths import join_paths, paths_and_leaves


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A step lowered for a platform, with abstract arrays.

    Attributes:
        lowered: What JAX lowered.
        mesh: The mesh of its arrays; None if no array is on one.
        arguments: What goes in, by the name that the program gives it.
        results: What comes out, in the program's order.
        scopes: Which layers wrote which marks.
        notes: What could not be done as it should, in sentences.
        microbatches: How many parts of the batch a train step takes one after the other.
    """

    lowered: jax.stages.Lowered
    mesh: AnyMesh | None
    arguments: Mapping[str, StepArray]
    results: tuple[StepArray, ...]
    scopes: LayerScopes
    notes: tuple[str, ...] = ()
    microbatches: int = 1


def lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platform: str | None = None,
    called: str = "...(",
) -> LoweredStep:
    """Lowers a step for abstract arguments, its layers marked.

    Args:
        step: A train step, an evaluation step, a trainer, a function, under ``jax.jit`` or not, or
            a layer.
        args: What it is called with, concrete or abstract. Nothing of it is run, moved or changed.
        kwargs: The same by keyword.
        platform: What it is compiled for: ``"cpu"``, ``"tpu"``, ``"cuda"``; by default that of
            the mesh's devices, and the CPU if the mesh is abstract.
        called: How the call begins that the step was given in, for messages: ``"why("``.

    Returns:
        The lowered step.

    Raises:
        MeshError: The arrays are on several meshes, or some are on other devices.
        RuleTypeError: It is not a step, or these are not its arguments.
        ShardingError: As calling the step does.
    """
    if isinstance(getattr(step, "__self__", None), StatefulTrainer):
        step = step.__self__
    if isinstance(step, StatefulTrainer):
        refuse_positional(tuple(args), f"{called}trainer, ")
        inputs = step.placed_inputs(_abstract(_read(kwargs)))
        return _lower_state_step(step.step_fn, step.current_state, inputs, platform)
    if isinstance(step, CompiledStep):
        refuse_positional(tuple(args[1:]), f"{called}step, state, ")
        state = args[0] if args else None
        return _lower_state_step(step, state, _read(kwargs), platform)
    return _lower_function(step, args, kwargs, platform)


def _lower_state_step(
    step: CompiledStep, state: Any, inputs: dict[str, Any], platform: str | None
) -> LoweredStep:
    """A step of a train state, lowered for structs in place of the state's arrays."""
    flat = flat_of(state)
    paths = flat.form.paths()
    check_inputs(step.computation.loss_fn, inputs)
    check_arrays([*zip(paths, flat.leaves(), strict=True), *paths_and_leaves(inputs)])
    leaves: list[Any] = list(map(abstract_leaf, flat.leaves()))
    if step.declared_state is not None:
        leaves = step.declared_state.checked(flat.form, leaves)
    inputs = step.declared_inputs.placed(_abstract(inputs))
    mesh = one_mesh([*zip(paths, leaves, strict=True), *paths_and_leaves(inputs)])
    without = [
        path
        for path, given, leaf in zip(paths, flat.leaves(), leaves, strict=True)
        if is_abstract(given) and leaf.sharding is None
    ]
    notes = _note_on_state(without, mesh) + _note_on_undecided(paths_and_leaves(inputs), mesh)
    state = jax.tree.unflatten(jax.tree.structure(state), [_on_mesh(mesh, x) for x in leaves])
    of_step = (LOSS_SCOPE, OPTIMIZER_SCOPE) if isinstance(step, TrainStep) else (LOSS_SCOPE,)
    traced, scopes, more = with_marks(
        lambda scopes: _marked_step(step, scopes).trace(state, **inputs), of_step
    )
    arrays = [
        StepArray.of(path, part_of_field(path), leaf, read)
        for path, leaf, read in zip(paths, jax.tree.leaves(state), read_in(state), strict=True)
    ]
    changing, constant = flat.form.parted(arrays)
    going_in = [*changing, *constant, *_arrays_of("inputs", inputs, "inputs")]
    arguments = {
        argument.name: dataclasses.replace(
            array, sharding=argument.sharding, donated=argument.donated
        )
        for argument, array in zip(traced_arguments(traced), going_in, strict=True)
    }
    new, aux = traced.out_info
    results = _arrays_of("loss", new, "outputs")
    if isinstance(step, TrainStep):
        results = [
            dataclasses.replace(array, sharding=StepArray.of("", array.part, leaf).sharding)
            for array, leaf in zip(changing, new, strict=True)
        ]
    results += _arrays_of("aux", aux, "outputs")
    lowered, mesh = _lowered(traced, platform, mesh)
    return LoweredStep(
        lowered,
        mesh,
        arguments,
        tuple(results),
        scopes,
        (*notes, *more, *notes_on(traced)),
        step.computation.accumulate_steps,
    )


def _marked_step(step: CompiledStep, scopes: LayerScopes) -> CompiledStep:
    """A step like another, whose loss function gets a marked model."""
    loss_fn = step.computation.loss_fn

    @functools.wraps(loss_fn)
    def marked_loss(*, model: Any, **others: Any) -> Any:
        return loss_fn(model=scopes.marked(model), **others)

    computation = dataclasses.replace(step.computation, loss_fn=marked_loss)
    return dataclasses.replace(step, computation=computation)


def _lower_function(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], platform: str | None
) -> LoweredStep:
    """A function, compiled or not, or a layer, lowered."""
    traced, scopes, notes = traced_function(step, args, kwargs)
    arguments, results = arguments_of(traced, scopes), results_of(traced, scopes)
    # What the arguments do not say, the function's own options or its layers may.
    mesh = one_mesh([(array.path, array) for array in arguments.values()])
    mesh = mesh or one_mesh([(array.path, array) for array in results])
    lowered, mesh = _lowered(traced, platform, mesh)
    undecided = _note_on_undecided([(a.path, a) for a in arguments.values()], mesh)
    arguments = {name: array.on(mesh) for name, array in arguments.items()}
    results = tuple(array.on(mesh) for array in results)
    notes = (*notes, *undecided, *notes_on(traced))
    return LoweredStep(lowered, mesh, arguments, results, scopes, notes)


def _lowered(
    traced: jax.stages.Traced, platform: str | None, mesh: AnyMesh | None
) -> tuple[jax.stages.Lowered, AnyMesh | None]:
    """What was traced, lowered, and the mesh that it is for."""
    is_ahead = platform is not None
    if platform is None and isinstance(mesh, AbstractMesh):
        platform = "cpu"
    platforms = None if platform is None else (platform,)
    try:
        with auto_context():
            lowered = traced.lower(lowering_platforms=platforms)
    except ValueError as error:
        # Whoever compiles ahead says it of the absent devices.
        if is_ahead or "devices to be present" not in str(error):
            raise
        raise MeshError(
            "the step calls back into Python, as jax.debug.print and jax.pure_callback do, which "
            "JAX cannot lower for a mesh without devices. Take these calls out, or lay its arrays "
            "out on make_mesh({...}) of as many devices, which may be simulated."
        ) from error
    if mesh is None:
        # No argument is on one, but layers may pin activations on one.
        mesh = one_mesh([("the program", sharding) for sharding in shardings_of(lowered)])
    if mesh is None:
        refuse_constraints_alone(traced)
    return lowered, mesh


def _arrays_of(name: str, tree: Any, part: StepPart) -> list[StepArray]:
    """The arrays of an argument or a result, in order."""
    return [
        StepArray.of(join_paths(name, path), part, leaf, read)
        for (path, leaf), read in zip(paths_and_leaves(tree), read_in(tree), strict=True)
    ]


def _read(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as arrays, whatever library made them."""
    read = without_bare_arrays(dict(inputs), "a step")
    refuse_inputs(read)
    return dict(read)


def _abstract(inputs: dict[str, Any]) -> dict[str, Any]:
    """Structs in place of the arrays of inputs."""
    return dict(jax.tree.map(abstract_leaf, inputs))


def _on_mesh(mesh: AnyMesh | None, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A struct of a state, replicated over the mesh if it has no place on it."""
    if mesh is None or leaf.sharding is not None:
        return leaf
    return described_array(leaf, NamedSharding(mesh, PartitionSpec()))


def _note_on_state(without: Sequence[str], mesh: AnyMesh | None) -> list[str]:
    """What is said of structs of a state without a layout beside arrays that have one."""
    if mesh is None or mesh.size == 1 or not without:
        return []
    return [
        f"{count_text(len(without), 'array')} of the state without a layout, such as {without[0]}, "
        "counted as a copy on every device; TrainState.initial_state(make_plan(model, mesh, "
        "rules).restore_structs(), ...) makes a state with all layouts"
    ]


def _note_on_undecided(arrays: Sequence[tuple[str, Any]], mesh: AnyMesh | None) -> list[str]:
    """What is said of arguments that the compiler lays out, beside others that have a layout."""
    if mesh is None or mesh.size == 1:
        return []
    chosen = [path for path, leaf in arrays if leaf.shape and leaf.sharding is None]
    if not chosen:
        return []
    shown = ", ".join(chosen[:3]) + (f" and {len(chosen) - 3} more" if len(chosen) > 3 else "")
    return [
        f"the compiler chose the layout of arguments that have none: {shown}; place(model, mesh, "
        "rules), its plan's restore_structs() and shard_batch(batch, mesh, rules) decide it"
    ]
