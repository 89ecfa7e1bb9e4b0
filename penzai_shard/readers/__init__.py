"""Whose arrays these are: one reader for each library opens its nodes and makes others like them.

``register_reader`` adds one for the arrays of anybody else.
"""

from typing import Any

__all__ = ["Content", "Reader", "register_reader"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penzai_shard.readers import reader

    return getattr(reader, name)
