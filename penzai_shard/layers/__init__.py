"""Layers that change how a model runs, and not what it computes."""

from penzai_shard.layers.wrapper import WrapperLayer

__all__ = ["WrapperLayer"]
