"""Compiled programs read without running them: computations, groups of devices, collectives."""

from penzai_shard.compiled_programs.collective_operations import (
    KINDS,
    CollectiveOperation,
    read_collectives,
)
from penzai_shard.compiled_programs.device_groups import GroupAxes
from penzai_shard.compiled_programs.instruction_text import ArrayType
from penzai_shard.compiled_programs.kept_slices import kept_slice_bytes
from penzai_shard.compiled_programs.modules import Computation, Instruction, Module
from penzai_shard.compiled_programs.unknown_communication import unknown_communication
from penzai_shard.compiled_programs.value_flow import ValueFlow

__all__ = [
    "KINDS",
    "ArrayType",
    "CollectiveOperation",
    "Computation",
    "GroupAxes",
    "Instruction",
    "Module",
    "ValueFlow",
    "kept_slice_bytes",
    "read_collectives",
    "unknown_communication",
]
