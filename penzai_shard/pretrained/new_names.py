"""Other names for arrays, made by patterns, where nobody says which names there may be."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from penzai_shard.checkpointing.meant_patterns import pattern_meant
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.tree_paths import (
    name_matches,
    text_with_wildcards_filled,
    wildcard_texts,
    wildcards,
)


def new_names(names: Sequence[str], rules: Mapping[str, str | None] | None) -> dict[str, str]:
    """The new name of each array.

    Args:
        names: The names.
        rules: New names by patterns, as for ``name_matching.matched_names``: each wildcard is
            carried over, in order. None in place of a name leaves an array out; what no pattern
            matches keeps its name.

    Raises:
        CheckpointMismatchError: With all that is wrong: patterns that match nothing or can be read
            in several ways, several patterns for one array, several arrays of one name.
        RuleTypeError: The rules are not a mapping of texts.

    >>> new_names(["block_0/w", "bias"], {"block_*/w": "model.layers.*.weight"})
    {'block_0/w': 'model.layers.0.weight', 'bias': 'bias'}
    """
    rules = _checked(rules)
    problems = []
    for pattern, new in rules.items():
        if not any(name_matches(pattern, name) for name in names):
            problems.append(
                f"{pattern!r}: the pattern matches no array of the model."
                f"{pattern_meant(pattern, names)}"
            )
        elif new is not None and pattern not in names and wildcards(pattern) != wildcards(new):
            problems.append(
                f"{pattern!r}: {new!r}: each wildcard is carried over, in order, so write the same "
                "in both."
            )
    raise_all(CheckpointMismatchError, "cannot rename arrays:", problems)
    found: dict[str, str] = {}
    for name in names:
        matching = [pattern for pattern in rules if name_matches(pattern, name)]
        exact = [pattern for pattern in matching if pattern == name]
        if len(exact or matching) > 1:
            problems.append(
                f"{name}: matched by {' and '.join(map(repr, matching))}. Make the patterns "
                "exclude each other."
            )
        elif not matching:
            found[name] = name
        elif (new := rules[(exact or matching)[0]]) is not None:
            texts = list(itertools.islice(wildcard_texts(matching[0], name), 2))
            if len(texts) > 1 and not exact:
                problems.append(
                    f"{name}: the pattern {matching[0]!r} can be read in several ways. Write one "
                    "with fewer wildcards, or this name whole."
                )
            found[name] = new if exact else text_with_wildcards_filled(new, texts[0])
    homes: dict[str, list[str]] = {}
    for name, new in found.items():
        homes.setdefault(new, []).append(name)
    problems += [
        f"{new}: {len(own)} arrays would have this name, {' and '.join(map(repr, own))}. Give one "
        "of them another name."
        for new, own in homes.items()
        if len(own) > 1
    ]
    raise_all(CheckpointMismatchError, "cannot rename arrays:", problems)
    return found


def _checked(rules: Any) -> Mapping[str, str | None]:
    rules = {} if rules is None else rules
    if not isinstance(rules, Mapping) or not all(
        isinstance(pattern, str) and isinstance(new, str | None) and new != ""
        for pattern, new in rules.items()
    ):
        raise RuleTypeError(
            f"names={rules!r:.80}: give a mapping from patterns of names in the model to names in "
            "the file, for instance {'block_*/w': 'layers.*.weight'}."
        )
    return rules
