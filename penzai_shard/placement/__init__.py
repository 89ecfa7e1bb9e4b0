"""Putting models on a mesh by logical axis names, and building them on it from the start."""

from penzai_shard.placement.builders import is_model
from penzai_shard.placement.initializing import (
    abstract_model,
    initialize_parameters_sharded,
    partly_initialized,
    sharded_init,
)
from penzai_shard.placement.placing import (
    described,
    described_array,
    name_to_name_device_put,
    place,
    put,
)
from penzai_shard.placement.stored_padding import padded_on_devices, padded_parts

__all__ = [
    "abstract_model",
    "described",
    "described_array",
    "initialize_parameters_sharded",
    "is_model",
    "name_to_name_device_put",
    "padded_on_devices",
    "padded_parts",
    "partly_initialized",
    "place",
    "put",
    "sharded_init",
]
