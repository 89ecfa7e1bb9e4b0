"""Several residual streams in one program, such as those of images and of texts."""

import collections
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.attentions import Attention
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.tree_paths import split_path

_OF_STREAMS = ("heads", "head_groups", "query_heads", "projection", "neurons")
# What blocks of several streams may have in common: these are no lengths of a stream.
_COMMON = frozenset(
    {"embedding", "vocabulary", "outputs", "rank", "joint_embedding", "qkv", "kv", "gate_up"}
)


class _Words(NamedTuple):
    """What tells streams apart in paths.

    Attributes:
        place: At which place of the paths it stands.
        by_part: The stream of each part of a path that can stand there.
    """

    place: int
    by_part: Mapping[tuple[str, ...], DimensionClass]


def leave_other_streams_open(facts: ProgramFacts, names: ClassNames) -> None:
    """Takes their names from heads and neurons of a stream that has none, beside one that has.

    They stand beside what is not decided, and never beside the embedding: there are two models.
    """
    embedding = names.with_role("embedding")
    beside = {
        part: {each for weight in facts.in_weights[part] for each in weight.classes}
        for part in names.with_role(*_OF_STREAMS) & facts.in_weights.keys()
    }
    known = {names.roles[part] for part, others in beside.items() if others & embedding}
    for part, others in beside.items():
        is_open = any(
            each.size > 1 and each not in names.roles and each not in facts.of_inputs
            for each in others
        )
        if is_open and names.roles[part] in known and not others & embedding:
            doubt = "it is of a residual stream that is not decided, and there is another one"
            names.take_back(part, doubt)


def tell_streams_apart(
    facts: ProgramFacts, names: ClassNames, attentions: Sequence[Attention]
) -> None:
    """Gives residual streams that nothing ties names of their own, by a word in their paths.

    Equal lengths are not equal axes: the width of an image encoder is not that of a text encoder,
    and that of ``stages.0`` not that of ``stages.1``. Where no word tells them apart, the one that
    begins at the vocabulary is the embedding; where none does, the one that more than twice as many
    weights have as all others, as those of blocks do beside those of a pooling behind them.
    """
    streams = sorted(names.with_role("embedding"))
    if len(streams) < 2:
        return
    words = _words(facts, streams)
    if words is not None:
        labels = {stream: "_".join(part) for part, stream in words.by_part.items()}
        for stream, word in labels.items():
            reason = f"blocks under {word!r} have a residual stream that nothing ties to others"
            names.call(stream, f"{word}_embedding", reason)
        for part, stream in _owners(facts, names, words, _of_poolings(facts, names, attentions)):
            reason = f"{names.reason(part)}, of the stream of {labels[stream]!r}"
            names.call(part, f"{labels[stream]}_{names.roles[part]}", reason)
        return
    vocabulary = names.with_role("vocabulary")
    begins = [
        stream
        for stream in streams
        if any(not vocabulary.isdisjoint(each.classes) for each in facts.in_weights[stream])
    ]
    counts = {stream: len(facts.in_weights[stream]) for stream in streams}
    most = [stream for stream in streams if counts[stream] > sum(counts.values()) * 2 / 3]
    kept = begins or most
    for stream in streams:
        if kept != [stream]:
            doubt = "it is one of several residual streams, which nothing ties"
            names.take_back(stream, doubt)


def _words(facts: ProgramFacts, streams: list[DimensionClass]) -> _Words | None:
    """A word for each stream, which stands at one place of the paths of most of its weights."""
    paths = {
        stream: [
            split_path(each.path)
            for each in facts.in_weights[stream]
            if ({*streams} - {stream}).isdisjoint(each.classes)
        ]
        for stream in streams
    }
    for place in range(max((len(path) for own in paths.values() for path in own), default=0)):
        found = {}
        for stream, own in paths.items():
            counts = collections.Counter(_word(path, place) for path in own if len(path) > place)
            word, count = next(iter(counts.most_common(1)), ((), 0))
            if 2 * count > len(own) and "_".join(word).isidentifier():
                found[stream] = word
        if len(found) == len(streams) == len(set(found.values())):
            return _Words(place, {word: stream for stream, word in found.items()})
    return None


def _word(path: Sequence[str], place: int) -> tuple[str, ...]:
    """What stands at a place of a path; a number together with what is numbered."""
    return tuple(path[max(place - 1, 0) if path[place].isdigit() else place : place + 1])


def _of_poolings(
    facts: ProgramFacts, names: ClassNames, attentions: Sequence[Attention]
) -> Set[DimensionClass]:
    """What those attentions have for themselves whose queries are learned, not of a stream."""
    found: set[DimensionClass] = set()
    for attention in attentions:
        asked = facts.nearest_products(attention.taken.get("queries", -1))
        made_of = {part for each in asked for part in each.contracted} & facts.in_weights.keys()
        if made_of and made_of.isdisjoint(names.roles):
            found |= {*attention.heads} | attention.contracted | attention.values
    return found


def _owners(
    facts: ProgramFacts, names: ClassNames, words: _Words, of_none: Set[DimensionClass]
) -> Iterator[tuple[DimensionClass, DimensionClass]]:
    """What belongs to one stream alone, with the stream.

    It stands beside that stream alone; or, as what a decoder makes of an encoder's, only in weights
    the paths of which have the word of the stream.
    """
    streams = frozenset(words.by_part.values())
    for part, role in list(names.roles.items()):
        weights = facts.in_weights.get(part, ())
        paths = [split_path(each.path) for each in weights]
        beside = {stream for each in weights for stream in streams.intersection(each.classes)}
        if len(beside) > 1:
            own = {_word(path, words.place) if len(path) > words.place else () for path in paths}
            beside = {words.by_part[word] for word in own if own <= words.by_part.keys()}
        if role not in _COMMON and part not in of_none and len(beside) == 1:
            yield part, beside.pop()
