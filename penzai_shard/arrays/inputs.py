"""Checks the arrays that something is to run on, all at once and by path.

Arrays on an Explicit mesh are relabelled onto its Auto twin here, and nowhere else on the way in.
"""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from penzai_shard.arrays.kinds import device_dtype, is_deleted, is_struct, is_traced
from penzai_shard.arrays.structure import Leaf, Structure, flatten
from penzai_shard.errors import Problems, ShardingError
from penzai_shard.meshes import mesh_text, on_auto_twin, same_devices


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays that are ready to run on.

    Attributes:
        leaves: The arrays, on meshes with Auto axes.
        structure: The rest of their tree.
        mesh: The mesh that they lie on, None if they lie on none.
    """

    leaves: tuple[Leaf, ...]
    structure: Structure
    mesh: Mesh | None


def run_inputs(
    tree: Any, called: str, *, abstract: bool = False, several_meshes: bool = False
) -> Inputs:
    """Takes the inputs of a function apart, and refuses what nothing can run on.

    Args:
        tree: The inputs, as one tree.
        called: The function that was called, for messages.
        abstract: Whether shapes may stand in place of arrays.
        several_meshes: Whether arrays may lie on different meshes, as those that are to be moved.

    Raises:
        ShardingError: Arrays are deleted, abstract, too wide for JAX, on several meshes, or no
            arrays; all of them are in it.
    """
    leaves, structure = flatten(tree)
    problems = Problems(f"{called} cannot run on these arrays:")
    problems.extend(structure.problems)
    meshes: list[Mesh] = []
    values = []
    for leaf in leaves:
        value = leaf.value
        if is_deleted(value):
            fix = "Use the array that came back, or leave donation out."
            problems.add(leaf.path, "it is deleted; a call that donated it has its memory", fix)
        elif is_struct(value) and not abstract:
            fix = "Make it: sharded_init(build, mesh=mesh, rules=rules)."
            problems.add(leaf.path, "it is a shape and holds no values", fix)
        elif leaf.dtype is None:
            what = f"a {type(value).__name__} stands where an array should be"
            problems.add(leaf.path, what, "Give an array.")
        elif _is_too_wide(value):
            fix = "Set jax.config.update('jax_enable_x64', True)."
            problems.add(
                leaf.path, f"it has values that {device_dtype(value.dtype)} cannot hold", fix
            )
        values.append(value if is_deleted(value) else on_auto_twin(value))
        _add_mesh(values[-1], meshes)
    if len(meshes) > 1 and not several_meshes:
        texts = " and ".join(f"({mesh_text(mesh)})" for mesh in meshes)
        fix = "Place them on one: place(tree, mesh, rules)."
        problems.add("", f"the arrays lie on different meshes, {texts}", fix)
    problems.raise_if_any(ShardingError)
    ready = (dataclasses.replace(x, value=v) for x, v in zip(leaves, values, strict=True))
    return Inputs(tuple(ready), structure, meshes[0] if meshes else None)


def _add_mesh(value: Any, meshes: list[Mesh]) -> None:
    if is_traced(value) or is_deleted(value):
        return
    sharding = getattr(value, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    # An array on one device goes wherever the others are.
    if not isinstance(mesh, Mesh) or mesh.size == 1:
        return
    if not any(same_devices(mesh, other) for other in meshes):
        meshes.append(mesh)


def _is_too_wide(value: Any) -> bool:
    """Whether JAX, which has integers of 32 bits, would keep others than those of an array."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "iu":
        return False
    narrow = device_dtype(value.dtype)
    if narrow == value.dtype or not value.size:
        return False
    limits = np.iinfo(narrow)
    return bool(value.min() < limits.min or value.max() > limits.max)
