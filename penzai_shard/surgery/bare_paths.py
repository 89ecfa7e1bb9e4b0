"""Where the layers of an edited model are in the model as it was."""

from typing import Any

from penzai_shard.surgery.inserted_layers import library_role, vanishes
from penzai_shard.surgery.tree_nodes import Keys, children_of, keys_text, kind_of, snake_case


def bare_paths(model: Any) -> dict[str, str]:
    """For each node of a model its path once all that was put in is taken off, as ``strip`` does.

    So an edit does not change what a layer is called. A wrapper is called as the layer in it. Other
    layers that were put in are called by their type, and by the layer that they are before, as in
    ``sublayers/before_2/constrain_sharding``.

    Args:
        model: A model, or any tree with layers in it.

    Returns:
        Paths by the paths of the model as it is; both are empty for its root.

    >>> from penzai import pz
    >>> from penzai_shard.layers import Jitted
    >>> bare_paths(Jitted(pz.nn.Sequential([pz.nn.Identity()])))
    {'': '', 'body': '', 'body/sublayers': 'sublayers', 'body/sublayers/0': 'sublayers/0'}
    """
    found: dict[str, str] = {}
    _add(found, model, (), ())
    return found


def _add(found: dict[str, str], node: Any, keys: Keys, bare: Keys) -> None:
    if kind_of(node).is_leaf:
        return
    found[keys_text(keys)] = keys_text(bare)
    match library_role(type(node)):
        case "wrapper" | "original":
            _add(found, node.body, (*keys, "body"), bare)
        case "inserted" if node.holds_original:
            inside = (*bare, "inserted", layer_name(node.body))
            _add_around_original(found, node.body, (*keys, "body"), inside, bare)
        case "sequence":
            is_gone = [vanishes(layer) for layer in node.sublayers]
            is_alone = is_gone.count(False) == 1
            for i, layer in enumerate(node.sublayers):
                path: Keys = bare if is_alone else (*bare, "sublayers", i)
                if is_gone[i]:
                    path = (*bare, "inserted", layer_name(layer))
                _add(found, layer, (*keys, "sublayers", i), path)
        case _:
            _add_children(found, node, keys, bare)


def _add_children(found: dict[str, str], node: Any, keys: Keys, bare: Keys) -> None:
    gone = 0
    for key, child in children_of(node):
        path: Keys = (*bare, key)
        if isinstance(node, list | tuple) and isinstance(key, int):
            path = (*bare, key - gone)
            if vanishes(child):
                path = (*bare, f"before_{key - gone}", layer_name(child))
                gone += 1
        _add(found, child, (*keys, key), path)


def _add_around_original(
    found: dict[str, str], node: Any, keys: Keys, inside: Keys, bare: Keys
) -> None:
    """What was put around a layer of the model, and that layer, whose path is ``bare``."""
    if kind_of(node).is_leaf:
        return
    if library_role(type(node)) == "original":
        _add(found, node, keys, bare)
        return
    found[keys_text(keys)] = keys_text(inside)
    for key, child in children_of(node):
        _add_around_original(found, child, (*keys, key), (*inside, key), bare)


def layer_name(layer: Any) -> str:
    """What a layer without a path is called: by its type, without what was put around it.

    >>> from penzai import pz
    >>> from penzai_shard.layers import Jitted
    >>> layer_name(Jitted(pz.nn.Identity()))
    'identity'
    """
    while library_role(type(layer)) in ("wrapper", "inserted", "original"):
        layer = layer.body
    return snake_case(type(layer).__name__)
