"""Which stored array goes where in a model that calls it otherwise, decided from names alone.

Names are matched part by part by the patterns of ``tree_paths``, whatever separates the parts. What
can be read in two ways is refused.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from penzai_shard.checkpointing.meant_patterns import (
    PARAMETERS,
    alternatives,
    nearest_names,
    pattern_meant,
)
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.tree_paths import (
    name_matches,
    path_matches,
    split_path,
    wildcard_texts,
    wildcards,
    with_wildcards_filled,
)

NameRules: TypeAlias = Mapping[str, str | None]
Patterns: TypeAlias = str | Sequence[str]

# How many names at most a message gives that one stored name may become.
_SHOWN_READINGS = 3

# A pattern that can be read in more ways than this counts as unclear, whatever it gives.
_MOST_READINGS = 1000


@dataclasses.dataclass(frozen=True)
class _Rule:
    """One entry of ``names``: what it makes of a stored name."""

    pattern: str
    name: str | None

    def __str__(self) -> str:
        return f"{self.pattern!r}: {self.name!r}"

    def matching(self, stored: Collection[str]) -> list[str]:
        # A name written out means that array alone, also where its separators match others.
        if self.pattern in stored:
            return [self.pattern]
        return [name for name in stored if path_matches(self.pattern, name)]

    def results(self, stored_name: str) -> set[tuple[str, ...]]:
        """The parts of the name that a stored one becomes, for each way to read the pattern."""
        assert self.name is not None
        if self.pattern == stored_name:
            return {split_path(self.name)}
        found: set[tuple[str, ...]] = set()
        for count, texts in enumerate(wildcard_texts(self.pattern, stored_name)):
            if len(found) == _SHOWN_READINGS or count == _MOST_READINGS:
                return found | {("...",)}
            found.add(with_wildcards_filled(self.name, texts))
        return found

    def wildcard_problem(self, stored: Collection[str]) -> str:
        """Why the name cannot take what the pattern's wildcards stand for; empty if it can."""
        if self.name is None or self.pattern in stored:
            return ""
        given, taken = wildcards(self.pattern), wildcards(self.name)
        if given == taken:
            return ""
        return (
            f"{self}: the pattern has {_listed(given)} and the name {_listed(taken)}. Each "
            "wildcard is carried over, in order, so write the same in both."
        )


def matched_names(
    stored: Collection[str],
    wanted: Collection[str],
    names: NameRules | None,
    *,
    leave_unknown: bool = False,
    source: str = "the checkpoint",
    target: str = "the model",
) -> dict[str, str]:
    """Finds which stored array each name in a model stands for.

    Args:
        stored: The names of the stored arrays.
        wanted: The names in the model.
        names: For patterns of stored names, the names in the model, as
            ``{"layers.*.w": "block_*/w"}``. Each of the pattern's wildcards, ``*``, ``?`` and
            ``**``, is carried over, in order. A pattern that is a stored name to the letter means
            this one alone. With None in place of a name the arrays stay in the checkpoint, whatever
            other patterns say. What no pattern matches keeps its name.
        leave_unknown: Whether arrays may stay in the checkpoint whose new name the model does not
            have, as long as it has one of those that a pattern gives.
        source: How the side that has the stored names is called in messages.
        target: How the other is called.

    Returns:
        The stored name by the name in the model. Stored arrays that the model does not have are
        there under their own names, unless a pattern matched them.

    Raises:
        CheckpointMismatchError: With all that is wrong: patterns that match nothing, differ in
            their wildcards from the name or can be read in several ways; names that the model does
            not have; two names for one array, or two arrays for one name.
        RuleTypeError: ``names`` is not a mapping of texts.

    >>> matched_names(
    ...     ["layers.0.w", "layers.1.w", "bias"],
    ...     ["block_0/w", "block_1/w", "bias"],
    ...     {"layers.*.w": "block_*/w"},
    ... )
    {'block_0/w': 'layers.0.w', 'block_1/w': 'layers.1.w', 'bias': 'bias'}
    """
    matching = {rule: rule.matching(stored) for rule in _rules(names)}
    problems = {
        rule: _matches_nothing(rule, stored, wanted, source)
        if not matching[rule]
        else rule.wildcard_problem(stored)
        for rule in matching
    }
    # Left where they are, or what becomes of them is not known.
    without_name = {
        name
        for rule, found in matching.items()
        if rule.name is None or problems[rule]
        for name in found
    }
    becomes, unresolved = _resolved_names(
        {
            rule: [name for name in found if name not in without_name]
            for rule, found in matching.items()
        },
        wanted,
        target,
        leave_unknown=leave_unknown,
    )
    taken: dict[str, dict[str, str]] = {}
    for stored_name in stored:
        if stored_name not in without_name and stored_name not in becomes:
            taken.setdefault(stored_name, {})[stored_name] = "by its own name"
        for name, rule in becomes.get(stored_name, {}).items():
            if name in wanted:
                taken.setdefault(name, {})[stored_name] = f"by {rule}"
    raise_all(
        CheckpointMismatchError,
        f"cannot match the names of {source}:",
        [*filter(None, problems.values()), *unresolved, *_two_names(becomes), *_two_arrays(taken)],
    )
    return {name: next(iter(claims)) for name, claims in taken.items()}


