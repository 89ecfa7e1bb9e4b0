"""A short vocabulary of words in paths: the last resort for what the program leaves open."""

import re
from collections.abc import Iterable

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.tree_paths import split_path

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
WORDS_OF_PLACES = frozenset({"wpe", "pos", "position", "positions", "positional"})
# What lets several places share a row of a table.
_SHARING = frozenset({"stablehlo.log", "stablehlo.maximum", "stablehlo.minimum"})
_EMBEDDING = (("embedding",),)
# The name, the words of which one must be in the path, what may stand beside it, and what else must
# be: that it is as long as what has the name already, or that rows of it are shared.
_VOCABULARY: tuple[tuple[str, frozenset[str], tuple[tuple[str, ...], ...], str], ...] = (
    (
        "vocabulary",
        frozenset({"head", "logits", "unembed", "decoder", "vocab", "output"}),
        _EMBEDDING,
        "length",
    ),
    ("positions", WORDS_OF_PLACES, _EMBEDDING, ""),
    ("buckets", frozenset({"relative", "relpos"}), (("heads",),), "sharing"),
    (
        "experts",
        frozenset({"router", "experts", "expert", "moe"}),
        (*_EMBEDDING, ("embedding", "neurons")),
        "length",
    ),
)


def name_by_path_words(facts: ProgramFacts, names: ClassNames) -> None:
    """Names classes by words in the paths of the weights that have them.

    Only what a weight has beside known axes, so that nothing else can be meant; the vocabulary
    and the experts also must be as long as what has that name by the program, and rows of buckets
    be shared by several places. Nothing is tied: a class that the program has found gets a name.
    """
    lengths = {name: {part.size for part in names.with_role(name)} for name, *_ in _VOCABULARY}
    led = {facts.leads[part] for part in names.with_role("embedding") & facts.leads.keys()}
    for weight in facts.call.weights:
        parts = [part for part in weight.classes if part.size > 1]
        open_parts = names.without_role({*parts} - facts.of_inputs.keys() - led)
        named = tuple(sorted(names.roles[part] for part in parts if part in names.roles))
        if len(open_parts) != 1:
            continue
        (part,) = open_parts
        words = set(words_of(weight.path))
        for name, known, beside, needs in _VOCABULARY:
            found = sorted(words & known)
            if not found or named not in beside or facts.in_weights[part][0] is not weight:
                continue
            if needs == "sharing" and not _is_shared(facts, part):
                continue
            if needs != "length":
                names.give(part, name, f"the path says {found[0]!r}")
            elif part.size in lengths[name]:
                reason = f"the path says {found[0]!r}, and it is as long as the {name}"
                names.give(part, name, reason)


def _is_shared(facts: ProgramFacts, rows: DimensionClass) -> bool:
    """Whether several places may share a row: far ones do, with T5; none does with Swin."""
    chosen = [each.index for each in facts.lookups if each.rows == rows]
    chosen += [each.data for each in facts.with_weights if each.contracted == {rows}]
    return any(not _SHARING.isdisjoint(facts.kinds_before(each)) for each in chosen)


def words_of(path: str) -> Iterable[str]:
    """The words of a path, in small letters.

    >>> list(words_of("model.lm_head/posEmbed"))
    ['model', 'lm', 'head', 'pos', 'embed']
    """
    for part in split_path(path):
        yield from (word.lower() for word in _WORDS.findall(part))
