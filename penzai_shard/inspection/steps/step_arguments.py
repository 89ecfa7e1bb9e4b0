"""What is wrong with what a step was given, found before anything is traced."""

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from penzai.core.variables import AbstractVariable

from penzai_shard.array_kinds import is_concrete, is_traced
from penzai_shard.errors import MeshError, RuleTypeError, ShardingError, raise_all
from penzai_shard.meshes import AnyMesh, mesh_text
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.readers import is_shared_object
from penzai_shard.traced_programs import equations
from penzai_shard.training.loss_contract import RESERVED
from penzai_shard.training.state_layout import meshes_of, sharding_text

_ONE_MESH = (
    "Lay all out on one mesh: make_plan(model, mesh, rules).restore_structs() or place(model, "
    "mesh, rules), and shard_batch(batch, mesh, rules)."
)


def one_mesh(arrays: Sequence[tuple[str, Any]]) -> AnyMesh | None:
    """The mesh that arrays are on, an Explicit one as its Auto twin.

    Args:
        arrays: Arrays, structs, or whatever else has a sharding, each with its path.

    Returns:
        The mesh; None if no array is on one.

    Raises:
        MeshError: There are several, or an array is committed to other devices than the mesh's.

    >>> import jax
    >>> one_mesh([("x", jax.numpy.ones(2))]) is None
    True
    """
    first = meshes_of(arrays)
    if len(first) > 1:
        raise_all(
            MeshError,
            f"the arrays that this step gets are on several meshes. {_ONE_MESH}",
            [f"{path}: is on {_described(mesh)}." for mesh, path in first.items()],
        )
    if not first:
        return None
    (mesh,) = first
    elsewhere = [
        f"{path}: is on {sharding_text(sharding)}, and others on {_described(mesh)}."
        for path, leaf in arrays
        if (sharding := _committed_to(leaf)) is not None and not _is_on(sharding, mesh)
    ]
    raise_all(
        MeshError,
        f"some arrays that this step gets are on other devices than the mesh's. {_ONE_MESH}",
        elsewhere,
    )
    return mesh


