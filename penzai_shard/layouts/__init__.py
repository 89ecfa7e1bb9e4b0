"""Layouts: each parallelism by name, with all that follows from it for a model and its training."""
