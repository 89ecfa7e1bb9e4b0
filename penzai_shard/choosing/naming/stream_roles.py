"""The logical axes of what flows between blocks, and of what stands between two products."""

import collections
import itertools
import math
from collections.abc import Iterator

from penzai_shard.choosing.dimensions import DimensionClass, length_of
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import (
    DOT,
    Classes,
    Product,
    ProgramFacts,
    sources_of,
)
from penzai_shard.library_apis.shardy_records import PRODUCTS
from penzai_shard.sharding_propagation import FLOW

_SCALED = frozenset({"stablehlo.add", "stablehlo.multiply"})
_BROADCAST = "stablehlo.broadcast_in_dim"
_HANDING_ON = frozenset({"stablehlo.concatenate", "stablehlo.pad", "stablehlo.reduce_window"})


def name_embedding(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what weights read from the residual stream, and what they add to it."""
    found: dict[DimensionClass, str] = {}
    others = facts.mapped_over | _never_read_alone(facts) | facts.of_inputs.keys()
    for stream, classes in _residual_streams(facts):
        candidates = {
            part: len(facts.in_weights[part])
            for part in classes - others - _factors(facts, stream)
            if part in facts.in_weights
        }
        most = max(candidates.values(), default=0)
        best = [part for part, count in candidates.items() if count == most]
        if most > 1 and len(best) == 1:
            found[best[0]] = "blocks read it and add to it what they make of it"
    for part in sorted(found):
        names.give(part, "embedding", found[part])


def _never_read_alone(facts: ProgramFacts) -> Classes:
    """What products with weights contract, but only together with others, as heads of attention."""
    together: set[DimensionClass] = set()
    alone: set[DimensionClass] = set()
    for each in facts.with_weights:
        led = {facts.leads[part] for part in each.contracted if part in facts.leads}
        own = each.contracted - led
        together |= each.contracted & led
        is_joint = len(own) > 1 and each.operation.kind == DOT
        (together if is_joint else alone).update(own)
    return frozenset(together - alone)


def _factors(facts: ProgramFacts, value: int) -> Classes:
    """What dimensions of a value are products of, in tensor trains; not what groups always lead."""
    return frozenset(
        part
        for parts in facts.call.dimensions.of_value(value)
        for before, part in zip((None, *parts), parts, strict=False)
        if len(parts) > 1 and (part != parts[-1] or facts.leads.get(part) != before)
    )


def _residual_streams(facts: ProgramFacts) -> Iterator[tuple[int, Classes]]:
    """Values, with their classes, to which is added what products with weights make of them."""
    seen: set[Classes] = set()
    for operation in facts.program.operations:
        if operation.kind != "stablehlo.add" or operation.results[0] not in facts.from_inputs:
            continue
        classes = facts.classes(operation.results[0])
        left, right = operation.operands
        if classes in seen or left == right or classes.isdisjoint(facts.in_weights):
            continue
        if any(_is_made_of(facts, *pair) for pair in itertools.permutations((left, right))):
            seen.add(classes)
            yield operation.results[0], classes


def _is_made_of(facts: ProgramFacts, added: int, stream: int) -> bool:
    """Whether products with weights make one value of another."""
    if not {added, stream} <= facts.from_inputs:
        return False
    made = facts.made_by_weights
    last = next((made[v] for v in facts.before(added, made) if v in made), None)
    if last is None:
        return False
    before = {value for operand in last.operands for value in facts.before(operand)}
    if stream in before:
        return True
    # What loops make in between, as of blocks of queries, does not show in one round of them.
    makers = facts.program.makers
    begins = makers[stream].number if stream in makers else -1
    handed_on = (makers[value] for value in before if value in makers)
    loops = (each for each in handed_on if each.kind == FLOW and len(sources_of(each)) > 1)
    if all(each.number < begins for each in loops):
        return False
    return not facts.reached([stream], last.number - 1).isdisjoint(last.operands)


def name_neurons(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what products make of the embedding, and another contracts to give it back."""
    embedding = names.with_role("embedding")
    made: set[DimensionClass] = set()
    for each in facts.with_weights:
        if each.contracted & embedding and each.operation.kind == DOT:
            made |= each.made
    # One product may make them together with something else, to be cut apart.
    together = collections.defaultdict[DimensionClass, set[DimensionClass]](set)
    for whole in made & facts.runs.keys():
        for cut in {cut for found in facts.runs[whole].values() for _, cut in found}:
            if len(cut) == 1:
                together[cut[0]].add(whole)
    # What a product makes of itself is the state of a recurrence.
    states = {part for each in facts.with_weights for part in each.made & each.contracted}
    reason = "a product makes it of the embedding, and another contracts over it"
    convolved: list[DimensionClass] = []
    for each in facts.with_weights:
        before = _between_products(facts, each) if each.made & embedding else frozenset()
        for part in names.without_role(each.contracted & facts.in_weights.keys() - states):
            if not made & before & ({part} | together[part]):
                continue
            if any(part in near.batch for near in _convolutions_before(facts, each)):
                convolved.append(part)
            else:
                names.give(part, "neurons", reason)
    # Where MLPs have convolutions in them, these are their neurons; beside other MLPs they are not.
    is_beside = bool(names.with_role("neurons"))
    for part in convolved:
        if is_beside:
            why = (
                f"{reason}; a convolution takes each by itself in between, as of other neurons none"
            )
            names.give(part, "conv_channels", why)
        else:
            names.give(part, "neurons", reason)
    _tell_bottlenecks_apart(facts, names)


def _convolutions_before(facts: ProgramFacts, product: Product) -> list[Product]:
    """The convolutions that a product is taken of, with no other product in between."""
    return [each for each in facts.nearest_products(product.data) if each.operation.kind != DOT]


def _tell_bottlenecks_apart(facts: ProgramFacts, names: ClassNames) -> None:
    """Takes the name from what is shorter than the embedding, where other neurons are longer.

    So the bottlenecks of adapters are (https://arxiv.org/abs/1902.00751). Experts may have few
    neurons, and so may one beside them that has all tokens, and what is gated is no adapter.
    """
    embedding, neurons = names.with_role("embedding"), names.with_role("neurons")
    lengths = {part: _length(facts, names, part) for part in embedding | neurons}
    shorter = {part for part in neurons if any(lengths[part] < lengths[each] for each in embedding)}
    if len(embedding) != 1 or shorter == neurons or names.with_role("experts"):
        return
    for part in {part for part in shorter if not _is_gated(facts, part)}:
        doubt = "a product makes it of the embedding, which is longer, as other neurons are"
        names.take_back(part, doubt)


def _length(facts: ProgramFacts, names: ClassNames, part: DimensionClass) -> int:
    """How long a dimension is that has a class, together with groups of it that have no name."""
    role = names.roles[part]
    return max(
        math.prod(each.size for each in parts if names.roles.get(each, role) == role)
        for weight in facts.in_weights[part]
        for parts in weight.parts
        if part in parts
    )


def _is_gated(facts: ProgramFacts, part: DimensionClass) -> bool:
    """Whether what a product contracts over a class is multiplied of what is made separately."""
    ends = _Ends(facts, frozenset({part}))
    slices = {each.results[0] for each in facts.program.operations if each.cuts}

    def sources(value: int) -> set[int]:
        before = facts.before(value, ends)
        return {each for each in before if each in facts.by_result or each in slices}

    for product in facts.with_weights:
        if part not in product.contracted:
            continue
        for value in facts.before(product.data, ends):
            maker = facts.program.makers.get(value)
            if maker is None or maker.kind != "stablehlo.multiply" or value in facts.by_result:
                continue
            made = [sources(each) for each in maker.operands if each in facts.from_inputs]
            if len(made) == 2 and all(made) and made[0] != made[1]:
                return True
    return False


class _Ends:
    """Where nothing is looked at behind: what products make, and what is broadcast along a class.

    A scale for each token is made of the token, and says nothing of what it scales.
    """

    def __init__(self, facts: ProgramFacts, along: Classes) -> None:
        self._facts = facts
        self._along = along

    def __contains__(self, value: object) -> bool:
        facts = self._facts
        maker = facts.program.makers.get(value) if isinstance(value, int) else None
        if maker is None or value in facts.by_result or maker.kind != _BROADCAST:
            return value in facts.by_result
        before, after = (facts.classes(each) for each in (maker.operands[0], maker.results[0]))
        return bool(self._along & after) and self._along.isdisjoint(before)


def _between_products(facts: ProgramFacts, product: Product) -> Classes:
    """The classes of the products with weights that another is taken of; none if it is linear.

    None either if a loop comes in between, or positions are shifted or joined: what is handed on
    from one to the next is a state, not neurons. Nor if something comes in from inputs alone, such
    as the noise of a code.
    """
    made = facts.by_result
    between = tuple(facts.before(product.data, _Ends(facts, product.contracted)))
    nearest = [made[value] for value in between if value in made]
    if any(each.weight is None for each in nearest) or _is_linear(facts, product):
        return frozenset()
    if any(_has_noise(facts, value) for value in between):
        return frozenset()
    handed_on: set[DimensionClass] = set()
    for value in between:
        maker = facts.program.makers.get(value)
        if maker is None or value in made or value not in facts.from_inputs:
            continue
        if maker.kind == FLOW and len(sources_of(maker)) > 1:
            return frozenset()
        if maker.kind in _HANDING_ON:
            handed_on |= facts.classes(value)
    classes = frozenset(p for each in nearest for p in facts.classes(each.operation.results[0]))
    return classes - handed_on


def _has_noise(facts: ProgramFacts, value: int) -> bool:
    """Whether a value is scaled or shifted by what inputs give, and is no mask."""
    maker = facts.program.makers.get(value)
    if maker is None or maker.kind not in _SCALED or value in facts.by_result:
        return False
    given = {*maker.operands} & facts.from_inputs - facts.from_weights
    return any("stablehlo.compare" not in facts.kinds_before(operand) for operand in given)


def _is_linear(facts: ProgramFacts, product: Product) -> bool:
    """Whether a product is taken of another, with nothing in between: a product of low rank."""
    weighted = {each.operation.number for each in facts.with_weights if each.operation.kind == DOT}
    return any(origin.number in weighted for origin in facts.linear_origins(product.data))


def name_ranks(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what two weights are multiplied over, with nothing in between: a low rank.

    One after the other with an input, or both to be added to a third, as adapters are. What two
    weights of a head are multiplied over are the features of that head, and so with all that is
    done side by side.
    """
    side_by_side = facts.in_weights.keys() - facts.mapped_over
    for each in facts.products:
        if each.operation.kind != DOT:
            continue
        if facts.from_inputs.isdisjoint(each.operation.operands):
            # A sum of Kronecker products has several dimensions of either weight.
            is_of_a_matrix = min(map(len, each.free)) <= 1
            if not is_of_a_matrix or not _is_added_to_a_weight(facts, each):
                continue
        elif each.weight is None or not _is_linear(facts, each):
            continue
        if len(each.contracted) > 1 or each.batch & side_by_side:
            continue
        for part in names.without_role(each.contracted & facts.in_weights.keys()):
            beside = min(math.prod(each.shape) for each in facts.in_weights[part]) // part.size
            if part not in facts.of_inputs and part.size < beside:
                reason = "two weights are multiplied over it, with nothing in between"
                names.give(part, "rank", reason)


def name_ranks_of_tables(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what rows of a table have, if it is shorter than the embedding that is made of them.

    A lookup is a product with the table, so that both weights are one of low rank, as in ALBERT.
    """
    embedding = names.with_role("embedding")
    tables = [each for each in facts.lookups if each.rows in facts.in_weights]
    for each in facts.with_weights:
        is_first = each.operation.kind == DOT and not facts.nearest_products(each.data)
        if not is_first or not each.made <= embedding:
            continue
        before = {*facts.before(each.data)}
        rows = {p for one in tables if one.operation.results[0] in before for p in one.others}
        for part in names.without_role(rows & each.contracted & facts.in_weights.keys()):
            if part.size < length_of(each.made):
                reason = "rows of a table have it, and a product makes the longer embedding of them"
                names.give(part, "rank", reason)


def _is_added_to_a_weight(facts: ProgramFacts, product: Product) -> bool:
    return any(
        operation.kind == "stablehlo.add"
        and facts.from_inputs.isdisjoint(operation.operands)
        and any(facts.is_weight(operand) for operand in operation.operands)
        for operation in facts.after(product.operation.results[0], PRODUCTS)
    )


def tell_groups(facts: ProgramFacts, names: ClassNames) -> None:
    """Tells groups of an axis, as norms and scales make them, from axes of their own."""
    for part in names.with_role("embedding", "neurons") & facts.leads.keys():
        groups = facts.leads[part]
        if names.roles[part] == "embedding" or names.roles.get(groups) == "neurons":
            names.group(groups, part)


def name_joint(facts: ProgramFacts, names: ClassNames) -> None:
    """Names what two streams are compared over: the joint embedding of CLIP.

    So it is called in the paper (https://arxiv.org/abs/2103.00020, figure 3).
    """
    embedding = names.with_role("embedding")
    for each in facts.products:
        if facts.is_of_a_weight(each):
            continue
        made_of = [
            frozenset(p for made in facts.nearest_products(operand) for p in made.contracted)
            for operand in each.operation.operands
        ]
        if all(own & embedding for own in made_of) and made_of[0].isdisjoint(made_of[1]):
            for part in names.without_role(each.contracted & facts.in_weights.keys()):
                reason = "products make it of two residual streams, which are compared over it"
                names.give(part, "joint_embedding", reason)
