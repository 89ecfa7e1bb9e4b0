"""The work that both do: a model of the guide, its sizes, rules, input and optimizer."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.flax_guide.modules import MLP, LogicalMLP, guide_mesh, mesh_sharding

BATCH = 8
RULES = (("batch", "data"), ("hidden", "model"))


@dataclasses.dataclass(frozen=True)
class Work:
    """A model of the guide and what it is trained with.

    Attributes:
        name: What the table calls it.
        module: The model.
        depth: How wide its layers are.
        rules: Which logical axis goes to which mesh axis; None where the model's annotations are
            mesh axes themselves.
    """

    name: str
    module: nn.Module
    depth: int
    rules: tuple[tuple[str, str], ...] | None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh."""
        return guide_mesh()

    @functools.cached_property
    def x(self) -> jax.Array:
        """The input, split along the batch."""
        return jax.device_put(jnp.ones((BATCH, self.depth)), mesh_sharding("data"))

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """What both programs take: module, rules, mesh, optimizer, random key and input."""
        optimizer = optax.adam(learning_rate=0.001)
        return self.module, self.rules, self.mesh, optimizer, jax.random.key(0), self.x


def works(depth: int = 1024, layers: int = 4) -> dict[str, Work]:
    """The models of the table, by name.

    Args:
        depth: How wide the layers are, in and between them.
        layers: How many there are.
    """
    found = (
        Work("mesh axes, unrolled", MLP(layers, depth, False), depth, None),
        Work("logical axes, unrolled", LogicalMLP(layers, depth, False), depth, RULES),
        Work("logical axes, scanned", LogicalMLP(layers, depth, True), depth, RULES),
    )
    return {work.name: work for work in found}


def parameter_count(tree: Any) -> int:
    """How many numbers a tree of parameters has."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
