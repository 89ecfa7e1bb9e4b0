"""Rules for names that would fill what is missing with what is left, as a fix to be pasted."""

import itertools
import re
from collections.abc import Iterator, Mapping

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.name_matching import matched_names
from penzai_shard.errors import CheckpointMismatchError
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.tree_paths import split_path

_NUMBER = re.compile(r"\d+")
_MOST_RULES = 6
_MOST_PAIRS = 20_000


def suggested_names(
    left: Mapping[str, ArrayRecord], missing: Mapping[str, ArrayRecord]
) -> dict[str, str]:
    """Rules by which arrays may have been renamed, as few as will do.

    Args:
        left: The stored arrays that nothing wants.
        missing: The wanted arrays that are not stored.

    Returns:
        What to pass as ``names``, if only names have changed; nothing of arrays that fit in several
        ways.

    >>> record = ArrayRecord((2,), "int32", ("a",))
    >>> left = {f"model.layers.{i}.mlp.w": record for i in range(3)}
    >>> suggested_names(left, {f"net/block_{i}/mlp/w": record for i in range(3)})
    {'model/layers/*/**': 'net/block_*/**'}
    """
    rules: dict[str, str] = {}
    left, missing = dict(left), dict(missing)
    refused: set[tuple[str, str]] = set()
    while left and missing and len(rules) < _MOST_RULES:
        pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for rule, pair in itertools.islice(_rules(left, missing), _MOST_PAIRS):
            if rule not in refused:
                pairs.setdefault(rule, []).append(pair)
        if not pairs:
            break
        rule = max(pairs, key=lambda one: len(pairs[one]))
        found = _found(rule, left, missing)
        if found is None:
            refused.add(rule)
            continue
        if rivals := _rivals(rule, pairs):
            # One of the two would be a guess, and so for all that are called alike.
            names = itertools.chain(*found, *(pair for one in rivals for pair in pairs[one]))
            endings = {split_path(name)[-1] for name in names}
            left, missing = (
                {name: one for name, one in side.items() if split_path(name)[-1] not in endings}
                for side in (left, missing)
            )
            continue
        rules |= dict([rule])
        for stored, name in found:
            del left[stored], missing[name]
    return rules


def _found(
    rule: tuple[str, str], left: Mapping[str, ArrayRecord], missing: Mapping[str, ArrayRecord]
) -> list[tuple[str, str]] | None:
    """Stored and wanted names that a rule brings together; None where some of them do not fit."""
    try:
        taken = matched_names(left, missing, dict([rule]))
    except CheckpointMismatchError:
        return None
    found = [(stored, name) for name, stored in taken.items() if name in missing]
    fits = all(_form(left[stored]) == _form(missing[name]) for stored, name in found)
    return found if fits else None


def _rivals(
    rule: tuple[str, str], pairs: Mapping[tuple[str, str], list[tuple[str, str]]]
) -> list[tuple[str, str]]:
    """The rules of as many arrays that would fill, or use, some of the same arrays otherwise."""
    stored, names = map(set, zip(*pairs[rule], strict=True))
    return [
        other
        for other, its in pairs.items()
        if other != rule
        and len(its) == len(pairs[rule])
        and any(one in stored or name in names for one, name in its)
    ]


def _form(record: ArrayRecord) -> tuple[object, ...]:
    return record.shape, record.axes


def _rules(
    left: Mapping[str, ArrayRecord], missing: Mapping[str, ArrayRecord]
) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """For arrays of one form whose names are alike, the most general rule from one to the other.

    Each with the two names.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for stored, record in left.items():
        alike.setdefault((_form(record), split_path(stored)[-1:]), []).append(stored)
    for name, record in missing.items():
        parts = split_path(name)
        same_ending = alike.get((_form(record), parts[-1:]), [])
        for stored in same_ending:
            yield _rule(split_path(stored), parts), (stored, name)
        near = None if same_ending else nearest_name(name, left)
        if near is not None and _form(left[near]) == _form(record):
            yield _rule(split_path(near), parts), (near, name)


def _rule(stored: tuple[str, ...], name: tuple[str, ...]) -> tuple[str, str]:
    """From what stands before the parts in which two names end alike; numbers may be any."""
    common = 0
    while common < min(len(stored), len(name)) - 1 and stored[-1 - common] == name[-1 - common]:
        common += 1
    before = ["/".join(parts[: len(parts) - common]) for parts in (stored, name)]
    if _NUMBER.findall(before[0]) == _NUMBER.findall(before[1]):
        before = [_NUMBER.sub("*", text) for text in before]
    ending = "/**" if common else ""
    return before[0] + ending, before[1] + ending
