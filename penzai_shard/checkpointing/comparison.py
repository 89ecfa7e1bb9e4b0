"""Finding every difference between the arrays given and the arrays wanted, before reading."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.name_matching import NameRules
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.rule_kinds import did_you_mean, nearest_name

AxisMismatch = Literal["error", "transpose"]
DtypeMismatch = Literal["error", "cast"]
Extra = Literal["error", "ignore"]
BlockMismatch = Literal["error", "convert"]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What may differ between a checkpoint and what it fills.

    Attributes:
        on_axis_mismatch: ``"transpose"`` reorders arrays whose logical axes have another order.
        on_dtype_mismatch: ``"cast"`` converts to the wanted dtype.
        on_extra: ``"ignore"`` leaves arrays alone that nothing wants.
        rename_axes: Logical axis names in the checkpoint that have other names in what it fills.
        names: For patterns of names in the checkpoint, the names in what it fills.
        on_block_mismatch: ``"convert"`` stacks the parameters of blocks, or unstacks them.
    """

    on_axis_mismatch: AxisMismatch = "error"
    on_dtype_mismatch: DtypeMismatch = "error"
    on_extra: Extra = "error"
    rename_axes: Mapping[str, str] | None = None
    names: NameRules | None = None
    on_block_mismatch: BlockMismatch = "error"

    def __post_init__(self) -> None:
        choices = {
            "on_axis_mismatch": ("error", "transpose"),
            "on_dtype_mismatch": ("error", "cast"),
            "on_extra": ("error", "ignore"),
            "on_block_mismatch": ("error", "convert"),
        }
        problems = [
            f"{name}={getattr(self, name)!r}: choose one of {', '.join(map(repr, allowed))}."
            for name, allowed in choices.items()
            if getattr(self, name) not in allowed
        ]
        raise_all(CheckpointMismatchError, "cannot restore with these options:", problems)

    def renamed(self, records: Mapping[str, ArrayRecord]) -> dict[str, ArrayRecord]:
        """Records of a checkpoint with the logical axis names of what it fills.

        Raises:
            CheckpointMismatchError: A name to be replaced occurs nowhere.
            RuleTypeError: ``rename_axes`` is not a mapping of names.

        >>> records = {"w": ArrayRecord((2,), "int32", ("old",))}
        >>> Tolerance(rename_axes={"old": "new"}).renamed(records)["w"].axes
        ('new',)
        """
        names = self.rename_axes or {}
        if not isinstance(names, Mapping) or not all(isinstance(n, str) for n in names.values()):
            raise RuleTypeError(
                f"rename_axes={names!r}: give a dictionary of names, {{'old': 'new'}}."
            )
        present = {axis for record in records.values() for axis in record.axes or () if axis}
        raise_all(
            CheckpointMismatchError,
            "cannot rename logical axes:",
            [
                f"{old}: no array in the checkpoint has this logical axis. It has "
                f"{', '.join(map(repr, sorted(present))) or 'none'}."
                f"{_rename_fix(old, names, present)}"
                for old in names
                if old not in present
            ],
        )

        def axes_of(record: ArrayRecord) -> tuple[str | None, ...] | None:
            # A positional dimension has no name to be replaced, whatever the keys are.
            return record.axes and tuple(a if a is None else names.get(a, a) for a in record.axes)

        return {
            name: dataclasses.replace(record, axes=axes_of(record))
            for name, record in records.items()
        }


@dataclasses.dataclass(frozen=True)
class Wording:
    """How the two sides and the fixes are called in messages.

    Attributes:
        source: Where the arrays are, with its verb, such as ``the checkpoint has``.
        target: What wants them, such as ``the model``.
        reorder_fix: Fix for another order of the same axes; ``{order}`` is the wanted order.
        rename_fix: Fix for other names; ``{renames}`` is a dictionary from stored to wanted names.
        dtype_fix: Fix for another dtype; ``{dtype}`` is the wanted one.
        extra_fix: Fix for an array that nothing wants; ``{name}`` is its name.
        missing_fix: Fix for an array that is missing; ``{name}`` is its name.
        renamed_fix: Fix for one that may be there under a name nearly the same, ``{near}``.
        unnamed_source_fix: Fix for an array given without names for one that has some; ``{names}``
            are those, by the array's name.
        unnamed_target_fix: The same the other way round.
    """

    source: str
    target: str
    reorder_fix: str
    rename_fix: str
    dtype_fix: str
    extra_fix: str
    missing_fix: str
    unnamed_source_fix: str
    unnamed_target_fix: str
    renamed_fix: str = "Did you mean {near!r}?"


