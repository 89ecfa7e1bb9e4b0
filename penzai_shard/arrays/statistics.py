"""Finds which dimensions of its parameter an array has that an optimizer keeps.

adafactor and sm3 keep some dimensions only, histories have one more. An optimizer's state repeats
the tree of the parameters in tables: below a table's path, every array stands at the path of its
parameter. Which dimensions an array has follows from its shape, and where lengths are equal from
the conventions of optax. Sources: Shazeer and Stern, "Adafactor" (2018); Anil et al., "Memory
Efficient Adaptive Optimization" (2019), for sm3.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from penzai_shard.arrays.structure import Leaf, Statistic

_PARAMETERS, _OPTIMIZER = "params", "opt_state"
# Numbers of an optimizer that belong to no parameter, as the coefficients of Muon, are small.
_MOST_COEFFICIENTS = 64


def name_statistics(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The same leaves, where those of an optimizer have the names of their parameters' dimensions.

    A statistic whose dimensions cannot be told keeps ``statistic.kept`` None, and has no names.
    """
    parameters = _parameters(leaves)
    owners = _find_owners([leaf.path for leaf in leaves], parameters)
    return [_name_statistic(leaf, owners.get(leaf.path), bool(parameters)) for leaf in leaves]


def _name_statistic(leaf: Leaf, parameter: Leaf | None, has_parameters: bool) -> Leaf:
    statistic = leaf.statistic
    if statistic is not None and statistic.kept is not None:
        return leaf
    if parameter is not None and (leaf.shape != parameter.shape or leaf.names is None):
        statistic = Statistic(parameter.path, parameter.names, parameter.shape)
    if statistic is not None and statistic.sizes is not None:
        kept = kept_dimensions(statistic.sizes, leaf.shape, leaf.path)
        names = None
        if kept is not None and statistic.names is not None:
            names = tuple(None if dim is None else statistic.names[dim] for dim in kept)
        statistic = dataclasses.replace(statistic, kept=kept)
        return dataclasses.replace(leaf, names=names, statistic=statistic)
    is_of_optimizer = statistic is None and _OPTIMIZER in leaf.path.split("/")
    is_small = leaf.shape and int(np.prod(leaf.shape)) <= _MOST_COEFFICIENTS
    if has_parameters and is_of_optimizer and leaf.names is None and is_small:
        return dataclasses.replace(leaf, names=(None,) * len(leaf.shape))
    return leaf


def _parameters(leaves: Sequence[Leaf]) -> dict[str, Leaf]:
    """The parameters of a train state by their path within the field, or module, that has them."""
    found: dict[str, Leaf] = {}
    if any(_OPTIMIZER in leaf.path.split("/") for leaf in leaves):
        for leaf in leaves:
            first, _, rest = leaf.path.partition("/")
            if first == _PARAMETERS or (leaf.role == "parameter" and _OPTIMIZER not in rest):
                found.setdefault(rest, leaf)
    return found


def _find_owners(paths: Sequence[str], parameters: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The parameter of each array that stands in a table, by the array's path."""
    splits = {path: _split_path(path) for path in paths if parameters}
    no_tables = {
        prefix
        for pairs in splits.values()
        for prefix, end in pairs
        if _parameter_at(end, parameters) is None
    }
    found: dict[str, Leaf] = {}
    for path, pairs in splits.items():
        ends = (end for prefix, end in pairs if prefix not in no_tables)
        owners = (_parameter_at(end, parameters) for end in ends)
        # The shortest: below "mu", a parameter "mu/w" is not the one called "w".
        if (owner := next(owners, None)) is not None:
            found[path] = owner
    return found


def _split_path(path: str) -> list[tuple[str, str]]:
    """A path below an optimizer's state as a table's path and the rest, in each way."""
    parts = path.split("/")
    if _OPTIMIZER not in parts:
        return []
    places = range(parts.index(_OPTIMIZER) + 1, len(parts))
    return [("/".join(parts[:n]), "/".join(parts[n:])) for n in places]


def _parameter_at(end: str, parameters: Mapping[str, Leaf]) -> Leaf | None:
    """The parameter at the end of a path, which may have a number behind it, as in sm3."""
    shorter, _, last = end.rpartition("/")
    return parameters.get(end) or (parameters.get(shorter) if last.isdigit() else None)


def kept_dimensions(
    sizes: Sequence[int], shape: Sequence[int], path: str
) -> tuple[int | None, ...] | None:
    """For each dimension of a statistic its parameter's; None for one that the parameter lacks.

    Args:
        sizes: The parameter's shape.
        shape: The statistic's shape.
        path: Where the statistic stands, which decides between dimensions of equal length.

    Returns:
        None if several ways fit, or none.

    >>> kept_dimensions((4, 6), (6,), "v_col"), kept_dimensions((4, 6), (1,), "v")
    ((1,), (None,))
    """
    sizes, shape = tuple(sizes), tuple(shape)
    rank = len(sizes)
    if shape == (1,) and 1 not in sizes:
        # What adafactor keeps where it needs no statistic of this kind.
        return (None,)
    if len(shape) == rank and all(s in (1, n) for s, n in zip(shape, sizes, strict=True)):
        pairs = zip(shape, sizes, strict=True)
        return tuple(dim if s == n else None for dim, (s, n) in enumerate(pairs))
    if len(shape) > rank and shape[len(shape) - rank :] == sizes:
        # A history, as that of lbfgs: the latest values in front.
        return (*(None,) * (len(shape) - rank), *range(rank))
    fits = [
        dims
        for dims in itertools.combinations(range(rank), len(shape))
        if tuple(sizes[dim] for dim in dims) == shape
    ]
    return fits[0] if len(fits) == 1 else _kept_by_convention(fits, sizes, path)


def _kept_by_convention(
    fits: Sequence[tuple[int, ...]], sizes: tuple[int, ...], path: str
) -> tuple[int, ...] | None:
    parts = path.split("/")
    if parts[-1].isdigit():
        # sm3 keeps a list with one statistic for each dimension.
        return next((fit for fit in fits if fit == (int(parts[-1]),)), None)
    # adafactor drops the longest dimension from v_row, the second longest from v_col.
    rank = next(({"v_row": -1, "v_col": -2}[p] for p in parts if p in ("v_row", "v_col")), None)
    if rank is None or len(sizes) < 2:
        return None
    dropped = int(np.argsort(sizes)[rank])
    kept = tuple(dim for dim in range(len(sizes)) if dim != dropped)
    return kept if kept in fits else None