def matched_state_names(
    stored: Collection[str],
    wanted: Collection[str],
    names: NameRules | None,
    *,
    leave_unknown: bool = False,
    source: str = "the checkpoint",
    target: str = "the train state",
) -> dict[str, str]:
    """``matched_names`` for the arrays of train states.

    The rules are of the parameters' names. What an optimizer keeps for a parameter, under a path
    that ends with its name, follows it. In a tree without parameters they are of all paths.

    >>> stored = ["step", "params/old", "opt_state/0/mu/old"]
    >>> wanted = ["step", "params/new", "opt_state/0/mu/new"]
    >>> matched_state_names(stored, wanted, {"old": "new"})
    {'step': 'step', 'params/new': 'params/old', 'opt_state/0/mu/new': 'opt_state/0/mu/old'}
    """
    match = functools.partial(
        matched_names, names=names, leave_unknown=leave_unknown, source=source, target=target
    )
    of_params = [n.removeprefix(PARAMETERS) for n in stored if n.startswith(PARAMETERS)]
    if not names or not of_params:
        return match(stored, wanted)
    taken = match(
        of_params, [n.removeprefix(PARAMETERS) for n in wanted if n.startswith(PARAMETERS)]
    )
    renamed: dict[str, str | None] = dict.fromkeys(of_params)
    renamed.update({stored_name: name for name, stored_name in taken.items()})
    claims: dict[str, dict[str, str]] = {}
    for full in stored:
        name = _name_in_state(full, renamed, wanted)
        if name is not None:
            claims.setdefault(name, {})[full] = "by the parameter that it is for"
    raise_all(CheckpointMismatchError, f"cannot match the names of {source}:", _two_arrays(claims))
    return {name: next(iter(claim)) for name, claim in claims.items()}


def _name_in_state(
    full: str, renamed: Mapping[str, str | None], wanted: Collection[str]
) -> str | None:
    """The name in the state of a stored array, None if its parameter stays in the checkpoint."""
    for slash in re.finditer("/", full):
        start, parameter = full[: slash.end()], full[slash.end() :]
        if parameter in renamed:
            name = renamed[parameter]
            if name is None:
                return None
            # Something else may be called like a parameter, such as a hyperparameter.
            is_other = start + name not in wanted and full in wanted
            return full if is_other else start + name
    return full


def _resolved_names(
    matching: Mapping[_Rule, Sequence[str]],
    wanted: Collection[str],
    target: str,
    *,
    leave_unknown: bool,
) -> tuple[dict[str, dict[str, _Rule]], list[str]]:
    """What each stored name that some rule matches becomes by which rule, and what is wrong."""
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for name in wanted:
        by_parts.setdefault(split_path(name), []).append(name)
    becomes: dict[str, dict[str, _Rule]] = {}
    problems: list[str] = []
    for rule, stored_names in matching.items():
        unknown: list[str] = []
        for stored_name in stored_names:
            candidates, problem = _resolved(rule, stored_name, by_parts, wanted, target)
            becomes.setdefault(stored_name, {}).update(dict.fromkeys(candidates, rule))
            if problem:
                (unknown if len(candidates) == 1 else problems).append(problem)
        if not leave_unknown or len(unknown) == len(stored_names):
            problems += unknown
    return becomes, problems


def _rules(names: Any) -> list[_Rule]:
    if names is None:
        return []
    if not isinstance(names, Mapping):
        raise RuleTypeError(
            "names must be a mapping from patterns of stored names to names in the model, not "
            f"{type(names).__name__}. Write for instance {{'layers.*.w': 'block_*/w'}}."
        )
    raise_all(
        RuleTypeError,
        "these names cannot be read:",
        [
            f"{pattern!r}: {name!r}: both must be texts; None in place of the name leaves the "
            "arrays where they are."
            for pattern, name in names.items()
            if not isinstance(pattern, str) or not isinstance(name, str | None)
        ],
    )
    return [_Rule(pattern, name) for pattern, name in names.items()]


