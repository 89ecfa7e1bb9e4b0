"""The models of Flax's guide, written for linen alone: nothing here knows of penzai_shard.

Layers of two matrix products with a ReLU between them, one after the other or scanned, their
parameters annotated with mesh axes or with logical axes. Source: Flax, "Scale up Flax Modules on
multiple devices" (docs/guides/parallel_training/flax_on_pjit), whose structure, initialisers,
constraints and mesh these are.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import benchmarks.simulated_devices  # noqa: F401


@functools.cache
def guide_mesh() -> Mesh:
    """The mesh of the guide: two devices along the batch times four along the hidden layer."""
    return Mesh(mesh_utils.create_device_mesh((2, 4)), ("data", "model"))


def mesh_sharding(*entries: Any) -> NamedSharding:
    """A layout on that mesh."""
    return NamedSharding(guide_mesh(), PartitionSpec(*entries))


class DotReluDot(nn.Module):
    """Two products, annotated with mesh axes."""

    depth: int
    dense_init: Callable[..., Any] = nn.initializers.xavier_normal()

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """What the layer makes of activations; and None, as ``nn.scan`` wants it."""
        up_init = nn.with_partitioning(self.dense_init, (None, "model"))
        y = jax.nn.relu(nn.Dense(self.depth, kernel_init=up_init, use_bias=False)(x))
        y = jax.lax.with_sharding_constraint(y, mesh_sharding("data", "model"))
        down_init = nn.with_partitioning(self.dense_init, ("model", None))
        down = self.param("W2", down_init, (self.depth, x.shape[-1]))
        z = jnp.dot(y, down)
        return jax.lax.with_sharding_constraint(z, mesh_sharding("data", None)), None


class MLP(nn.Module):
    """Layers annotated with mesh axes."""

    num_layers: int
    depth: int
    use_scan: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """The activations behind the last layer."""
        if self.use_scan:
            scanned = nn.scan(
                DotReluDot,
                length=self.num_layers,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: None},
            )
            return scanned(self.depth)(x)[0]
        for _ in range(self.num_layers):
            x, _ = DotReluDot(self.depth)(x)
        return x


class LogicalDotReluDot(nn.Module):
    """Two products, annotated with logical axes."""

    depth: int
    dense_init: Callable[..., Any] = nn.initializers.xavier_normal()

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """What the layer makes of activations; and None, as ``nn.scan`` wants it."""
        up_init = nn.with_logical_partitioning(self.dense_init, ("embed", "hidden"))
        y = jax.nn.relu(nn.Dense(self.depth, kernel_init=up_init, use_bias=False)(x))
        y = jax.lax.with_sharding_constraint(y, mesh_sharding("data", "model"))
        down_init = nn.with_logical_partitioning(self.dense_init, ("hidden", "embed"))
        down = self.param("W2", down_init, (self.depth, x.shape[-1]))
        return nn.with_logical_constraint(jnp.dot(y, down), ("batch", "embed")), None


class LogicalMLP(nn.Module):
    """Layers annotated with logical axes; a scanned stack has the axis ``layer``."""

    num_layers: int
    depth: int
    use_scan: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """The activations behind the last layer."""
        if self.use_scan:
            scanned = nn.scan(
                LogicalDotReluDot,
                length=self.num_layers,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: "layer"},
            )
            return scanned(self.depth)(x)[0]
        for _ in range(self.num_layers):
            x, _ = LogicalDotReluDot(self.depth)(x)
        return x
