"""Paths that differ in their numbers only, as those of equal blocks do, as one path."""

import re
from collections.abc import Iterable, Sequence

NUMBER = re.compile(r"\d+")


def folding_key(path: str) -> str:
    """What paths that differ in their numbers only have in common.

    >>> folding_key("stage_2/block_11/w") == folding_key("stage_0/block_3/w")
    True
    """
    return NUMBER.sub("*", path)


def varying_numbers(paths: Sequence[str]) -> list[tuple[int, ...] | None]:
    """For each number in paths of one key, its values in their order; None if it is always one.

    >>> varying_numbers(["stage_2/block_0/w", "stage_2/block_1/w"])
    [None, (0, 1)]
    """
    columns = zip(*(map(int, NUMBER.findall(path)) for path in paths), strict=True)
    return [column if len(set(column)) > 1 else None for column in columns]


def folded_path(paths: Sequence[str]) -> str:
    """Paths of one key as one, with ``*`` for each number in which they differ.

    >>> folded_path(["stage_2/block_0/w", "stage_2/block_1/w"])
    'stage_2/block_*/w'
    """
    varying = iter(varying_numbers(paths))
    return NUMBER.sub(lambda number: "*" if next(varying) else number.group(), paths[0])


def folded_rows(rows: Iterable[tuple[str, ...]], collapse: bool = True) -> list[tuple[str, ...]]:
    """Rows of texts that begin with a path, those alike in one, with their count after the path.

    Args:
        rows: For each array its path, and what is said of it.
        collapse: Whether rows are alike that differ in the numbers of their paths only.

    >>> folded_rows([("block_0/w", "damaged"), ("block_1/w", "damaged"), ("b", "damaged")])
    [('block_*/w', '2', 'damaged'), ('b', '1', 'damaged')]
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, *texts in rows:
        groups.setdefault((folding_key(path) if collapse else path, *texts), []).append(path)
    return [(folded_path(paths), str(len(paths)), *texts) for (_, *texts), paths in groups.items()]
