"""Checkpoints: parameters by name and whole train states, restored straight onto any mesh.

Orbax, which writes and reads them, is loaded when it is first used.
"""

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.first_api_names import first_api_names
from penzai_shard.checkpointing.manager import CheckpointManager
from penzai_shard.checkpointing.manifest import Manifest, read_manifest
from penzai_shard.checkpointing.parameter_dict import param_dict, with_params
from penzai_shard.checkpointing.parameters import restore_params, restore_structs, save_params
from penzai_shard.checkpointing.stacked_blocks import stack_blocks, unstack_blocks
from penzai_shard.checkpointing.train_states import restore_train_state, save_train_state
from penzai_shard.checkpointing.verifying import (
    CheckpointVerification,
    VerifiedArray,
)

__all__ = [
    "ArrayRecord",
    "CheckpointManager",
    "CheckpointVerification",
    "Manifest",
    "VerifiedArray",
    "first_api_names",
    "param_dict",
    "read_manifest",
    "restore_params",
    "restore_structs",
    "restore_train_state",
    "save_params",
    "save_train_state",
    "stack_blocks",
    "unstack_blocks",
    "with_params",
]
