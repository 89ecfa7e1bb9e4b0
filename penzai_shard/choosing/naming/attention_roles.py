"""Heads and projections: what attention contracts, and what it does side by side."""

import dataclasses
from collections.abc import Iterator

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import Classes, Product, ProgramFacts, parts_of

_PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.while"})
_SOFTMAX = frozenset({"stablehlo.exponential", "stablehlo.logistic"})


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The products of one attention.

    Attributes:
        heads: What it does side by side, of what weights have.
        contracted: What queries and keys are contracted over.
        values: What its results have beside that.
    """

    heads: Classes
    contracted: Classes
    values: Classes


def name_attention(facts: ProgramFacts, names: ClassNames) -> None:
    """Names heads and projections by the products of attention.

    Queries times keys is a product of two values that both depend on the inputs, which a softmax
    is taken of; what comes of that is multiplied with the values.
    """
    for attention in _attentions(facts, names):
        for part in attention.contracted:
            reason = "queries and keys are contracted over it in attention"
            names.give(part, "projection", reason)
        for part in attention.values:
            reason = "the results of attention have it beside the heads, as its values have"
            names.give(part, "projection", reason)
        _name_heads(facts, names, attention)


def _attentions(facts: ProgramFacts, names: ClassNames) -> Iterator[_Attention]:
    weighted = facts.in_weights.keys() - facts.of_inputs.keys()
    weighted -= names.with_role("embedding") | names.with_role("layers")
    by_operation = {each.operation.number: each for each in facts.among_data}
    for scores in facts.among_data:
        contracted = scores.contracted & weighted
        beside = (scores.batch | scores.free[0] | scores.free[1]) & weighted
        if not contracted or not (scores.batch or beside):
            continue
        exponential = _softmax_of(facts, scores)
        if exponential is None:
            continue
        values: set[DimensionClass] = set()
        for operation in facts.after(exponential, _PRODUCTS):
            if product := by_operation.get(operation.number):
                free = (product.free[0] | product.free[1]) & weighted
                values |= free - beside - contracted
        yield _Attention(frozenset(beside), contracted, frozenset(values))


def _softmax_of(facts: ProgramFacts, scores: Product) -> int | None:
    """What the exponential of a product is, if one is taken of it."""
    for operation in facts.after(scores.operation.results[0], _PRODUCTS | _SOFTMAX):
        if operation.kind in _SOFTMAX:
            return operation.results[0]
    return None


def _name_heads(facts: ProgramFacts, names: ClassNames, attention: _Attention) -> None:
    """Names what attention does side by side, by which of the weights have it.

    In grouped-query attention the weights of keys and values have the groups alone.
    """
    heads = sorted(attention.heads, key=lambda part: part.number)
    projections = attention.contracted | attention.values
    projecting = [
        frozenset(parts_of(weight))
        for weight in facts.call.weights
        if projections.intersection(parts_of(weight))
    ]
    if len(heads) == 1:
        shared = any(heads[0] not in parts and len(parts) > 1 for parts in projecting)
        if shared:
            reason = "attention is done side by side along it, with keys and values that lack it"
            names.give(heads[0], "query_heads", reason)
        else:
            names.give(heads[0], "heads", "attention is done side by side along it")
    elif len(heads) == 2:
        lacking = [
            [each for each in heads if each not in parts]
            for parts in projecting
            if parts.intersection(heads)
        ]
        only = {each[0] for each in lacking if len(each) == 1}
        if len(only) == 1:
            (query,) = only
            (group,) = {*heads} - only
            reason = "attention is done side by side along it, for keys and values too"
            names.give(group, "head_groups", reason)
            reason = "queries have it in each group of heads, and keys and values lack it"
            names.give(query, "query_heads", reason)
    for part in names.without_role(heads):
        names.doubts[part] = (
            "attention is done side by side along it and along others, and no weight shows which "
            "of them keys and values have"
        )
