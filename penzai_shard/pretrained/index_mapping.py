"""Where the elements at an index of a reshaped array are in the array before.

Dimensions that a reshape splits or merges form groups, each with its own elements in the order of
rows. At an index, a group's elements are runs of consecutive ones, and each run is a few boxes of
the dimensions before. So nothing is read that is not at the index.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penzai_shard.pretrained.stored_tensors import Index


class Part(NamedTuple):
    """Some elements of a group, in the order of rows.

    Attributes:
        offset: How many elements of the index stand before them.
        length: How many they are.
        box: Where they are in the group's dimensions before the reshape.
    """

    offset: int
    length: int
    box: Index


def reshaped_parts(
    before: Sequence[int], after: Sequence[int], index: Index
) -> list[tuple[Part, ...]]:
    """For each group of dimensions, the parts that hold the elements at an index.

    Args:
        before: The shape before the reshape; not of length 0 anywhere.
        after: The shape after.
        index: Of the shape after; not empty.

    >>> reshaped_parts((6, 5), (2, 3, 5), (slice(1, 2), slice(0, 2), slice(0, 5)))
    [(Part(offset=0, length=2, box=(slice(3, 5, None),)),),
     (Part(offset=0, length=5, box=(slice(0, 5, None),)),)]
    """
    return [
        tuple(_parts(before[source], after[target], index[target]))
        for source, target in _groups(before, after)
    ]


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The smallest series of neighbouring dimensions that hold equally many elements."""
    source, target = 0, 0
    while source < len(before) or target < len(after):
        ends = [min(source + 1, len(before)), min(target + 1, len(after))]
        while (held := math.prod(before[source : ends[0]])) != (
            wanted := math.prod(after[target : ends[1]])
        ):
            ends[0 if held < wanted else 1] += 1
        yield slice(source, ends[0]), slice(target, ends[1])
        source, target = ends


def _parts(before: Sequence[int], after: Sequence[int], index: Index) -> Iterator[Part]:
    offset = 0
    for start, stop in _runs(after, index):
        for box in _boxes(before, start, stop):
            length = math.prod(s.stop - s.start for s in box)
            yield Part(offset, length, box)
            offset += length


def _runs(lengths: Sequence[int], index: Index) -> Iterator[tuple[int, int]]:
    """Where consecutive elements at an index begin and end, counted in the order of rows."""
    partial = [d for d, s in enumerate(index) if (s.start, s.stop) != (0, lengths[d])]
    if not partial:
        yield 0, math.prod(lengths)
        return
    last = partial[-1]
    inner = math.prod(lengths[last + 1 :])
    outer = [range(s.start, s.stop) for s in index[:last]]
    for places in itertools.product(*outer):
        row = 0
        for place, length in zip(places, lengths, strict=False):
            row = row * length + place
        first = row * lengths[last]
        yield (first + index[last].start) * inner, (first + index[last].stop) * inner


def _boxes(lengths: Sequence[int], start: int, stop: int) -> Iterator[Index]:
    """Boxes that hold the elements of a run, in order."""
    if not lengths:
        yield ()
        return
    inner = math.prod(lengths[1:])
    first, last = start // inner, stop // inner
    if start % inner:
        end = min(stop - first * inner, inner)
        for box in _boxes(lengths[1:], start % inner, end):
            yield (slice(first, first + 1), *box)
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, length) for length in lengths[1:]))
    if stop % inner and first <= last:
        for box in _boxes(lengths[1:], 0, stop % inner):
            yield (slice(last, last + 1), *box)
