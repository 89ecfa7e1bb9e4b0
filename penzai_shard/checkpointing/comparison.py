"""Finding every difference between the arrays there are and the arrays wanted, before reading."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Literal

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.errors import CheckpointMismatchError, raise_all

AxisMismatch = Literal["error", "transpose"]
DtypeMismatch = Literal["error", "cast"]
Extra = Literal["error", "ignore"]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What may differ between a checkpoint and what it fills.

    Attributes:
        on_axis_mismatch: ``"transpose"`` puts another order of the same logical axes right.
        on_dtype_mismatch: ``"cast"`` converts to the wanted dtype.
        on_extra: ``"ignore"`` leaves arrays alone that nothing wants.
    """

    on_axis_mismatch: AxisMismatch = "error"
    on_dtype_mismatch: DtypeMismatch = "error"
    on_extra: Extra = "error"

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}."
            for name, value, choices in (
                ("on_axis_mismatch", self.on_axis_mismatch, ("error", "transpose")),
                ("on_dtype_mismatch", self.on_dtype_mismatch, ("error", "cast")),
                ("on_extra", self.on_extra, ("error", "ignore")),
            )
            if value not in choices
        ]
        raise_all(CheckpointMismatchError, "cannot restore with these options:", problems)


@dataclasses.dataclass(frozen=True)
class Wording:
    """How the two sides and the fixes are called in messages.

    Attributes:
        source: Where the arrays are, such as ``the checkpoint``.
        target: What wants them, such as ``the model``.
        reorder_fix: Fix for another order of the same axes; ``{order}`` is the wanted order.
        rename_fix: Fix for other names; ``{renames}`` is a dictionary from names there to wanted.
        dtype_fix: Fix for another dtype; ``{dtype}`` is the wanted one.
        extra_fix: Fix for an array that nothing wants; ``{name}`` is its name.
        missing_fix: Fix for an array that is not there; ``{name}`` is its name.
    """

    source: str
    target: str
    reorder_fix: str
    rename_fix: str
    dtype_fix: str
    extra_fix: str
    missing_fix: str


RESTORING = Wording(
    source="the checkpoint",
    target="the model",
    reorder_fix="Pass on_axis_mismatch='transpose' to have it reordered.",
    rename_fix="If they mean the same, pass rename_axes={renames}.",
    dtype_fix="Pass on_dtype_mismatch='cast', or give the model this dtype.",
    extra_fix="Pass on_extra='ignore' to leave it there.",
    missing_fix="To give it a value of your own, restore a dictionary without {name!r} and use "
    "with_params.",
)

RESTORING_STATE = dataclasses.replace(
    RESTORING,
    target="the train state",
    dtype_fix="Pass on_dtype_mismatch='cast', or give the state this dtype.",
    missing_fix="Build the state with the model and the optimizer that it was saved with.",
)

REPLACING = Wording(
    source="the values given",
    target="the model",
    reorder_fix="Give {name!r} as value.order_as({order}).",
    rename_fix="If they mean the same, rename them: value.untag({old}).tag({new}).",
    dtype_fix="Give it as {dtype}.",
    extra_fix="Leave {name!r} out of the values.",
    missing_fix="To keep the model's own, give param_dict(model)[{name!r}].",
)


