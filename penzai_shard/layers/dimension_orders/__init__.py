"""Running the program of a layer without moving the dimensions of its arrays."""

from penzai_shard.layers.dimension_orders.ordered_arrays import OrderedArray
from penzai_shard.layers.dimension_orders.running import run_in_place

__all__ = ["OrderedArray", "run_in_place"]
