"""What a checkpoint holds, as a table and as JSON."""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from penzai_shard.checkpoint_reports.stored_arrays import (
    KINDS,
    CheckpointContents,
    StoredArray,
    contents_of,
)
from penzai_shard.checkpointing.locations import PathLike, shown_path
from penzai_shard.meshes import mesh_text
from penzai_shard.path_folding import folding_key
from penzai_shard.planning.plan_table import axes_text, bytes_text, grouped_rows
from penzai_shard.report_trees import count_text
from penzai_shard.text_tables import PreparedTable, Report

# More parts than this, or parts of one array each, are as long to read as the table.
_PARTS_SHOWN = 6
_METADATA_SHOWN = 300


class StoredArraysTable(PreparedTable):
    """The arrays of a checkpoint."""

    headings = ("array", "count", "logical axes/mesh axes", "dtype", "size")
    right_aligned = frozenset({"count", "size"})
    unwrapped = frozenset({"dtype"})
    paths = frozenset({"array"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CheckpointDescription(Report):
    """What a checkpoint holds, as ``describe_checkpoint`` found it. It has no arrays.

    Attributes:
        contents: The checkpoint's arrays and what else is known of it.
    """

    contents: CheckpointContents

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """The arrays, in the order of the checkpoint."""
        return self.contents.arrays

    @property
    def total_bytes(self) -> int:
        """The size of all arrays, in bytes."""
        return sum(array.record.nbytes for array in self.arrays)

    @property
    def mesh(self) -> Mapping[str, int] | None:
        """The mesh that most bytes were laid out over at save, by the sizes of its axes.

        Without axes for a single device; None where that was not kept.
        """
        sizes: collections.Counter[tuple[tuple[str, int], ...]] = collections.Counter()
        for array in self.arrays:
            if array.mesh is not None:
                sizes[tuple(array.mesh.items())] += array.record.nbytes
        return dict(sizes.most_common(1)[0][0]) if sizes else None

    def table(self, *, collapse: bool = True) -> StoredArraysTable:
        """The description as a table: plain text for ``print``, coloured by ``rich.print``.

        Args:
            collapse: Show arrays that differ only in the numbers in their names, such as those
                of equal blocks, as one row with a count.
        """
        mesh = self.mesh
        rows = grouped_rows(
            [
                (a.name, _axes_text(a, mesh), a.record.dtype, a.record.nbytes, "")
                for a in self.contents.arrays
            ],
            collapse,
        )
        where = f"; saved {_on(mesh)}" if mesh is not None else ""
        verdict = (
            f"{KINDS[self.contents.kind]}: {count_text(len(self.arrays), 'array')}, "
            f"{bytes_text(self.total_bytes)}{where}"
        )
        return StoredArraysTable(tuple(row[:5] for row in rows), verdict, tuple(self._remarks()))

    def _remarks(self) -> Iterator[str]:
        yield f"by dtype: {_totals(self.arrays, lambda array: array.record.dtype)}"
        parts = parts_of([array.name for array in self.arrays])
        if 1 < len(set(parts.values())) <= min(_PARTS_SHOWN, len(self.arrays) // 2):
            yield f"by part: {_totals(self.arrays, lambda array: parts[array.name])}"
        if self.contents.saved is not None:
            where = shown_path(self.contents.path)
            yield f"saved at {self.contents.saved:%Y-%m-%d %H:%M:%S} UTC, in {where}"
        for key, value in self.contents.metadata.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            cut = len(text) > _METADATA_SHOWN
            yield f"{key}: {text[:_METADATA_SHOWN]}{'...' if cut else ''}"
        if self.contents.caveat:
            yield self.contents.caveat

    def to_json(self) -> str:
        """All of it as JSON text: one object per array, sizes in bytes."""
        return json.dumps(
            {
                "path": self.contents.path,
                "kind": self.contents.kind,
                "saved": self.contents.saved and self.contents.saved.isoformat(),
                "metadata": self.contents.metadata,
                "caveat": self.contents.caveat,
                "total_bytes": self.total_bytes,
                "mesh": self.mesh,
                "arrays": [_data(array) for array in self.arrays],
            },
            indent=2,
            default=str,
        )


def describe_checkpoint(path: PathLike) -> CheckpointDescription:
    """What a checkpoint holds; no array of it is read, and no device is used.

    Args:
        path: A checkpoint of parameters or of a train state, or one that plain Orbax wrote; or a
            safetensors file, its index, or a directory with either.

    Returns:
        Names, logical axes, shapes, dtypes, sizes and the shardings at save. It prints as a
        table, in which equal blocks are one row, and shows itself as one in a notebook.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: What the checkpoint says of its arrays is not as it was saved.
        CheckpointMismatchError: It has a format that this version does not read.
        MissingExtraError: Orbax is not installed, or safetensors.

    >>> import tempfile
    >>> from penzai import pz
    >>> from penzai_shard import place, make_mesh, save_params
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> blocks = {f"block_{i}/w": pz.nx.ones({"in": 8, "out": 2}) for i in range(3)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_params(f"{folder}/params", place(blocks, mesh, {"in": "data"}))
    ...     print(describe_checkpoint(path).table().rows)
    (('block_*/w', '3', 'in=8/data, out=2', 'float32', '192 B'),)
    """
    return CheckpointDescription(contents_of(path))


def parts_of(names: Sequence[str]) -> dict[str, str]:
    """The part of a tree that each of some names belongs to: what follows what all share.

    >>> parts_of(["lm/block_0/w", "lm/block_1/w", "lm/embed"])
    {'lm/block_0/w': 'lm/block_*', 'lm/block_1/w': 'lm/block_*', 'lm/embed': 'lm/embed'}
    """
    split = {name: name.split("/") for name in names}
    shared = 0
    while len({tuple(parts[: shared + 1]) for parts in split.values()}) == 1 and all(
        len(parts) > shared + 1 for parts in split.values()
    ):
        shared += 1
    return {name: folding_key("/".join(parts[: shared + 1])) for name, parts in split.items()}


def _axes_text(array: StoredArray, mesh: Mapping[str, int] | None) -> str:
    record = array.record
    text = axes_text(record.axes, record.shape, array.spec or PartitionSpec())
    if array.mesh is None or array.mesh == mesh or not record.shape:
        return text
    return f"{text} ({_on(array.mesh)})"


def _on(mesh: Mapping[str, int]) -> str:
    return f"on mesh ({mesh_text(mesh)})" if mesh else "on one device"


def _totals(arrays: Sequence[StoredArray], key: Callable[[StoredArray], str]) -> str:
    """Bytes and numbers of arrays, by what they have in common, the largest first."""
    sizes: dict[str, list[int]] = {}
    for array in arrays:
        sizes.setdefault(key(array), []).append(array.record.nbytes)
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    return ", ".join(
        f"{name} {bytes_text(sum(each))} ({count_text(len(each), 'array')})"
        for name, each in ordered
    )


def _data(array: StoredArray) -> dict[str, Any]:
    return {
        "name": array.name,
        "axes": array.record.axes,
        "shape": array.record.shape,
        "dtype": array.record.dtype,
        "key_impl": array.record.key_impl,
        "bytes": array.record.nbytes,
        "checksum": array.record.values,
        "mesh": array.mesh,
        "spec": None if array.spec is None else list(array.spec),
    }
