"""A plan as a table."""

from collections.abc import Iterable, Sequence

from jax.sharding import PartitionSpec

from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.path_folding import folded_path, folding_key
from penzai_shard.report_trees import bytes_text
from penzai_shard.rule_kinds import LogicalAxis, dimension_texts
from penzai_shard.text_tables import PreparedTable

Row = tuple[str, str, str, int, str]

SCALARS = "(scalars)"


def axes_text(
    names: Sequence[LogicalAxis | None] | None,
    shape: Sequence[int],
    spec: PartitionSpec,
    stored_shape: Sequence[int] | None = None,
) -> str:
    """The dimensions of an array with the mesh axes that they are split over.

    Args:
        names: The logical axis of each dimension, if the array has names.
        shape: Its shape.
        spec: Its spec.
        stored_shape: The shape that it is stored with, if that may be padded.

    >>> axes_text(("embedding", "seq"), (128, 63), PartitionSpec("data", "x"), (128, 64))
    'embedding=128/data, seq=63(64)/x'
    """
    if not shape:
        return "scalar"
    return ", ".join(
        dimension
        + (f"({stored})" if stored != length else "")
        + ("/" + "+".join(mesh_axes) if mesh_axes else "")
        for dimension, length, stored, mesh_axes in zip(
            dimension_texts(names or (None,) * len(shape), shape),
            shape,
            stored_shape or shape,
            mesh_axes_by_dimension(spec, len(shape)),
            strict=True,
        )
    )


def grouped_rows(rows: Iterable[Row], collapse: bool = True) -> tuple[tuple[str, ...], ...]:
    """Rows of texts, those alike in one with their count and the sum of their bytes.

    Args:
        rows: For each array its path, axes, dtype, bytes per device and reason.
        collapse: Whether arrays are alike that differ in the numbers of their paths only, and
            all scalars.

    >>> grouped_rows([(f"block_{i}/w", "a=2", "int8", 2, "") for i in range(3)])
    (('block_*/w', '3', 'a=2', 'int8', '6 B', ''),)
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        path, axes, dtype, _, reason = row
        place = path
        if collapse:
            place = SCALARS if axes == "scalar" else folding_key(path)
        groups.setdefault((place, axes, dtype, reason), []).append(row)
    shown = []
    for (place, axes, dtype, reason), members in groups.items():
        paths = [member[0] for member in members]
        path = SCALARS if place == SCALARS and len(paths) > 1 else folded_path(paths)
        held = bytes_text(sum(member[3] for member in members))
        shown.append((path, str(len(members)), axes, dtype, held, reason))
    return tuple(shown)


class PlanTable(PreparedTable):
    """Rows and totals of a plan; ``print`` and notebooks show them."""

    headings = ("array", "count", "logical axes/mesh axes", "dtype", "per device", "reason")
    right_aligned = frozenset({"count", "per device"})
    unwrapped = frozenset({"dtype"})
    paths = frozenset({"array"})
    # From this width on the reasons have room beside the rest.
    below = "reason"
    wide = 140
