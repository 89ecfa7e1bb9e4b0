"""What is wrong with what a step was given, found before anything is traced."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from penzai_shard.array_kinds import is_concrete
from penzai_shard.errors import MeshError, RuleTypeError, raise_all
from penzai_shard.meshes import AnyMesh, auto_twin, mesh_text
from penzai_shard.training.loss_contract import RESERVED
from penzai_shard.training.state_layout import sharding_text

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
    first: dict[AnyMesh, str] = {}
    for path, leaf in arrays:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            first.setdefault(auto_twin(sharding.mesh), path)
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
