"""Checking the numbers of a checkpoint without a model or a mesh."""

import dataclasses
import json
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from penzai_shard.checkpointing.array_reading import data_struct, read_in_groups
from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.locations import PathLike, shown_path
from penzai_shard.checkpointing.manifest import read_manifest
from penzai_shard.checkpointing.value_checksums import checksums_of
from penzai_shard.path_folding import folded_rows
from penzai_shard.planning.plan_table import bytes_text
from penzai_shard.report_trees import count_text
from penzai_shard.text_tables import FindingsTable, Report

Finding = Literal["ok", "damaged", "unreadable", "unchecked"]


@dataclasses.dataclass(frozen=True)
class VerifiedArray:
    """What was found of one array of a checkpoint.

    Attributes:
        name: Its name.
        record: What the checkpoint says of it.
        finding: ``"ok"`` if its numbers are those saved, ``"damaged"`` if they are others,
            ``"unreadable"`` if they cannot be read, and ``"unchecked"`` if they can, but the
            checkpoint has no checksum of them.
        reason: Why it cannot be read; empty for all others.
    """

    name: str
    record: ArrayRecord
    finding: Finding
    reason: str = ""


class VerificationTable(FindingsTable):
    """The arrays of a checkpoint whose numbers are not those saved, or not known to be."""

    headings = ("array", "count", "saved as", "numbers")
    right_aligned = frozenset({"count"})
    paths = frozenset({"array"})


_MEANINGS = {
    "damaged": "are not those that were saved",
    "unreadable": "cannot be read",
    "unchecked": "are not checked: no checksum was kept",
}


@dataclasses.dataclass(frozen=True, repr=False)
class CheckpointVerification(Report):
    """What was found of a checkpoint; it prints as a table of what is damaged.

    Attributes:
        path: Where it is.
        kind: ``"params"`` or ``"train_state"``, or ``"safetensors"``; None if plain Orbax wrote it.
        arrays: All its arrays.
        caveat: What could not be checked, in words; empty if all could.
    """

    path: str
    kind: str | None
    arrays: tuple[VerifiedArray, ...]
    caveat: str

    @property
    def damaged(self) -> tuple[str, ...]:
        """The names of the arrays whose numbers are others or cannot be read."""
        return tuple(a.name for a in self.arrays if a.finding in ("damaged", "unreadable"))

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The names of the arrays that can be read, and of whose numbers no checksum was kept."""
        return tuple(a.name for a in self.arrays if a.finding == "unchecked")

    @property
    def ok(self) -> bool:
        """Whether all numbers are known to be those that were saved."""
        return not self.damaged and not self.unchecked

    def table(self, *, collapse: bool = True) -> VerificationTable:
        """What is wrong as a table.

        Args:
            collapse: Show arrays that differ only in the numbers in their names as one row.
        """
        # Where nothing can be checked, the verdict says it of all.
        shown = {"damaged", "unreadable"}
        if len(self.unchecked) < len(self.arrays):
            shown.add("unchecked")
        rows = folded_rows(
            (
                (
                    each.name,
                    f"{each.record} {each.record.dtype}",
                    _MEANINGS[each.finding] + (f": {each.reason}" if each.reason else ""),
                )
                for each in self.arrays
                if each.finding in shown
            ),
            collapse,
        )
        caveat = (f"the checkpoint {self.caveat}",) if self.caveat else ()
        return VerificationTable(tuple(rows), self._verdict(), caveat, ok=self.ok)

    def _verdict(self) -> str:
        size = bytes_text(sum(each.record.nbytes for each in self.arrays))
        total = f"{count_text(len(self.arrays), 'array')}, {size}, in {shown_path(self.path)}"
        if self.damaged:
            return f"DAMAGED: {len(self.damaged):,} of {total}"
        if self.unchecked:
            return f"not checked, as no checksums were kept: {len(self.unchecked):,} of {total}"
        return f"as it was saved: {total}"

    def to_json(self) -> str:
        """All of it as JSON text: one object per array."""
        arrays = [
            {"name": each.name, "finding": each.finding, "reason": each.reason}
            for each in self.arrays
        ]
        content = {"path": self.path, "kind": self.kind, "ok": self.ok, "damaged": self.damaged}
        return json.dumps({**content, "caveat": self.caveat, "arrays": arrays}, indent=2)


def verify_arrays(
    path: PathLike, *, on_array: Callable[[VerifiedArray], None] | None = None
) -> CheckpointVerification:
    """Reads all of an Orbax checkpoint, and compares its numbers with their checksums.

    This is how the public ``verify_checkpoint`` reads checkpoints, which takes safetensors files
    too and shows how far it is.

    Args:
        path: The checkpoint's directory.
        on_array: Called for each array once it was checked.

    Returns:
        What was found of each array.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: What it says of its arrays is not as it was saved.
        CheckpointMismatchError: It is in a format that this version does not read.
        MissingExtraError: Orbax is not installed.

    >>> import tempfile
    >>> from penzai import pz
    >>> from penzai_shard.checkpointing import save_params
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_params(f"{directory}/params", {"w": pz.nx.ones({"a": 2})})
    ...     found = verify_arrays(path)
    >>> found.damaged, [(array.name, array.finding) for array in found.arrays]
    ((), [('w', 'ok')])
    """
    manifest = read_manifest(path)
    structs = {name: _struct(record) for name, record in manifest.records.items()}
    arrays: list[VerifiedArray] = []
    for group in read_in_groups(manifest, structs, add_up=True, most_unreadable=None):
        found = checksums_of(group.sums)
        for name in found:
            record = manifest.records[name]
            finding: Finding = "ok" if found[name] == (record.values,) else "damaged"
            if name in group.unreadable:
                finding = "unreadable"
            elif record.values is None:
                finding = "unchecked"
            arrays.append(VerifiedArray(name, record, finding, group.unreadable.get(name, "")))
            if on_array is not None:
                on_array(arrays[-1])
    return CheckpointVerification(manifest.path, manifest.kind, tuple(arrays), manifest.caveat)


def _struct(record: ArrayRecord) -> jax.ShapeDtypeStruct:
    dtype = jnp.uint32 if record.key_impl else jnp.dtype(record.dtype)
    return data_struct(jax.ShapeDtypeStruct(record.shape, dtype), record)
