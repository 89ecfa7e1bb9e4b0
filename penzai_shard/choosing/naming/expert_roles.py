"""Experts: what weights have side by side, and a product of the embedding chooses among."""

import collections
from collections.abc import Iterator

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import DOT, Classes, ProgramFacts
from penzai_shard.library_apis.shardy_records import PRODUCTS
from penzai_shard.sharding_propagation import Operation

_ORDERS = frozenset({"chlo.top_k", "stablehlo.sort"})
_WEIGHED = "stablehlo.multiply"


def name_experts(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what weights of products have side by side, and a product of the embedding chooses."""
    # What a depthwise convolution does side by side are channels.
    side_by_side = {
        part
        for each in facts.with_weights
        if each.operation.kind == DOT
        for part in names.without_role(each.batch & facts.in_weights.keys())
    }
    looked_up = {
        lookup.rows
        for lookup in facts.lookups
        # Rows are matrices: those of a table of tokens that are made one by one are none.
        if lookup.rows in facts.in_weights
        and lookup.index in facts.from_weights
        and sum(part.size > 1 for part in lookup.others) > 1
    }
    side_by_side |= looked_up
    for router, order in tuple(_routers(facts, names)):
        if router in side_by_side:
            how = "the embedding weighs them" if order is None else "the largest are chosen"
            names.give(router, "experts", f"products are done side by side along it, and {how}")
        if order is None:
            continue
        chosen = _of_chosen(facts, order)
        experts = [
            part
            for part in names.without_role(side_by_side | _stacked(facts) | _compared(facts, order))
            if part.size == router.size and part != router and part in facts.in_weights
        ]
        # Equal lengths say nothing: those of the next layer are as many, and so may others be.
        experts = [part for part in experts if part in chosen]
        if len(experts) == 1 or (experts and looked_up.issuperset(experts)):
            reason = "the largest of its elements are chosen, and weights have as many side by side"
            names.give(router, "experts", reason)
            reason = "weights have it side by side, and the largest of a product are chosen for it"
            for part in experts:
                names.give(part, "experts", reason)
        elif chosen & names.with_role("embedding"):
            reason = (
                "the largest of its elements are chosen, to weigh what is added to the embedding"
            )
            names.give(router, "experts", reason)


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
) -> Iterator[tuple[DimensionClass, Operation | None]]:
    """What products make of the embedding alone, to weigh something with.

    With each the operation that looks for its largest elements; None if there is none.
    """
    embedding = names.with_role("embedding")
    for each in facts.with_weights:
        if not each.contracted & embedding or len(each.made) != 1:
            continue
        (part,) = each.made
        if part in names.roles or part not in facts.in_weights:
            continue
        orders = (
            operation
            for operation in facts.after(each.operation.results[0], PRODUCTS | _ORDERS)
            if operation.kind in _ORDERS or len(operation.results) > 1
        )
        yield part, next(orders, None)


def _of_chosen(facts: ProgramFacts, order: Operation) -> Classes:
    """The classes of what the largest elements, or their places, are multiplied or looked up with.

    Up to the next products, and to the next lookup in weights alone, as of tokens that are chosen.
    """
    tables = {
        lookup.operation.number: lookup
        for lookup in facts.lookups
        if lookup.operation.operands[0] not in facts.from_inputs
    }
    found: set[DimensionClass] = set()
    waiting, seen = collections.deque(order.results), set(order.results)
    while waiting:
        for user in facts.program.users.get(waiting.popleft(), ()):
            if user.number in tables:
                found.add(tables[user.number].rows)
                continue
            # One that multiplies what is chosen with what is chosen weighs nothing yet.
            weighs = user.kind == _WEIGHED and not seen.issuperset(user.operands)
            if user.kind in PRODUCTS or weighs:
                for value in (*user.operands, *user.results):
                    found |= facts.classes(value)
                continue
            fresh = [each for each in user.results if each not in seen]
            waiting += fresh
            seen.update(fresh)
    return frozenset(found)


def _compared(facts: ProgramFacts, order: Operation) -> Classes:
    """What the places of the largest elements are compared with, as for a row with a one."""
    found: set[DimensionClass] = set()
    for result in order.results[1:]:
        known = facts.classes(result)
        for operation in facts.after(result, PRODUCTS | _ORDERS | {"stablehlo.compare"}):
            if operation.kind == "stablehlo.compare":
                found |= facts.classes(operation.results[0]) - known
    return frozenset(found)
