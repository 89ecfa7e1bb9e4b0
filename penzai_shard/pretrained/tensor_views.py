"""Where the elements of a model's array are in the tensors of a file.

A view is said from the tensors outwards: a tensor, reshaped, transposed, stacked with others. Read
at an index, it asks each tensor only for the part that it needs.
"""

import abc
from typing import Any

import numpy as np

from penzai_shard.pretrained.stored_tensors import Index, TensorReader


class TensorView(abc.ABC):
    """How an array is made of stored tensors.

    Attributes:
        shape: The array's shape.
        dtype: The name of its dtype.
        tensors: The names of the tensors that it is made of.
    """

    shape: tuple[int, ...]
    dtype: str
    tensors: tuple[str, ...]

    @abc.abstractmethod
    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """The part of the array at an index, in memory of its own."""
