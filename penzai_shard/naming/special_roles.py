"""Names experts, and tells apart residual streams that nothing ties."""

import collections
from collections.abc import Iterator, Sequence, Set

from penzai_shard.naming.class_names import ClassNames
from penzai_shard.naming.facts import DOT, PRODUCTS, Classes, Facts
from penzai_shard.naming.ties import AxisClass
from penzai_shard.paths import pattern_parts
from penzai_shard.propagation.flat import Operation

_ORDERS = frozenset({"chlo.top_k", "stablehlo.sort"})
# What blocks of several streams may have in common: these are no lengths of a stream.
_COMMON = frozenset({"embedding", "vocabulary", "outputs", "rank", "qkv", "kv", "qk", "gate_up"})

# Experts


def name_experts(facts: Facts, names: ClassNames) -> None:
    """What weights of products have side by side, and a product of the embedding chooses among."""
    dots = (each for each in facts.with_weights if each.operation.kind == DOT)
    side_by_side = {part for each in dots for part in each.batch}
    # Experts are matrices. Rows of a table are not, even if they are made and looked up, as tokens.
    matrices = {weight.parts[0] for weight in facts.call.weights if len(weight.classes) > 2}
    looked_up = {each.rows for each in facts.lookups if each.index in facts.from_weights}
    for router, order in tuple(_find_routers(facts, names)):
        if router in side_by_side:
            how = "the embedding weighs them" if order is None else "the largest are chosen"
            names.give_role(router, "experts", f"products are side by side along it, and {how}")
        if order is None:
            continue
        chosen = _of_chosen(facts, order)
        # Equal lengths say nothing: those of the next layer are as many, and so may others be.
        experts = [
            part
            for part in names.without_role(chosen & facts.in_weights.keys())
            if part.size == router.size and part != router and (part,) in matrices
        ]
        if len(experts) == 1 or (experts and looked_up.issuperset(experts)):
            for part in (router, *experts):
                reason = "weights have it side by side, and the largest of a product are chosen"
                names.give_role(part, "experts", reason)
        elif chosen & names.with_role("embedding"):
            reason = "the largest of its elements are chosen, to weigh what the embedding gets"
            names.give_role(router, "experts", reason)


def _find_routers(facts: Facts, names: ClassNames) -> Iterator[tuple[AxisClass, Operation | None]]:
    """The axes that products make of the embedding, to weigh something with.

    With each the operation that looks for its largest elements; None if there is none.
    """
    embedding = names.with_role("embedding")
    for each in facts.with_weights:
        if not each.contracted & embedding or len(each.made) != 1:
            continue
        (part,) = each.made
        if part in names.roles or part not in facts.in_weights:
            continue
        after = facts.after(each.operation.results[0], PRODUCTS | _ORDERS)
        yield part, next((o for o in after if o.kind in _ORDERS or len(o.results) > 1), None)


def _of_chosen(facts: Facts, order: Operation) -> Classes:
    """The classes of what the largest elements, or their places, are multiplied or looked up with.

    Up to the next products, and to the next lookup in weights, as of tokens that are chosen.
    """
    tables = {each.operation.number: each.rows for each in facts.lookups if each.is_table}
    found: set[AxisClass] = set()
    waiting, seen = collections.deque(order.results), {*order.results}
    while waiting:
        for user in facts.users.get(waiting.popleft(), ()):
            # One that multiplies what is chosen with what is chosen weighs nothing yet.
            weighs = user.kind == "stablehlo.multiply" and not seen.issuperset(user.operands)
            if user.number in tables:
                found.add(tables[user.number])
            elif user.kind in PRODUCTS or weighs:
                for value in (*user.operands, *user.results):
                    found |= facts.classes(value)
            else:
                waiting += [each for each in user.results if each not in seen]
                seen.update(user.results)
    return frozenset(found)


# Streams


def tell_streams_apart(facts: Facts, names: ClassNames) -> None:
    """Gives residual streams that nothing ties names of their own, by a word in their paths.

    Equal lengths are not equal axes: the width of an image encoder is not that of a text encoder,
    and that of ``stages.0`` not that of ``stages.1``. Where no word tells them apart, the one that
    begins at the vocabulary is the embedding; where none does, the one that more than twice as many
    weights have as all others: blocks have more weights than the pooling behind them. The other
    streams stay open, and with them what their blocks have.
    """
    streams = sorted(names.with_role("embedding"))
    labels = _find_labels(facts, streams) if len(streams) > 1 else {}
    if labels:
        for stream, label in labels.items():
            reason = f"blocks under {label!r} have a residual stream that nothing ties to others"
            names.give_name(stream, f"{label}_embedding", reason)
        for part, stream in _find_owners(facts, names, labels.keys()):
            label = labels[stream]
            reason = f"{names.reasons[part]}, of the stream of {label!r}"
            names.give_name(part, f"{label}_{names.roles[part]}", reason)
        return
    kept = {*streams}
    if len(streams) > 1:
        vocabulary = names.with_role("vocabulary")
        counts = {stream: len(facts.in_weights[stream]) for stream in streams}
        kept = {stream for stream in streams if facts.neighbours(stream) & vocabulary}
        kept = kept or {one for one in streams if counts[one] > sum(counts.values()) * 2 / 3}
        kept = kept if len(kept) == 1 else set()
    for part, role in list(names.roles.items()):
        near = facts.neighbours(part)
        if part in streams and part not in kept:
            names.take_role(part, "it is one of several residual streams, which nothing ties")
        elif streams and role not in _COMMON and near and not near & kept:
            names.take_role(part, "it is of a residual stream that is not decided")


def _find_labels(facts: Facts, streams: Sequence[AxisClass]) -> dict[AxisClass, str]:
    """A word for each stream, which stands at one place of the paths of most of its weights."""
    paths = {
        stream: [
            pattern_parts(each.path)
            for each in facts.in_weights[stream]
            if ({*streams} - {stream}).isdisjoint(each.classes)
        ]
        for stream in streams
    }
    for place in range(max((len(path) for own in paths.values() for path in own), default=0)):
        found = {}
        for stream, own in paths.items():
            words = (_word(path, place) for path in own if len(path) > place)
            for word, count in collections.Counter(words).most_common(1):
                if 2 * count > len(own) and word.isidentifier():
                    found[stream] = word
        if len({*found.values()}) == len(streams):
            return found
    return {}


def _word(path: Sequence[str], place: int) -> str:
    """What stands at a place of a path; a number together with what is numbered."""
    return "_".join(path[max(place - 1, 0) if path[place].isdigit() else place : place + 1])


def _find_owners(
    facts: Facts, names: ClassNames, streams: Set[AxisClass]
) -> Iterator[tuple[AxisClass, AxisClass]]:
    """The classes that belong to one stream only, as their weights have no other: with the stream.

    What a decoder makes of an encoder's stream belongs to none.
    """
    for part, role in list(names.roles.items()):
        weights = facts.in_weights.get(part, ())
        owners = {stream for each in weights for stream in streams & {*each.classes}}
        if role not in _COMMON and len(owners) == 1:
            yield part, owners.pop()
