"""Where a program attends: queries times keys, a softmax of that, and that times the values."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import DOT, Classes, Product, ProgramFacts
from penzai_shard.sharding_propagation.factors import rule_of

_PRODUCTS = frozenset({DOT})
_SOFTMAX = frozenset({"stablehlo.exponential"})
_SUM = "stablehlo.reduce"
_SIDE_BY_SIDE = -1


@dataclasses.dataclass(frozen=True)
class Attention:
    """The products of one attention.

    Attributes:
        scores: The product of queries and keys.
        softmax: The value of the exponential that is taken of it; several products may be added
            before.
        heads: What it does side by side, of what weights have.
        contracted: What queries and keys are contracted over, of what weights have.
        values: What its results have beside that.
        summed: What its results are sums over.
        taken: Its operands: ``queries``, ``keys`` and ``values``, as far as it shows which is
            which.
    """

    scores: Product
    softmax: int
    heads: tuple[DimensionClass, ...]
    contracted: Classes
    values: Classes
    summed: Classes
    taken: Mapping[str, int]


def attentions_of(facts: ProgramFacts, names: ClassNames) -> Iterator[Attention]:
    """The attentions of a program, in its order."""
    weighted = facts.in_weights.keys() - facts.of_inputs.keys()
    weighted -= names.with_role("embedding") | names.with_role("layers") | facts.mapped_over
    # What rows of tables have is compared by attention only where products make it.
    rows = {part for each in facts.lookups for part in each.others}
    weighted -= rows - {p for each in facts.with_weights for p in each.made - each.contracted}
    by_operation = {each.operation.number: each for each in facts.products}
    for scores in facts.products:
        contracted = scores.contracted & weighted
        if not scores.contracted or facts.is_of_a_weight(scores):
            continue
        exponential = _softmax_of(facts, scores)
        if exponential is None:
            continue
        keys = _summed_by_softmax(facts, scores)
        if keys == _SIDE_BY_SIDE:
            # So capsules share out what each of them gives among those that get it.
            continue
        beside = scores.of_result
        shared = scores.free[0] | scores.free[1] if keys is None else scores.free[keys]
        values: set[DimensionClass] = set()
        summed: set[DimensionClass] = set()
        mixes = []
        for operation in facts.after(exponential, _PRODUCTS):
            product = by_operation.get(operation.number)
            if product is not None and not facts.is_of_a_weight(product):
                values |= (product.free[0] | product.free[1]) & weighted - beside - contracted
                summed |= product.contracted & shared
                mixes.append(product)
        projecting = contracted | values
        if not summed or not projecting:
            continue
        of_projections = {
            part
            for weight in facts.call.weights
            if projecting.intersection(weight.classes)
            for part in weight.classes
        }
        heads = sorted(beside & weighted & of_projections - summed)
        mixes.sort(key=lambda product: product.operation.number)
        yield Attention(
            scores,
            exponential,
            tuple(heads),
            contracted,
            frozenset(values),
            frozenset(summed),
            _taken(facts, scores, keys, exponential, mixes),
        )


def _softmax_of(facts: ProgramFacts, scores: Product) -> int | None:
    """What the exponential of a product is, if one is taken of it."""
    for operation in facts.after(scores.operation.results[0], _PRODUCTS | _SOFTMAX):
        if operation.kind in _SOFTMAX:
            return operation.results[0]
    return None


def _taken(
    facts: ProgramFacts,
    scores: Product,
    keys: int | None,
    exponential: int,
    mixes: Sequence[Product],
) -> dict[str, int]:
    """The queries, the keys and the values of an attention."""
    found: dict[str, int] = {}
    if keys is not None:
        found["queries"] = scores.operation.operands[1 - keys]
        found["keys"] = scores.operation.operands[keys]
    of_softmax = {*facts.made_of(exponential, _PRODUCTS)}
    for mix in mixes[:1]:
        others = [each for each in mix.operation.operands if each not in of_softmax]
        if len(others) == 1:
            found["values"] = others[0]
    return found


def _summed_by_softmax(facts: ProgramFacts, scores: Product) -> int | None:
    """Which operand has the keys: that whose places the softmax reduces over.

    None if it does not show, and ``_SIDE_BY_SIDE`` if it reduces over what both operands have.
    """
    rule = scores.operation.rule
    assert rule is not None
    operands = [{f for factors in each for f in factors} for each in rule.operands]
    result = scores.operation.results[0]
    places = {factor: place for place, factors in enumerate(rule.results[0]) for factor in factors}
    # Positions of queries and of keys may be of one class: places tell them apart.
    known = {result: {place: factor for factor, place in places.items()}}
    waiting = collections.deque([result])
    while waiting:
        value = waiting.popleft()
        for user in facts.program.users.get(value, ()):
            rule = rule_of(user, facts.program.values)
            if rule is None or user.kind in _PRODUCTS:
                continue
            of_factor = {
                factor: known[value][place]
                for place, factors in enumerate(rule.operands[user.operands.index(value)])
                for factor in factors
                if place in known[value]
            }
            if user.kind == _SUM:
                reduced = {of_factor[factor] for factor in rule.reduced & of_factor.keys()}
                sides = [
                    bool(reduced & (own - other)) for own, other in itertools.permutations(operands)
                ]
                if reduced and not any(sides):
                    return _SIDE_BY_SIDE
                return sides.index(True) if sum(sides) == 1 else None
            for made, dimensions in zip(user.results, rule.results, strict=True):
                if made not in known:
                    known[made] = {
                        place: of_factor[factor]
                        for place, factors in enumerate(dimensions)
                        for factor in factors
                        if factor in of_factor
                    }
                    waiting.append(made)
    return None
