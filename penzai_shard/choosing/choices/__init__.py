"""The layout for a training step, found among all sane ones."""
