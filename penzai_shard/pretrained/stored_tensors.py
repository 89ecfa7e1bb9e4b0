"""Tensors in files: what is known of each, and the protocol by which parts of them are read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

Index = tuple[slice, ...]
"""One slice per dimension, each with a start, a stop and step 1."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Everything about a tensor in a file that is known without reading it.

    Attributes:
        name: Its name, unique over all files of a model.
        shape: Its shape.
        dtype: The name of its dtype as NumPy and JAX have it, such as ``bfloat16``.
        file: The file that holds it, for messages.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str


class TensorReader(Protocol):
    """Tensors in one or several files, of which parts can be read."""

    tensors: Mapping[str, StoredTensor]
    """All tensors by name."""

    def read(self, name: str, index: Index) -> np.ndarray[Any, Any]:
        """The part of a tensor at an index, and nothing more of it; its own memory."""
        ...
