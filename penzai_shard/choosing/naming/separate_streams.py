"""Several residual streams in one program, such as those of images and of texts."""

import collections
from collections.abc import Iterator, Mapping

from penzai_shard.choosing.dimensions import DimensionClass
from penzai_shard.choosing.naming.class_names import ClassNames
from penzai_shard.choosing.naming.program_facts import ProgramFacts
from penzai_shard.tree_paths import split_path

# What each stream may have of its own, and what must not be taken for that of another.
_OWN = ("neurons", "heads", "head_groups", "query_heads", "projection", "experts")


def tell_streams_apart(facts: ProgramFacts, names: ClassNames) -> None:
    """Gives residual streams that nothing ties names of their own, by a word in their paths.

    Equal lengths are not equal axes: the width of an image encoder is not that of a text encoder.
    Where no word tells them apart, the one that begins at the vocabulary is the embedding.
    """
    streams = sorted(names.with_role("embedding"), key=lambda part: part.number)
    if len(streams) < 2:
        return
    words = _words(facts, streams)
    if words:
        for stream, word in words.items():
            reason = f"blocks under {word!r} have a residual stream that nothing ties to others"
            names.call(stream, f"{word}_embedding", reason)
        for part, stream in _owners(facts, names, streams):
            reason = f"{names.reason(part)}, of the stream of {words[stream]!r}"
            names.call(part, f"{words[stream]}_{names.roles[part]}", reason)
        return
    begins = [
        stream
        for stream in streams
        if any(
            names.with_role("vocabulary") & facts.classes_of_weight(number)
            for number in facts.in_weights[stream]
        )
    ]
    for stream in streams:
        if begins != [stream]:
            doubt = "it is one of several residual streams, which nothing ties"
            names.take_back(stream, doubt)


def _words(
    facts: ProgramFacts, streams: list[DimensionClass]
) -> Mapping[DimensionClass, str] | None:
    """A word for each stream, which stands at one place of the paths of most of its weights."""
    paths = {
        stream: [
            split_path(facts.call.weights[number].path)
            for number in facts.in_weights[stream]
            if facts.classes_of_weight(number).isdisjoint(set(streams) - {stream})
        ]
        for stream in streams
    }
    for place in range(max((len(path) for own in paths.values() for path in own), default=0)):
        words = {}
        for stream, own in paths.items():
            counts = collections.Counter(path[place] for path in own if len(path) > place)
            word, count = next(iter(counts.most_common(1)), ("", 0))
            if 2 * count > len(own) and word.isidentifier():
                words[stream] = word
        if len(words) == len(streams) == len(set(words.values())):
            return words
    return None


def _owners(
    facts: ProgramFacts, names: ClassNames, streams: list[DimensionClass]
) -> Iterator[tuple[DimensionClass, DimensionClass]]:
    """What belongs to one stream alone, with the stream."""
    for part, role in list(names.roles.items()):
        beside = {
            stream
            for number in facts.in_weights.get(part, ())
            for stream in facts.classes_of_weight(number).intersection(streams)
        }
        if role in _OWN and len(beside) == 1:
            yield part, beside.pop()