def _committed_to(leaf: Any) -> Sharding | None:
    """Where an array must stay; None where JAX may place it, or where it is on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, Sharding) or isinstance(sharding, NamedSharding):
        return None
    return None if is_concrete(leaf) and not leaf.committed else sharding


def _is_on(sharding: Sharding, mesh: AnyMesh) -> bool:
    if not isinstance(mesh, Mesh):
        return sharding.num_devices == mesh.size
    return sharding.device_set == set(mesh.devices.flat)


def _described(mesh: AnyMesh) -> str:
    if isinstance(mesh, AbstractMesh):
        return f"an abstract mesh {mesh_text(mesh)}"
    ids = [device.id for device in mesh.devices.flat]
    shown = f"{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"
    return f"a mesh {mesh_text(mesh)} of the devices {shown}"


def check_arrays(arrays: Sequence[tuple[str, Any]]) -> None:
    """Checks that arrays can go into one step.

    Args:
        arrays: Arrays, structs, or whatever else has a sharding, each with its path.

    Raises:
        MeshError: As ``one_mesh`` does.
        RuleTypeError: Some are being traced.
        ShardingError: Some have a layout that does not fit; all are reported.
    """
    raise_all(
        RuleTypeError,
        "a step is looked at outside of jax.jit and other transformations:",
        [f"{path}: is being traced. Give the array itself." for path, x in arrays if is_traced(x)],
    )
    problems = []
    for path, leaf in arrays:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and (problem := _misfit(leaf.shape, sharding)):
            problems.append(f"{path or 'the argument'}: {problem}")
    raise_all(ShardingError, "some arrays that this step gets cannot be laid out so:", problems)
    one_mesh(arrays)


def _misfit(shape: tuple[int, ...], sharding: NamedSharding) -> str:
    """What is wrong with a layout; empty if it fits."""
    if len(sharding.spec) > len(shape):
        return (
            f"{sharding.spec} is for {len(sharding.spec)} dimensions, and the shape is "
            f"{shape}. Leave entries out of the spec."
        )
    for i, axes in enumerate(mesh_axes_by_dimension(sharding.spec, len(shape))):
        parts = math.prod(sharding.mesh.shape[name] for name in axes)
        if shape[i] % parts:
            text = ", ".join(f"{name!r} ({sharding.mesh.shape[name]})" for name in axes)
            return (
                f"dimension {i} ({shape[i]}) of the shape {shape} does not divide over mesh axis "
                f"{text}. Pad it to {-(-shape[i] // parts) * parts}, or leave it whole."
            )
    return ""


def check_callable(step: Any) -> None:
    """Checks that something is a step.

    Raises:
        RuleTypeError: It is not.

    >>> check_callable(print)
    """
    if isinstance(step, jax.stages.Lowered | jax.stages.Compiled | jax.stages.Traced):
        raise RuleTypeError(
            f"this step is a jax.stages.{type(step).__name__} already, which does not say what its "
            "arrays and layers are. Give the function under jax.jit that it was made of."
        )
    if isinstance(step, type):
        raise RuleTypeError(f"a step is an object, and {step.__name__} is a class. Make one of it.")
    if is_shared_object(step):
        raise RuleTypeError(
            f"this {type(step).__name__} is a module whose calls change variables in it, which are "
            "no arguments of a program so. Take them out, graph, variables = nnx.split(module), "
            "and give jax.jit(lambda variables, x: nnx.merge(graph, variables)(x)), variables, x."
        )
    if type(step).__module__.startswith("flax.nnx."):
        raise RuleTypeError(
            f"this step is under a transformation of Flax NNX ({type(step).__name__}), which does "
            "not give the modules that it changes as results. Take their variables out, graph, "
            "variables = nnx.split((model, optimizer)), and give a function under jax.jit that "
            "begins with nnx.merge(graph, variables) and returns nnx.state((model, optimizer))."
        )
    if not callable(step):
        raise RuleTypeError(
            f"a step is something to call, not a {type(step).__name__}. Give a function under "
            "jax.jit and its arguments, a train step and its state, or a layer and its input: "
            "step, state, x=x, not what the step gives, step(state, x=x)."
        )


def check_call(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that a function takes some arguments.

    Raises:
        RuleTypeError: It does not.

    >>> check_call(lambda x, *, scale=1: x, (1,), {"scale": 2})
    """
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return  # Functions written in C may have no signature.
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(step, "__name__", type(step).__name__)
        fix = "Give what it is called with, arrays or structs, after it: step, x, y=y."
        if {"model", "rng", "state"} <= signature.parameters.keys():
            fix = (
                "If it is a loss function, give the step that is made of it: "
                f"build_train_step_fn({name}), state and inputs."
            )
        raise RuleTypeError(
            f"these are not the arguments of {name}{signature}: {error}. {fix}"
        ) from None


def refuse_variables(arguments: Sequence[tuple[str, Any]], cause: Exception) -> None:
    """Raises for mutable variables in the arguments of a function under ``jax.jit``, if any."""
    problems = [
        f"{path}: is a {type(leaf).__name__}."
        for path, leaf in arguments
        if isinstance(leaf, AbstractVariable)
    ]
    if problems:
        raise RuleTypeError(
            "a function under jax.jit takes no mutable variables. Give it "
            "pz.freeze_variables(model), or give the function without jax.jit:",
            problems,
        ) from cause


def refuse_constraints_alone(traced: jax.stages.Traced) -> None:
    """Raises for a program of one device with constraints on an abstract mesh.

    Of such a mesh JAX learns from arguments alone.

    Raises:
        MeshError: There are such constraints.
    """
    for equation in equations(traced.jaxpr):
        mesh = getattr(equation.params.get("sharding"), "mesh", equation.params.get("mesh"))
        if isinstance(mesh, AbstractMesh) and mesh.size > 1:
            raise MeshError(
                f"layers of this step lay activations out on {_described(mesh)}, and none of its "
                f"arguments is on it. {_ONE_MESH}"
            )


def check_inputs(loss_fn: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Checks that a loss function takes some inputs, and that there are all that it needs.

    Raises:
        RuleTypeError: It does not, or there are not; all such inputs are reported.

    >>> check_inputs(lambda model, rng, state, x: None, {"x": 1})
    """
    parameters: Mapping[str, inspect.Parameter] = {}
    # Functions written in C may have no signature.
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(loss_fn).parameters
    if not parameters:
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    problems = [
        f"{name}: is missing. Give it by keyword, an array or a struct: {name}=..."
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in inputs and name not in RESERVED
    ]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        others = ", ".join(name for name in named if name not in RESERVED) or "none"
        problems += [
            f"{name}: is not an input of it; its inputs are {others}."
            for name in inputs
            if name not in named
        ]
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    raise_all(RuleTypeError, f"these are not the inputs of the loss function {name}:", problems)
