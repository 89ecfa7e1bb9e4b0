"""A short vocabulary of words in paths: the last resort for what the program leaves open."""

import re
from collections.abc import Iterable

from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.tree_paths import split_path

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
# The name, the words of which one must be in the path, and what must stand beside it.
_VOCABULARY: tuple[tuple[str, frozenset[str], str], ...] = (
    ("vocabulary", frozenset({"head", "logits", "unembed", "decoder", "vocab", "output"}), "size"),
    ("positions", frozenset({"wpe", "pos", "position", "positions", "positional"}), "embedding"),
    ("buckets", frozenset({"relative"}), "heads"),
    ("experts", frozenset({"router", "experts", "expert", "moe"}), "size"),
)


def name_by_path_words(facts: ProgramFacts, names: ClassNames) -> None:
    """Names classes by words in the paths of the weights that have them.

    Only what a weight has beside the embedding, so that nothing else can be meant; the vocabulary
    and the experts also must be as long as what has that name by the program. Nothing is tied: a
    class that the program has found gets a name.
    """
    lengths = {name: {part.size for part in names.with_role(name)} for name, *_ in _VOCABULARY}
    for number, weight in enumerate(facts.call.weights):
        parts = [part for dimension in weight.parts or () for part in dimension if part.size > 1]
        open_parts = names.without_role({*parts} - facts.of_inputs.keys())
        named = [names.roles[part] for part in parts if part in names.roles]
        if len(named) != 1 or len(open_parts) != 1:
            continue
        (part,) = open_parts
        words = set(words_of(weight.path))
        for name, known, needs in _VOCABULARY:
            found = sorted(words & known)
            if named != (["heads"] if needs == "heads" else ["embedding"]):
                continue
            fits = needs != "size" or part.size in lengths[name]
            if found and fits and facts.in_weights[part][0] == number:
                longer = f", and it is as long as the {name}" if needs == "size" else ""
                names.give(part, name, f"the path says {found[0]!r}{longer}")


def words_of(path: str) -> Iterable[str]:
    """The words of a path, in small letters.

    >>> list(words_of("model.lm_head/posEmbed"))
    ['model', 'lm', 'head', 'pos', 'embed']
    """
    for part in split_path(path):
        yield from (word.lower() for word in _WORDS.findall(part))
