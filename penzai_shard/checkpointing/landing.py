"""What becomes of an array once it is read: itself, one block of a stack, or all blocks of one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from penzai_shard.checkpointing.correspondence import Correspondence
from penzai_shard.checkpointing.padded_layouts import Layout, PaddedLayout, true_layouts
from penzai_shard.checkpointing.stacking import (
    GrowingStack,
    sharding_of_blocks,
    sharding_of_stack,
    unstacked,
)
from penzai_shard.named_leaves import NamedLeaf


class Landing(Protocol):
    """Where an array goes that is read."""

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and layout that it must have, with its axes in the order of the model's.

        Without a layout it is read into host memory.
        """
        ...

    def land(self, array: jax.Array) -> dict[str, jax.Array]:
        """The arrays of the model, by name, that are complete with it."""
        ...


@dataclasses.dataclass(frozen=True)
class _Itself:
    name: str
    struct: jax.ShapeDtypeStruct

    def land(self, array: jax.Array) -> dict[str, jax.Array]:
        return {self.name: array}


@dataclasses.dataclass(frozen=True)
class _ThroughHost:
    name: str
    struct: jax.ShapeDtypeStruct
    layout: PaddedLayout

    def land(self, array: Any) -> dict[str, jax.Array]:
        # One of them is in host memory at a time.
        return {self.name: jax.block_until_ready(self.layout.from_host(array))}


@dataclasses.dataclass(frozen=True)
class _OneBlock:
    name: str
    number: int
    stack: GrowingStack

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        whole, k = self.stack.struct, self.stack.dimension
        shape = (*whole.shape[:k], *whole.shape[k + 1 :])
        return jax.ShapeDtypeStruct(
            shape, whole.dtype, sharding=sharding_of_blocks(whole.sharding, k)
        )

    def land(self, array: jax.Array) -> dict[str, jax.Array]:
        self.stack.put(self.number, array)
        return {} if self.stack.missing else {self.name: self.stack.whole()}


@dataclasses.dataclass(frozen=True)
class _AllBlocks:
    dimension: int
    blocks: Mapping[str, jax.ShapeDtypeStruct]
    is_wanted: Mapping[str, bool]

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        first, k = next(iter(self.blocks.values())), self.dimension
        shape = (*first.shape[:k], len(self.blocks), *first.shape[k:])
        return jax.ShapeDtypeStruct(
            shape, first.dtype, sharding=sharding_of_stack(first.sharding, k)
        )

    def land(self, array: jax.Array) -> dict[str, jax.Array]:
        shardings = [struct.sharding for struct in self.blocks.values()]
        # The stack is kept until they are made.
        blocks = jax.block_until_ready(unstacked(array, self.dimension, shardings))
        found = zip(self.blocks, blocks, strict=True)
        return {name: block for name, block in found if self.is_wanted[name]}


def landings_of(
    found: Correspondence, leaves: Mapping[str, NamedLeaf], layouts: Mapping[str, Layout]
) -> dict[str, Landing]:
    """Where each array goes that is read.

    Args:
        found: What is to be read.
        leaves: The arrays of the model by name.
        layouts: Where each of them is to be.
    """
    shardings = true_layouts(layouts, leaves)

    def struct_of(name: str) -> jax.ShapeDtypeStruct:
        leaf = leaves[name]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])

    landings: dict[str, Landing] = {}
    for conversion in found.conversions:
        if conversion.stacks:
            stack = GrowingStack(struct_of(conversion.stacked), conversion.dimension)
            for number, name in enumerate(conversion.blocks):
                landings[name] = _OneBlock(conversion.stacked, number, stack)
        else:
            landings[conversion.stacked] = _AllBlocks(
                conversion.dimension,
                {name: struct_of(name) for name in conversion.blocks},
                {name: name not in found.others for name in conversion.blocks},
            )

    def itself(name: str) -> Landing:
        struct, layout = struct_of(name), layouts[name]
        if isinstance(layout, PaddedLayout) and layout.goes_through_host(struct.shape):
            return _ThroughHost(name, jax.ShapeDtypeStruct(struct.shape, struct.dtype), layout)
        return _Itself(name, struct)

    return {name: landings[name] if name in landings else itself(name) for name in found.wanted}
