"""The names of the dimensions of weights, from those of the classes they are products of."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from penzai_shard.choosing.dimensions import DimensionClass, length_of
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.choosing.naming.traced_call import CalledArray
from penzai_shard.fused_axes import FusedAxes, factors_of
from penzai_shard.path_folding import folding_key
from penzai_shard.rule_kinds import LogicalAxis


@dataclasses.dataclass(frozen=True)
class DimensionName:
    """What a dimension of an array is called, and why.

    Attributes:
        name: The logical axis; None if that is not decided.
        reason: Why it is called so, or why that is not decided, as a sentence.
        unknown: Of one that is not decided a number, which all dimensions have that the program
            ties to it; None where the program does not say.
    """

    name: LogicalAxis | None
    reason: str
    unknown: int | None = None


_UNKNOWN = "the program does not decide what it is"


def _with_numbers(
    weights: Sequence[CalledArray], found: Sequence[tuple[DimensionName, ...]]
) -> list[tuple[DimensionName, ...]]:
    """Gives what is not decided the numbers by which it is known again."""
    numbers: dict[tuple[DimensionClass, ...], int] = {}

    def numbered(weight: CalledArray, place: int, each: DimensionName) -> DimensionName:
        if each.name is not None or weight.value is None or weight.shape[place] == 1:
            return each
        number = numbers.setdefault(weight.parts[place], len(numbers) + 1)
        return dataclasses.replace(each, unknown=number)

    return [
        tuple(numbered(weight, place, each) for place, each in enumerate(dimensions))
        for weight, dimensions in zip(weights, found, strict=True)
    ]


def names_of_weights(facts: ProgramFacts, names: ClassNames) -> list[tuple[DimensionName, ...]]:
    """The name of each dimension of each weight of a call, from those of its classes."""
    weights = facts.call.weights
    importance = collections.Counter(part for weight in weights for part in {*weight.classes})
    found = [
        _without_repeats(_of_weight(facts, names, weight), weight, importance) for weight in weights
    ]
    return _with_numbers(weights, _as_alike(weights, found, names))


def _as_alike(
    weights: Sequence[CalledArray],
    found: Sequence[tuple[DimensionName, ...]],
    names: ClassNames,
) -> list[tuple[DimensionName, ...]]:
    """Names for weights that the program does not use, as those have them whose paths are alike.

    Those of equal blocks are: their paths differ in numbers alone, and their shapes are the same.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = collections.defaultdict(list)
    for number, weight in enumerate(weights):
        if weight.value is not None and all(part in names.roles for part in weight.classes):
            alike[folding_key(weight.path), weight.shape].append(number)
    named = list(found)
    for number, weight in enumerate(weights):
        used = alike.get((folding_key(weight.path), weight.shape), [])
        if weight.value is None and len({tuple(each.name for each in found[n]) for n in used}) == 1:
            reason = f"{weights[used[0]].path} has it there, and their paths are alike"
            named[number] = tuple(DimensionName(e.name, reason) for e in found[used[0]])
    return named


def _of_weight(facts: ProgramFacts, names: ClassNames, weight: CalledArray) -> list[DimensionName]:
    found = []
    for number, known in enumerate(weight.names):
        if known is not None:
            found.append(DimensionName(known, "it is called so already"))
        elif weight.value is None:
            found.append(DimensionName(None, "the program does not use this array"))
        else:
            found.append(_of_dimension(facts, names, weight.parts[number]))
    return found


def _of_dimension(
    facts: ProgramFacts, names: ClassNames, parts: Sequence[DimensionClass]
) -> DimensionName:
    if len(parts) == 1 and parts[0].size == 1:
        return DimensionName(None, "it has length 1")
    groups: list[list[DimensionClass]] = []
    for part in parts:
        if groups and _are_one(facts, names, groups[-1][-1], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    sizes: dict[str, int] = {}
    reasons = []
    for group in groups:
        named = next(filter(None, map(names.name, reversed(group))), None)
        if named is None:
            return DimensionName(None, _doubt(groups, group, names))
        name, reason = named
        if name in sizes:
            return DimensionName(None, f"two of the axes that it is a product of would be {name!r}")
        sizes[name] = length_of(group)
        reasons.append(reason)
    if len(sizes) == 1:
        return DimensionName(next(iter(sizes)), reasons[0])
    told = "; ".join(f"{name}: {reason}" for name, reason in zip(sizes, reasons, strict=True))
    return DimensionName(FusedAxes.of(sizes), told)


def _are_one(
    facts: ProgramFacts, names: ClassNames, first: DimensionClass, second: DimensionClass
) -> bool:
    """Whether two parts of a dimension that follow each other are one logical axis."""
    if names.groups.get(first) == second:
        return True
    if second not in facts.together.get(first, ()):
        return False
    one, other = names.name(first), names.name(second)
    return one is not None and other is not None and one[0] == other[0]


def _doubt(
    groups: Sequence[Sequence[DimensionClass]], group: Sequence[DimensionClass], names: ClassNames
) -> str:
    found = [names.doubts[part] for part in group if part in names.doubts]
    doubt = found[0] if found else _UNKNOWN
    if len(groups) == 1:
        return doubt
    lengths = "*".join(str(length_of(each)) for each in groups)
    return f"it is a product of lengths {lengths}; of that of {length_of(group)}, {doubt}"


def _without_repeats(
    dimensions: Sequence[DimensionName],
    weight: CalledArray,
    importance: Mapping[DimensionClass, int],
) -> tuple[DimensionName, ...]:
    """An array has each logical axis once: the dimension whose axis more weights have keeps it."""

    def rank(number: int) -> tuple[int, int]:
        parts = weight.parts[number] if weight.parts else ()
        return -max((importance.get(part, 0) for part in parts), default=0), number

    taken: set[LogicalAxis] = set()
    kept = list(dimensions)
    for number in sorted(range(len(kept)), key=rank):
        each = kept[number]
        if each.name is None:
            continue
        own = {each.name, *factors_of(each.name)}
        if repeated := sorted(str(name) for name in own & taken):
            reason = f"it would be {repeated[0]!r}, as another of its dimensions is ({each.reason})"
            kept[number] = DimensionName(None, reason)
        taken |= own
    return tuple(kept)
