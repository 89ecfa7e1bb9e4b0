"""What may be meant by a name that does not exist, and by a pattern that matches none."""

import difflib
import re
from collections.abc import Collection, Iterator, Sequence

from penzai_shard.rule_kinds import did_you_mean
from penzai_shard.tree_paths import path_matches, split_path

PARAMETERS = "params/"
"""What the names of the parameters in a train state begin with."""

# What names and patterns hardly ever have.
_EXPRESSION = re.compile(r"\\|[()^$|]|\.[*+]")


def pattern_meant(pattern: str, names: Collection[str]) -> str:
    """What to say of a pattern that matches nothing: one that does, as it may be meant.

    Often a part is left out or misspelt, or ``**`` stands within one, where it is no more than
    ``*``; or it is a regular expression.

    >>> pattern_meant(r"block_\\d+/(.*)", ["block_0/w", "block_1/w", "bias"])[:72]
    ' Patterns have the wildcards *, ? and **, and are no regular expressions'
    """
    for other in _alike(pattern, names):
        if count := _matched(other, names):
            return _meant(other, count, names)
    if not _EXPRESSION.search(pattern):
        return nearest_names(pattern, names)
    for other in _alike(_in_wildcards(pattern), names):
        if count := _matched(other, names):
            return _NOT_EXPRESSIONS + _meant(other, count, names)
    return (_NOT_EXPRESSIONS if re.search(r"[\\|]", pattern) else "") + nearest_names(
        pattern, names
    )


_NOT_EXPRESSIONS = " Patterns have the wildcards *, ? and **, and are no regular expressions."


def _meant(other: str, count: int, names: Collection[str]) -> str:
    return f" Did you mean {other!r}, which matches {count:,} of {len(names):,}?"


def _matched(pattern: str, names: Collection[str]) -> int:
    return sum(path_matches(pattern, name) for name in names)


def _alike(pattern: str, names: Collection[str]) -> Iterator[str]:
    """Patterns that may be meant by one, the nearest first."""
    within = re.sub(r"(?<=[^./*])\*\*", "*/**", re.sub(r"\*\*(?=[^./*])", "**/*", pattern))
    yield from (within, f"{pattern}/**", f"**/{pattern}", f"**/{within}/**".replace("**/**", "**"))
    yield pattern.removeprefix(PARAMETERS)
    if "*" in pattern:
        parts = {re.sub(r"\d+", "*", part) for name in names for part in split_path(name)}

        def spelt(part: re.Match[str]) -> str:
            return (difflib.get_close_matches(part[0], parts, 1) or [part[0]])[0]

        yield re.sub(r"[^./\[\]]*[^./\[\]*][^./\[\]]*", spelt, pattern)


def _in_wildcards(expression: str) -> str:
    """A pattern much like a regular expression."""
    text = re.sub(r"\(\?(:|P<\w+>)|[()^$]", "", expression)
    text = re.sub(r"(\\[dwS]|\[[^/\]]*\])[+*]?\??", "*", text)
    return re.sub(r"\.[*+]\??", "**", text).replace("\\", "")


def nearest_names(name: str, names: Collection[str]) -> str:
    """What to say of a name that does not exist: the one that is meant, or those most like it.

    >>> nearest_names("weight", ["weights", "bias"])
    " Did you mean 'weights'?"
    """
    if meant := did_you_mean(name, names):
        return meant
    nearest = difflib.get_close_matches(name, names, 3, 0.0)
    return f" The nearest of {len(names):,} are {alternatives(nearest, 'and')}." if nearest else ""


def alternatives(texts: Sequence[str], word: str) -> str:
    """Texts in a sentence.

    >>> alternatives(["a", "b", "c"], "or")
    "'a', 'b' or 'c'"
    """
    *most, last = map(repr, texts)
    return f"{', '.join(most)} {word} {last}" if most else last
