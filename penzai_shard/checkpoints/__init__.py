"""Saves and restores arrays by name: written by Orbax, read onto any mesh, verified."""
