"""Says what each logical axis of a traced call is for, and calls it that: heads, neurons, ...

A class has a *role*, a pattern of operations such as "a product makes it of the embedding, and
another contracts over it", and by default is called so. Where a pattern is not whole the axis stays
open: a name too few costs a line of overrides, a wrong one a wrong layout. A name that people gave
wins, and changes nothing of what other classes do.
"""

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set

from penzai_shard.naming.cuts import cover
from penzai_shard.naming.facts import DOT, PRODUCTS, Classes, Facts, Product, sources_of
from penzai_shard.naming.ties import AxisClass, indices_of_loops, length_of
from penzai_shard.paths import pattern_parts
from penzai_shard.propagation.flat import FLOW, Operation
from penzai_shard.rules import TRANSFORMER_AXES

# What devices may compute parts of is called as in the rules for transformers.
_NEURONS, _HEADS, _HEAD_GROUPS, _QUERY_HEADS, _VOCABULARY = TRANSFORMER_AXES

_EXPONENTIAL, _MULTIPLY = "stablehlo.exponential", "stablehlo.multiply"
_ORDERS = frozenset({"chlo.top_k", "stablehlo.sort"})
# What blocks of several streams may have in common: these are no lengths of a stream.
_COMMON = frozenset({"embedding", "vocabulary", "outputs", "rank", "qkv", "kv", "qk", "gate_up"})


class ClassNames:
    """What each class is called, and why.

    Attributes:
        roles: What classes do in the program; the first role that one gets stays.
        reasons: Why a class has its role, or has lost it.
        given: Names that are not roles, each with its reason.

    >>> names, part = ClassNames(), AxisClass(0, 8)
    >>> names.give_role(part, "neurons", "a product makes it")
    >>> names.give_name(part, "mlp", "'up' has that name")
    >>> names.roles[part], names.names[part]
    ('neurons', ('mlp', "'up' has that name"))
    """

    def __init__(self) -> None:
        self.roles: dict[AxisClass, str] = {}
        self.reasons: dict[AxisClass, str] = {}
        self.given: dict[AxisClass, tuple[Hashable, str]] = {}

    @property
    def names(self) -> Mapping[AxisClass, tuple[Hashable, str]]:
        """What each class is called, with the reason."""
        return {part: (role, self.reasons[part]) for part, role in self.roles.items()} | self.given

    def give_role(self, part: AxisClass, role: str, reason: str) -> None:
        """Gives a class a role, unless it has one or is of length 1."""
        if part.size > 1 and part not in self.roles:
            self.roles[part], self.reasons[part] = role, reason

    def give_name(self, part: AxisClass, name: Hashable, reason: str) -> None:
        """Gives a class a name, whatever its role is; the first one stays."""
        if part.size > 1:
            self.given.setdefault(part, (name, reason))

    def take_role(self, part: AxisClass, reason: str) -> None:
        """Takes its role from a class, and with it the name that it has by that."""
        del self.roles[part]
        self.reasons[part] = reason

    def with_role(self, *roles: str) -> Set[AxisClass]:
        """The classes that have one of some roles."""
        return {part for part, role in self.roles.items() if role in roles}

    def without_role(self, parts: Iterable[AxisClass]) -> list[AxisClass]:
        """Those of some classes that have no role yet, in order."""
        return sorted(part for part in parts if part not in self.roles)


