"""Heads and projections: what attention contracts, and what it does side by side."""

import collections
import itertools
from collections.abc import Mapping, Sequence

from penzai_shard.choosing.dimensions import DimensionClass, length_of
from penzai_shard.choosing.naming.attentions import Attention
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import Classes, Product, ProgramFacts
from penzai_shard.choosing.naming.rotations import is_rotated


def name_attention(facts: ProgramFacts, names: ClassNames, attentions: Sequence[Attention]) -> None:
    """Names heads and projections by the products of attention.

    Queries times keys is a product of two values neither of which is a weight, which a softmax is
    taken of; what comes of that is multiplied with the values. Where several such products are
    added, or queries are put together of what several weights make, as in DeepSeek's, they are
    contracted over several axes.
    """
    by_softmax: dict[int, list[Attention]] = collections.defaultdict(list)
    for attention in attentions:
        by_softmax[attention.softmax].append(attention)
    for added in by_softmax.values():
        made = _made_for_queries(facts, added)
        # Scores of the same axis may be added too, as those of places are in DeBERTa.
        contracted = {each.scores.contracted for each in added}
        length = sum(length_of(each) for each in contracted)
        if len(made) > 1 and sum(length_of(each) for each in made) == length:
            _name_parts_of_projections(facts, names, made)
        else:
            for attention in added:
                _name_projection(facts, names, attention)
        for attention in added:
            _name_values(names, attention, 0 if len(made) > 1 else length)
            _name_heads(facts, names, attention)
            _name_positions(facts, names, attention)


def _name_positions(facts: ProgramFacts, names: ClassNames, attention: Attention) -> None:
    """Names what attention sums over, where weights that have it are added to what inputs give.

    Those that are a sequence themselves, as the latents of a Perceiver, are not added to it.
    """
    for part in names.without_role(attention.summed & facts.in_weights.keys()):
        values = [each.value for each in facts.in_weights[part]]
        if any(value is not None and _is_added_to_inputs(facts, value) for value in values):
            reason = "attention sums over it, and weights that have it are added to its inputs"
            names.give(part, "positions", reason)
        else:
            names.doubts[part] = "attention sums over it, and no weight is added along it"


def _is_added_to_inputs(facts: ProgramFacts, weight: int) -> bool:
    """Whether a weight is added to something that is not made of it."""
    made = facts.reached([weight])
    added = (each for each in facts.program.operations if each.kind == "stablehlo.add")
    return any(
        weight in facts.moved_from(first) and second in facts.from_inputs and second not in made
        for each in added
        for first, second in itertools.permutations(each.operands)
    )


def _beside_heads(attention: Attention, product: Product) -> Classes:
    """What a product makes of a weight for each head."""
    return product.made - attention.scores.of_result


def _made_for_queries(
    facts: ProgramFacts, added: Sequence[Attention]
) -> Mapping[Classes, tuple[int, int]]:
    """What different weights make for each head of the queries, with its value and the queries."""
    found: dict[Classes, tuple[int, int]] = {}
    for attention in added:
        queries = attention.taken.get("queries", -1)
        for product in facts.nearest_products(queries):
            made = _beside_heads(attention, product)
            if made and all(made.isdisjoint(other) for other in found):
                found[made] = product.operation.results[0], queries
    return found


def _name_projection(facts: ProgramFacts, names: ClassNames, attention: Attention) -> None:
    """Names what queries and keys are contracted over, however its elements are moved before."""
    for part in attention.contracted:
        names.give(part, "projection", "queries and keys are contracted over it in attention")
    length = length_of(attention.scores.contracted)
    for purpose in ("queries", "keys"):
        products = facts.nearest_products(attention.taken.get(purpose, -1))
        made = {_beside_heads(attention, product) for product in products}
        if [length_of(each) for each in made] == [length]:
            for part in facts.in_weights.keys() & made.pop():
                reason = f"{purpose} have it for each head, and attention contracts over all of it"
                names.give(part, "projection", reason)
    for whole in attention.contracted & facts.runs.keys():
        for value, cut in (each for found in facts.runs[whole].values() for each in found):
            if len(cut) == 1 and is_rotated(facts, value, attention.taken.get("queries", -1)):
                reason = "it is the part of what attention contracts that is rotated by positions"
                names.give(cut[0], "rope_projection", reason)


def _name_parts_of_projections(
    facts: ProgramFacts,
    names: ClassNames,
    made: Mapping[Classes, tuple[int, int]],
) -> None:
    """Names the axes that queries and keys are contracted over, by which of them are rotated."""
    rotated = {part: is_rotated(facts, *where) for part, where in made.items()}
    for parts, turned in rotated.items():
        for part in parts:
            if len(set(rotated.values())) < 2 or len(parts) > 1:
                names.doubts[part] = "attention contracts over it and over others"
            elif turned:
                reason = "attention contracts over it and over others; it is rotated by positions"
                names.give(part, "rope_projection", reason)
            else:
                reason = "attention contracts over it and over others, which are rotated"
                names.give(part, "nope_projection", reason)


def _name_values(names: ClassNames, attention: Attention, length: int) -> None:
    """Names what the results of attention have beside the heads, as its values have it.

    It is as long as what queries and keys are contracted over, or an axis of its own.
    """
    is_as_long = length_of(attention.values) == length
    for part in attention.values:
        reason = "the results of attention have it beside the heads, as its values have"
        if is_as_long:
            names.give(part, "projection", reason)
        elif len(attention.values) == 1:
            names.give(part, "value_projection", f"{reason}, and it is not as long as its keys")
        else:
            names.doubts[part] = "values of attention have it, which is not as long as its keys"


def _name_heads(facts: ProgramFacts, names: ClassNames, attention: Attention) -> None:
    """Names what attention does side by side, by what keys and values have of it.

    In grouped-query attention they have the groups alone.
    """
    heads = attention.heads
    lacking = {part for part in heads if _keys_lack(facts, attention, part)}
    if len(heads) == 1 and lacking:
        reason = "attention is done side by side along it, with keys and values that lack it"
        names.give(heads[0], "query_heads", reason)
    elif len(heads) == 1:
        names.give(heads[0], "heads", "attention is done side by side along it")
    elif len(heads) == 2 and len(lacking) == 1:
        for part in heads:
            if part in lacking:
                reason = "queries have it in each group of heads, and keys and values lack it"
                names.give(part, "query_heads", reason)
            else:
                reason = "attention is done side by side along it, for keys and values too"
                names.give(part, "head_groups", reason)
    for part in names.without_role(heads):
        names.doubts[part] = (
            "attention is done side by side along it and along others, and nothing shows which of "
            "them keys and values have"
        )


def _keys_lack(facts: ProgramFacts, attention: Attention, head: DimensionClass) -> bool:
    """Whether keys get one of the heads by being repeated, or do not have it at all.

    Where nothing shows what keys have, values do.
    """
    for operand in attention.scores.operation.operands:
        # Rows of a table are no keys, though queries are multiplied with them as with keys.
        is_made = operand not in facts.from_weights or facts.nearest_products(operand)
        if is_made and any(head not in facts.classes(v) for v in facts.moved_from(operand)):
            return True
    projecting = attention.contracted or attention.values
    projections = {
        value
        for each in facts.with_weights
        if each.made & projecting
        for value in facts.before(each.weight_operand)
    }
    for weight in facts.call.weights:
        parts = frozenset(weight.classes)
        others = parts.intersection(attention.heads) or len(attention.heads) == 1
        if weight.value in projections and head not in parts and others and projecting & parts:
            return True
    return False
