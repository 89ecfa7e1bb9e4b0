"""The training loop: progress, records, checkpoints, resuming, stopping, batches placed ahead."""

from penzai_shard.fitting.fit_call import fit
from penzai_shard.fitting.log_records import LogRecord, MemoryUse

__all__ = ["LogRecord", "MemoryUse", "fit"]
