"""What weights are stacked along: layers, and the parts of a fused projection."""

import collections
from collections.abc import Iterator

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import PRODUCTS, ProgramFacts
from penzai_shard.path_folding import folding_key

_ATTENTION = frozenset({"heads", "head_groups", "query_heads", "projection"})
_FUSED = {3: "qkv", 2: "kv"}
# A stack of layers is one of several weights.
_FEWEST_STACKED = 2


def name_layers(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what loops take from weights one by one, and what is taken from several by hand."""
    for part in facts.call.dimensions.stepped & facts.in_weights.keys() - facts.of_inputs.keys():
        names.give(part, "layers", "a loop takes its elements one by one")
    by_length: dict[int, list[DimensionClass]] = collections.defaultdict(list)
    for part in _taken_one_after_another(facts):
        by_length[part.size].append(part)
    for parts in by_length.values():
        stacked = {
            folding_key(facts.call.weights[number].path)
            for part in parts
            for number in facts.in_weights[part]
        }
        if len(stacked) >= _FEWEST_STACKED:
            for part in names.without_role(parts):
                names.give(part, "layers", "its elements are used one after the other")


def _taken_one_after_another(facts: ProgramFacts) -> Iterator[DimensionClass]:
    """The first dimensions of weights all of whose elements are taken, each for the next layer."""
    taken: dict[DimensionClass, dict[int, int]] = collections.defaultdict(dict)
    first = {
        weight.parts[0][0]
        for weight in facts.call.weights
        if weight.parts and len(weight.parts[0]) == 1
    }
    for operation in facts.program.operations:
        if not operation.cuts or operation.operands[0] in facts.from_inputs:
            continue
        parts = facts.call.dimensions.of_value(operation.operands[0])
        for dimension, (start, end, _) in zip(parts, operation.cuts, strict=True):
            if end - start == 1 and len(dimension) == 1 and dimension[0] in first:
                taken[dimension[0]].setdefault(start, operation.results[0])
    for part, values in taken.items():
        if len(values) == part.size > 1 and _is_used_after(facts, values[1], values[0]):
            yield part


def _is_used_after(facts: ProgramFacts, value: int, earlier: int) -> bool:
    """Whether a value is multiplied with something that another one was used for."""
    reached = facts.reached([earlier])
    for operation in facts.after(value, PRODUCTS):
        if operation.kind in PRODUCTS:
            return not reached.isdisjoint(operation.operands)
    return False


def name_fused_parts(facts: ProgramFacts, names: ClassNames) -> None:
    """Names the number of projections that one weight does, beside or within their heads."""
    beside: dict[DimensionClass, list[set[str]]] = collections.defaultdict(list)
    for weight in facts.call.weights:
        parts = [part for dimension in weight.parts or () for part in dimension]
        for part in names.without_role({*parts}):
            beside[part].append({names.roles[p] for p in parts if p in names.roles})
    apart = _taken_apart(facts)
    for part in sorted(apart & beside.keys(), key=lambda part: part.number):
        in_weights = beside[part]
        if part in facts.together or any(part in each for each in facts.together.values()):
            continue
        if part.size in _FUSED and all(named & _ATTENTION for named in in_weights):
            reason = "one weight does so many projections for attention"
            names.give(part, _FUSED[part.size], reason)
        elif part.size == 2 and all("neurons" in named for named in in_weights):
            names.give(part, "gate_up", "one weight makes neurons and their gates")


def _taken_apart(facts: ProgramFacts) -> set[DimensionClass]:
    """Classes whose elements are taken one by one, or that a dimension is cut into the parts of."""
    apart = {
        part
        for weight in facts.call.weights
        for dimension in weight.parts or ()
        for part in dimension[:-1]
    }
    for operation in facts.program.operations:
        for dimension, (start, end, _) in zip(
            facts.call.dimensions.of_value(operation.operands[0]) if operation.cuts else (),
            operation.cuts,
            strict=True,
        ):
            if end - start == 1 and len(dimension) == 1:
                apart.add(dimension[0])
    return apart