RESTORING = Wording(
    source="the checkpoint has",
    target="the model",
    reorder_fix="Pass on_axis_mismatch='transpose' to have it reordered.",
    rename_fix="If they mean the same, pass rename_axes={renames}.",
    dtype_fix="Pass on_dtype_mismatch='cast', or give the model this dtype.",
    extra_fix="Pass on_extra='ignore' to leave it there.",
    missing_fix="To leave the model's own value there, pass others='keep'.",
    unnamed_source_fix="If it has these, restore it as an array without names, "
    "on_unnamed='replicate', and name it then: name_axes(restored, {names}).",
    unnamed_target_fix="Name it in the model too: name_axes(model, {names}).",
    renamed_fix="If it is {near!r} there, pass names={{{near!r}: {name!r}}}.",
)

RESTORING_STATE = dataclasses.replace(
    RESTORING,
    target="the train state",
    dtype_fix="Pass on_dtype_mismatch='cast', or give the state this dtype.",
    missing_fix="Build the state with the model and the optimizer that it was saved with.",
    unnamed_target_fix="Build the state with a model that names it.",
)

REPLACING = Wording(
    source="the values given have",
    target="the model",
    reorder_fix="Give {name!r} as value.order_as({order}).",
    rename_fix="If they mean the same, rename them: value.untag({old}).tag({new}).",
    dtype_fix="Give it as {dtype}.",
    extra_fix="Leave {name!r} out of the values.",
    missing_fix="To keep the model's own, give param_dict(model)[{name!r}].",
    unnamed_source_fix="Name it: name_axes(values, {names}).",
    unnamed_target_fix="Give its data alone.",
)

INITIALISING = dataclasses.replace(
    REPLACING,
    source="the model that others= builds has",
    reorder_fix="Build the same model.",
    rename_fix="Build the same model.",
    dtype_fix="Build the same model.",
    missing_fix="Build the same model.",
    unnamed_source_fix="Build the same model.",
    unnamed_target_fix="Build the same model.",
)


def compare(
    stored: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
    *,
    headline: str,
    wording: Wording,
    tolerance: Tolerance,
    compare_dtypes: bool = True,
    called: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
) -> dict[str, tuple[int, ...]]:
    """Compares all arrays by name and refuses every difference at once.

    Args:
        stored: The arrays given.
        wanted: The arrays wanted.
        headline: First line of the message.
        wording: How the two sides and the fixes are called.
        tolerance: What may differ.
        compare_dtypes: Whether the dtypes must agree.
        called: What the arrays given are called there, if they were renamed.
        also: What else is wrong, to be said with the rest.

    Returns:
        For each array whose axes have another order and may be reordered: which stored dimension
        each wanted one is, as ``jax.numpy.transpose`` takes it.

    Raises:
        CheckpointMismatchError: With one line per array that is missing, superfluous, or of other
            axes, sizes, dtype or PRNG implementation.

    >>> stored = {"w": ArrayRecord((2, 3), "float32", ("a", "b"))}
    >>> wanted = {"w": ArrayRecord((3, 2), "float32", ("b", "a"))}
    >>> transpose = Tolerance(on_axis_mismatch="transpose")
    >>> compare(stored, wanted, headline="no:", wording=RESTORING, tolerance=transpose)
    {'w': (1, 0)}
    """
    extra = [name for name in stored if name not in wanted]
    missing = [name for name in wanted if name not in stored]
    nested = _nested_otherwise(extra, missing, wording)
    raise_all(CheckpointMismatchError, headline, [nested] if nested else [])
    called = called or {}
    orders: dict[str, tuple[int, ...]] = {}
    problems = list(also)
    for name, target in wanted.items():
        source = stored.get(name)
        if source is None:
            near = nearest_name(name, extra)
            renamed = f" {wording.renamed_fix.format(name=name, near=near)}" if near else ""
            problems.append(
                f"{name}: {wording.target} wants {target} {target.dtype}, and {wording.source} no "
                f"such array.{renamed} {wording.missing_fix.format(name=name)}"
            )
            continue
        order = _order(source, target)
        problem = _axes_problem(name, source, target, order, wording, tolerance) or (
            _dtype_problem(source, target, wording, tolerance) if compare_dtypes else ""
        )
        if problem:
            other = called.get(name, name)
            there = f" It is {other!r} there." if other != name else ""
            problems.append(f"{name}: {wording.source} {problem}{there}")
        elif order is not None and order != tuple(sorted(order)):
            orders[name] = order
    if tolerance.on_extra == "error":
        problems += [
            f"{name}: {wording.source} {stored[name]} {stored[name].dtype}, and {wording.target} "
            f"has no such array.{did_you_mean(name, missing)} "
            f"{wording.extra_fix.format(name=name)}"
            for name in extra
        ]
    raise_all(CheckpointMismatchError, headline, problems)
    return orders


