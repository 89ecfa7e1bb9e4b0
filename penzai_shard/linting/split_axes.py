"""Which logical axes of an array are split, and what is moved when that changes."""

from collections.abc import Iterable, Mapping

from jax.sharding import PartitionSpec

from penzai_shard.partition_specs import mesh_axes_by_dimension, part_count
from penzai_shard.rule_kinds import LogicalAxis


def axis_sizes(
    names: Iterable[LogicalAxis | None] | None, shape: Iterable[int]
) -> dict[LogicalAxis, int]:
    """The length of each logical axis; positional dimensions are left out.

    >>> axis_sizes(("a", None), (2, 3)), axis_sizes(None, (2,))
    ({'a': 2}, {})
    """
    return {name: size for name, size in zip(names or (), shape, strict=False) if name is not None}


def split_of(
    names: Iterable[LogicalAxis | None] | None, spec: PartitionSpec, sizes: Mapping[str, int]
) -> dict[LogicalAxis, tuple[str, ...]]:
    """The mesh axes of each logical axis that is split, without those of size 1.

    >>> split_of(("a", "b"), PartitionSpec(None, "data"), {"data": 2})
    {'b': ('data',)}
    """
    names = tuple(names or ())
    entries = mesh_axes_by_dimension(spec, max(len(names), len(spec)))
    return {
        name: split
        for name, axes in zip(names, entries, strict=False)
        if name is not None and (split := tuple(axis for axis in axes if sizes[axis] > 1))
    }


def moved_bytes(
    nbytes: int,
    before: Mapping[LogicalAxis, tuple[str, ...]],
    after: Mapping[LogicalAxis, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> int:
    """What each device receives when an array goes from one layout to another, in bytes.

    What it holds already it does not receive. Where the mesh axes of a logical axis change to
    others, what it holds by chance is the mean over the devices.

    >>> moved_bytes(64, {"b": ("x",)}, {}, {"x": 4}), moved_bytes(64, {}, {"b": ("x",)}, {"x": 4})
    (48, 0)
    """
    part, kept = 1.0, 1.0
    for name in {*before, *after}:
        old, new = before.get(name, ()), after.get(name, ())
        counts = [part_count(axes, sizes) for axes in (old, new)]
        part /= counts[1]
        is_finer = old == new[: len(old)] or new == old[: len(new)]
        kept /= max(counts) if is_finer else counts[0] * counts[1]
    return round(nbytes * (part - kept))
