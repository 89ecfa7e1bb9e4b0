"""Boxes of Flax linen: ``nn.Partitioned`` and ``nn.LogicallyPartitioned``.

Source: Flax, "Scale up Flax Modules on multiple devices", and ``flax.core.meta``.
"""

import sys
from typing import Any

from penzai_shard.readers.array_reader import ArrayReader, ReadArray


class _LinenReader(ArrayReader):
    """Reads every kind of ``flax.core.meta.AxisMetadata``; refuses those that it does not know."""

    library = "flax.core.meta"
    extra = "flax"

    def reads(self, node_type: type) -> bool:
        return issubclass(node_type, sys.modules["flax.core.meta"].AxisMetadata)

    def read(self, node: Any) -> ReadArray:
        if not isinstance(node, sys.modules["flax.core.meta"].Partitioned):
            return ReadArray(
                node.unbox(),
                (),
                f"the axis names in a {type(node).__name__} of Flax are not known",
            )
        return ReadArray(node.value, tuple(node.names))

    def with_data(self, node: Any, data: Any) -> Any:
        return node.replace_boxed(data)


READER = _LinenReader()
