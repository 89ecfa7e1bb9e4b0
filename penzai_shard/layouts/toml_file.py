"""Reads and writes layouts as TOML."""


class LayoutFiles:
    """How a ``Layout`` is read from a file, and written."""
