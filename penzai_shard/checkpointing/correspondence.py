"""Which stored array fills which array of a model or train state, decided before any is read.

The steps: names (``name_matching``), the part that is asked for, blocks stacked on one side alone
(``block_conversion``), then every array by itself (``comparison``).
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.block_conversion import (
    BlockConversion,
    conversion_problems,
    find_conversions,
    other_forms,
)
from penzai_shard.checkpointing.comparison import RESTORING_STATE, Tolerance, Wording, compare
from penzai_shard.checkpointing.name_matching import (
    EVERYTHING,
    PARAMETERS,
    Selection,
    matched_names,
    matched_state_names,
)
from penzai_shard.checkpointing.name_suggestions import suggested_names

_OTHERS_FIX = "If it is to have another value, name it in except_."
_NOTHING_IN_COMMON = (
    "Nothing in the checkpoint has a name of the model's. Pass names= if it calls them otherwise."
)


@dataclasses.dataclass(frozen=True)
class Part:
    """Which arrays are to be restored.

    Attributes:
        selection: The arrays that are.
        has_others: Whether there are other values for those that are not, or that the checkpoint
            does not have.
    """

    selection: Selection = EVERYTHING
    has_others: bool = False


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """What is to be read, and what becomes of it.

    Attributes:
        stored_names: What each array of the checkpoint is called there, by its name here.
        wanted: What is to be read, by its name here, with axes and sizes as they should be.
        orders: For each array whose axes are stored in another order, which stored dimension each
            one is.
        conversions: Which arrays are stacked or unstacked once they are read.
        others: The arrays that are not restored.
        left: The arrays that stay in the checkpoint though nobody chose others.
    """

    stored_names: Mapping[str, str]
    wanted: Mapping[str, ArrayRecord]
    orders: Mapping[str, tuple[int, ...]]
    conversions: tuple[BlockConversion, ...]
    others: tuple[str, ...]
    left: tuple[str, ...]


def correspond(
    stored: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
    *,
    part: Part,
    headline: str,
    wording: Wording,
    tolerance: Tolerance,
) -> Correspondence:
    """Finds which stored array fills which wanted one, and refuses everything that is wrong.

    Args:
        stored: The arrays of the checkpoint.
        wanted: All arrays of what is filled.
        part: Which of them are to be restored.
        headline: First line of the message.
        wording: How the two sides and the fixes are called.
        tolerance: What may differ.

    Raises:
        CheckpointMismatchError: Names cannot be matched, or with one line per array that is
            missing, superfluous, or differs in what may not.

    >>> from penzai_shard.checkpointing.comparison import RESTORING
    >>> found = correspond(
    ...     {"old": ArrayRecord((2,), "int32", ("a",))},
    ...     {"new": ArrayRecord((2,), "int32", ("a",)), "more": ArrayRecord((), "int32", ())},
    ...     part=Part(has_others=True),
    ...     headline="no:",
    ...     wording=RESTORING,
    ...     tolerance=Tolerance(names={"old": "new"}),
    ... )
    >>> found.stored_names, found.others
    ({'new': 'old'}, ('more',))
    """
    stored = tolerance.renamed(stored)
    is_state = wording is RESTORING_STATE
    match = matched_state_names if is_state else matched_names
    names = match(
        stored,
        {**wanted, **dict.fromkeys(other_forms(wanted))},
        tolerance.names,
        leave_unknown=tolerance.on_extra == "ignore",
        target=wording.target,
    )
    records = {name: stored[stored_name] for name, stored_name in names.items()}
    chosen = part.selection.of(wanted, target=wording.target)
    others = [name for name in wanted if name not in part.selection]
    also = _nothing_for(others) if others and not part.has_others else []
    conversions, problems = find_conversions(records, wanted)
    also += problems
    idle = [c for c in conversions if not any(name in part.selection for name in c.wanted)]
    active = [c for c in conversions if c not in idle]
    if tolerance.on_block_mismatch == "error":
        also += conversion_problems(active)
    converted = {name for c in active for name in c.wanted}
    if part.has_others:
        wording = dataclasses.replace(wording, missing_fix=_OTHERS_FIX)
    if part.has_others and part.selection.is_everything:
        lacking = [name for name in chosen if name not in records and name not in converted]
        # Nothing at all is not a part.
        if len(lacking) == len(chosen):
            also.append(_NOTHING_IN_COMMON)
        else:
            others += lacking
    to_read = _to_read(wanted, set(others), active)
    not_asked_for = {name for conversion in idle for name in conversion.stored}
    records = {
        name: record
        for name, record in records.items()
        if name in to_read or (name in part.selection and name not in not_asked_for)
    }
    if not tolerance.names:
        also = _renamed(records, to_read, PARAMETERS if is_state else "") + also
    orders = compare(
        records,
        to_read,
        headline=headline,
        wording=wording,
        tolerance=tolerance,
        called=names,
        also=also,
    )
    return Correspondence(
        names,
        to_read,
        orders,
        tuple(active),
        tuple(others),
        tuple(n for n in records if n not in to_read and part.selection.is_everything),
    )


def _renamed(
    records: Mapping[str, ArrayRecord], to_read: Mapping[str, ArrayRecord], start: str
) -> list[str]:
    """The rules for names with which what is stored would fit, if some have changed.

    Args:
        records: What is stored.
        to_read: What is wanted.
        start: What stands before the names that rules are for.
    """
    left, missing = (
        {
            name.removeprefix(start): record
            for name, record in one.items()
            if name not in other and name.startswith(start)
        }
        for one, other in ((records, to_read), (to_read, records))
    )
    # What is said of a single array has a rule of its own.
    rules = suggested_names(left, missing) if len(missing) > 1 else {}
    if not rules:
        return []
    return [f"Arrays of the same axes and sizes have other names: pass names={rules}."]


def _to_read(
    wanted: Mapping[str, ArrayRecord],
    others: Collection[str],
    conversions: Iterable[BlockConversion],
) -> dict[str, ArrayRecord]:
    """What is wanted of the checkpoint, in the form in which it is stored there."""
    converted = {name: conversion for conversion in conversions for name in conversion.wanted}
    found: dict[str, ArrayRecord] = {}
    for name, record in wanted.items():
        if name in others:
            continue
        if name in converted:
            as_stored = converted[name].as_stored(record)
            found.update(dict.fromkeys(converted[name].stored, as_stored))
        else:
            found[name] = record
    return found


def _nothing_for(others: Collection[str]) -> list[str]:
    return [
        *(f"{name}: is not to be restored." for name in others),
        "Say what these get: others='keep' for the values that the model has, or "
        "others=build_model, the function that builds it, for new ones.",
    ]
