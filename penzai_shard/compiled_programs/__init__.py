"""Compiled programs read without running them: computations, groups of devices, collectives."""

from penzai_shard.compiled_programs.modules import ArrayType, Computation, Instruction, Module

__all__ = ["ArrayType", "Computation", "Instruction", "Module"]