def name_classes(facts: Facts) -> ClassNames:
    """What the classes of a call are called, with reasons.

    >>> import jax
    >>> from penzai_shard.naming.trace import trace_call
    >>> def run(params, x):
    ...     for up, down in params:
    ...         x = x + jax.nn.relu(x @ up) @ down
    ...     return x
    >>> up, down, x = (jax.ShapeDtypeStruct(n, "float32") for n in [(8, 32), (32, 8), (4, 8)])
    >>> call = trace_call(run, [(up, down)] * 2, x, input_names=[("batch", None)])
    >>> names = name_classes(Facts(call)).names
    >>> [names[part][0] for part in call.weights[0].classes]
    ['embedding', 'neurons']
    """
    names = ClassNames()
    for weight in facts.call.weights:
        for parts, name in zip(weight.parts, weight.names, strict=False):
            if name is not None and len(parts) == 1:
                names.give_name(parts[0], name, f"{weight.path} has that name already")
    # The first role that an axis gets stays. The embedding is first, as most others are what a
    # product makes of it. Then come axes that are indexed, so that rows of a table and layers of a
    # loop are not taken for heads; then attention and experts, as what they make of the embedding
    # and give back looks like neurons. Axes that their neighbours name come last.
    _name_embedding(facts, names)
    _name_vocabulary(facts, names)
    _name_layers(facts, names)
    attentions = list(_find_attentions(facts, names))
    _name_attention(facts, names, attentions)
    _name_experts(facts, names)
    _name_neurons(facts, names)
    _name_positions(facts, names)
    _name_joined(facts, names, attentions)
    _name_gates(facts, names)
    _name_ranks(facts, names)
    _name_outputs(facts, names)
    # Last, residual streams that nothing ties get different names, or none.
    _tell_streams_apart(facts, names)
    for part, name in facts.of_inputs.items():
        if part not in names.roles:
            names.give_name(part, name, "an input has that name, and the program ties both")
    return names


# The residual stream


def _name_embedding(facts: Facts, names: ClassNames) -> None:
    """What products with weights read, and what they make of it is added to."""
    made, seen = facts.made_by_weights, set[frozenset[AxisClass]]()
    # What is contracted only together with others, as heads with projections, is no embedding.
    dots = [each.contracted for each in facts.with_weights if each.operation.kind == DOT]
    together = {part for parts in dots if len(parts) > 1 for part in parts}
    together -= {part for parts in dots if len(parts) == 1 for part in parts}
    for each in facts.program.operations:
        classes = facts.classes(each.results[0]).intersection(facts.in_weights) - together
        is_new = each.kind == "stablehlo.add" and classes and classes not in seen
        if not is_new or not {*each.operands} <= facts.from_inputs:
            continue
        for added, stream in itertools.permutations(each.operands):
            last = next((made[v] for v in facts.before(added, made) if v in made), None)
            if last and facts.reached([stream], last.number - 1) & {*last.operands}:
                seen.add(classes)
                # Of several axes, as with positions next to it, the one that most weights have.
                counts = collections.Counter({p: len(facts.in_weights[p]) for p in classes})
                (best, most), *rest = counts.most_common()
                if most > 1 and (not rest or rest[0][1] < most):
                    reason = "blocks read it and add to it what they make of it"
                    names.give_role(best, "embedding", reason)
                    # What people call the axis of an input is its name in the weights, too.
                    if best in facts.of_inputs:
                        names.give_name(best, facts.of_inputs[best], reason)


# What is indexed


def _name_vocabulary(facts: Facts, names: ClassNames) -> None:
    """What inputs are looked up in, if it is their only table or as long as the logits are."""
    embedding, logits = names.with_role("embedding"), _find_logits(facts)
    tables = dict[AxisClass, Set[AxisClass]]()
    for each in facts.lookups:
        is_begin = each.rows in facts.in_weights and (not embedding or embedding & each.others)
        is_given = each.index in facts.from_inputs - facts.from_weights
        if each.is_table and is_begin and is_given:
            tables[each.rows] = _long(facts.classes(each.index))
    chosen = tables.keys() & logits.keys() or {
        rows
        for rows, index in tables.items()
        if any(part.size == rows.size and index <= others for part, others in logits.items())
    }
    # An index of which another input has more dimensions, as of an image, is its label.
    inputs = [{*each.classes} for each in facts.call.inputs]
    unlabelled = {rows for rows, index in tables.items() if not any(index < own for own in inputs)}
    if len(chosen := chosen or unlabelled) == 1:
        names.give_role(min(chosen), _VOCABULARY, "rows are looked up along it by an input")


