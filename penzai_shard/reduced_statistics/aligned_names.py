"""Names for optimizer statistics that keep only some of their parameter's dimensions.

optax maps over the arrays inside named arrays, so that the state of adafactor or sm3 holds named
arrays whose data has lost dimensions: the names say ``(embedding, neurons)`` and the shape is
``(neurons,)``. The dimensions that are left keep their names, and so their layout.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from penzai_shard.rule_kinds import LogicalAxis, dimension_texts

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class DimensionsOf:
    """The dimensions of a parameter that a statistic of it has.

    Attributes:
        names: The parameter's logical axes, None for a positional dimension; None altogether for a
            parameter without names.
        sizes: The parameter's shape.
        kept: For each dimension of the statistic its number in the parameter, or None.
    """

    names: tuple[LogicalAxis | None, ...] | None
    sizes: tuple[int, ...]
    kept: tuple[int | None, ...]

    def of_kept(self, of_whole: Sequence[_T]) -> tuple[_T | None, ...]:
        """Of what each dimension of the parameter has, that for each of the statistic.

        >>> DimensionsOf(None, (8, 4), (1, None)).of_kept(["rows", "columns"])
        ('columns', None)
        """
        return tuple(None if number is None else of_whole[number] for number in self.kept)


@dataclasses.dataclass(frozen=True)
class AlignedNames:
    """The names of what is left of an array's dimensions.

    Attributes:
        names: One per dimension that is left; None where it has none.
        note: How they were found.
        problem: Why they cannot be found; empty when they can.
    """

    names: tuple[LogicalAxis | None, ...]
    note: str = ""
    problem: str = ""


def align_names(
    sizes: Mapping[LogicalAxis, int],
    shape: tuple[int, ...],
    path: str = "",
    part: Sequence[Any] | None = None,
) -> AlignedNames:
    """Finds which named dimensions a statistic of some shape still has.

    Args:
        sizes: Names and sizes of the parameter's dimensions, in order.
        shape: The statistic's shape.
        path: Where it is in the whole tree; adafactor's ``v_row`` and ``v_col`` are
            distinguished by it.
        part: Key path inside the parameter's place, for optimizers such as sm3 that keep one
            statistic per dimension in it.

    Returns:
        The names, or a problem.

    >>> align_names({"embedding": 256, "neurons": 512}, (512,)).names
    ('neurons',)
    >>> align_names({"a": 256, "b": 256}, (256,), path="0/v_row/w").names
    ('a',)
    """
    if not shape:
        return AlignedNames((), "scalar statistic")
    if shape == (1,) and 1 not in sizes.values():
        return AlignedNames((None,), "placeholder without content")
    names, lengths = tuple(sizes), tuple(sizes.values())
    if len(shape) == len(lengths) and all(
        size in (1, length) for size, length in zip(shape, lengths, strict=True)
    ):
        by_dimension = zip(names, shape, lengths, strict=True)
        remaining = tuple(name if size == length else None for name, size, length in by_dimension)
        return AlignedNames(remaining, "statistic with reduced dimensions of length 1")
    fits = [
        chosen
        for chosen in itertools.combinations(range(len(lengths)), len(shape))
        if tuple(lengths[i] for i in chosen) == shape
    ]
    axes = ", ".join(dimension_texts(sizes, sizes.values()))
    problem = f"its logical axes ({axes}) do not fit its data of shape {shape}"
    chosen = fits[0] if len(fits) == 1 else None
    if len(fits) > 1:
        problem = f"its data of shape {shape} fits several of its logical axes ({axes})"
        chosen = _by_convention(fits, lengths, path, part)
    if chosen is None:
        problem += ". Name the array again with pz.nx.wrap(data).tag(...)"
        return AlignedNames((None,) * len(shape), problem=problem)
    return AlignedNames(tuple(names[i] for i in chosen), "statistic of some dimensions")


def _by_convention(
    fits: Sequence[tuple[int, ...]],
    lengths: tuple[int, ...],
    path: str,
    part: Sequence[Any] | None,
) -> tuple[int, ...] | None:
    """Which of several dimensions of equal length it is, by the conventions of optax."""
    if part and isinstance(part[-1], jax.tree_util.SequenceKey):
        # sm3 keeps a list with one statistic per dimension, in order.
        own = (part[-1].idx,)
        return own if own in fits else None
    # adafactor drops the longest dimension from v_row and the second longest from v_col. The
    # field of the state comes before the name of the parameter.
    ranks = {"v_row": -1, "v_col": -2}
    field = next((piece for piece in path.split("/") if piece in ranks), None)
    if field is None or len(lengths) < 2:
        return None
    dropped = int(np.argsort(lengths)[ranks[field]])
    remaining = tuple(i for i in range(len(lengths)) if i != dropped)
    return remaining if remaining in fits else None
