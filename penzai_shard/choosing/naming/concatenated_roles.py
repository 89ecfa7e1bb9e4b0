"""What stands one after the other along one dimension: queries, keys and values, and latents."""

import collections
from collections.abc import Mapping, Sequence, Set

from penzai_shard.choosing.naming.attentions import Attention
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.cut_runs import Cut, cover
from penzai_shard.choosing.naming.program_facts import ProgramFacts

_LETTERS = {"queries": "q", "keys": "k", "values": "v"}
_OF_ROLES = {
    "q_lora_rank": frozenset("q"),
    "kv_lora_rank": frozenset("kv"),
    "neurons": frozenset({"neurons"}),
}
_LATENT = frozenset({"q_lora_rank", "kv_lora_rank"})
_HEADS = frozenset({"heads", "head_groups", "query_heads"})


def name_concatenated(
    facts: ProgramFacts, names: ClassNames, attentions: Sequence[Attention]
) -> None:
    """Names dimensions along which several things stand one after the other, by what these are.

    These need not be equally long, so that one name is for all of it: ``qkv`` where what follows
    each other are whole heads or projections, ``kv_projection`` where their elements do.
    ``compressed_kv`` is what DeepSeek's code calls a latent together with the part of keys that
    does not go by way of it.
    """
    purposes = _purposes(facts, attentions)
    for part, runs in facts.runs.items():
        if part in names.roles or part not in facts.in_weights or not cover(part, runs):
            continue
        served = [_served(names, found, purposes) for found in runs.values()]
        if not any(served) or len(set(served)) == 1:
            # So it is with the halves that are rotated.
            continue
        if not all(served):
            names.doubts[part] = "parts of it have different roles, some of them unknown"
            continue
        roles = {names.roles.get(p) for found in runs.values() for _, cut in found for p in cut}
        text, reason = _told(frozenset[str]().union(*served))
        if roles & _LATENT:
            names.give(part, f"compressed_{text}", f"latents of {reason}, as they are cut apart")
        elif roles <= _HEADS or "neurons" in roles:
            names.give(part, text, reason)
        else:
            names.give(part, f"{text}_projection", reason)


def _told(served: Set[str]) -> tuple[str, str]:
    """A name for what stands along one dimension, and the reason."""
    named = "".join(sorted(served - {"neurons"}, key="qkv".index))
    parts = [each for each, letter in _LETTERS.items() if letter in served]
    if "neurons" in served:
        named, parts = f"{named}_neurons", [*parts, "neurons"]
    return named, f"{' and '.join(parts)} stand one after the other along it"


def _purposes(facts: ProgramFacts, attentions: Sequence[Attention]) -> Mapping[int, frozenset[str]]:
    """What values are computed for, if no product is in between: the first attention tells."""
    found: dict[int, frozenset[str]] = {}
    for attention in attentions:
        own: dict[int, set[str]] = collections.defaultdict(set)
        for purpose, operand in attention.taken.items():
            for value in facts.before(operand, facts.by_result):
                own[value].add(_LETTERS[purpose])
            for product in facts.nearest_products(operand):
                if product.has_weight:
                    for value in facts.moved_from(product.weight_operand):
                        own[value].add(_LETTERS[purpose])
        for value, letters in own.items():
            found.setdefault(value, frozenset(letters))
    return found


def _served(
    names: ClassNames,
    found: Sequence[Cut],
    purposes: Mapping[int, frozenset[str]],
) -> frozenset[str]:
    """What one run is for: by what it is, such as a latent, or by what becomes of it."""
    served = frozenset[str]()
    for value, cut in found:
        role = names.roles.get(cut[0]) if len(cut) == 1 else None
        served |= _OF_ROLES.get(role or "", purposes.get(value, frozenset()))
    return served