def _find_logits(facts: Facts) -> dict[AxisClass, Set[AxisClass]]:
    """What results have last, or a loss looks up targets in, with the axes of the numbers."""
    lookups = (each for each in facts.lookups if not each.is_table)
    found = {each.rows: _long(facts.classes(each.index)) for each in lookups}
    for *others, last in filter(None, map(facts.call.dims.__getitem__, facts.program.results)):
        found |= {last[0]: _long(itertools.chain(*others))} if len(last) == 1 else {}
    return {part: others for part, others in found.items() if part in facts.in_weights}


def _long(classes: Iterable[AxisClass]) -> Set[AxisClass]:
    return {part for part in classes if part.size > 1}


def _name_layers(facts: Facts, names: ClassNames) -> None:
    """What a loop takes from weights one by one, to multiply with each what the last one made.

    Chunks of neurons, heads and experts are not layers: their results are only added.
    """
    taken = collections.defaultdict[tuple[int, AxisClass], list[int]](list)
    for operation, dim, counter in indices_of_loops(facts.program):
        whole = operation.operands[0]
        if whole in facts.from_weights:
            for part in facts.call.dims[whole][dim]:
                taken[counter, part].append(operation.results[0])
    for (counter, part), elements in taken.items():
        # A loop ends with the last of the operations that hand on what it carries.
        own = facts.makers[counter]
        last = own.number
        for each in facts.program.operations:
            if each.number == last + 1 and (each.kind, each.name) == (FLOW, own.name):
                last += 1
        of_elements = facts.reached(elements, last)
        for product in facts.with_weights:
            is_inside = product.operation.number < last and product.weight_operand in of_elements
            if is_inside and product.data in facts.reached(product.operation.results, last):
                reason = "a loop takes its elements one by one, each for what the last one made"
                names.give_role(part, "layers", reason)
                break


# Attention


@dataclasses.dataclass(frozen=True)
class _Attention:
    """A product of queries with keys, a softmax of it, and the product of that with values.

    Attributes:
        scores: The first product.
        mix: The last one.
        softmax: The value of the exponential.
        heads: What both products do side by side.
        contracted: What queries and keys are contracted over.
        values: What the result has that is neither heads nor queries.
    """

    scores: Product
    mix: Product
    softmax: int
    heads: Sequence[AxisClass]
    contracted: Set[AxisClass]
    values: Set[AxisClass]


def _find_attentions(facts: Facts, names: ClassNames) -> Iterator[_Attention]:
    """Products of two values that no weight is, with a softmax of them, and that times others."""
    weighted = facts.in_weights.keys() - facts.of_inputs.keys() - names.roles.keys()
    by_number = {each.operation.number: each for each in facts.products}
    for scores in facts.products:
        if not scores.contracted or facts.is_of_a_weight(scores):
            continue
        contracted, shared = scores.contracted & weighted, scores.free[0] | scores.free[1]
        after = facts.after(scores.operation.results[0], {DOT})
        softmax = next((each.results[0] for each in after if each.kind == _EXPONENTIAL), None)
        # The exponential of a sigmoid is not summed.
        if softmax is None or not any(
            each.kind == "stablehlo.reduce" and softmax in facts.moved_from(each.operands[0])
            for each in facts.after(softmax, {DOT})
        ):
            continue
        found = (by_number.get(each.number) for each in facts.after(softmax, {DOT}))
        mixes = [e for e in found if e and e.contracted & shared and not facts.is_of_a_weight(e)]
        mixed = {part for mix in mixes for part in mix.contracted}
        free = {part for mix in mixes for part in mix.free[0] | mix.free[1]}
        values = free & weighted - scores.of_result - contracted
        if not mixes or not contracted | values:
            continue
        near = {each for part in contracted | values for each in facts.neighbours(part)}
        heads = weighted & near & (scores.batch | scores.of_result - mixed)
        yield _Attention(scores, mixes[0], softmax, sorted(heads), contracted, values)


