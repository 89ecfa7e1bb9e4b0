"""A step as the compiler gets it, and what is known of each array in it: no device is touched."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from penzai_shard.errors import MeshError
from penzai_shard.inspection.layer_scopes import LayerScopes
from penzai_shard.inspection.step_arrays import StepArray, abstract_leaf, names_in
from penzai_shard.inspection.step_parts import StepPart, part_of_field
from penzai_shard.inspection.traced_functions import arguments_of, results_of, traced_function
from penzai_shard.meshes import AnyMesh, auto_context, auto_twin
from penzai_shard.training.gradient_step import LOSS_SCOPE, OPTIMIZER_SCOPE
from penzai_shard.training.train_state import TrainState, to_flat
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
    """

    lowered: jax.stages.Lowered
    mesh: AnyMesh | None
    arguments: Mapping[str, StepArray]
    results: tuple[StepArray, ...]
    scopes: LayerScopes
    notes: tuple[str, ...] = ()


def lower_step(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], platform: str | None = None
) -> LoweredStep:
    """Lowers a step for abstract arguments, its layers marked.

    Args:
        step: A train step, a function under ``jax.jit``, or a layer.
        args: What it is called with, concrete or abstract.
        kwargs: The same by keyword.
        platform: What it is compiled for: ``"cpu"``, ``"tpu"``, ``"cuda"``; by default that of
            the mesh's devices, and the CPU if the mesh is abstract.

    Returns:
        The lowered step.

    Raises:
        MeshError: The arrays are on several meshes.
    """
    mesh = _mesh_of((args, kwargs))
    platform = _platform_of(mesh) if platform is None else platform
    if isinstance(step, TrainStep):
        return _lower_train_step(step, *args, platform=platform, mesh=mesh, inputs=kwargs)
    return _lower_function(step, args, kwargs, platform, mesh)


def _lower_train_step(
    step: TrainStep,
    state: TrainState,
    *,
    platform: str | None,
    mesh: AnyMesh | None,
    inputs: Mapping[str, Any],
) -> LoweredStep:
    scopes = LayerScopes(of_step=(LOSS_SCOPE, OPTIMIZER_SCOPE))
    loss_fn = step.computation.loss_fn

    @functools.wraps(loss_fn)
    def marked_loss(*, model: Any, **others: Any) -> Any:
        return loss_fn(model=scopes.marked(model), **others)

    marked = dataclasses.replace(
        step, computation=dataclasses.replace(step.computation, loss_fn=marked_loss)
    )
    state = jax.tree.map(functools.partial(_on_mesh, mesh), state)
    inputs = jax.tree.map(abstract_leaf, dict(inputs))
    traced = marked.trace(state, **inputs)
    form = to_flat(state).form
    fields = [(path, part_of_field(path)) for path in form.paths()]
    leaves = jax.tree.leaves(state)
    arrays = [
        dataclasses.replace(StepArray.of(path, part, leaf), names=names)
        for (path, part), leaf, names in zip(fields, leaves, names_in(state), strict=True)
    ]
    changing, constant = form.parted(arrays)
    changing = [
        dataclasses.replace(array, donated=step.donate and i > 0)
        for i, array in enumerate(changing)
    ]
    arguments = {"step": changing[0]}
    arguments |= {f"rest[{i}]": array for i, array in enumerate(changing[1:])}
    arguments |= {f"packed[{i}]": array for i, array in enumerate(constant)}
    arguments |= _named_arguments("inputs", inputs, "inputs")
    _, aux = traced.out_info
    results = [dataclasses.replace(array, donated=False) for array in changing]
    results += [
        StepArray.of(join_paths("aux", path), "outputs", leaf)
        for path, leaf in paths_and_leaves(aux)
    ]
    lowered = _lowered(traced, platform)
    return LoweredStep(lowered, mesh, arguments, tuple(results), scopes)


def _lower_function(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platform: str | None,
    mesh: AnyMesh | None,
) -> LoweredStep:
    """A function, compiled or not, or a layer, lowered."""
    traced, scopes, notes = traced_function(step, args, kwargs)
    arguments, results = arguments_of(traced, scopes), results_of(traced, scopes)
    if mesh is None:
        # What the arguments do not say, the function's own options may.
        mesh = _mesh_of((*arguments.values(), *results))
        platform = _platform_of(mesh) if platform is None else platform
    return LoweredStep(_lowered(traced, platform), mesh, arguments, results, scopes, notes)


def _platform_of(mesh: AnyMesh | None) -> str | None:
    return "cpu" if isinstance(mesh, AbstractMesh) else None


def _lowered(traced: jax.stages.Traced, platform: str | None) -> jax.stages.Lowered:
    with auto_context():
        return traced.lower(lowering_platforms=None if platform is None else (platform,))


def _named_arguments(name: str, tree: Any, part: StepPart) -> dict[str, StepArray]:
    """The arrays of one argument by the name that JAX gives each in the program."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in paths_and_leaves(tree)]
    return {
        name + jax.tree_util.keystr(key_path): dataclasses.replace(
            StepArray.of(join_paths(name, path), part, leaf), names=names
        )
        for (key_path, leaf), path, names in zip(flat, paths, names_in(tree), strict=True)
    }


def _on_mesh(mesh: AnyMesh | None, leaf: Any) -> jax.ShapeDtypeStruct:
    """A struct in place of an array; replicated over the mesh if the array has no place on it."""
    leaf = abstract_leaf(leaf)
    if mesh is None or leaf.sharding is not None:
        return leaf
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)


def _mesh_of(tree: Any) -> AnyMesh | None:
    """The one mesh that arrays are on, Explicit ones as their Auto twin."""
    meshes = {
        auto_twin(leaf.sharding.mesh): None
        for leaf in jax.tree.leaves(tree)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }
    if len(meshes) > 1:
        raise MeshError(
            "the arguments are on several meshes: " + ", ".join(str(mesh) for mesh in meshes)
        )
    return next(iter(meshes), None)
