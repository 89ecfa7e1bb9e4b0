"""The arrays that go into a step and come out of it, each with its path and its part."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from penzai_shard.inspection.steps.step_parts import StepPart
from penzai_shard.layers.remat_policies import HOST_MEMORY
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_leaves import NamedLeaf, map_arrays
from penzai_shard.partition_specs import canonical_spec
from penzai_shard.placement import described_array
from penzai_shard.planning.plan import itemsize
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.training.state_layout import canonical

# The logical axis of each dimension, None for a positional one; None altogether without names.
Names = tuple[LogicalAxis | None, ...] | None


@dataclasses.dataclass(frozen=True)
class StepArray:
    """An array that goes into a step or comes out of it.

    Attributes:
        path: Where it is, as plans print it: ``params/decoder/block_3/mlp.up``.
        part: What it is for the step.
        shape: Its global shape, as it is stored.
        dtype: Its dtype.
        sharding: How it is laid out; None if the compiler decides.
        donated: Of an argument, whether a result may take its memory.
        names: The logical axis of each dimension.
        chosen_shape: The shape of what one device holds, where the compiler decides.
        true_shape: Its global shape without padding, if it is stored padded.
    """

    path: str
    part: StepPart
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    donated: bool = False
    names: Names = None
    chosen_shape: tuple[int, ...] | None = None
    true_shape: tuple[int, ...] | None = None

    @property
    def spec(self) -> PartitionSpec:
        """Its spec; that of a replicated array if it has none."""
        if not isinstance(self.sharding, NamedSharding):
            return PartitionSpec()
        return canonical_spec(self.sharding.spec)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what one device holds of it."""
        if self.sharding is not None:
            return self.sharding.shard_shape(self.shape)
        return self.shape if self.chosen_shape is None else self.chosen_shape

    @property
    def bytes_per_device(self) -> int:
        """What one device holds of it, in bytes."""
        return math.prod(self.shard_shape) * itemsize(self.dtype)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds all of it."""
        return self.shard_shape == self.shape

    @property
    def is_on_host(self) -> bool:
        """Whether it is kept in the host's memory instead of the device's."""
        return getattr(self.sharding, "memory_kind", None) == HOST_MEMORY

    def on(self, mesh: AnyMesh | None) -> "StepArray":
        """The array with its layout on a step's mesh, whatever JAX has for that in types."""
        if mesh is None or not isinstance(self.sharding, NamedSharding):
            return self
        sharding = NamedSharding(mesh, self.spec, memory_kind=self.sharding.memory_kind)
        return dataclasses.replace(self, sharding=sharding)

    def chosen(self, shape: tuple[int, ...]) -> "StepArray":
        """The array as a program holds it on each device, if the compiler was to decide.

        Args:
            shape: The shape that the program has for it.
        """
        if self.sharding is not None:
            return self
        # A random key has more dimensions there.
        return dataclasses.replace(self, chosen_shape=shape[: len(self.shape)])

    @classmethod
    def of(cls, path: str, part: StepPart, leaf: Any, read: NamedLeaf | None = None) -> "StepArray":
        """That of an array, or of a struct in its place.

        Args:
            path: Where it is.
            part: What it is for the step.
            leaf: The array.
            read: The same with its logical axes, as ``read_in`` gives it.
        """
        array = cls(path, part, tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None))
        return array if read is None else array.known_as(read)

    def known_as(self, read: NamedLeaf) -> "StepArray":
        """The array with the logical axes and true lengths that its tree gives it."""
        true_shape = None if read.padding is None else read.shape
        return dataclasses.replace(self, names=read.names, true_shape=true_shape)


def read_in(tree: Any) -> list[NamedLeaf]:
    """Every array of a tree with its logical axes, in the order of its leaves.

    >>> from penzai import pz
    >>> import jax.numpy as jnp
    >>> [leaf.names for leaf in read_in([jnp.ones(3), pz.nx.ones({"embedding": 4})])]
    [None, ('embedding',)]
    """
    # Of what is stored padded the leaf stands in the place of what is stored.
    return list(jax.tree.leaves(map_arrays(tree, lambda leaf: leaf)))


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """A struct in place of an array; its layout is kept if it is one by mesh axes."""
    sharding = getattr(leaf, "sharding", None)
    by_name = canonical(sharding) if isinstance(sharding, NamedSharding) else None
    return described_array(leaf, by_name)
