"""In what two checkpoints differ, and whether a checkpoint fits a model; no array is read."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from penzai_shard.checkpoint_reports.stored_arrays import (
    KINDS,
    CheckpointContents,
    contents_of,
)
from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.arrays_by_name import ArraysByName
from penzai_shard.checkpointing.comparison import Tolerance
from penzai_shard.checkpointing.locations import PathLike, shown_path
from penzai_shard.checkpointing.manifest import read_manifest
from penzai_shard.checkpointing.parameter_dict import stored_params
from penzai_shard.checkpointing.restoring import refuse_other_arrays
from penzai_shard.errors import CheckpointMismatchError, grouped_problems
from penzai_shard.path_folding import folded_rows
from penzai_shard.readers import without_repeats
from penzai_shard.report_trees import count_text
from penzai_shard.text_tables import FindingsTable, Report, TextTable
from penzai_shard.training import TrainState


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """One array in which two checkpoints differ.

    Attributes:
        name: Its name.
        what: In what: ``"axes"``, ``"order of axes"``, ``"sizes"``, ``"dtype"``, ``"values"``, or
            ``"only in the first"`` and ``"only in the second"``.
        first: What the first checkpoint says of it; None if it has no such array.
        second: The same of the second.
    """

    name: str
    what: tuple[str, ...]
    first: ArrayRecord | None
    second: ArrayRecord | None


class DifferencesTable(FindingsTable):
    """The arrays in which two checkpoints differ."""

    headings = ("array", "count", "differs in", "first", "second")
    right_aligned = frozenset({"count"})
    paths = frozenset({"array"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CheckpointComparison(Report):
    """In what two checkpoints differ, as ``compare_checkpoints`` found it.

    How the arrays were laid out at save is not compared: it changes no value.

    Attributes:
        paths: Where the two are.
        kinds: What they are: ``"params"``, ``"train_state"``, ``"orbax"`` or ``"safetensors"``.
        differences: The arrays in which they differ.
        same: The names of the arrays whose axes, sizes, dtypes and values are the same.
        not_compared: The names of the arrays that are alike, of whose values not both have
            checksums.
        notes: What else there is to know.
    """

    paths: tuple[str, str]
    kinds: tuple[str, str]
    differences: tuple[ArrayDifference, ...]
    same: tuple[str, ...]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def are_different(self) -> bool:
        """Whether they differ in an array, or one is a train state and the other is not."""
        return bool(self.differences) or _has_one_state(self.kinds)

    @property
    def are_equal(self) -> bool:
        """Whether they are known to hold the same, values too."""
        return not self.are_different and not self.not_compared

    def table(self, *, collapse: bool = True) -> TextTable:
        """The differences as a table.

        Args:
            collapse: Show those that differ only in the numbers in their names as one row.
        """
        rows = folded_rows(
            (
                (d.name, ", ".join(d.what), _record_text(d.first), _record_text(d.second))
                for d in self.differences
            ),
            collapse,
        )
        return DifferencesTable(
            tuple(rows), self._verdict(), tuple(self._remarks()), self.are_equal
        )

    def _verdict(self) -> str:
        total = len(self.differences) + len(self.same) + len(self.not_compared)
        arrays = count_text(total, "array")
        if self.differences:
            return f"different: {len(self.differences):,} of {arrays}"
        if self.are_different:
            return f"of different kinds, with {arrays} alike"
        if self.not_compared:
            return f"{arrays} alike in axes, sizes and dtypes; not all values compared"
        return f"equal: {arrays}, values compared by checksum"

    def _remarks(self) -> Iterator[str]:
        for which, path, kind in zip(("first", "second"), self.paths, self.kinds, strict=True):
            yield f"{which}: {KINDS[kind]}, {shown_path(path)}"
        if self.differences and self.same:
            yield f"the same in both: {count_text(len(self.same), 'array')}"
        if self.not_compared:
            yield (
                f"values not compared: {count_text(len(self.not_compared), 'array')}, of which not "
                "both have checksums"
            )
        yield from self.notes

    def to_json(self) -> str:
        """All of it as JSON text: one object per difference."""
        content = dataclasses.asdict(self)
        return json.dumps({"equal": self.are_equal, **content}, indent=2, default=str)


class ProblemsTable(FindingsTable):
    """What keeps a checkpoint from being restored into a model."""

    headings = ("array", "what differs")
    paths = frozenset({"array"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelComparison(Report):
    """Whether a checkpoint can be restored into a model, as ``compare_checkpoints`` found it.

    Attributes:
        path: The checkpoint.
        what: What it would be restored into: ``"model"`` or ``"train state"``.
        count: How many arrays that has.
        headline: What restoring would say first; empty if it would succeed.
        problems: One line per array that differs, with what to write.
    """

    path: str
    what: str
    count: int
    headline: str = ""
    problems: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether restoring would succeed, without any option."""
        return not self.headline

    def table(self, *, collapse: bool = True) -> TextTable:
        """The problems as a table.

        Args:
            collapse: Show those that differ only in the numbers in their names as one row.
        """
        if self.fits:
            verdict = f"fits: {count_text(self.count, 'array')} of the {self.what} can be restored"
            return ProblemsTable((), verdict, (f"checkpoint: {shown_path(self.path)}",))
        lines = self.problems
        if collapse:
            lines = tuple(line for line, _ in grouped_problems(self.problems))
        split = (line.partition(": ") for line in lines)
        rows = tuple((array, what) for array, _, what in split)
        return ProblemsTable(
            rows, self.headline.replace(self.path, shown_path(self.path)), ok=False
        )

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json.dumps({"fits": self.fits, **dataclasses.asdict(self)}, indent=2)


