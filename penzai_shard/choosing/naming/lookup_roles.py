"""Vocabularies and positions: what is looked up, and what logits have last."""

from collections.abc import Set

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.path_words import words_of
from penzai_shard.choosing.naming.program_facts import ProgramFacts

_TYPES = frozenset({"type", "types", "segment", "segments"})
_LOOKED_UP = "rows are looked up along it by an input"


def name_vocabulary(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what inputs are looked up in, and the last dimension of logits that is as long.

    Where inputs are looked up in several tables, only that is a vocabulary which there are logits
    for: the others may be anything.
    """
    tables, targets = _looked_up(facts)
    logits = _logits(facts, {p for index in tables.values() for p in facts.classes(index)})
    results = {*targets, *logits}
    tied = [part for part in tables if part in results]
    long = [part for part in tables if part.size in {each.size for each in results}]
    plain = [part for part in tables if not _is_of_types(facts, part)]
    chosen = tied or next((found for found in (long, plain) if len(found) == 1), [])
    for part in chosen:
        names.give(part, "vocabulary", _LOOKED_UP)
    sizes = {part.size for part in chosen}
    for part in sorted(results, key=lambda part: part.number):
        alike = [other for other in results if other.size == part.size]
        if part in targets and part.size in sizes:
            alike = [part]
        if part.size in sizes and len(alike) == 1:
            of = "inputs are looked up along it" if part in targets else "results have it last"
            names.give(part, "vocabulary", f"{of}, and it is as long as the vocabulary")
    for part in tables:
        names.doubts[part] = f"{_LOOKED_UP}, as are others, which need not mean the same"


def _is_of_types(facts: ProgramFacts, part: DimensionClass) -> bool:
    """Whether a table is one of types of tokens by its path, and so not one of tokens."""
    paths = (facts.call.weights[number].path for number in facts.in_weights[part])
    return any(_TYPES.intersection(words_of(path)) for path in paths)


def _looked_up(
    facts: ProgramFacts,
) -> tuple[dict[DimensionClass, int], dict[DimensionClass, int]]:
    """What inputs are looked up in: in weights, and in what is computed, as by a loss.

    With each the value of an index.
    """
    tables: dict[DimensionClass, int] = {}
    targets: dict[DimensionClass, int] = {}
    for lookup in facts.lookups:
        by_input = lookup.index in facts.from_inputs and lookup.index not in facts.from_weights
        if by_input and lookup.rows in facts.in_weights:
            is_table = lookup.operation.operands[0] not in facts.from_inputs
            (tables if is_table else targets)[lookup.rows] = lookup.index
    for product in facts.with_weights:
        # An index may be written as a row of zeros and a one.
        if product.data not in facts.from_weights and _is_comparison(facts, product.data):
            for part in product.contracted & facts.in_weights.keys():
                tables[part] = product.data
    return tables, targets


def _is_comparison(facts: ProgramFacts, value: int) -> bool:
    return any(each.kind == "stablehlo.compare" for each in facts.linear_origins(value))


def _logits(facts: ProgramFacts, index: Set[DimensionClass]) -> set[DimensionClass]:
    """The last dimensions of results that have all that is looked up before."""
    found = set()
    inputs = {part for part in index if part in facts.of_inputs}
    for result in facts.program.results:
        parts = facts.call.dimensions.of_value(result)
        before = {p for each in parts[:-1] for p in each}
        is_real = facts.program.values[result].dtype.startswith(("f", "bf"))
        if before and inputs <= before and is_real and len(parts[-1]) == 1:
            found.add(parts[-1][0])
    return found & facts.in_weights.keys()


def name_positions(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what is looked up, or cut, by places that are counted and not given."""
    embedding = names.with_role("embedding")
    for lookup in facts.lookups:
        index_rank = len(facts.program.values[lookup.index].shape)
        if (
            lookup.rows in facts.in_weights
            and lookup.others & embedding
            and lookup.operation.operands[0] not in facts.from_inputs
            and lookup.index not in facts.from_weights
            and index_rank <= 3
            and _is_counted(facts, lookup.index)
        ):
            names.give(lookup.rows, "positions", "rows are looked up along it by counted places")
    for operation in facts.program.operations:
        if not operation.cuts or operation.operands[0] in facts.from_inputs:
            continue
        before, after = (
            facts.call.dimensions.of_value(value)
            for value in (operation.operands[0], operation.results[0])
        )
        for parts, cut in zip(before, after, strict=True):
            is_cut = len(parts) == len(cut) == 1 and parts != cut
            if is_cut and cut[0] in facts.of_inputs and parts[0] in facts.in_weights:
                reason = "as many of its elements are taken as an input is long"
                names.give(parts[0], "positions", reason)


def _is_counted(facts: ProgramFacts, index: int) -> bool:
    makers = facts.program.makers
    return any(
        value in makers and makers[value].kind == "stablehlo.iota"
        for value in (index, *facts.before(index))
    )
