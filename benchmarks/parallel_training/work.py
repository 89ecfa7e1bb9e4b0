"""The work that all do: a Llama-like transformer, its weights, its batch and its layouts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

BLOCK_WEIGHTS = {
    "attention_norm": ("embedding",),
    "query": ("embedding", "heads", "projection"),
    "key": ("embedding", "heads", "projection"),
    "value": ("embedding", "heads", "projection"),
    "output": ("heads", "projection", "embedding"),
    "mlp_norm": ("embedding",),
    "gate": ("embedding", "neurons"),
    "up": ("embedding", "neurons"),
    "down": ("neurons", "embedding"),
}
"""The weights of a block and the logical axes of each, in order."""

ROOT_WEIGHTS = {
    "embedder": ("vocabulary", "embedding"),
    "final_norm": ("embedding",),
    "head": ("embedding", "vocabulary"),
}
"""The other weights."""

EPSILON = 1e-6
WAVELENGTH = 10_000.0
MASKED = -2.3819763e38


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way of writing the train step, compiled and ready to run.

    Attributes:
        compiled: The compiled step.
        start: Makes the state to start from.
        step: Takes a state, which it uses up; gives the next one and the loss.
    """

    compiled: Any
    start: Callable[[], Any]
    step: Callable[[Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of model and batch."""

    blocks: int = 4
    embedding: int = 256
    heads: int = 8
    projection: int = 32
    neurons: int = 768
    vocabulary: int = 512
    batch: int = 16
    seq: int = 128

    def weight_axes(self) -> dict[str, tuple[str, ...]]:
        """The logical axes of every weight, by name."""
        of_blocks = {
            f"block_{i}/{name}": axes
            for i in range(self.blocks)
            for name, axes in BLOCK_WEIGHTS.items()
        }
        return {**of_blocks, **ROOT_WEIGHTS}

    def weights(self) -> dict[str, np.ndarray]:
        """The weights that all start from."""
        draw = np.random.default_rng(0)

        def of(name: str, axes: tuple[str, ...]) -> np.ndarray:
            lengths = [getattr(self, axis) for axis in axes]
            if len(axes) == 1:
                return np.ones(lengths, np.float32)
            return draw.normal(scale=0.05, size=lengths).astype(np.float32)

        return {name: of(name, axes) for name, axes in self.weight_axes().items()}

    def tokens(self) -> np.ndarray:
        """A batch; a sequence has one token more than the model is fed."""
        draw = np.random.default_rng(1)
        return draw.integers(self.vocabulary, size=(self.batch, self.seq + 1)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters and activations are split, in logical axes.

    Attributes:
        name: Its name.
        mesh_axes: The mesh axes and their lengths.
        parameters: Which logical axis of parameters goes to which mesh axis.
        activations: The same for activations.
    """

    name: str
    mesh_axes: Mapping[str, int]
    parameters: Mapping[str, str]
    activations: Mapping[str, str]

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh; its axes are Auto."""
        auto = (jax.sharding.AxisType.Auto,) * len(self.mesh_axes)
        return jax.make_mesh(tuple(self.mesh_axes.values()), tuple(self.mesh_axes), auto)

    def spec(self, rules: Mapping[str, str], axes: tuple[str, ...]) -> PartitionSpec:
        """The spec of an array with these logical axes."""
        entries = [rules.get(axis) for axis in axes]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def of_parameter(self, axes: tuple[str, ...]) -> NamedSharding:
        """The sharding of a parameter."""
        return NamedSharding(self.mesh, self.spec(self.parameters, axes))

    def of_activation(self, axes: tuple[str, ...]) -> NamedSharding:
        """The sharding of an activation."""
        return NamedSharding(self.mesh, self.spec(self.activations, axes))

    def constrain(self, x: Any, *axes: str) -> Any:
        """An activation with these logical axes, its layout pinned."""
        return jax.lax.with_sharding_constraint(x, self.of_activation(axes))


_TENSOR_PARALLEL = {"heads": "model", "neurons": "model", "vocabulary": "model"}
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("dp 8", {"data": 8}, {}, {"batch": "data"}),
        Layout("fsdp 8", {"data": 8}, {"embedding": "data"}, {"batch": "data"}),
        Layout(
            "4x2",
            {"data": 4, "model": 2},
            {"embedding": "data", **_TENSOR_PARALLEL},
            {"batch": "data", **_TENSOR_PARALLEL},
        ),
    )
}


OPTIMIZER = optax.adamw(1e-3)