def _name_attention(facts: Facts, names: ClassNames, attentions: Sequence[_Attention]) -> None:
    """What queries, keys and values have: heads, and for each of them a projection."""
    added = collections.Counter(each.softmax for each in attentions)
    for each in attentions:
        operands, length = each.scores.operation.operands, length_of(each.scores.contracted)
        # Scores that are sums of several products have projections of several kinds.
        if added[each.softmax] == 1:
            for part in sorted(each.contracted):
                reason = "queries and keys are contracted over it in attention"
                names.give_role(part, "projection", reason)
            for operand in operands:
                near = facts.nearest_products(operand)
                made = {e.made - each.scores.of_result for e in near if e.weight is not None}
                if [length_of(parts) for parts in made] == [length]:
                    for part in sorted(facts.in_weights.keys() & made.pop()):
                        names.give_role(part, "projection", "queries or keys have it for each head")
            for part in sorted(each.values) if length_of(each.values) == length else ():
                reason = "the results of attention have it for each head"
                names.give_role(part, "projection", reason)
        forms = [facts.classes(v) for operand in operands for v in facts.moved_from(operand)]
        lacking = [part for part in each.heads if any(part not in classes for classes in forms)]
        reason = "attention is done side by side along it"
        if len(each.heads) == 1:
            names.give_role(each.heads[0], _QUERY_HEADS if lacking else _HEADS, reason)
        elif len(each.heads) == 2 and len(lacking) == 1:
            for part in each.heads:
                names.give_role(part, _QUERY_HEADS if part in lacking else _HEAD_GROUPS, reason)


# Experts


def _name_experts(facts: Facts, names: ClassNames) -> None:
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


# Between two products


def _name_neurons(facts: Facts, names: ClassNames) -> None:
    """What a product makes of the embedding, and another contracts to give it back."""
    embedding = names.with_role("embedding")
    dots = [each for each in facts.with_weights if each.operation.kind == DOT]
    for each in dots:
        near = facts.nearest_products(each.data)
        is_plain = all(one.weight is not None and one.operation.kind == DOT for one in near)
        streams = each.made & embedding
        if not streams or not is_plain or _is_linear(facts, each):
            continue
        between = [v for v in facts.before(each.data, facts.by_result) if v in facts.from_inputs]
        makers = [facts.makers[value] for value in between if value in facts.makers]
        is_looped = any(one.kind == FLOW and len(sources_of(one)) > 1 for one in makers)
        made = {part for one in near if one.contracted & streams for part in one.made}
        found = made & each.contracted & facts.in_weights.keys()
        for part in names.without_role(found):
            role = "recurrent" if is_looped else _NEURONS
            reason = "a product makes it of the embedding, and another contracts over it"
            names.give_role(part, role, reason)


def _is_linear(facts: Facts, product: Product) -> bool:
    """Whether a product is taken of another one with a weight, with nothing in between."""
    made = {each.number for each in facts.made_by_weights.values()}
    return any(origin.number in made for origin in facts.linear_origins(product.data))


def _name_ranks(facts: Facts, names: ClassNames) -> None:
    """What two weights are multiplied over, with nothing in between."""
    for each in facts.products:
        is_matrix = each.operation.kind == DOT and len(each.contracted) == 1
        is_of_weights = facts.from_inputs.isdisjoint(each.operation.operands)
        is_low = is_of_weights or (each.weight is not None and _is_linear(facts, each))
        if not is_matrix or not is_low or not each.batch.isdisjoint(facts.in_weights):
            continue
        for part in names.without_role(each.contracted.intersection(facts.in_weights)):
            others = min(length_of(weight.classes) for weight in facts.in_weights[part])
            if part.size**2 < others and part not in facts.of_inputs:
                reason = "two weights are multiplied over it, with nothing in between"
                names.give_role(part, "rank", reason)


def _name_outputs(facts: Facts, names: ClassNames) -> None:
    """What products make of the embedding only for results: the vocabulary again, or others."""
    embedding, vocabulary = names.with_role("embedding"), names.with_role(_VOCABULARY)
    made = {p for each in facts.with_weights if each.contracted & embedding for p in each.made}
    logits, lengths = _find_logits(facts), {part.size for part in vocabulary}
    found = names.without_role(made & logits.keys())
    again = [part for part in found if part.size in lengths]
    if len(again) == 1:
        reason = "results have it last, and it is as long as the vocabulary"
        names.give_role(again[0], _VOCABULARY, reason)
    given = _long(part for each in facts.call.inputs for part in each.classes)
    others = [part for part in found if part not in again and given & logits[part]]
    # Where no vocabulary is found, what each token has may be it.
    if len(others) == 1 and (vocabulary or not given <= logits[others[0]]):
        reason = "a product makes it of the embedding, and results have it"
        names.give_role(others[0], "outputs", reason)


