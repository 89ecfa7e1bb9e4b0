"""The command ``penzai-shard``."""