def compare_checkpoints(first: PathLike, second: Any) -> CheckpointComparison | ModelComparison:
    """Compares a checkpoint with another one or with a model, without reading an array.

    Args:
        first: A checkpoint, or safetensors files.
        second: Another checkpoint; or what it shall be restored into, concrete or abstract: a
            model, a dictionary of named arrays, or a ``TrainState``.

    Returns:
        Of two checkpoints, in which arrays they differ: present in one alone, logical axes, their
        order, sizes, dtypes, and values by the checksums kept at save. If one of them is a train
        state and the other parameters alone, the parameters of both are compared. Of a model,
        what restoring would refuse.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at a path.
        CheckpointDamagedError: What a checkpoint says of its arrays is not as it was saved.
        CheckpointMismatchError: One has a format that this version does not read.
        MissingExtraError: Orbax is not installed.

    >>> import tempfile
    >>> from penzai import pz
    >>> from penzai_shard import save_params
    >>> model = {"w": pz.nx.ones({"in": 8, "out": 2})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_params(f"{folder}/params", model)
    ...     print(compare_checkpoints(path, model).fits)
    ...     other = {"w": pz.nx.ones({"in": 8, "units": 2})}
    ...     print(compare_checkpoints(path, other).problems[0])
    True
    w: the checkpoint has (in=8, out=2), and the model wants (in=8, units=2): the logical axes ...
    """
    if isinstance(second, str | os.PathLike):
        return _compared(contents_of(first), contents_of(second))
    is_state = isinstance(second, TrainState)
    tree = second if is_state else stored_params(without_repeats(second))
    leaves = ArraysByName(tree, "restoring", without_inserted=is_state).leaves
    # What is wrong with the checkpoint itself is an error, and no answer.
    path = read_manifest(first).path
    fits = ModelComparison(path, "train state" if is_state else "model", len(leaves))
    try:
        refuse_other_arrays(first, "train_state" if is_state else "params", leaves, Tolerance())
    except CheckpointMismatchError as error:
        headline = str(error).partition("\n")[0]
        return dataclasses.replace(fits, headline=headline, problems=error.problems)
    return fits


def _compared(first: CheckpointContents, second: CheckpointContents) -> CheckpointComparison:
    paths, kinds = (first.path, second.path), (first.kind, second.kind)
    notes = []
    if _has_one_state(kinds):
        first, second = (c.parameters() if c.kind == "train_state" else c for c in (first, second))
        notes.append("of the train state the parameters were compared")
    ours, theirs = ({a.name: a.record for a in each.arrays} for each in (first, second))
    differences: list[ArrayDifference] = []
    same: list[str] = []
    not_compared: list[str] = []
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        if what := _differing(a, b):
            differences.append(ArrayDifference(name, what, a, b))
        elif a and b and (_checksums_are_kept(a, b) or not a.nbytes):
            same.append(name)
        else:
            not_compared.append(name)
    notes += _notes(ours, theirs)
    return CheckpointComparison(
        paths, kinds, tuple(differences), tuple(same), tuple(not_compared), tuple(notes)
    )


def _has_one_state(kinds: tuple[str, str]) -> bool:
    """Whether one of two is a train state and the other has parameters alone.

    What plain Orbax wrote may be either.
    """
    return "train_state" in kinds and ("params" in kinds or "safetensors" in kinds)


def _notes(first: Mapping[str, ArrayRecord], second: Mapping[str, ArrayRecord]) -> Iterator[str]:
    unequal = first.keys() ^ second.keys()
    if unequal and all(name.startswith("opt_state/") for name in unequal):
        yield "they have the states of different optimizers"
    nameless = [
        which
        for which, records in (("first", first), ("second", second))
        if records and all(record.axes is None for record in records.values())
    ]
    if nameless:
        what = "neither has" if len(nameless) == 2 else f"the {nameless[0]} does not have"
        yield f"logical axes not compared: {what} their names"


def _differing(first: ArrayRecord | None, second: ArrayRecord | None) -> tuple[str, ...]:
    """In what two records differ, as far as is known."""
    if second is None:
        return ("only in the first",)
    if first is None:
        return ("only in the second",)
    what = []
    same_order = True
    if first.axes is not None and second.axes is not None and first.axes != second.axes:
        same_order = sorted(map(repr, first.axes)) != sorted(map(repr, second.axes))
        what.append("axes" if same_order else "order of axes")
    if _sizes(first, same_order) != _sizes(second, same_order):
        what.append("sizes")
    if (first.dtype, first.key_impl) != (second.dtype, second.key_impl):
        what.append("dtype")
    if not what and _checksums_are_kept(first, second) and first.values != second.values:
        what.append("values")
    return tuple(what)


def _checksums_are_kept(first: ArrayRecord, second: ArrayRecord) -> bool:
    return None not in (first.values, second.values)


def _sizes(record: ArrayRecord, in_order: bool) -> list[Any]:
    pairs = zip(record.axes or (), record.shape, strict=False)
    return list(record.shape) if in_order else sorted(map(repr, pairs))


def _record_text(record: ArrayRecord | None) -> str:
    return "-" if record is None else f"{record} {record.dtype}"
