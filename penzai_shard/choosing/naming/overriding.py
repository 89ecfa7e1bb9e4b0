"""Names that a person gives by path pattern, which go before those that are found."""

from collections.abc import Mapping, Sequence

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.traced_call import AxisNames, CalledArray
from penzai_shard.choosing.naming.weight_names import DimensionName
from penzai_shard.errors import RuleTypeError, SelectionError, raise_all
from penzai_shard.fused_axes import FusedAxes, factors_of
from penzai_shard.planning.axis_naming import NamesByPattern, check_names
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.tree_paths import path_matches


class Overrides:
    """The names that were given for some of the weights.

    Args:
        weights: The weights.
        patterns: The names by path pattern.

    Raises:
        RuleTypeError: The names cannot be read, or one logical axis gets two.
        SelectionError: They do not fit an array, or match none.
    """

    def __init__(self, weights: Sequence[CalledArray], patterns: Mapping[str, AxisNames]) -> None:
        check_names(patterns)
        self._weights = weights
        self._given: dict[int, tuple[LogicalAxis | None, ...]] = {}
        self._pattern_of: dict[int, str] = {}
        matching = NamesByPattern(patterns)
        problems = []
        for number, weight in enumerate(weights):
            fits = [pattern for pattern in patterns if path_matches(pattern, weight.path)]
            if not fits:
                matching.paths.append(weight.path)
                continue
            names, problem = matching.array(weight.path, weight.shape)
            problem = problem or _named_otherwise(weight, names, fits[0])
            if problem:
                problems.append(f"{weight.path or 'the array'}: {problem}")
            elif names is not None:
                self._given[number] = _with_lengths(names, weight)
                self._pattern_of[number] = fits[0]
        raise_all(SelectionError, "cannot override these names:", [*problems, *matching.unused()])

    def name_classes(self, names: ClassNames) -> None:
        """Gives the classes of the weights their names, so that all weights have them."""
        given: dict[DimensionClass, tuple[str, str]] = {}
        problems: dict[str, None] = {}
        for number, dimensions in self._given.items():
            weight = self._weights[number]
            for parts, name in zip(weight.parts, dimensions, strict=False):
                own: Sequence[LogicalAxis | None] = factors_of(name) or (name,)
                for part, one in zip(parts, own, strict=False):
                    if not isinstance(one, str) or len(own) != len(parts):
                        continue
                    pattern = self._pattern_of[number]
                    first, by = given.setdefault(part, (one, pattern))
                    if first != one:
                        problems[
                            f"{weight.path}: override {pattern!r} calls {one!r} what override "
                            f"{by!r} calls {first!r}, and the program ties both. Give both the "
                            "same name, or None in one of them."
                        ] = None
                    names.call(part, one, f"override {pattern!r} calls it so")
        raise_all(RuleTypeError, "one logical axis gets two names:", list(problems))

    def applied(
        self, found: Sequence[tuple[DimensionName, ...]]
    ) -> list[tuple[DimensionName, ...]]:
        """What was found, and what was given in place of it."""
        named = list(found)
        for number, dimensions in self._given.items():
            reason = f"override {self._pattern_of[number]!r} says so"
            named[number] = tuple(DimensionName(name, reason) for name in dimensions)
        return named


def _named_otherwise(weight: CalledArray, names: AxisNames | None, pattern: str) -> str:
    """Why an array that has names already cannot have others; empty if it has none, or these."""
    if names is None or all(
        own in (None, given) for own, given in zip(weight.names, names, strict=True)
    ):
        return ""
    return (
        f"override {pattern!r} gives it {tuple(names)}, and it has names already, {weight.names}, "
        "which name_axes keeps. Take these off before, by without_names."
    )


def _with_lengths(names: AxisNames, weight: CalledArray) -> tuple[LogicalAxis | None, ...]:
    """Names with the lengths of what they are fused of, where the program knows these."""
    known = []
    for number, name in enumerate(names):
        parts = weight.parts[number] if weight.parts else ()
        if type(name) is str and len(factors_of(name)) == len(parts) > 1:
            name = FusedAxes(name, [part.size for part in parts])
        known.append(name)
    return tuple(known)
