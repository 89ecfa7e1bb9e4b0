"""Training in one call: progress, records, evaluation, checkpoints, and batches placed ahead."""
