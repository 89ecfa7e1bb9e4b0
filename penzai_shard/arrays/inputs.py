"""Prepares what a function is called with: arrays to run on, or structs to be lowered for.

Arrays on an Explicit mesh are relabelled onto its Auto twin here, and nowhere else on the way in.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from penzai_shard.arrays.kinds import device_dtype, is_deleted, is_struct, is_traced
from penzai_shard.arrays.structure import Leaf, Structure, flatten
from penzai_shard.errors import MeshError, Problems, ShardingError
from penzai_shard.jax_internals.tracing import is_weak_type
from penzai_shard.meshes import AnyMesh, auto_context, on_auto_twin, same_devices


def run_inputs(
    tree: Any, called: str, *, allow_structs: bool = False
) -> tuple[list[Leaf], Structure]:
    """Takes the inputs of a function apart, and refuses what nothing can run on.

    Args:
        tree: The inputs, as one tree.
        called: The function that was called, for messages.
        allow_structs: Whether shapes are as good as arrays, as for a function that is lowered only.

    Returns:
        The arrays, on meshes with Auto axes, and the rest of the tree.

    Raises:
        ShardingError: Arrays are deleted, shapes, too wide for JAX, or no arrays; all of them are
            in it.
    """
    leaves, structure = flatten(tree)
    problems = Problems(f"{called} cannot run on these arrays:")
    # What is lowered may be a model beside its variables, which are another argument.
    problems.extend(x for x in structure.problems if not (allow_structs and x.kind == "empty"))
    # JAX would name the first of them, by its type or shape and not by its path.
    for leaf in leaves:
        value = leaf.value
        if is_deleted(value):
            fix = "Use the array that came back, or leave donation out."
            problems.add(leaf.path, "it is deleted; a call that donated it has its memory", fix)
        elif is_struct(value) and not allow_structs:
            fix = "Make it: sharded_init(build, mesh=mesh, rules=rules)."
            problems.add(leaf.path, "it is a shape and holds no values", fix)
        elif leaf.dtype is None:
            what = f"a {type(value).__name__} stands where an array should be"
            problems.add(leaf.path, what, "Give an array.")
        elif _is_too_wide(value):
            fix = "Set jax.config.update('jax_enable_x64', True)."
            problems.add(leaf.path, "it has integers that 32 bits cannot hold", fix)
    problems.raise_if_any(ShardingError)
    values = on_auto_twin([leaf.value for leaf in leaves])
    pairs = zip(leaves, values, strict=True)
    return [dataclasses.replace(leaf, value=value) for leaf, value in pairs], structure


def bound_sharding(value: Any) -> Sharding | None:
    """Where an array stays while others go to it; None for one that goes wherever others are."""
    if is_traced(value) or not (getattr(value, "committed", False) or is_struct(value)):
        return None
    sharding: Sharding | None = value.sharding
    return sharding


def find_mesh(leaves: Iterable[Leaf], called: str) -> AnyMesh | None:
    """The mesh over which arrays lie, or None where none lies over a mesh.

    Args:
        leaves: The arrays, as ``run_inputs`` gives them.
        called: The function that was called, for messages.

    Raises:
        MeshError: They are bound to different devices; all that differ from the first are in it.
    """
    # Others go wherever these are, as in jax.jit.
    bound = [(x.path, own) for x in leaves if (own := bound_sharding(x.value)) is not None]
    problems = Problems(f"{called} needs all arrays on one mesh, or one device:")
    for path, sharding in bound:
        if not _are_on_same_devices(sharding, bound[0][1]):
            own, other = (getattr(found, "mesh", found) for found in (sharding, bound[0][1]))
            what = f"it lies over {own}, {bound[0][0]!r} over {other}"
            problems.add(path, what, "Move it: place(tree, mesh, rules).")
    problems.raise_if_any(MeshError)
    return getattr(bound[0][1], "mesh", None) if bound else None


def _are_on_same_devices(a: Sharding, b: Sharding) -> bool:
    if isinstance(a, NamedSharding) and isinstance(b, NamedSharding):
        return same_devices(a.mesh, b.mesh)
    return a.num_devices == b.num_devices and a.device_set == b.device_set


def _is_too_wide(value: Any) -> bool:
    """Whether JAX, which has integers of 32 bits, would change the values of an array."""
    # JAX cuts the upper bits off without a word.
    is_host = not isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    if not is_host or not np.issubdtype(np.result_type(value), np.integer):
        return False
    array = np.asarray(value)
    limits = np.iinfo(device_dtype(array.dtype))
    return bool(array.size and (array.min() < limits.min or array.max() > limits.max))


# What is lowered


@dataclasses.dataclass(frozen=True)
class Lowerable:
    """The function that a step would call, and what it would call it with.

    Attributes:
        jitted: The function, as ``jax.jit`` made it.
        args: Its arguments, with structs in place of arrays.
        leaves: Path and logical axes of each array of ``args``, in their order. The first piece of
            a path says what it is of: ``params``, ``opt_state``, ``inputs``.
        results: What each of the results is: the number of the argument whose next value it is,
            or a name.
    """

    jitted: Any
    args: tuple[Any, ...]
    leaves: tuple[Leaf, ...]
    results: tuple[int | str, ...]

    def trace(self) -> Any:
        """The program as JAX traced it."""
        with auto_context():
            return self.jitted.trace(*self.args)


def make_struct(value: Any) -> jax.ShapeDtypeStruct:
    """A struct of an array, with its sharding over a mesh; each time another object.

    A struct keeps whether the dtype gives way to that of what it meets: by that programs differ.

    >>> make_struct(2.0)
    ShapeDtypeStruct(shape=(), dtype=float32, weak_type=True)
    """
    array = value if hasattr(value, "dtype") else jax.numpy.asarray(value)
    own = bound_sharding(array)
    sharding = own if isinstance(own, NamedSharding) else None
    weak = is_weak_type(array)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=weak)
