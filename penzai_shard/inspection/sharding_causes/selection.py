"""Which rows of a report a name stands for."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from penzai_shard.errors import RuleTypeError, SelectionError
from penzai_shard.inspection.sharding_causes.records import WhyRow
from penzai_shard.path_folding import paths_in_ranges, ranged_paths
from penzai_shard.rule_kinds import did_you_mean
from penzai_shard.tree_paths import path_matches

# A list of blocks and its number, as most frameworks write them.
_NUMBERED = re.compile(r"\b(\w*?[a-z])s?/(\d+|\*)(?=/|$)")


def selected_rows(rows: Sequence[WhyRow], at: str, known: Iterable[str]) -> tuple[WhyRow, ...]:
    """The rows about a layer and all in it, a parameter or a result.

    Args:
        rows: All rows.
        at: The label or the path, or a pattern of one; from the root of the model, or else any
            part of one. ``blocks/3`` also stands for a layer that is called ``block_3``.
        known: The labels and paths of all layers.

    Raises:
        RuleTypeError: It is not a name.
        SelectionError: There is none.
    """
    if not isinstance(at, str):
        what = f"class {at.__name__}" if isinstance(at, type) else type(at).__name__
        raise RuleTypeError(
            "at= is what the table calls a layer, a parameter or a result, or a pattern as "
            f"'**/mlp', not the {what}. Leave it out to see all names."
        )
    written = at.strip().strip("/")
    patterns = [written]
    # As tables of collectives write equal blocks.
    with contextlib.suppress(ValueError):
        patterns = [*paths_in_ranges(written)]
    # In Penzai's own models the number is part of the name: block_3.
    numbered = [_NUMBERED.sub(r"\1_\2", pattern) for pattern in patterns]
    for tried, begin in itertools.product((patterns, numbered), ("", "**/")):
        wanted = [f"{begin}{pattern}/**" for pattern in tried if pattern]
        found = tuple(row for row in rows if any(map(_matches(wanted), _names(row))))
        if found:
            return found
    silent = sorted(name for name in known if _matches([f"{one}/**" for one in patterns])(name))
    if silent:
        raise SelectionError(
            f"at={at!r}: the layer {silent[0]} makes no array of its own in the forward pass: it "
            "gives what it gets, or nothing uses what it gives. Ask for the layer around it."
        )
    names = {name for row in rows for name in _names(row)} | set(known)
    # A name may begin with any of its parts.
    parts = 1 + written.count("/")
    ends = {"/".join(name.split("/")[-parts:]) for name in names}
    hint = did_you_mean(written, names | ends) or _of_the_same_end(written, rows)
    raise SelectionError(
        f"at={at!r}: the step has no layer, parameter or result of this name.{hint} Without at= "
        "the table names all that there are; patterns such as '**/mlp' stand for several."
    )


def _of_the_same_end(written: str, rows: Sequence[WhyRow]) -> str:
    """A pattern for what has the same last part, if there is any."""
    pattern = f"**/{written.rpartition('/')[2]}"
    found = list(dict.fromkeys(row.label for row in rows if path_matches(pattern, row.label)))
    if not found:
        return ""
    return f" Did you mean {pattern!r}, which is {' and '.join(ranged_paths(found)[:3])}?"


def _names(row: WhyRow) -> tuple[str, ...]:
    return tuple(dict.fromkeys((row.label, row.path)))


def _matches(patterns: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(path_matches(pattern, name) for pattern in patterns)
