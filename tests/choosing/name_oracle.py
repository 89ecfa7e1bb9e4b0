"""Judges names and classes of dimensions against what the author of a model calls them.

Knows of programs nothing: it compares labels, pair by pair. A dimension that its author leaves
without name, as the taps of a convolution and what has length 1, is one of its own.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

Labels = Mapping[str, tuple[Hashable, ...]]
"""For each weight what its dimensions are called or classed as, None where nothing is known."""

Names = Mapping[str, tuple[str | None, ...]]
"""For each weight what its author calls its dimensions."""


@dataclasses.dataclass(frozen=True)
class Tie:
    """Two dimensions of weights."""

    first: tuple[str, int]
    second: tuple[str, int]
    label: Hashable
    true: tuple[Hashable, Hashable]

    def __str__(self) -> str:
        (path, i), (other, j) = self.first, self.second
        return f"{path}[{i}] {self.true[0]} = {other}[{j}] {self.true[1]}: {self.label}"


@dataclasses.dataclass(frozen=True)
class Ties:
    """How well the dimensions that have one label are those that have one name.

    Attributes:
        right: Pairs of one name that have one label.
        wrong: Pairs that have one label and two names.
        missed: Pairs of one name that have two labels, or none.
    """

    right: int
    wrong: tuple[Tie, ...]
    missed: tuple[Tie, ...]

    @property
    def precision(self) -> float:
        return self.right / max(self.right + len(self.wrong), 1)

    @property
    def recall(self) -> float:
        return self.right / max(self.right + len(self.missed), 1)


def ties(labels: Labels, names: Names) -> Ties:
    """Compares all pairs of dimensions."""
    places = [(path, i) for path, axes in names.items() for i in range(len(axes))]
    right, wrong, missed = 0, [], []
    for first, second in itertools.combinations(places, 2):
        label, other = (labels[path][i] for path, i in (first, second))
        true = tuple(names[path][i] for path, i in (first, second))
        is_tied = label is not None and label == other
        is_one = true[0] is not None and true[0] == true[1]
        if is_tied and is_one:
            right += 1
        elif is_tied:
            wrong.append(Tie(first, second, label, true))
        elif is_one:
            missed.append(Tie(first, second, (label, other), true))
    return Ties(right, tuple(wrong), tuple(missed))


def by_factor(
    names: Names,
    parts: Mapping[str, Sequence[Sequence[tuple[Hashable, int]]]],
    lengths: Mapping[str, int],
) -> tuple[dict[str, tuple[Hashable, ...]], dict[str, tuple[str | None, ...]]]:
    """Labels and names of the factors of dimensions, where the parts found are those factors.

    Args:
        names: The author's names.
        parts: For each dimension its parts, major first, with the length of each.
        lengths: The length of each factor of a fused name.

    Returns:
        For each weight one label and one name per factor, in order; for dimensions whose parts are
        not its factors one for all of it.
    """
    labels: dict[str, tuple[Hashable, ...]] = {}
    flat: dict[str, tuple[str | None, ...]] = {}
    for path, axes in names.items():
        found: list[Hashable] = []
        called: list[str | None] = []
        for axis, own in zip(axes, parts[path], strict=True):
            factors = (axis or "").split("*")
            groups = _grouped(own, [lengths.get(factor, 0) for factor in factors])
            if len(factors) > 1 and groups is not None:
                found += groups
                called += factors
            else:
                found.append(_label(own))
                called.append(axis)
        labels[path], flat[path] = tuple(found), tuple(called)
    return labels, flat


def _grouped(
    parts: Sequence[tuple[Hashable, int]], lengths: Sequence[int]
) -> list[Hashable] | None:
    """Parts in runs of which each multiplies to a length; None if they do not."""
    left = [part for part in parts if part[1] != 1]
    groups: list[Hashable] = []
    for length in lengths:
        run: list[tuple[Hashable, int]] = []
        while math.prod(size for _, size in run) < length and left:
            run.append(left.pop(0))
        if math.prod(size for _, size in run) != length:
            return None
        groups.append(_label(run))
    return None if left else groups


def _label(parts: Iterable[tuple[Hashable, int]]) -> Hashable:
    # A dimension of length 1 is tied to none.
    return tuple(label for label, size in parts if size != 1) or None


@dataclasses.dataclass(frozen=True)
class Compared:
    """Names found, beside those of the author in the words of the library.

    Attributes:
        complete: The weights whose names are all those of their author.
        incomplete: The others, each with what was found and what is true.
        misnamed: Those that have a name which their author does not give.
    """

    complete: tuple[str, ...]
    incomplete: Mapping[str, tuple[tuple[Hashable, ...], tuple[str | None, ...]]]
    misnamed: tuple[str, ...]

    @property
    def share(self) -> float:
        return len(self.complete) / (len(self.complete) + len(self.incomplete))


def compared(found: Labels, names: Names, words: Mapping[str, str]) -> Compared:
    """Compares names, weight by weight.

    Args:
        found: The names found.
        names: The author's.
        words: What the library calls an axis that the author calls otherwise; one to one.
    """
    assert len(set(words.values())) == len(words), "two words of the author are one"

    def in_our_words(axis: str | None) -> str | None:
        return axis and "*".join(words.get(part, part) for part in axis.split("*"))

    wanted = {path: tuple(map(in_our_words, axes)) for path, axes in names.items()}
    complete = tuple(path for path, axes in wanted.items() if tuple(found[path]) == axes)
    misnamed = tuple(
        f"{path}: {found[path]}, by its author {axes}"
        for path, axes in wanted.items()
        if any(name not in (None, true) for name, true in zip(found[path], axes, strict=True))
    )
    incomplete = {
        path: (found[path], axes) for path, axes in wanted.items() if path not in complete
    }
    return Compared(complete, incomplete, misnamed)