def compare(
    stored: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
    *,
    headline: str,
    wording: Wording,
    tolerance: Tolerance,
    compare_dtypes: bool = True,
) -> dict[str, tuple[int, ...]]:
    """Compares all arrays by name and refuses every difference at once.

    Args:
        stored: The arrays there are.
        wanted: The arrays wanted.
        headline: First line of the message.
        wording: How the two sides and the fixes are called.
        tolerance: What may differ.
        compare_dtypes: Whether the dtypes must agree.

    Returns:
        For each array whose axes lie in another order and may be put right: which stored
        dimension each wanted one is, as ``jax.numpy.transpose`` takes it.

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
    permutations: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for name, target in wanted.items():
        source = stored.get(name)
        if source is None:
            problems.append(_missing(name, target, extra, wording))
            continue
        problem, permutation = _compare_axes(name, source, target, wording, tolerance)
        if not problem and compare_dtypes:
            problem = _compare_dtypes(name, source, target, wording, tolerance)
        if problem:
            problems.append(problem)
        elif permutation is not None:
            permutations[name] = permutation
    if tolerance.on_extra == "error":
        for name in extra:
            problems.append(_superfluous(name, stored[name], wanted, stored, wording))
    raise_all(CheckpointMismatchError, headline, problems)
    return permutations


def _missing(name: str, target: ArrayRecord, extra: list[str], wording: Wording) -> str:
    return (
        f"{name}: {wording.target} wants {target} {target.dtype}, and {wording.source} "
        f"{_has(wording)} no such array.{_did_you_mean(name, extra)} "
        f"{wording.missing_fix.format(name=name)}"
    )


def _superfluous(
    name: str,
    source: ArrayRecord,
    wanted: Mapping[str, ArrayRecord],
    stored: Mapping[str, ArrayRecord],
    wording: Wording,
) -> str:
    free = [other for other in wanted if other not in stored]
    return (
        f"{name}: {wording.source} {_has(wording)} {source} {source.dtype}, and {wording.target} "
        f"has no such array.{_did_you_mean(name, free)} {wording.extra_fix.format(name=name)}"
    )


def _has(wording: Wording) -> str:
    return "have" if wording.source.startswith("the values") else "has"


def _did_you_mean(name: str, candidates: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.8)
    return f" Did you mean {close[0]!r}?" if close else ""


def _compare_axes(
    name: str, source: ArrayRecord, target: ArrayRecord, wording: Wording, tolerance: Tolerance
) -> tuple[str, tuple[int, ...] | None]:
    """The problem with an array's axes, or how to put their order right if that is needed."""
    both = f"{name}: {wording.source} {_has(wording)} {source}, and {wording.target} wants {target}"
    if source.axes is None or target.axes is None or source.axes == target.axes:
        if source.shape == target.shape:
            return "", None
        return f"{both}: the sizes differ. Build {wording.target} with the same sizes.", None
    permutation = _permutation(source.axes, target.axes)
    if permutation is not None:
        if tuple(source.shape[i] for i in permutation) != target.shape:
            return f"{both}: the sizes differ. Build {wording.target} with the same sizes.", None
        if tolerance.on_axis_mismatch == "transpose":
            return "", permutation
        order = ", ".join(repr(axis) for axis in target.axes if axis is not None)
        fix = wording.reorder_fix.format(name=name, order=order)
        return f"{both}: the same logical axes in another order. {fix}", None
    renames = {old: new for old, new in zip(source.axes, target.axes, strict=False) if old != new}
    # A plain renaming: same sizes, and each of the other names stands on one side only.
    if source.shape == target.shape and all(
        old and new and old not in target.axes and new not in source.axes
        for old, new in renames.items()
    ):
        fix = wording.rename_fix.format(
            renames=renames,
            old=", ".join(map(repr, renames)),
            new=", ".join(map(repr, renames.values())),
        )
        return f"{both}: the logical axes have other names. {fix}", None
    return f"{both}: the logical axes differ. Build {wording.target} with the same axes.", None


def _permutation(
    source: tuple[str | None, ...], target: tuple[str | None, ...]
) -> tuple[int, ...] | None:
    """Which source dimension each target one is; positional ones keep their order."""
    if sorted(map(repr, source)) != sorted(map(repr, target)):
        return None
    free = list(range(len(source)))
    found = []
    for axis in target:
        dimension = next(i for i in free if source[i] == axis)
        free.remove(dimension)
        found.append(dimension)
    return tuple(found)


def _compare_dtypes(
    name: str, source: ArrayRecord, target: ArrayRecord, wording: Wording, tolerance: Tolerance
) -> str:
    if source.key_impl != target.key_impl:
        return (
            f"{name}: {wording.source} {_has(wording)} {_kind(source)}, and {wording.target} wants "
            f"{_kind(target)}. Make the key with jax.random.key(seed, impl=...) of the same kind."
        )
    if source.dtype == target.dtype or tolerance.on_dtype_mismatch == "cast":
        return ""
    return (
        f"{name}: {wording.source} {_has(wording)} {source.dtype}, and {wording.target} wants "
        f"{target.dtype}. {wording.dtype_fix.format(dtype=target.dtype)}"
    )


def _kind(record: ArrayRecord) -> str:
    return f"{record.key_impl!r} PRNG keys" if record.key_impl else f"{record.dtype} numbers"
