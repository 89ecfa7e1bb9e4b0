"""Numbers that stand for rounding errors: as large as a dtype rounds, of a seed and their places.

Source: Parker 1997, "Monte Carlo Arithmetic"; Denis, de Oliveira Castro, Petit 2016, "Verificarlo".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDEST_EPSILON = float(np.finfo(np.float64).eps)

_PRIMES = (2654435761, 2246822519, 3266489917, 668265263, 374761393)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How to disturb a run.

    Attributes:
        seed: A number that decides how each rounding falls, as a uint32 scalar.
        scale: How large the roundings are, in those of the dtypes; 0 for an exact run.
        coarsest: The machine epsilon to round to where an operation's own is finer; 0 for none.
    """

    seed: Any
    scale: Any
    coarsest: Any

    @classmethod
    def of(cls, seed: int = 0, scale: float = 0.0, coarsest: float = 0.0) -> "Rounding":
        """A rounding to be given to a compiled program; by default one that rounds nothing."""
        return cls(np.uint32(seed), np.float64(scale), np.float64(coarsest))

    def errors(self, shape: tuple[int, ...], epsilon: float) -> Any:
        """Numbers between minus and plus half an epsilon, the same for a place and seed."""
        size = jnp.maximum(epsilon, self.coarsest) / 2 * self.scale
        return scattered_numbers(self.seed, shape).astype(jnp.float64) * size


jax.tree_util.register_dataclass(Rounding, ["seed", "scale", "coarsest"], [])


def scattered_numbers(seed: Any, shape: tuple[int, ...]) -> Any:
    """Numbers between -1 and 1 that depend on a seed and their places alone, as float32.

    They are hashes of the places: much less to compile than JAX's random numbers.

    >>> scattered_numbers(1, (2, 3)).shape
    (2, 3)
    """
    places = jnp.asarray(seed, jnp.uint32)
    for dimension, prime in zip(range(len(shape)), _PRIMES * len(shape), strict=False):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)
        places = (places + index * np.uint32(prime)) * np.uint32(747796405)
        places = places ^ (places >> np.uint32(15))
    places = places * np.uint32(2891336453)
    places = places ^ (places >> np.uint32(16))
    return (places >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-23) - np.float32(1)
