"""What a checkpoint holds, in what two differ, and whether one is whole: values that print."""

from penzai_shard.checkpoint_reports.comparing import (
    ArrayDifference,
    CheckpointComparison,
    ModelComparison,
    compare_checkpoints,
)
from penzai_shard.checkpoint_reports.description import CheckpointDescription, describe_checkpoint
from penzai_shard.checkpoint_reports.run_description import (
    NumberedCheckpoint,
    RunDescription,
    describe_run,
    is_run,
)
from penzai_shard.checkpoint_reports.stored_arrays import StoredArray
from penzai_shard.checkpoint_reports.verification import verify_checkpoint

__all__ = [
    "ArrayDifference",
    "CheckpointComparison",
    "CheckpointDescription",
    "ModelComparison",
    "NumberedCheckpoint",
    "RunDescription",
    "StoredArray",
    "compare_checkpoints",
    "describe_checkpoint",
    "describe_run",
    "is_run",
    "verify_checkpoint",
]
