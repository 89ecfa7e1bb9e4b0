"""Latents: inner ranks by way of which attention gets its queries, or its keys and values."""

from collections.abc import Sequence, Set

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.attentions import Attention
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import Product, ProgramFacts
from penzai_shard.sharding_propagation import FLOW

# What norms and biases do to a value, and what moves it.
_OF_NORMS = frozenset(
    {
        FLOW,
        "stablehlo.add",
        "stablehlo.broadcast_in_dim",
        "stablehlo.convert",
        "stablehlo.divide",
        "stablehlo.multiply",
        "stablehlo.power",
        "stablehlo.reduce",
        "stablehlo.reshape",
        "stablehlo.rsqrt",
        "stablehlo.slice",
        "stablehlo.sqrt",
        "stablehlo.subtract",
        "stablehlo.transpose",
    }
)


def name_latents(facts: ProgramFacts, names: ClassNames, attentions: Sequence[Attention]) -> None:
    """Names what weights make of the embedding, for others to make queries, or values, of it.

    In between there is a norm at most, and nothing goes past it. The latent of keys and values is
    made of what queries are made of: any other may be what is attended to. DeepSeek-V2 has both
    (https://arxiv.org/abs/2405.04434); their names are those of its configuration.
    """
    embedding = names.with_role("embedding")
    for attention in attentions:
        if len(attention.taken) < 3:
            continue
        _name_attended(facts, names, attention)
        queries, keys, values = (
            facts.nearest_products(attention.taken[each]) for each in ("queries", "keys", "values")
        )
        (asked, asked_by), (known, known_by) = (
            _latent(facts, embedding, attention, each) for each in (queries, values)
        )
        if asked == known:
            continue
        if asked is not None:
            reason = "a product makes it of the embedding, and queries are made of it alone"
            names.give(asked, "q_lora_rank", reason)
        read = _read_by(facts, asked_by or queries)
        is_of_keys = any(known in each.contracted for each in keys)
        if known is not None and is_of_keys and not read.isdisjoint(_read_by(facts, known_by)):
            reason = (
                "a product makes it of what queries are made of; keys and values are made of it"
            )
            names.give(known, "kv_lora_rank", reason)


def _name_attended(facts: ProgramFacts, names: ClassNames, attention: Attention) -> None:
    """Names a latent that is key and value at once, weights for these being applied to the rest.

    So it is where weights are absorbed, as for decoding: queries are taken into the latent before,
    and what comes of attention is taken out of it behind.
    """
    keys, values = (_moved_whole(facts, attention.taken[each]) for each in ("keys", "values"))
    if keys.isdisjoint(values):
        return
    embedding = names.with_role("embedding")
    for part in attention.contracted:
        taken_out = [
            each
            for each in facts.with_weights
            if each.contracted == {part} and each.made and not each.made & embedding
        ]
        if taken_out:
            reason = "it is key and value at once, and a product makes values of heads of it behind"
            names.give(part, "kv_lora_rank", reason)


def _moved_whole(facts: ProgramFacts, value: int) -> set[int]:
    """A value, and those that all of it is another form of."""
    forms = set()
    for each in facts.moved_from(value):
        forms.add(each)
        maker = facts.program.makers.get(each)
        if maker is None or maker.kind not in _OF_NORMS or maker.kind == "stablehlo.slice":
            break
    return forms


def _latent(
    facts: ProgramFacts,
    embedding: Set[DimensionClass],
    attention: Attention,
    products: Sequence[Product],
) -> tuple[DimensionClass | None, Sequence[Product]]:
    """What all of some products contract, if one product makes it of the embedding; and that."""
    contracted = {part for each in products for part in each.contracted}
    if len(contracted) != 1 or not all(map(facts.is_of_a_weight, products)):
        return None, ()
    (part,) = contracted
    before = {
        made.operation.number: made for p in products for made in facts.nearest_products(p.data)
    }
    if part in embedding or len(before) != 1 or not all(_is_normed(facts, p) for p in products):
        return None, ()
    down = tuple(before.values())
    if not facts.is_of_a_weight(down[0]) or not down[0].contracted & embedding:
        return None, ()
    if down[0].made.intersection(attention.heads):
        return None, ()
    return part, down


def _is_normed(facts: ProgramFacts, product: Product) -> bool:
    """Whether nothing but norms is between what a product takes and other products."""
    made = facts.by_result
    between = {*facts.before(product.data, made)} & facts.from_inputs
    makers = (facts.program.makers.get(value) for value in between if value not in made)
    return all(each is None or each.kind in _OF_NORMS for each in makers)


def _read_by(facts: ProgramFacts, products: Sequence[Product]) -> set[int]:
    """What some products take, in all its forms."""
    of_weights = [each for each in products if each.has_weight]
    return {form for each in of_weights for form in facts.moved_from(each.data)}
