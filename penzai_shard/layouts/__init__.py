"""Layouts: rules for parameters, computation and optimizer together, and what carries them out."""

from penzai_shard.layouts.layout import Layout

__all__ = ["Layout"]
