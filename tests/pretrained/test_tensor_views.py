"""Views of tensors: whatever they are composed of, they read what NumPy would, and no more."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penzai_shard.pretrained.stored_tensors import StoredTensor
from penzai_shard.pretrained.tensor_views import (
    Concatenated,
    Converted,
    Increased,
    Reshaped,
    Sliced,
    Transposed,
    WholeTensor,
    part_of,
    stacked,
)
from tests.pretrained.tensors_in_memory import TensorsInMemory, whole_index

DTYPES = ["float32", "bfloat16", "float16"]


class Drawn:
    """A view, and the array that NumPy makes by the same operations."""

    def __init__(self, view, array):
        self.view, self.array = view, array


@st.composite
def compositions(draw):
    arrays = {}

    def tensor(shape, dtype):
        name = f"t{len(arrays)}"
        size = math.prod(shape)
        values = np.arange(size, dtype=np.float32) + 1000 * len(arrays)
        arrays[name] = values.reshape(shape).astype(np.dtype(dtype)) / np.asarray(7, dtype)
        stored = StoredTensor(name, tuple(shape), dtype, "file")
        return Drawn(WholeTensor(stored), arrays[name])

    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))
    drawn = tensor(shape, dtype)
    repeated = False
    for _ in range(draw(st.integers(0, 5))):
        drawn, again = draw(st.sampled_from(OPERATIONS))(draw, drawn, tensor)
        repeated = repeated or again
    return arrays, drawn, repeated


def reshaped(draw, drawn, tensor):
    shape = draw(st.permutations(factors(drawn.array.size)))
    merged = []
    for length in shape:
        if merged and draw(st.booleans()):
            merged[-1] *= length
        else:
            merged.append(length)
    if draw(st.booleans()):
        merged.insert(draw(st.integers(0, len(merged))), 1)
    if math.prod(merged) != drawn.array.size:
        merged = [drawn.array.size]
    return Drawn(Reshaped(drawn.view, merged), drawn.array.reshape(merged)), False


def factors(size):
    found, divisor = [], 2
    while size > 1:
        while size % divisor == 0:
            found.append(divisor)
            size //= divisor
        divisor += 1
    return found


def transposed(draw, drawn, tensor):
    order = draw(st.permutations(range(drawn.array.ndim)))
    return Drawn(Transposed(drawn.view, order), drawn.array.transpose(order)), False


def sliced(draw, drawn, tensor):
    index = draw(indices(drawn.array.shape))
    make = draw(st.sampled_from([Sliced, part_of]))
    view = make(drawn.view, [s.start for s in index], [s.stop - s.start for s in index])
    return Drawn(view, drawn.array[index]), False


def put_together(draw, drawn, tensor):
    other = tensor(drawn.array.shape, drawn.view.dtype)
    if drawn.array.ndim and draw(st.booleans()):
        along = draw(st.integers(0, drawn.array.ndim - 1))
        view = Concatenated([drawn.view, other.view, drawn.view], along)
        return Drawn(view, np.concatenate([drawn.array, other.array, drawn.array], along)), True
    along = draw(st.integers(0, drawn.array.ndim))
    view = stacked([other.view, drawn.view], along)
    return Drawn(view, np.stack([other.array, drawn.array], along)), False


def increased(draw, drawn, tensor):
    added = drawn.array + np.asarray(1, drawn.array.dtype)
    return Drawn(Increased(drawn.view, 1.0), added), False


def converted(draw, drawn, tensor):
    dtype = draw(st.sampled_from(DTYPES))
    return Drawn(Converted(drawn.view, dtype), drawn.array.astype(np.dtype(dtype))), False


OPERATIONS = [reshaped, reshaped, transposed, sliced, put_together, increased, converted]


@st.composite
def indices(draw, shape):
    ends = [sorted(draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape]
    # Empty ones now and then; most of the time a part.
    return tuple(
        slice(first, max(last, min(first + 1, length)) if draw(st.booleans()) else last)
        for (first, last), length in zip(ends, shape, strict=True)
    )


@settings(max_examples=150)
@given(compositions(), st.data())
def test_any_composition_reads_what_numpy_does_and_no_element_more(composition, data):
    arrays, drawn, repeated = composition
    index = data.draw(indices(drawn.array.shape))
    reader = TensorsInMemory(arrays)
    part = drawn.view.read(reader, index)
    assert drawn.view.shape == drawn.array.shape
    assert (part.dtype, np.dtype(drawn.view.dtype)) == (drawn.array.dtype,) * 2
    assert part.tobytes() == drawn.array[index].tobytes()
    assert part.shape == drawn.array[index].shape
    assert reader.elements_read == part.size
    assert set(drawn.view.tensors) <= set(arrays)
    if not repeated:
        whole = drawn.view.read(TensorsInMemory(arrays), whole_index(drawn.view.shape))
        assert whole.tobytes() == drawn.array.tobytes()


def test_a_part_of_stacked_tensors_is_made_of_those_that_it_is_in():
    tensors = [WholeTensor(StoredTensor(name, (4, 3), "float32", "f")) for name in "qkv"]
    view = Transposed(stacked(tensors, 0), (0, 2, 1))
    assert view.tensors == ("q", "k", "v")
    assert part_of(view, (1, 0, 2), (1, 3, 2)).tensors == ("k",)
    assert part_of(view, (1, 0, 2), (2, 3, 2)).tensors == ("q", "k", "v")


@pytest.mark.parametrize(
    ("before", "after", "index", "reads"),
    [
        # A weight of eight heads: two heads, of which one box is read.
        ((32, 5), (8, 4, 5), (slice(2, 4), slice(0, 4), slice(0, 5)), 1),
        # A part of each of three heads: one box each.
        ((32, 5), (8, 4, 5), (slice(2, 5), slice(1, 3), slice(0, 5)), 3),
        # Columns split by heads, and rows by another mesh axis.
        ((5, 32), (5, 8, 4), (slice(1, 3), slice(2, 4), slice(0, 4)), 1),
        # Dimensions merged: a row's end, whole rows, a row's beginning.
        ((4, 6), (24,), (slice(4, 20),), 3),
    ],
)
def test_a_reshape_reads_boxes_and_not_elements_one_by_one(before, after, index, reads):
    array = np.arange(math.prod(before), dtype=np.float32).reshape(before)
    reader = TensorsInMemory({"t": array})
    view = Reshaped(WholeTensor(reader.tensors["t"]), after)
    np.testing.assert_array_equal(view.read(reader, index), array.reshape(after)[index])
    assert reader.reads == reads
