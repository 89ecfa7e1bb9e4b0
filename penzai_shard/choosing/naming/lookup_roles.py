"""Vocabularies and positions: what is looked up, and what logits have last."""

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts

_LOOKED_UP = "rows are looked up along it by an input"


def name_vocabulary(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what inputs are looked up in, and the last dimension of logits that is as long.

    Where inputs are looked up in several tables, only that is a vocabulary which there are logits
    for: the others may be anything.
    """
    tables, targets = _looked_up(facts)
    logits = _logits(facts)
    lengths = {part.size for part in (*targets, *logits)}
    chosen = [part for part in tables if part in logits or part in targets]
    chosen = chosen or [part for part in tables if part.size in lengths]
    if not chosen and len(tables) == 1:
        chosen = list(tables)
    sizes = {part.size for part in chosen}
    if len({*chosen}) > 1 and len(sizes) > 1:
        chosen = []
    for part in chosen:
        names.give(part, "vocabulary", _LOOKED_UP)
    for part in targets:
        if part.size in sizes:
            reason = "inputs are looked up along it, as in the vocabulary, which is as long"
            names.give(part, "vocabulary", reason)
    for part in logits:
        if part.size in sizes:
            reason = "results have it last, and it is as long as the vocabulary"
            names.give(part, "vocabulary", reason)
    for part in tables:
        if part not in names.names:
            names.doubts[part] = f"{_LOOKED_UP}, as are others, which need not mean the same"


def _looked_up(
    facts: ProgramFacts,
) -> tuple[dict[DimensionClass, None], dict[DimensionClass, None]]:
    """What inputs are looked up in: in weights, and in what is computed, as by a loss."""
    tables: dict[DimensionClass, None] = {}
    targets: dict[DimensionClass, None] = {}
    for lookup in facts.lookups:
        by_input = lookup.index in facts.from_inputs and lookup.index not in facts.from_weights
        if by_input and lookup.rows in facts.in_weights:
            is_table = lookup.operation.operands[0] not in facts.from_inputs
            (tables if is_table else targets)[lookup.rows] = None
    for product in facts.with_weights:
        # An index may be written as a row of zeros and a one.
        if product.data not in facts.from_weights and _is_comparison(facts, product.data):
            for part in product.contracted & facts.in_weights.keys():
                tables[part] = None
    return tables, targets


def _is_comparison(facts: ProgramFacts, value: int) -> bool:
    return any(each.kind == "stablehlo.compare" for each in facts.linear_origins(value))


def _logits(facts: ProgramFacts) -> dict[DimensionClass, None]:
    """The last dimensions of results that have a dimension of the inputs before."""
    found: dict[DimensionClass, None] = {}
    for result in facts.program.results:
        parts = facts.call.dimensions.of_value(result)
        of_inputs = {p for each in parts[:-1] for p in each} & facts.of_inputs.keys()
        is_real = facts.program.values[result].dtype.startswith(("f", "bf"))
        if of_inputs and is_real and len(parts[-1]) == 1 and parts[-1][0] in facts.in_weights:
            found[parts[-1][0]] = None
    return found


def name_positions(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what is looked up, or cut, by places that are counted and not given."""
    embedding = {part for part, name in names.names.items() if name == "embedding"}
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
