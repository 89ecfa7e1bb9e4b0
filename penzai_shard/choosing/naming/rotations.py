"""Whether what a product makes is rotated by positions before attention contracts it."""

from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.library_apis.shardy_records import PRODUCTS

_WAVES = frozenset({"stablehlo.cosine", "stablehlo.sine"})
_TIMES = "stablehlo.multiply"


def is_rotated(facts: ProgramFacts, made: int, operand: int) -> bool:
    """Whether a value is multiplied with waves, or with a table, on its way to an operand.

    Args:
        facts: The program.
        made: The value.
        operand: What is computed of it, with no product in between.
    """
    on_the_way = {*facts.before(operand, facts.by_result)}
    of_value = {*facts.made_of(made, PRODUCTS)}
    for value in on_the_way & of_value:
        maker = facts.program.makers.get(value)
        if maker is None or maker.kind != _TIMES:
            continue
        if any(_is_table(facts, each) for each in maker.operands if each not in of_value):
            return True
    return False


def _is_table(facts: ProgramFacts, value: int) -> bool:
    """Whether a value is of cosines and sines, or has been computed before."""
    if not _WAVES.isdisjoint(facts.kinds_before(value, facts.by_result)):
        return True
    *_, first = facts.moved_from(value)
    has_elements = any(length > 1 for length in facts.program.values[first].shape)
    return has_elements and value not in facts.from_inputs and value not in facts.from_weights
