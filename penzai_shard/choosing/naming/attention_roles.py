"""Heads and projections: what attention contracts, and what it does side by side."""

import dataclasses
import math
from collections.abc import Iterator

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import (
    DOT,
    Classes,
    Product,
    ProgramFacts,
    parts_of,
)

_PRODUCTS = frozenset({DOT, "stablehlo.while"})
_SOFTMAX = frozenset({"stablehlo.exponential"})
_SUM = "stablehlo.reduce"


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The products of one attention.

    Attributes:
        scores: The product of queries and keys.
        heads: What it does side by side, of what weights have.
        contracted: What queries and keys are contracted over, of what weights have.
        values: What its results have beside that.
        summed: What its results are sums over.
    """

    scores: Product
    heads: tuple[DimensionClass, ...]
    contracted: Classes
    values: Classes
    summed: Classes


def name_attention(facts: ProgramFacts, names: ClassNames) -> None:
    """Names heads and projections by the products of attention.

    Queries times keys is a product of two values neither of which is a weight, which a softmax is
    taken of; what comes of that is multiplied with the values.
    """
    for attention in _attentions(facts, names):
        for part in attention.contracted:
            reason = "queries and keys are contracted over it in attention"
            names.give(part, "projection", reason)
        length = math.prod(part.size for part in attention.scores.contracted)
        is_as_long = math.prod(part.size for part in attention.values) == length
        for part in attention.values:
            if is_as_long:
                reason = "the results of attention have it beside the heads, as its values have"
                names.give(part, "projection", reason)
            else:
                names.doubts[part] = "values of attention have it, which is not as long as its keys"
        _name_heads(facts, names, attention)
        for part in attention.summed & facts.in_weights.keys():
            names.give(part, "positions", "attention sums over it, and weights have it too")


def _attentions(facts: ProgramFacts, names: ClassNames) -> Iterator[_Attention]:
    weighted = facts.in_weights.keys() - facts.of_inputs.keys()
    weighted -= names.with_role("embedding") | names.with_role("layers")
    by_operation = {each.operation.number: each for each in facts.products}
    for scores in facts.products:
        contracted = scores.contracted & weighted
        if not scores.contracted or facts.is_of_a_weight(scores):
            continue
        exponential = _softmax_of(facts, scores)
        if exponential is None:
            continue
        beside = scores.batch | scores.free[0] | scores.free[1]
        shared = _shared_out(facts, exponential) or scores.free[0] | scores.free[1]
        values: set[DimensionClass] = set()
        summed: set[DimensionClass] = set()
        for operation in facts.after(exponential, _PRODUCTS):
            product = by_operation.get(operation.number)
            if product is not None and not facts.is_of_a_weight(product):
                values |= (product.free[0] | product.free[1]) & weighted - beside - contracted
                summed |= product.contracted & shared
        projecting = contracted | values
        if not summed or not projecting:
            continue
        of_projections = {
            part
            for weight in facts.call.weights
            if projecting.intersection(parts_of(weight))
            for part in parts_of(weight)
        }
        heads = sorted(beside & weighted & of_projections - summed, key=lambda part: part.number)
        yield _Attention(scores, tuple(heads), contracted, frozenset(values), frozenset(summed))


def _softmax_of(facts: ProgramFacts, scores: Product) -> int | None:
    """What the exponential of a product is, if one is taken of it."""
    for operation in facts.after(scores.operation.results[0], _PRODUCTS | _SOFTMAX):
        if operation.kind in _SOFTMAX:
            return operation.results[0]
    return None


def _shared_out(facts: ProgramFacts, exponential: int) -> Classes:
    """What a softmax shares out among: what the exponential is summed over, to be divided by it.

    The gradient of an attention sums over heads too, where several queries have one key.
    """
    found: set[DimensionClass] = set()
    for operation in facts.after(exponential, _PRODUCTS | {_SUM}):
        summed, rule = operation.operands[0], operation.rule
        if operation.kind != _SUM or rule is None or exponential not in facts.moved_from(summed):
            continue
        dimensions = facts.call.dimensions.of_value(summed)
        for parts, factors in zip(dimensions, rule.operands[0], strict=True):
            if rule.reduced.intersection(factors):
                found.update(parts)
    return frozenset(found)


def _name_heads(facts: ProgramFacts, names: ClassNames, attention: _Attention) -> None:
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


def _keys_lack(facts: ProgramFacts, attention: _Attention, head: DimensionClass) -> bool:
    """Whether keys or values get one of the heads by being repeated, or do not have it at all."""
    for operand in attention.scores.operation.operands:
        if any(head not in facts.classes(value) for value in facts.moved_from(operand)):
            return True
    projecting = attention.contracted | attention.values
    for weight in facts.call.weights:
        parts = frozenset(parts_of(weight))
        others = parts.intersection(attention.heads) or len(attention.heads) == 1
        if projecting & parts and head not in parts and others and len(weight.shape) > 1:
            return True
    return False
