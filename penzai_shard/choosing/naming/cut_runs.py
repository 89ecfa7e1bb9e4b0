"""What slices cut out of the dimensions of values."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from penzai_shard.choosing.dimensions import DimensionClass, ProgramDimensions, length_of

Cut: TypeAlias = tuple[int, tuple[DimensionClass, ...]]
"""A value that is cut out, and the classes of what it is."""

Runs: TypeAlias = Mapping[tuple[int, int], Sequence[Cut]]
"""What is cut out of a class, by its start and its end."""


def cut_runs(dimensions: ProgramDimensions) -> Mapping[DimensionClass, Runs]:
    """What slices cut out of the slowest classes of dimensions, without what is faster in both."""
    found: dict[DimensionClass, dict[tuple[int, int], list[Cut]]] = {}
    for operation, before, after, (start, end, stride) in dimensions.cuts:
        faster = before[1:]
        step = length_of(faster)
        if before == after or stride != 1 or start % step or end % step:
            continue
        slower = after[: len(after) - len(faster)]
        if after == (*slower, *faster):
            runs = found.setdefault(before[0], {})
            cut = tuple(part for part in slower if part.size > 1)
            runs.setdefault((start // step, end // step), []).append((operation.results[0], cut))
    return found


def cover(part: DimensionClass, runs: Runs) -> bool:
    """Whether several runs cover a class, without gaps and nothing twice."""
    ends = [0, *(end for _, end in sorted(runs))]
    return len(runs) > 1 and ends == [*(start for start, _ in sorted(runs)), part.size]
