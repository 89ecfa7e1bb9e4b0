"""Ties what slices and concatenations say of dimensions, until they say nothing more.

Shardy's rules tie nothing that changes in length. So queries, keys and values of one weight, halves
that rotary embeddings change for one another, and gates next to their neurons would stay open.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from penzai_shard.naming.ties import Elements, Ties, walk
from penzai_shard.propagation.flat import Operation, Propagated

CONCATENATE = "stablehlo.concatenate"
# Where a part starts in a dimension, where it ends, and its stride.
_Place = tuple[int, int, int]
# These may take an element from another place, and keep the shape all the same.
_MOVING = frozenset(
    f"stablehlo.{kind}"
    for kind in ("convolution", "dot_general", "gather", "reshape", "scatter", "transpose")
)


def cover(length: int, runs: Iterable[tuple[int, int]]) -> bool:
    """Whether several runs, from start to end, cover a length, without gaps and nothing twice.

    >>> cover(8, [(4, 8), (0, 4)]), cover(8, [(0, 4), (5, 8)])
    (True, False)
    """
    starts, ends = zip(*sorted(runs), strict=True)
    return len(starts) > 1 and (*starts, length) == (0, *ends)


@dataclasses.dataclass(frozen=True)
class _Parted:
    """A dimension with its parts: what it is cut into, or put together from.

    Attributes:
        whole: The element of the dimension.
        parts: The element of each part by its place.
        source: Of what is put together: the dimension, as long as it, that all parts come from.
    """

    whole: int
    parts: Mapping[_Place, int]
    source: int | None = None

    def covers(self, ties: Ties) -> bool:
        """Whether each element of the dimension is in one part; those of strided cuts are not."""
        is_dense = all(stride == 1 for _, _, stride in self.parts)
        return is_dense and cover(ties.sizes[self.whole], (place[:2] for place in self.parts))


def tie_cuts(program: Propagated, ties: Ties, elements: Elements) -> None:
    """Ties what parts of dimensions say of one another.

    Args:
        program: The program, without what goes back over it for a gradient: there parts are put
            together that were cut apart before.
        ties: Where all else has been tied.
        elements: The elements in it of the dimensions of each value.
    """
    cut = list(_read_cut(program, elements))
    joined = list(_read_joined(program, elements))
    while True:
        before = ties.count
        _tie_same_places([*cut, *joined], ties)
        _tie_joined_again(cut, joined, ties)
        if ties.count == before:
            # Last, as parts may get to be of one kind by all the others.
            _split_equal_parts(program, cut, joined, ties, elements)
        if ties.count == before:
            return


# Reading


def _read_cut(program: Propagated, elements: Elements) -> Iterator[_Parted]:
    found: dict[int, dict[_Place, int]] = collections.defaultdict(dict)
    for operation in program.operations:
        values = (operation.operands[0], operation.results[0]) if operation.cuts else ()
        for dim, place in enumerate(operation.cuts):
            whole, part = ((elements[v][dim], program.values[v].shape[dim]) for v in values)
            if part[1] < whole[1]:
                found[whole[0]][place] = part[0]
    return itertools.starmap(_Parted, found.items())


def _read_joined(program: Propagated, elements: Elements) -> Iterator[_Parted]:
    for operation in program.operations:
        if operation.kind != CONCATENATE:
            continue
        shapes = [program.values[v].shape for v in (*operation.results, *operation.operands)]
        lengths = enumerate(zip(*shapes, strict=True))
        dim = next((n for n, of_dim in lengths if len({*of_dim}) > 1), None)
        if dim is None:
            continue
        ends = [0, *itertools.accumulate(shape[dim] for shape in shapes[1:])]
        places = [(start, end, 1) for start, end in itertools.pairwise(ends)]
        parts = [elements[operand][dim] for operand in operation.operands]
        sources = {elements[v][dim] for v in _find_sources(program, operation, dim)}
        source = sources.pop() if len(sources) == 1 else None
        whole = elements[operation.results[0]][dim]
        yield _Parted(whole, dict(zip(places, parts, strict=True)), source)


def _find_sources(program: Propagated, joined: Operation, dim: int) -> Iterator[int]:
    """The nearest values that are as long as what is put together, and that it comes from.

    By way of cuts along that dimension, and of operations on each element.
    """
    shapes = [value.shape for value in program.values]
    length = shapes[joined.results[0]][dim]

    def sources(value: int) -> Iterator[int]:
        shape, maker = shapes[value], program.makers.get(value)
        if shape[dim] == length or maker is None or maker.kind in _MOVING:
            return
        is_along = maker.cuts or maker.kind == CONCATENATE
        for operand in maker.operands if maker.rule or len(maker.operands) == 1 else ():
            other = shapes[operand]
            # Along the dimension lengths change, all others stay.
            if shape == ((*other[:dim], shape[dim], *other[dim + 1 :]) if is_along else other):
                yield operand

    return (value for value in walk(joined.operands, sources) if shapes[value][dim] == length)


# Tying


def _tie_same_places(parted: Sequence[_Parted], ties: Ties) -> None:
    """Parts at one place of a dimension are one."""
    first: dict[tuple[tuple[int, ...], _Place], int] = {}
    for each in parted:
        whole = tuple(ties.parts([each.whole]))
        for place, part in each.parts.items():
            ties.unify([first.setdefault((whole, place), part)], [part])


def _tie_joined_again(cut: Sequence[_Parted], joined: Sequence[_Parted], ties: Ties) -> None:
    """What is put together, in any order, of the parts that a dimension was cut into is that."""

    def parts_of(each: _Parted) -> list[list[int]]:
        return sorted(ties.parts([part]) for part in each.parts.values())

    sources = {each.whole: each for each in cut if each.covers(ties)}
    for each in joined:
        source = sources.get(each.source) if each.source is not None else None
        if source is not None and parts_of(each) == parts_of(source):
            ties.unify([source.whole], [each.whole])


def _split_equal_parts(
    program: Propagated,
    cut: Sequence[_Parted],
    joined: Sequence[_Parted],
    ties: Ties,
    elements: Elements,
) -> None:
    """A dimension that is cut into equal parts of one kind is the product of their number and them.

    They are of one kind if their major part is. And they must be an axis in another place too: of
    an argument, or one that is cut further. Halves that are put together again are not.
    """
    given = {part for value in program.arguments for part in ties.parts(elements[value])}
    again = [ties.parts([each.whole]) for each in joined]
    for each in cut:
        whole, parts = ties.parts([each.whole]), [*each.parts.values()]
        lengths = {end - start for start, end, _ in each.parts}
        if len(whole) > 1 or whole in again or len(parts) < 2 or len(lengths) > 1:
            continue
        of_parts = [ties.parts([part]) for part in parts]
        kinds = {part[0] if part else None for part in of_parts}
        is_axis = any(len(part) > 1 or given.issuperset(part) for part in of_parts)
        if len(kinds) > 1 or None in kinds or not is_axis or not each.covers(ties):
            continue
        for part in parts[1:]:
            ties.unify(parts[:1], [part])
        ties.unify([each.whole], [ties.new(len(parts)), parts[0]])
