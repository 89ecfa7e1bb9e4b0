"""Where the elements of a model's array are in the tensors of a file.

A view is said from the tensors outwards: a tensor, reshaped, transposed, stacked with others. Read
at an index, it asks each tensor only for the elements that are at this index.
"""

import abc
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penzai_shard.pretrained.index_mapping import reshaped_parts
from penzai_shard.pretrained.stored_tensors import Index, StoredTensor, TensorReader


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


class WholeTensor(TensorView):
    """A tensor as it is stored."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.shape, self.dtype, self.tensors = tensor.shape, tensor.dtype, (tensor.name,)

    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """As for every view."""
        return reader.read(self.tensors[0], index)


class Converted(TensorView):
    """An array in another dtype, each element rounded to the nearest."""

    def __init__(self, source: TensorView, dtype: str) -> None:
        self.source = source
        self.shape, self.dtype, self.tensors = source.shape, dtype, source.tensors

    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """As for every view."""
        return self.source.read(reader, index).astype(np.dtype(self.dtype), copy=False)


class Increased(TensorView):
    """An array with a number added to each element, in the array's dtype."""

    def __init__(self, source: TensorView, by: float) -> None:
        self.source, self.by = source, by
        self.shape, self.dtype, self.tensors = source.shape, source.dtype, source.tensors

    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """As for every view."""
        part = self.source.read(reader, index)
        return part + np.asarray(self.by, part.dtype)


class Transposed(TensorView):
    """An array whose dimension ``i`` is dimension ``permutation[i]`` of another."""

    def __init__(self, source: TensorView, permutation: Sequence[int]) -> None:
        self.source, self.permutation = source, tuple(int(place) for place in permutation)
        self.shape = tuple(source.shape[place] for place in self.permutation)
        self.dtype, self.tensors = source.dtype, source.tensors

    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """As for every view."""
        of_source = tuple(index[self.permutation.index(place)] for place in range(len(index)))
        return self.source.read(reader, of_source).transpose(self.permutation)


class Sliced(TensorView):
    """A box of another array."""

    def __init__(self, source: TensorView, starts: Sequence[int], shape: Sequence[int]) -> None:
        self.source, self.starts = source, tuple(int(start) for start in starts)
        self.shape = tuple(int(length) for length in shape)
        self.dtype, self.tensors = source.dtype, source.tensors

    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """As for every view."""
        moved = (slice(i.start + s, i.stop + s) for i, s in zip(index, self.starts, strict=True))
        return self.source.read(reader, tuple(moved))


class Reshaped(TensorView):
    """The elements of another array in another shape, in the order of rows."""

    def __init__(self, source: TensorView, shape: Sequence[int]) -> None:
        self.source, self.shape = source, tuple(int(length) for length in shape)
        self.dtype, self.tensors = source.dtype, source.tensors

    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """As for every view."""
        shape = _shape_at(index)
        if not math.prod(shape):
            return np.empty(shape, np.dtype(self.dtype))
        groups = reshaped_parts(self.source.shape, self.shape, index)
        whole = [sum(part.length for part in parts) for parts in groups]
        if all(len(parts) == 1 for parts in groups):
            of_source = tuple(s for (part,) in groups for s in part.box)
            return self.source.read(reader, of_source).reshape(shape)
        result = np.empty(whole, np.dtype(self.dtype))
        for combination in itertools.product(*groups):
            of_source = tuple(s for part in combination for s in part.box)
            place = tuple(slice(part.offset, part.offset + part.length) for part in combination)
            read = self.source.read(reader, of_source)
            result[place] = read.reshape([part.length for part in combination])
        return result.reshape(shape)


class Concatenated(TensorView):
    """Arrays one after the other along a dimension."""

    def __init__(self, sources: Sequence[TensorView], dimension: int) -> None:
        self.sources, self.dimension = tuple(sources), dimension
        first = self.sources[0]
        lengths = [source.shape[dimension] for source in self.sources]
        self.starts = tuple(itertools.accumulate(lengths, initial=0))
        self.shape = (*first.shape[:dimension], sum(lengths), *first.shape[dimension + 1 :])
        self.dtype = first.dtype
        names = itertools.chain.from_iterable(source.tensors for source in self.sources)
        self.tensors = tuple(dict.fromkeys(names))

    def read(self, reader: TensorReader, index: Index) -> np.ndarray[Any, Any]:
        """As for every view."""
        before, after = index[: self.dimension], index[self.dimension + 1 :]
        wanted = index[self.dimension]
        result = np.empty(_shape_at(index), np.dtype(self.dtype))
        around = (slice(None),) * self.dimension
        for source, start in zip(self.sources, self.starts[:-1], strict=True):
            first = max(wanted.start, start)
            last = min(wanted.stop, start + source.shape[self.dimension])
            if first < last:
                of_source = (*before, slice(first - start, last - start), *after)
                place = (*around, slice(first - wanted.start, last - wanted.start))
                result[place] = source.read(reader, of_source)
        return result


def stacked(sources: Sequence[TensorView], dimension: int) -> TensorView:
    """Arrays of one shape along a new dimension."""
    shape = sources[0].shape
    lengthened = (*shape[:dimension], 1, *shape[dimension:])
    return Concatenated([Reshaped(source, lengthened) for source in sources], dimension)


def part_of(source: TensorView, starts: Sequence[int], shape: Sequence[int]) -> TensorView:
    """A box of an array, as a view of no other tensors than those that it is made of."""
    if isinstance(source, Transposed):
        order = source.permutation
        places = [order.index(dimension) for dimension in range(len(order))]
        inner = part_of(source.source, [starts[p] for p in places], [shape[p] for p in places])
        return Transposed(inner, order)
    if isinstance(source, Concatenated):
        along = source.dimension
        for one, first in zip(source.sources, source.starts[:-1], strict=True):
            start = starts[along] - first
            if start >= 0 and start + shape[along] <= one.shape[along]:
                return part_of(one, [*starts[:along], start, *starts[along + 1 :]], shape)
    return Sliced(source, starts, shape)


def _shape_at(index: Index) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in index)
