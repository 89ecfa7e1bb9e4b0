"""Patch JAX models with selectors, lay them over a mesh by axis name."""

__version__ = "0.2.0"
