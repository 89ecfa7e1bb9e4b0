"""The logical axes of what flows between blocks, and of what stands between two products."""

import collections
import math
from collections.abc import Iterator

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import (
    DOT,
    PRODUCTS,
    Classes,
    Product,
    ProgramFacts,
)
from penzai_shard.sharding_propagation import Operation


def name_embedding(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what weights read from the residual stream, and what they add to it."""
    found: dict[DimensionClass, str] = {}
    for classes in _residual_streams(facts):
        candidates = {
            part: len(facts.in_weights[part])
            for part in classes
            if part in facts.in_weights and part not in facts.of_inputs
        }
        most = max(candidates.values(), default=0)
        best = [part for part, count in candidates.items() if count == most]
        if most > 1 and len(best) == 1:
            found[best[0]] = "blocks read it and add to it what they make of it"
    for part in sorted(found, key=lambda part: part.number):
        names.give(part, "embedding", found[part])


def _residual_streams(facts: ProgramFacts) -> Iterator[Classes]:
    """The classes of values that something is added to that products with weights make of them."""
    seen: set[Classes] = set()
    for operation in facts.program.operations:
        if operation.kind != "stablehlo.add" or operation.results[0] not in facts.from_inputs:
            continue
        classes = facts.classes(operation.results[0])
        left, right = operation.operands
        if classes in seen or left == right or classes.isdisjoint(facts.in_weights):
            continue
        if any(_is_made_of(facts, *pair) for pair in ((left, right), (right, left))):
            seen.add(classes)
            yield classes


def _is_made_of(facts: ProgramFacts, added: int, stream: int) -> bool:
    """Whether products with weights make one value of another."""
    if not {added, stream} <= facts.from_inputs:
        return False
    made = facts.made_by_weights
    last = next((made[v] for v in (added, *facts.before(added, made)) if v in made), None)
    return last is not None and any(
        stream in (operand, *facts.before(operand)) for operand in last.operands
    )


def name_neurons(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what one product makes of the embedding, and another contracts to give it back."""
    embedding = names.with_role("embedding")
    made: set[DimensionClass] = set()
    for each in facts.with_weights:
        if each.contracted & embedding and each.operation.kind == DOT:
            made |= each.made
    for each in facts.with_weights:
        if not each.made & embedding or not _is_of_products_with_weights(facts, each):
            continue
        for part in names.without_role(each.contracted & made & facts.in_weights.keys()):
            # In gradients a product with a weight goes back over what it made.
            if (
                sum(bool(embedding & facts.classes_of_weight(n)) for n in facts.in_weights[part])
                > 1
            ):
                reason = "a product makes it of the embedding, and another contracts over it"
                names.give(part, "neurons", reason)


def _is_of_products_with_weights(facts: ProgramFacts, product: Product) -> bool:
    """Whether a product is taken of others with weights, with something in between."""
    by_result = facts.by_result
    before = (product.data, *facts.before(product.data, by_result))
    nearest = [by_result[value] for value in before if value in by_result]
    return all(each.weight is not None for each in nearest) and not _is_linear(facts, product)


def _is_linear(facts: ProgramFacts, product: Product) -> bool:
    """Whether a product is taken of another, with nothing in between: a product of low rank."""
    weighted = {each.operation.number for each in facts.with_weights if each.operation.kind == DOT}
    return any(origin.number in weighted for origin in facts.linear_origins(product.data))


def name_ranks(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what two weights are multiplied over, with nothing in between: a low rank.

    One after the other with an input, or both to be added to a third, as adapters are.
    """
    for each in facts.products:
        if each.operation.kind != DOT:
            continue
        if facts.from_inputs.isdisjoint(each.operation.operands):
            if not _is_added_to_a_weight(facts, each):
                continue
        elif each.weight is None or not _is_linear(facts, each):
            continue
        for part in names.without_role(each.contracted & facts.in_weights.keys()):
            beside = [
                math.prod(size for size in facts.call.weights[number].shape) // part.size
                for number in facts.in_weights[part]
            ]
            if part not in facts.of_inputs and part.size < min(beside):
                reason = "two weights are multiplied over it, with nothing in between"
                names.give(part, "rank", reason)


def _is_added_to_a_weight(facts: ProgramFacts, product: Product) -> bool:
    return any(
        operation.kind == "stablehlo.add"
        and facts.from_inputs.isdisjoint(operation.operands)
        and any(facts.is_weight(operand) for operand in operation.operands)
        for operation in facts.after(product.operation.results[0], PRODUCTS)
    )


def name_experts(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what weights of products have side by side, and a product of the embedding chooses."""
    routers = dict(_routers(facts, names))
    side_by_side = {
        part
        for each in facts.with_weights
        for part in names.without_role(each.batch & facts.in_weights.keys())
    }
    looked_up = {
        lookup.rows
        for lookup in facts.lookups
        if lookup.rows in facts.in_weights and lookup.index in facts.from_weights
    }
    side_by_side |= looked_up
    for router, compared in routers.items():
        chosen = compared is not None
        if router in side_by_side:
            how = "the largest are chosen among them" if chosen else "the embedding weighs them"
            names.give(router, "experts", f"products are done side by side along it, and {how}")
        experts = [
            part
            for part in names.without_role(side_by_side | _stacked(facts) | (compared or set()))
            if part.size == router.size and part != router and part in facts.in_weights
        ]
        if chosen and experts and (len(experts) == 1 or looked_up.issuperset(experts)):
            reason = "the largest of its elements are chosen, and weights have as many side by side"
            names.give(router, "experts", reason)
            reason = "weights have it side by side, and the largest of a product are chosen for it"
            for part in experts:
                names.give(part, "experts", reason)


def _stacked(facts: ProgramFacts) -> set[DimensionClass]:
    """The first dimensions of several weights that are stacks of matrices."""
    first = collections.Counter(
        weight.parts[0][0]
        for weight in facts.call.weights
        if weight.parts and len(weight.shape) > 2 and len(weight.parts[0]) == 1
    )
    return {part for part, count in first.items() if count > 1}


def _routers(
    facts: ProgramFacts, names: ClassNames
) -> Iterator[tuple[DimensionClass, Classes | None]]:
    """What products make of the embedding alone, to weigh something with.

    With each what the places of its largest elements are compared with; None if these are not
    looked for.
    """
    embedding = names.with_role("embedding")
    for each in facts.with_weights:
        if not each.contracted & embedding or len(each.made) != 1:
            continue
        (part,) = each.made
        if part in names.roles or part not in facts.in_weights:
            continue
        compared = None
        for operation in facts.after(each.operation.results[0], PRODUCTS | _ORDERS):
            if operation.kind in _ORDERS or len(operation.results) > 1:
                compared = frozenset(_compared(facts, operation))
                break
        yield part, compared


def _compared(facts: ProgramFacts, order: Operation) -> Iterator[DimensionClass]:
    """What the places of the largest elements are compared with, as for a row with a one."""
    for result in order.results[1:]:
        known = facts.classes(result)
        for operation in facts.after(result, PRODUCTS | _ORDERS | {"stablehlo.compare"}):
            if operation.kind == "stablehlo.compare":
                yield from facts.classes(operation.results[0]) - known


_ORDERS = frozenset({"chlo.top_k", "stablehlo.sort"})
