"""Layouts: rules for parameters, computation and optimizer together, and what carries them out."""
