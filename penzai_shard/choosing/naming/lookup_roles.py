"""Vocabularies and positions: what is looked up, and what logits have last."""

from collections.abc import Sequence, Set

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.path_words import WORDS_OF_PLACES, words_of
from penzai_shard.choosing.naming.program_facts import Classes, Lookup, ProgramFacts
from penzai_shard.library_apis.shardy_records import PRODUCTS
from penzai_shard.sharding_propagation import FLOW, walk

_TYPES = frozenset({"type", "types", "segment", "segments"})
_PUT_TOGETHER = frozenset({"stablehlo.add", "stablehlo.concatenate"})
# What is done to an index before a lookup, and leaves it the number that it was.
_KEEPS_NUMBERS = frozenset(
    {
        FLOW,
        "stablehlo.add",
        "stablehlo.broadcast_in_dim",
        "stablehlo.convert",
        "stablehlo.reshape",
        "stablehlo.select",
        "stablehlo.transpose",
    }
)
_LOOKED_UP = "rows are looked up along it by an input"
_AS_OTHERS = "as are others, which need not mean the same"


def name_vocabulary(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what inputs are looked up in, and the last dimension of logits that is as long.

    Where inputs are looked up in several tables, only that is a vocabulary which there are logits
    for, or which alone is not said to be of types of tokens or of positions by its path: the others
    may be anything. What does not begin a residual stream, such as a label that conditions it, is
    no vocabulary; nor is what is of matrices, such as heads of tasks; nor is one without logits of
    the same stream if its rows are added or joined to what products make of other inputs, such as
    time steps to states.
    """
    tables, targets = _looked_up(facts)
    tables = {part: index for part, index in tables.items() if _begins_a_stream(facts, names, part)}
    logits = {part for index in tables.values() for part in _logits(facts, facts.classes(index))}
    results = {*targets, *logits}
    tied = [part for part in tables if part in results]
    long = [part for part in tables if part.size in {each.size for each in results}]
    of_logits = {part for each in results for part in _beside(facts, each)}
    others = {part for part in tables if _is_added_to_others(facts, part)}
    if len(long) > 1 or others.intersection(long) or names.with_role("embedding"):
        long = [part for part in long if of_logits & _beside(facts, part)]
    plain = [part for part in tables if not _word_of(facts, part, _TYPES | WORDS_OF_PLACES)]
    plain = [part for part in plain if part not in others]
    chosen = tied or next((found for found in (long, plain) if len(found) == 1), [])
    for part in chosen:
        names.give(part, "vocabulary", _LOOKED_UP)
    sizes = {part.size for part in chosen}
    for part in sorted(results):
        alike = [other for other in results if other.size == part.size]
        if part in targets and part.size in sizes:
            alike = [part]
        if part.size in sizes and len(alike) == 1:
            of = "inputs are looked up along it" if part in targets else "results have it last"
            names.give(part, "vocabulary", f"{of}, and it is as long as the vocabulary")
    for part in sorted(tables.keys() - names.roles.keys(), key=lambda part: part.number):
        for other in (each for each in chosen if each.size == part.size):
            if _numbers_behind(facts, tables[part]) & _numbers_behind(facts, tables[other]):
                reason = f"{_LOOKED_UP}, by which rows of the vocabulary are looked up too"
                names.give(part, "vocabulary", reason)
    for part in tables:
        word = _word_of(facts, part, _TYPES)
        if word and _beside(facts, part) & names.with_role("embedding"):
            names.give(part, "token_types", f"{_LOOKED_UP}, and the path says {word!r}")
        is_added = part not in names.roles and part in others
        why = "to be joined or added to what products make of others" if is_added else _AS_OTHERS
        names.doubts[part] = f"{_LOOKED_UP}, {why}"


def _word_of(facts: ProgramFacts, part: DimensionClass, known: Set[str]) -> str:
    """The word in the path of a table that says what it is a table of; "" if none does."""
    words = (word for each in facts.in_weights[part] for word in words_of(each.path))
    return next((word for word in words if word in known), "")


def _is_added_to_others(facts: ProgramFacts, rows: DimensionClass) -> bool:
    """Whether rows of a table are added, or joined, to what products make of something else."""
    for lookup in facts.lookups:
        if lookup.rows != rows:
            continue
        row = lookup.operation.results[0]
        made = facts.reached([row])
        for added in facts.after(row, PRODUCTS):
            if added.kind not in _PUT_TOGETHER:
                continue
            others = set(added.operands) & facts.from_inputs - made
            if any(each.has_weight for value in others for each in facts.nearest_products(value)):
                return True
    return False


def _numbers_behind(facts: ProgramFacts, index: int) -> Set[int]:
    """The inputs whose numbers an index is, but for what makes negative ones count from the end."""
    makers = facts.program.makers

    def sources(value: int) -> Sequence[int]:
        maker = makers.get(value)
        if maker is None or maker.kind not in _KEEPS_NUMBERS:
            return ()
        given = [each for each in maker.operands if each in facts.from_inputs]
        return () if maker.kind == "stablehlo.add" and len(given) > 1 else given

    return {each for each in walk([index], sources) if each not in makers}


def _beside(facts: ProgramFacts, part: DimensionClass) -> Classes:
    """What the weights that have a class have beside it."""
    return frozenset(p for each in facts.in_weights[part] for p in each.classes) - {part}


def _begins_a_stream(facts: ProgramFacts, names: ClassNames, part: DimensionClass) -> bool:
    """Whether rows of a table are of the embedding, or a product makes it of them."""
    embedding, beside = names.with_role("embedding"), _beside(facts, part)
    return (
        not embedding
        or not beside.isdisjoint(embedding)
        or any(
            each.contracted & beside and each.made and each.made <= embedding
            for each in facts.with_weights
        )
    )


def _looked_up(
    facts: ProgramFacts,
) -> tuple[dict[DimensionClass, int], dict[DimensionClass, int]]:
    """What inputs are looked up in: in weights, and in what is computed, as by a loss.

    With each the value of an index.
    """
    tables: dict[DimensionClass, int] = {}
    targets: dict[DimensionClass, int] = {}
    for lookup in facts.lookups:
        if _is_given(facts, lookup.index) and lookup.rows in facts.in_weights:
            is_table = lookup.operation.operands[0] not in facts.from_inputs
            if is_table and _is_of_matrices(facts, lookup):
                continue
            (tables if is_table else targets)[lookup.rows] = lookup.index
    for product in facts.with_weights:
        # An index may be written as a row of zeros and a one.
        by_input = product.data in facts.from_inputs and product.data not in facts.from_weights
        if by_input and _is_comparison(facts, product.data):
            for part in product.contracted & facts.in_weights.keys():
                tables[part] = product.data
    return tables, targets


def _is_of_matrices(facts: ProgramFacts, lookup: Lookup) -> bool:
    """Whether an index looks up a matrix: a product contracts one dimension, and has another."""
    row = lookup.operation.results[0]
    return any(
        each.contracted & lookup.others and free & lookup.others
        for each in facts.products
        for operand, free in zip(each.operation.operands, each.free, strict=True)
        if row in facts.moved_from(operand)
    )


def _is_given(facts: ProgramFacts, index: int) -> bool:
    """Whether an index is an input, or begins as one in a loop that makes the next."""
    given = facts.from_inputs - facts.from_weights
    if index in given or index not in facts.from_inputs:
        return index in given
    makers = facts.program.makers
    before = facts.before(index, facts.by_result)
    handed_on = (makers[value] for value in before if value in makers)
    return any(each.kind == FLOW and not given.isdisjoint(each.operands) for each in handed_on)


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


def name_outputs(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what products make of the embedding for one result alone, such as classes.

    What is as long as a table that inputs are looked up in may be a vocabulary.
    """
    embedding = names.with_role("embedding")
    made = {p for each in facts.with_weights if each.contracted & embedding for p in each.made}
    of_inputs = {part for each in facts.call.inputs for part in each.classes}
    last = {
        parts[-1][0]
        for parts in map(facts.call.dimensions.of_value, facts.program.results)
        if parts and len(parts[-1]) == 1 and not of_inputs.isdisjoint(p for d in parts for p in d)
    }
    looked_up = (part for tables in _looked_up(facts) for part in tables)
    lengths = {p.size for p in looked_up if names.roles.get(p, "vocabulary") == "vocabulary"}
    pooled = _pooled(facts, names, last)
    if pooled is not None:
        reason = "a product makes it of the embedding without positions, and others results of it"
        names.give(pooled, "pooled", reason)
        made |= {p for each in facts.with_weights if pooled in each.contracted for p in each.made}
    found = names.without_role(last & made & facts.in_weights.keys() - facts.of_inputs.keys())
    if len(found) == 1 and found[0].size not in lengths:
        names.give(found[0], "outputs", "a product makes it of the embedding, and results have it")


def _pooled(
    facts: ProgramFacts, names: ClassNames, last: Set[DimensionClass]
) -> DimensionClass | None:
    """What a product makes of the embedding without positions, for others to make results of.

    So BERT's pooler does.
    """
    embedding = names.with_role("embedding")
    reads = [each for each in facts.with_weights if each.contracted & embedding]
    known = {part for each in reads for part in facts.classes(each.data) & facts.of_inputs.keys()}
    made = {
        part
        for each in reads
        if not known <= facts.classes(each.data) and len(each.made) == 1
        for part in names.without_role(each.made & facts.in_weights.keys())
    }
    read = {part: [e for e in facts.with_weights if part in e.contracted] for part in made}
    found = [part for part, by in read.items() if by and all(each.made <= last for each in by)]
    return found[0] if len(found) == 1 else None


def name_positions(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what is looked up, or cut, by places that are counted and not given."""
    embedding = names.with_role("embedding", "rank")
    for lookup in facts.lookups:
        index_rank = len(facts.program.values[lookup.index].shape)
        if (
            lookup.rows in facts.in_weights
            and lookup.others & embedding
            and lookup.operation.operands[0] not in facts.from_inputs
            and lookup.index not in facts.from_weights
            and index_rank <= 3
            and "stablehlo.iota" in facts.kinds_before(lookup.index)
        ):
            names.give(lookup.rows, "positions", "rows are looked up along it by counted places")
    for operation, before, after, _ in facts.call.dimensions.cuts:
        is_cut = len(before) == len(after) == 1 and before != after
        if not is_cut or operation.operands[0] in facts.from_inputs:
            continue
        if after[0] in facts.of_inputs and before[0] in facts.in_weights:
            reason = "as many of its elements are taken as an input is long"
            names.give(before[0], "positions", reason)
    _tell_crossing_apart(facts, names)


def _tell_crossing_apart(facts: ProgramFacts, names: ClassNames) -> None:
    """Takes the name from positions that one value has beside others, as frames beside places."""
    positions = names.with_role("positions")
    if len(positions) < 2:
        return
    values = {value for each in facts.program.operations for value in each.results}
    # Rows and columns that all weights have together, as of patches, are one axis.
    before = {second: first for first, parts in facts.together.items() for second in parts}

    def slowest(part: DimensionClass) -> DimensionClass:
        while before.get(part) in positions:
            part = before[part]
        return part

    crossing = {
        part
        for classes in {facts.classes(value) for value in values}
        if len(set(map(slowest, classes & positions))) > 1
        for part in classes & positions
    }
    for part in crossing:
        names.take_back(part, "it is one of several positions that some values have at once")