def _nested_otherwise(extra: list[str], missing: list[str], wording: Wording) -> str:
    """Says that one side has all names of the other under one more key; empty if it is not so.

    >>> _nested_otherwise(["params/w"], ["w"], RESTORING)
    "params/w: the checkpoint has all names of the model under 'params'. Give the model under ...
    """
    for longer, shorter in ((extra, missing), (missing, extra)):
        end = f"/{shorter[0]}" if shorter else ""
        prefixes = [n.removesuffix(end) for n in longer if end and n.endswith(end)]
        there = set(longer)
        whole = [p for p in prefixes if all(f"{p}/{name}" in there for name in shorter)]
        # Of several, any would be a guess.
        if len(whole) != 1:
            continue
        prefix = whole[0]
        keys = prefix.split("/")
        place = "".join(f"[{key!r}]" for key in keys)
        if longer is extra:
            around = "".join(f"{{{key!r}: " for key in keys) + "model" + "}" * len(keys)
            return (
                f"{prefix}{end}: {wording.source} all names of {wording.target} under {prefix!r}. "
                f"Give {wording.target} under the same keys: {around}."
            )
        return (
            f"{prefix}{end}: {wording.target} has all names under {prefix!r}, and "
            f"{wording.source} them without. Give what is in it: model{place}."
        )
    return ""


def _rename_fix(old: str, names: Mapping[str, str], present: Collection[str]) -> str:
    """What to write in place of a name to be replaced that occurs nowhere; empty if unknown."""
    if names[old] not in present or nearest_name(old, present) not in (None, names[old]):
        return did_you_mean(old, present)
    turned = dict(
        (name, new) if name in present or new not in present else (new, name)
        for name, new in names.items()
    )
    return f" Names are given as old: new; write rename_axes={turned!r}."


def _order(source: ArrayRecord, target: ArrayRecord) -> tuple[int, ...] | None:
    """Which source dimension each target one is; None where their logical axes differ.

    Positional dimensions keep their order, and so do those of which no names are known.
    """
    if source.axes is None or target.axes is None or source.axes == target.axes:
        return tuple(range(len(source.shape)))
    if sorted(map(repr, source.axes)) != sorted(map(repr, target.axes)):
        return None
    free = list(range(len(source.axes)))
    found = []
    for axis in target.axes:
        dimension = next(i for i in free if source.axes[i] == axis)
        free.remove(dimension)
        found.append(dimension)
    return tuple(found)


def _axes_problem(
    name: str,
    source: ArrayRecord,
    target: ArrayRecord,
    order: tuple[int, ...] | None,
    wording: Wording,
    tolerance: Tolerance,
) -> str:
    """Why an array's axes are not those wanted; empty if they are, or may be reordered."""
    if order is None and (renames := _renames(source, target)):
        old, new = (", ".join(map(repr, names)) for names in (renames, renames.values()))
        what = "the logical axes have other names"
        fix = wording.rename_fix.format(renames=renames, old=old, new=new)
    elif order is None and source.shape == target.shape and _is_nameless(source):
        what = "the logical axes differ"
        fix = wording.unnamed_source_fix.format(names={name: target.axes})
    elif order is None and source.shape == target.shape and _is_nameless(target):
        what = "the logical axes differ"
        fix = wording.unnamed_target_fix.format(names={name: source.axes})
    elif order is None:
        what, fix = "the logical axes differ", f"Build {wording.target} with the same axes."
    elif tuple(source.shape[i] for i in order) != target.shape:
        what, fix = "the sizes differ", f"Build {wording.target} with the same sizes."
    elif order != tuple(sorted(order)) and tolerance.on_axis_mismatch == "error":
        wanted = ", ".join(repr(axis) for axis in target.axes or () if axis is not None)
        what = "the same logical axes in another order"
        fix = wording.reorder_fix.format(name=name, order=wanted)
    else:
        return ""
    return f"{source}, and {wording.target} wants {target}: {what}. {fix}"


def _is_nameless(record: ArrayRecord) -> bool:
    return not any(axis is not None for axis in record.axes or ())


def _renames(source: ArrayRecord, target: ArrayRecord) -> dict[str, str]:
    """Old and new names, if these are all that differs: each is found on one side only."""
    if source.axes is None or target.axes is None or source.shape != target.shape:
        return {}
    pairs = [both for both in zip(source.axes, target.axes, strict=True) if both[0] != both[1]]
    renames = {old: new for old, new in pairs if old and new}
    is_plain = len(renames) == len(pairs) and not any(
        old in target.axes or new in source.axes for old, new in renames.items()
    )
    return renames if is_plain else {}


def _dtype_problem(
    source: ArrayRecord, target: ArrayRecord, wording: Wording, tolerance: Tolerance
) -> str:
    if source.key_impl != target.key_impl:
        return (
            f"{_kind(source)}, and {wording.target} wants {_kind(target)}. "
            "Make the key with jax.random.key(seed, impl=...) of the same kind."
        )
    if source.dtype == target.dtype or tolerance.on_dtype_mismatch == "cast":
        return ""
    return (
        f"{source.dtype}, and {wording.target} wants {target.dtype}. "
        f"{wording.dtype_fix.format(dtype=target.dtype)}"
    )


def _kind(record: ArrayRecord) -> str:
    return f"{record.key_impl!r} PRNG keys" if record.key_impl else f"{record.dtype} numbers"
