"""Putting models on a mesh by logical axis names, and making them there in the first place."""

from penzai_shard.placement.initializing import (
    abstract_model,
    initialize_parameters_sharded,
    sharded_init,
)
from penzai_shard.placement.placing import name_to_name_device_put, place, put

__all__ = [
    "abstract_model",
    "initialize_parameters_sharded",
    "name_to_name_device_put",
    "place",
    "put",
    "sharded_init",
]