def _resolved(
    rule: _Rule,
    stored_name: str,
    by_parts: Mapping[tuple[str, ...], list[str]],
    wanted: Collection[str],
    target: str,
) -> tuple[list[str], str]:
    """The name that a stored one becomes, which the model may lack, and what is wrong.

    There is no name where it cannot be told.
    """
    if rule.name and rule.name in wanted and not wildcards(rule.name):
        return [rule.name], ""
    results = rule.results(stored_name)
    texts = sorted("/".join(parts) for parts in results)
    if len(results) > 1:
        return [], (
            f"{stored_name}: the pattern in {rule} can be read in several ways, which make it "
            f"{alternatives(texts, 'or')}. Write a pattern with fewer wildcards, or this name "
            "whole."
        )
    found = sorted(by_parts.get(results.pop(), ()))
    if len(found) > 1:
        return [], (
            f"{stored_name}: {rule} makes it {texts[0]!r}, and {target} has "
            f"{alternatives(found, 'and')}. Give it one of them by name: "
            f"names={{{stored_name!r}: {found[0]!r}}}."
        )
    if not found:
        return texts, (
            f"{stored_name}: {rule} makes it {texts[0]!r}, and {target} has no such array."
            f"{nearest_names(texts[0], wanted)}"
        )
    return found, ""


def _matches_nothing(
    rule: _Rule, stored: Collection[str], wanted: Collection[str], source: str
) -> str:
    problem = f"{rule}: the pattern matches no array of {source}."
    turned = _Rule(rule.name, rule.pattern) if rule.name is not None else None
    if turned and turned.matching(stored) and any(path_matches(rule.pattern, n) for n in wanted):
        return f"{problem} Names are given as stored: wanted; write names={{{turned}}}."
    return problem + pattern_meant(rule.pattern, stored)


def _two_names(becomes: Mapping[str, Mapping[str, _Rule]]) -> list[str]:
    return [
        f"{stored_name}: several rules match it, {' and '.join(map(str, given.values()))}. "
        f"Make the patterns exclude each other, or leave it: names={{..., {stored_name!r}: None}}."
        for stored_name, given in becomes.items()
        if len(given) > 1
    ]


def _two_arrays(taken: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [
        f"{name}: {len(claims)} stored arrays go here, "
        + " and ".join(f"{stored_name!r} {why}" for stored_name, why in claims.items())
        + f". To leave one where it is, write names={{..., {list(claims)[-1]!r}: None}}."
        for name, claims in taken.items()
        if len(claims) > 1
    ]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Some of the arrays of a model, by patterns of their names.

    Attributes:
        only: Patterns of which one must match; None if all arrays are meant.
        except_: Patterns of which none may match.
    """

    only: tuple[str, ...] | None = None
    except_: tuple[str, ...] = ()

    @classmethod
    def read(cls, only: Patterns | None, except_: Patterns | None) -> "Selection":
        """Reads the options ``only`` and ``except_``.

        Raises:
            RuleTypeError: They are neither a pattern nor several.

        >>> Selection.read("blocks/**", None)
        Selection(only=('blocks/**',), except_=())
        """
        return cls(
            None if only is None else _patterns("only", only),
            () if except_ is None else _patterns("except_", except_),
        )

    def __contains__(self, name: str) -> bool:
        return (self.only is None or _any_matches(self.only, name)) and not _any_matches(
            self.except_, name
        )

    @property
    def is_everything(self) -> bool:
        """Whether nothing was said, so that everything is meant."""
        return self.only is None and not self.except_

    def of(self, names: Collection[str], *, target: str = "the model") -> list[str]:
        """The names that are meant.

        Raises:
            CheckpointMismatchError: A pattern matches nothing, or nothing is left.

        >>> Selection.read(None, "**/bias").of(["a/w", "a/bias"])
        ['a/w']
        """
        problems = [
            f"{option}={pattern!r}: the pattern matches no array of {target}."
            f"{pattern_meant(pattern, names)}"
            for option, patterns in (("only", self.only or ()), ("except_", self.except_))
            for pattern in patterns
            if not _any_matches((pattern,), *names)
        ]
        found = [name for name in names if name in self]
        if not problems and not found and not self.is_everything:
            problems = [f"{self}: nothing of {target} is left. Give fewer patterns in except_."]
        raise_all(CheckpointMismatchError, f"cannot choose arrays of {target}:", problems)
        return found

    def __str__(self) -> str:
        said = [] if self.only is None else [f"only={list(self.only)!r}"]
        return ", ".join(said + ([f"except_={list(self.except_)!r}"] if self.except_ else []))


EVERYTHING = Selection()


def _patterns(option: str, given: Any) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Iterable) or isinstance(patterns, Mapping | bytes):
        patterns = (None,)
    patterns = tuple(patterns)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise RuleTypeError(
            f"{option}={given!r}: give a pattern of names, or several: {option}='**/mlp/**', or "
            f"{option}=['**/mlp/**', '**/bias']."
        )
    return patterns


def _any_matches(patterns: Iterable[str], *names: str) -> bool:
    return any(name_matches(pattern, name) for pattern in patterns for name in names)


def _listed(found: Sequence[str]) -> str:
    return ", ".join(map(repr, found)) or "no wildcard"
