"""A reader of tensors that are in memory, which counts what is read of them."""

import numpy as np

from penzai_shard.pretrained.stored_tensors import StoredTensor


class TensorsInMemory:
    """Arrays by name, read as if they were in a file."""

    def __init__(self, arrays, file="model.safetensors"):
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.tensors = {
            name: StoredTensor(name, array.shape, str(array.dtype), file)
            for name, array in self.arrays.items()
        }
        self.reads = self.elements_read = 0

    def read(self, name, index):
        part = self.arrays[name][index].copy()
        self.reads, self.elements_read = self.reads + 1, self.elements_read + part.size
        return part


def whole_index(shape):
    """The index of all elements of an array."""
    return tuple(slice(0, length) for length in shape)
