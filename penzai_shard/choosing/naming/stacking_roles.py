"""What weights are stacked along: layers, and gates beside what they gate."""

import collections
import math
from collections.abc import Iterator, Set

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.dimensions.loop_indices import counter_behind, indexed_dimensions
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.library_apis.shardy_records import PRODUCTS
from penzai_shard.path_folding import folding_key
from penzai_shard.sharding_propagation import FLOW, Operation

_GATED = frozenset({"neurons", "conv_channels"})
# A stack of layers is one of several weights.
_FEWEST_STACKED = 2


def name_layers(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what loops take from weights one by one, and what is taken from several by hand."""
    passed_on = _passed_on(facts)
    for part in facts.call.dimensions.stepped & facts.in_weights.keys() - facts.of_inputs.keys():
        if part in passed_on:
            names.give(part, "layers", "a loop takes its elements one by one, each for the next")
        else:
            names.doubts[part] = (
                "a loop takes its elements one by one, and multiplies with none of them what it "
                "made with others"
            )
    by_length: dict[int, list[DimensionClass]] = collections.defaultdict(list)
    for part in _taken_one_after_another(facts, names):
        by_length[part.size].append(part)
    for parts in by_length.values():
        stacked = {folding_key(each.path) for part in parts for each in facts.in_weights[part]}
        if len(stacked) >= _FEWEST_STACKED:
            for part in names.without_role(parts):
                names.give(part, "layers", "its elements are used one after the other")


def _passed_on(facts: ProgramFacts) -> Set[DimensionClass]:
    """What a loop takes one by one, to multiply with each what it made with the one before.

    Layers are so; chunks of neurons, heads and experts whose results a loop only adds are not.
    """
    taken: dict[int, dict[int, tuple[DimensionClass, ...]]] = collections.defaultdict(dict)
    for operation in facts.program.operations:
        if operation.kind != "stablehlo.dynamic_slice":
            continue
        for number, index in indexed_dimensions(facts.program, operation):
            counter = counter_behind(facts.program, index)
            if counter is not None and operation.operands[0] in facts.from_weights:
                parts = facts.call.dimensions.parts(operation.operands[0], number)
                taken[counter][operation.results[0]] = parts
    found: set[DimensionClass] = set()
    for counter, elements in taken.items():
        last = _end_of_loop(facts, counter)
        by_parts: dict[tuple[DimensionClass, ...], list[int]] = collections.defaultdict(list)
        for value, parts in elements.items():
            by_parts[parts].append(value)
        for parts, values in by_parts.items():
            if found.issuperset(parts):
                continue
            own = facts.reached(values, last)
            if any(
                # What it makes goes round in the loop, and is multiplied there again.
                each.data in facts.reached(each.operation.results, last)
                for each in facts.with_weights
                if each.operation.number < last and each.weight_operand in own
            ):
                found.update(parts)
    return found


def _end_of_loop(facts: ProgramFacts, counter: int) -> int:
    """The number of the last operation of a loop: the last that hands something on in it."""
    own = facts.program.makers[counter]
    last = own.number
    for operation in facts.program.operations:
        is_next = operation.number == last + 1
        if is_next and operation.kind == FLOW and operation.name == own.name:
            last = operation.number
    return last


def _taken_one_after_another(facts: ProgramFacts, names: ClassNames) -> Iterator[DimensionClass]:
    """The first dimensions of weights all of whose elements are taken, each for the next layer.

    A loop may take several layers in each round, so that their number is a product.
    """
    taken: dict[DimensionClass, dict[int, int]] = collections.defaultdict(dict)
    first = {
        weight.parts[0][-1]
        for weight in facts.call.weights
        if weight.parts and {*weight.parts[0][:-1]} <= names.with_role("layers")
    }
    for part, start, operation in _elements(facts):
        if part in first and operation.operands[0] not in facts.from_inputs:
            taken[part].setdefault(start, operation.results[0])
    for part, values in taken.items():
        if len(values) == part.size > 1 and _is_used_after(facts, values[1], values[0]):
            yield part


def _is_used_after(facts: ProgramFacts, value: int, earlier: int) -> bool:
    """Whether what a value is first used with is something that another one was used for.

    Within one round of the loops around them: in the next all are used after all. Two scalars that
    weigh two things, which are then added, are used side by side.
    """
    own = {value}
    for operation in facts.after(value, PRODUCTS):
        others = {*operation.operands} & facts.from_inputs - own
        if others:
            return not facts.reached([earlier], operation.number - 1).isdisjoint(others)
        own.update(operation.results)
    return False


def name_gates(facts: ProgramFacts, names: ClassNames) -> None:
    """Names the two of which one weight makes neurons, and the gates of these."""
    beside: dict[DimensionClass, list[set[str]]] = collections.defaultdict(list)
    for weight in facts.call.weights:
        roles = {names.roles[part] for part in weight.classes if part in names.roles}
        for part in names.without_role({*weight.classes}):
            beside[part].append(roles)
    apart = _taken_apart(facts)
    for part in sorted(apart & beside.keys()):
        in_weights = beside[part]
        if part in facts.together or any(part in each for each in facts.together.values()):
            continue
        if part.size == 2 and all(named & _GATED for named in in_weights):
            names.give(part, "gate_up", "one weight makes neurons and their gates")


def name_modulations(facts: ProgramFacts, names: ClassNames) -> None:
    """Names the scales and shifts of the embedding that one weight makes, and of what.

    So DiT's adaLN does, of its conditioning (https://arxiv.org/abs/2212.09748).
    """
    embedding = names.with_role("embedding")
    apart = _taken_apart(facts)
    made_of = collections.Counter[DimensionClass]()
    for each in facts.with_weights:
        several = names.without_role(each.made - embedding)
        if len(each.made) != 2 or len(several) != 1 or not each.made & embedding:
            continue
        if each.contracted & embedding:
            continue
        if several[0] in apart and facts.is_of_a_weight(each):
            reason = "one weight makes so many scales and shifts of the embedding"
            names.give(several[0], "modulations", reason)
            made_of.update(each.contracted & facts.in_weights.keys())
    _tell_numbers_apart(facts, names)
    for part, count in made_of.items():
        if count > 1:
            names.give(part, "conditioning", "several weights make scales and shifts of it")


def _tell_numbers_apart(facts: ProgramFacts, names: ClassNames) -> None:
    """Leaves the name to scales and shifts of one number: blocks have more than the end has."""
    elements: collections.Counter[int] = collections.Counter()
    modulations = names.with_role("modulations")
    for part in modulations:
        elements[part.size] += sum(math.prod(each.shape) for each in facts.in_weights[part])
    for part in modulations:
        if part.size != max(elements, key=lambda size: (elements[size], size)):
            doubt = "one weight makes so many scales and shifts of the embedding, and others others"
            names.take_back(part, doubt)


def _taken_apart(facts: ProgramFacts) -> set[DimensionClass]:
    """Classes whose elements are taken one by one, or that a dimension is cut into the parts of."""
    parts = (part for each in facts.call.weights for parts in each.parts for part in parts[:-1])
    return {*parts, *(part for part, *_ in _elements(facts))}


def _elements(facts: ProgramFacts) -> Iterator[tuple[DimensionClass, int, Operation]]:
    """The classes that slices take an element of, each with its place, and the slice."""
    for operation, before, _, (start, end, _) in facts.call.dimensions.cuts:
        if end - start == 1 and len(before) == 1:
            yield before[0], start, operation
