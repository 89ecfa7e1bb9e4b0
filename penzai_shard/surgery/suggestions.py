"""What an edit that matched nothing may have meant."""

import difflib
from collections import Counter
from typing import Any

from penzai_shard.surgery.places import Where
from penzai_shard.surgery.rewriting import Rewriter
from penzai_shard.surgery.tree_nodes import keys_text, kind_of, names_of, nodes_of

_MOST_NAMED = 5


def nearest_places(model: Any, where: Where, layers_only: bool) -> str:
    """What the model has that is most like a place which it does not have, as a sentence.

    Args:
        model: The model.
        where: A place that matched nothing.
        layers_only: Whether only layers were asked for.

    Returns:
        For types the nearest types, for patterns the nearest parts and paths.

    >>> from penzai import pz
    >>> nearest_places(pz.nn.Sequential([]), Where.of("pz.nn:NamedGroup"), True)
    'The model has: Sequential (1).'
    """
    if where.within is not None or where.outside is not None:
        count = _count(model, Where(where.what), layers_only)
        if count:
            return f"Without within= and outside= there would be {count}."
    nodes = list(nodes_of(model))
    if isinstance(where.what, tuple):
        return _nearest_types(where.what, [node for _, node in nodes])
    if isinstance(where.what, str):
        return _nearest_paths(model, where.what, nodes)
    return f"The predicate is false for all {len(nodes)} nodes that were asked."


def _count(model: Any, where: Where, layers_only: bool) -> int:
    walk = Rewriter(where.finder(layers_only), lambda node, keys: (node,))
    walk.run(model)
    return walk.count


def _nearest_types(wanted: tuple[type, ...], nodes: list[Any]) -> str:
    counts = Counter(type(node) for node in nodes if kind_of(node).is_layer)
    same_name = [
        f"{found.__module__}.{found.__qualname__} ({count})"
        for found, count in counts.items()
        if any(found.__name__ == kind.__name__ for kind in wanted)
    ]
    if same_name:
        return f"The model has another type of that name: {', '.join(same_name)}."
    by_name = {kind.__name__: count for kind, count in counts.items()}
    if not by_name:
        return "The model has no layers."
    near = [
        name
        for kind in wanted
        for name in difflib.get_close_matches(kind.__name__, by_name, _MOST_NAMED, 0.5)
    ]
    common = [name for name, _ in Counter(by_name).most_common(_MOST_NAMED)]
    shown = list(dict.fromkeys(near or common))
    described = ", ".join(f"{name} ({by_name[name]})" for name in shown)
    return f"{'Nearest in the model' if near else 'The model has'}: {described}."


def _nearest_paths(model: Any, pattern: str, nodes: list[tuple[tuple[Any, ...], Any]]) -> str:
    layers = [(keys_text(path), node) for path, node in nodes if kind_of(node).is_layer]
    known = {part for path, _ in layers for part in path.split("/") if part}
    known |= {name for _, node in layers for name in names_of(node)}
    near = []
    closest: dict[str, str] = {}
    for part in pattern.split("/"):
        if part and not any(letter in part for letter in "*?") and part not in known:
            close = difflib.get_close_matches(part, known, 1, 0.5)
            if close:
                closest[part] = close[0]
            near.append(
                f"nothing is called {part!r}" + (f", nearest is {close[0]!r}" if close else "")
            )
    plain = pattern.replace("*", "").replace("//", "/")

    def rank(place: tuple[str, Any]) -> tuple[bool, float]:
        path, node = place
        names = {*path.split("/")[-1:], *names_of(node)}
        text = "/".join([path, *names_of(node)])
        is_meant = not names.isdisjoint(closest.values())
        return not is_meant, -difflib.SequenceMatcher(None, plain, text).ratio()

    ranked = [
        f"{path} ({type(node).__name__})"
        for path, node in sorted((place for place in layers if place[0]), key=rank)
    ]
    sentence = f"In the model {'; '.join(near)}. " if near else ""
    corrected = "/".join(closest.get(part, part) for part in pattern.split("/"))
    for candidate in (corrected, f"**/{corrected}"):
        count = _count(model, Where(candidate), layers_only=True)
        if count:
            sentence += f"Write {candidate!r}, which matches {count}. "
            break
    return sentence + f"Nearest paths: {', '.join(ranked[:3]) or 'none'}."
