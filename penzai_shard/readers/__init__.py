"""Whose arrays these are: one reader for each library opens its nodes and makes others like them.

``register_reader`` adds one for the arrays of anybody else.
"""

from penzai_shard.readers.reader import Content, Reader, register_reader

__all__ = ["Content", "Reader", "register_reader"]
