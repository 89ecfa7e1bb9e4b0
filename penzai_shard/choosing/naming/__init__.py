"""Logical axis names for the weights of functions that carry none."""

from penzai_shard.choosing.naming.inferred_names import InferredNames, Undecided
from penzai_shard.choosing.naming.inferring import infer_names
from penzai_shard.choosing.naming.weight_names import DimensionName

__all__ = ["DimensionName", "InferredNames", "Undecided", "infer_names"]
