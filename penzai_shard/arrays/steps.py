"""What a step lets others lower, compile and read: prices, locks, reports."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from penzai_shard.arrays.inputs import bound_sharding
from penzai_shard.arrays.structure import Leaf
from penzai_shard.jax_internals.tracing import is_weak_type
from penzai_shard.meshes import auto_context


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
