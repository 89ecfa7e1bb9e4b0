"""Paths that differ in their numbers only, as those of equal blocks do, as one path."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

NUMBER = re.compile(r"\d+")

# Numbers that are written again as they were: 7, and not 07.
_PLAIN_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")
_RANGES = re.compile(r"\{(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\}")
_BRACES = re.compile(r"\{\{|\}\}|" + _RANGES.pattern + r"|[{}]")
# More paths than this in one are not what anybody has written.
_MOST_PATHS = 1_000_000


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


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers in their order as runs without gaps, each by its ends.

    >>> number_runs([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    members = ([number for _, number in run] for _, run in runs)
    return [(run[0], run[-1]) for run in members]


def ranged_paths(paths: Iterable[str]) -> list[str]:
    """Paths in as few texts as exactly stand for them, with the numbers of equal blocks in braces.

    Unlike ``folded_path`` nothing is lost: ``paths_in_ranges`` gives them back.

    Args:
        paths: Paths, none of them twice.

    Returns:
        The texts, sorted by their words, then by their numbers.

    >>> ranged_paths(["block_0/w", "block_1/w", "block_2/w", "block_10/w", "b{in}"])
    ['block_{0-2,10}/w', 'b{{in}}']
    """
    alike: dict[tuple[str, ...], set[tuple[tuple[int, ...], ...]]] = {}
    for path in paths:
        pieces = _PLAIN_NUMBER.split(path)
        numbers = tuple((int(number),) for number in pieces[1::2])
        alike.setdefault(tuple(pieces[::2]), set()).add(numbers)
    texts = []
    for words, members in sorted(alike.items()):
        for column in reversed(range(len(words) - 1)):
            members = _joined(members, column)
        texts += [_ranged_text(words, numbers) for numbers in sorted(members)]
    return texts


def paths_in_ranges(text: str) -> Iterator[str]:
    """The paths that a text of ``ranged_paths`` stands for, by their numbers.

    Raises:
        ValueError: It is not such a text.

    >>> list(paths_in_ranges("block_{0-1,4}/w")), list(paths_in_ranges("b{{in}}"))
    (['block_0/w', 'block_1/w', 'block_4/w'], ['b{in}'])
    """
    parts: list[Sequence[str]] = []
    end = 0
    for brace in _BRACES.finditer(text):
        parts.append([text[end : brace.start()]])
        parts.append(_meant_by(brace, text))
        end = brace.end()
    parts.append([text[end:]])
    if math.prod(map(len, parts)) > _MOST_PATHS:
        raise ValueError(f"{text!r} stands for more than {_MOST_PATHS:,} paths")
    return map("".join, itertools.product(*parts))


def _joined(
    members: Iterable[tuple[tuple[int, ...], ...]], column: int
) -> set[tuple[tuple[int, ...], ...]]:
    """Rows that are alike but for one column as one, with all the numbers of that column."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for row in members:
        groups.setdefault((*row[:column], *row[column + 1 :]), []).extend(row[column])
    return {
        (*others[:column], tuple(sorted(numbers)), *others[column:])
        for others, numbers in groups.items()
    }


def _ranged_text(words: Sequence[str], numbers: Sequence[tuple[int, ...]]) -> str:
    escaped = [word.replace("{", "{{").replace("}", "}}") for word in words]
    written = [str(each[0]) if len(each) == 1 else f"{{{_runs_text(each)}}}" for each in numbers]
    return "".join(itertools.chain(*itertools.zip_longest(escaped, written, fillvalue="")))


def _runs_text(numbers: Iterable[int]) -> str:
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in number_runs(numbers)
    )


def _meant_by(brace: re.Match[str], text: str) -> Sequence[str]:
    if brace.group() in ("{{", "}}"):
        return [brace.group()[0]]
    if brace[1] is None:
        raise ValueError(f"{text!r} has a brace that is not one of a range such as {{0-3,5}}")
    runs = (run.partition("-") for run in brace[1].split(","))
    ends = [(int(first), int(last or first)) for first, _, last in runs]
    sizes = [last - first + 1 for first, last in ends]
    if min(sizes) < 1 or any(b[0] <= a[1] for a, b in itertools.pairwise(ends)):
        raise ValueError(f"{text!r} has numbers in braces that do not rise")
    if sum(sizes) > _MOST_PATHS:
        raise ValueError(f"{text!r} stands for more than {_MOST_PATHS:,} paths")
    return [str(number) for first, last in ends for number in range(first, last + 1)]
