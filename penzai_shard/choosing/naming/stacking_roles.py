"""What weights are stacked along: layers, and the parts of a fused projection."""

import collections

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts

_ATTENTION = frozenset({"heads", "head_groups", "query_heads", "projection"})
_FUSED = {3: "qkv", 2: "kv"}
# A stack of layers is one of several weights.
_FEWEST_STACKED = 2


def name_layers(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what loops take from weights one by one, and what is taken from several by hand."""
    for part in facts.call.dimensions.stepped & facts.in_weights.keys() - facts.of_inputs.keys():
        names.give(part, "layers", "a loop takes its elements one by one")
    by_length: dict[int, set[DimensionClass]] = collections.defaultdict(set)
    for part in _taken_one_by_one(facts):
        by_length[part.size].add(part)
    for parts in by_length.values():
        if len({number for part in parts for number in facts.in_weights[part]}) < _FEWEST_STACKED:
            continue
        for part in names.without_role(parts):
            names.give(part, "layers", "its elements are taken one by one, and those of others")


def _taken_one_by_one(facts: ProgramFacts) -> set[DimensionClass]:
    """The first dimensions of weights all of whose elements slices take one by one."""
    taken: dict[DimensionClass, set[int]] = collections.defaultdict(set)
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
                taken[dimension[0]].add(start)
    return {part for part, starts in taken.items() if len(starts) == part.size > 1}


def name_fused_parts(facts: ProgramFacts, names: ClassNames) -> None:
    """Names the number of projections that one weight does, beside or within their heads."""
    beside: dict[DimensionClass, list[set[str]]] = collections.defaultdict(list)
    for weight in facts.call.weights:
        parts = [part for dimension in weight.parts or () for part in dimension]
        for part in names.without_role({*parts}):
            beside[part].append({names.roles[p] for p in parts if p in names.roles})
    for part in sorted(beside, key=lambda part: part.number):
        in_weights = beside[part]
        if part in facts.together or any(part in each for each in facts.together.values()):
            continue
        if part.size in _FUSED and all(named & _ATTENTION for named in in_weights):
            reason = "one weight does so many projections for attention"
            names.give(part, _FUSED[part.size], reason)
        elif part.size == 2 and all("neurons" in named for named in in_weights):
            names.give(part, "gate_up", "one weight makes neurons and their gates")
