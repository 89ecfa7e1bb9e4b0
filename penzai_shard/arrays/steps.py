"""What a step lets others lower, compile and read: prices, locks, reports."""

import dataclasses
from typing import Any

from penzai_shard.arrays.structure import Leaf
from penzai_shard.meshes import auto_context


@dataclasses.dataclass(frozen=True)
class Lowerable:
    """The function that a step would call, and what it would call it with.

    Attributes:
        jitted: The function, as ``jax.jit`` made it.
        args: Its arguments, with structs in place of arrays.
        leaves: Path and logical axes of each array of ``args``, in their order. The first piece of
            a path says what it is of: ``params``, ``opt_state``, ``inputs``.
        donated: Of each array, whether the results may take its memory.
    """

    jitted: Any
    args: tuple[Any, ...]
    leaves: tuple[Leaf, ...]
    donated: tuple[bool, ...]

    def lower(self) -> Any:
        """The program as JAX hands it to the compiler."""
        with auto_context():
            return self.jitted.lower(*self.args)

    def trace(self) -> Any:
        """The program as JAX traced it."""
        with auto_context():
            return self.jitted.trace(*self.args)
