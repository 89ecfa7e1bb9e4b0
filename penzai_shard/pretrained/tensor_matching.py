"""Which tensor of a file each array of a model takes, and in which order of its dimensions.

Files of other projects say nothing of logical axes. A tensor of theirs is taken as it is where
nothing else can be meant; where it could be the other way round, the caller has to say its axes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.checkpointing.array_records import ArrayRecord, axis_text, record_of
from penzai_shard.checkpointing.comparison import (
    RESTORING,
    DtypeMismatch,
    Extra,
    Tolerance,
    compare,
)
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.pretrained.stored_tensors import StoredTensor
from penzai_shard.pretrained.tensor_views import TensorView, Transposed, WholeTensor
from penzai_shard.rule_kinds import LogicalAxis, did_you_mean
from penzai_shard.tree_paths import name_matches

AxesByPattern = Mapping[str, Sequence[LogicalAxis | None] | None]

_WORDING = dataclasses.replace(
    RESTORING,
    source="the file has",
    extra_fix="Pass on_extra='ignore' to leave it there, or names={{{name!r}: ...}} if the model "
    "calls it otherwise.",
    missing_fix="Pass names={{stored: {name!r}}} if the file calls it otherwise, or "
    "on_missing='keep' to keep the model's own value.",
)


@dataclasses.dataclass(frozen=True)
class Matching:
    """How tensors of files are matched with the arrays of a model.

    Attributes:
        names: The name of the tensor that each array takes, by the array's name; arrays that are
            not in it have none.
        axes: Logical axes of stored tensors, by patterns of their names.
        dtype: What floating numbers are cast to, None for what the model has.
        on_dtype_mismatch: Whether tensors are cast to the model's dtypes.
        on_extra: Whether tensors may be left over.
        rename_axes: Logical axis names in the files that have other names in the model.
    """

    names: Mapping[str, str]
    axes: AxesByPattern | None
    dtype: Any
    on_dtype_mismatch: DtypeMismatch
    on_extra: Extra
    rename_axes: Mapping[str, str] | None

    def views(
        self,
        tensors: Mapping[str, StoredTensor],
        records: Mapping[str, ArrayRecord],
        leaves: Mapping[str, NamedLeaf],
        headline: str,
    ) -> dict[str, TensorView]:
        """How each array is made of a tensor, once everything fits.

        Args:
            tensors: All tensors in the files.
            records: What the files say of their logical axes, if they do.
            leaves: The arrays to be filled, by name.
            headline: First line of the message.

        Raises:
            CheckpointMismatchError: With one line per tensor or array that has no counterpart, or
                one of other axes, sizes or dtype, or of which it is not clear how it is meant.
        """
        known = dict(records)
        as_they_are: set[str] = set()
        problems = self._add_given_axes(tensors, known, as_they_are)
        tolerance = Tolerance("transpose", self.on_dtype_mismatch, self.on_extra, self.rename_axes)
        known = tolerance.renamed(known) if self.rename_axes else known
        stored, wanted = {}, {name: record_of(leaf) for name, leaf in leaves.items()}
        for name, tensor_name in self.names.items():
            tensor = tensors[tensor_name]
            record = known.get(tensor_name) or ArrayRecord(tensor.shape, tensor.dtype)
            leaf = leaves.get(name)
            if leaf is not None:
                is_clear = record.axes is not None or tensor_name in as_they_are
                problem = "" if is_clear else _unclear(name, tensor, leaf)
                if problem := problem or _other_kind(name, tensor, leaf):
                    problems.append(problem)
                    del wanted[name]
                    continue
                if self.dtype is not None and _is_floating(leaf.dtype):
                    record = dataclasses.replace(record, dtype=str(leaf.dtype))
            stored[name] = record
        try:
            orders = compare(stored, wanted, headline="", wording=_WORDING, tolerance=tolerance)
        except CheckpointMismatchError as error:
            problems += error.problems
        raise_all(CheckpointMismatchError, headline, problems)
        views: dict[str, TensorView] = {
            name: WholeTensor(tensors[self.names[name]]) for name in leaves
        }
        return views | {name: Transposed(views[name], order) for name, order in orders.items()}

    def _add_given_axes(
        self,
        tensors: Mapping[str, StoredTensor],
        known: dict[str, ArrayRecord],
        as_they_are: set[str],
    ) -> list[str]:
        """Adds what the caller says of the axes of tensors; returns what is wrong with it."""
        problems = []
        patterns = _checked(self.axes)
        used = set()
        for name, tensor in tensors.items():
            matching = [p for p in patterns if name_matches(p, name)]
            used.update(matching)
            if len(matching) > 1:
                problems.append(
                    f"{name}: matched by {' and '.join(map(repr, matching))} in axes. Make the "
                    "patterns exclude each other."
                )
            elif matching:
                given = patterns[matching[0]]
                rank = len(tensor.shape)
                axes = (None,) * rank if given is None else tuple(map(axis_text, given))
                if len(axes) != rank:
                    problems.append(
                        f"{name}: axes gives it {len(axes)} logical axes, {axes}, and its shape is "
                        f"{tensor.shape}. Give {rank}, None for a positional dimension."
                    )
                elif given is not None and name in known and known[name].axes != axes:
                    problems.append(
                        f"{name}: axes says {axes}, and the file {known[name].axes}. Leave it out "
                        "of axes; where the model calls them otherwise, pass rename_axes."
                    )
                elif given is None:
                    as_they_are.add(name)
                elif name not in known:
                    known[name] = ArrayRecord(tensor.shape, tensor.dtype, axes)
        for pattern in patterns:
            if pattern not in used:
                problems.append(
                    f"{pattern}: this pattern of axes matches no tensor."
                    f"{did_you_mean(pattern, tensors)}"
                )
        return problems


def _checked(axes: Any) -> AxesByPattern:
    """Axes as the caller gave them, if they can be read.

    Raises:
        RuleTypeError: They cannot.
    """
    if axes is None:
        return {}
    example = "Write for instance axes={'layers.*.weight': ('out', 'in')}."
    if not isinstance(axes, Mapping):
        raise RuleTypeError(
            "axes must be a mapping from patterns of stored names to logical axes, not "
            f"{type(axes).__name__}. {example}"
        )
    wrong = [
        f"{pattern!r}: {given!r}: give a tuple of names, None for a positional dimension; or None "
        "for a tensor whose dimensions are in the model's order."
        for pattern, given in axes.items()
        if not isinstance(pattern, str)
        or isinstance(given, str)
        or not isinstance(given, Sequence | None)
    ]
    raise_all(RuleTypeError, f"these axes cannot be read. {example}", wrong)
    return axes


def _unclear(name: str, tensor: StoredTensor, leaf: NamedLeaf) -> str:
    """Why a tensor of unknown axes cannot be taken as it is; empty if it can."""
    if leaf.names is None or not any(axis is not None for axis in leaf.names):
        return ""
    wanted = record_of(leaf)
    axes = wanted.axes or ()
    says = f"the file has {tensor.shape} without names of axes, and the model wants {wanted}"
    if tensor.shape != leaf.shape:
        if sorted(tensor.shape) != sorted(leaf.shape):
            return ""
        order = [leaf.shape.index(length) for length in tensor.shape]
        by_length = tuple(axes[i] for i in order)
        if len(set(order)) < len(order):
            by_length = tuple(f"axis_{i}" for i in range(len(order)))
        return (
            f"{name}: {says}: the same lengths in another order. If they are so, say it: "
            f"axes={{{tensor.name!r}: {by_length}}}."
        )
    alike = [
        (first, second)
        for i, first in enumerate(axes)
        for j, second in enumerate(axes)
        if i < j and leaf.shape[i] == leaf.shape[j] > 1 and (first, second) != (None, None)
    ]
    if not alike:
        return ""
    first, second = alike[0]
    return (
        f"{name}: {says}, whose axes {first!r} and {second!r} are equally long, so that nothing "
        "shows which comes first in the file. Say the file's order: "
        f"axes={{{tensor.name!r}: {axes}}}, or {tuple(reversed(axes))}; or "
        f"axes={{{tensor.name!r}: None}} for the model's own."
    )


def _other_kind(name: str, tensor: StoredTensor, leaf: NamedLeaf) -> str:
    """Why numbers of a tensor cannot become those of an array, whatever is cast; empty if they can.

    Numbers of one kind are cast to another one of it: no integer becomes a fraction.
    """
    if leaf.dtype is None or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ""
    kinds = [_kind(tensor.dtype), _kind(leaf.dtype)]
    if kinds[0] == kinds[1]:
        return ""
    return (
        f"{name}: the file has {tensor.dtype}, and the model wants {leaf.dtype}. {kinds[0]} are "
        f"not made {kinds[1]}: give the model an array of {kinds[0]}."
    )


def _is_floating(dtype: Any) -> bool:
    return _kind(dtype) == "floating numbers"


def _kind(dtype: Any) -> str:
    for kind, text in (
        (np.bool_, "truth values"),
        (np.integer, "integers"),
        (np.floating, "floating numbers"),
    ):
        if jax.numpy.issubdtype(dtype, kind):
            return text
    return "complex numbers"