# Axes next to others


def _name_positions(facts: Facts, names: ClassNames) -> None:
    """What is looked up by consecutive numbers, and gives what the embedding gets."""
    embedding = names.with_role("embedding")
    for each in facts.lookups:
        is_table = each.is_table and each.rows in facts.in_weights and embedding & each.others
        is_given = each.index in facts.from_inputs | facts.from_weights
        if is_table and not is_given and "stablehlo.iota" in facts.kinds_before(each.index):
            names.give_role(each.rows, "positions", "rows are looked up along it by counted places")


def _name_joined(facts: Facts, names: ClassNames, attentions: Sequence[_Attention]) -> None:
    """Queries, keys and values that one weight makes, and that are cut apart."""
    uses = collections.defaultdict[int, set[str]](set)
    for each in attentions:
        operands = (*each.scores.operation.operands, *each.mix.operation.operands)
        for operand, kind in zip(operands, "qkvv", strict=True):
            if kind == "v" and each.scores.operation.results[0] in facts.before(operand):
                continue
            near = facts.nearest_products(operand)
            weights = (each.weight_operand for each in near if each.weight is not None)
            moved = itertools.chain(*map(facts.moved_from, weights))
            for value in itertools.chain(facts.before(operand, facts.by_result), moved):
                uses[value].add(kind)
    heads = {_HEADS, _HEAD_GROUPS, _QUERY_HEADS}
    for part, runs in facts.runs.items():
        if part in names.roles or part not in facts.in_weights or not cover(part.size, runs):
            continue
        used = [frozenset(k for v, _ in run for k in uses.get(v, ())) for run in runs.values()]
        if not all(used) or len({*used}) < 2:
            continue
        count = len(runs) + any("v" in kinds and len(kinds) > 1 for kinds in used)
        kinds = frozenset().union(*used)
        text = "qkv" if count == 3 else "kv" if "v" in kinds else "qk"
        roles = {names.roles.get(p) for run in runs.values() for _, parts in run for p in parts}
        # Of equal projections the axis is a product, which the program does not show.
        if roles <= heads:
            names.give_role(part, text, "they stand one after the other along it")
        elif len({end - start for start, end in runs}) > 1:
            names.give_role(part, f"{text}_projection", "they stand one after the other along it")


def _name_gates(facts: Facts, names: ClassNames) -> None:
    """An axis of two next to neurons, if both are cut apart and multiplied."""
    for part, runs in facts.runs.items():
        roles = [names.roles.get(each) for each in facts.neighbours(part)]
        if part.size != 2 or _NEURONS not in roles or not cover(part.size, runs):
            continue
        first, second = (facts.reached(v for v, _ in runs[run]) for run in sorted(runs))
        for each in facts.program.operations:
            sides = [{*each.operands} & side for side in (first - second, second - first)]
            if each.kind == _MULTIPLY and all(sides):
                names.give_role(part, "gate_up", "one weight makes neurons and their gates")


# Several residual streams


def _tell_streams_apart(facts: Facts, names: ClassNames) -> None:
    """Gives residual streams that nothing ties names of their own, by a word in their paths.

    Equal lengths are not equal axes: the width of an image encoder is not that of a text encoder,
    and that of ``stages.0`` not that of ``stages.1``. Where no word tells them apart, the one that
    begins at the vocabulary is the embedding; where none does, the one that more than twice as many
    weights have as all others: blocks have more weights than the pooling behind them. The other
    streams stay open.
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
    for stream in {*streams} - kept:
        names.take_role(stream, "it is one of several residual streams, which nothing ties")


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
