"""What people call the layers of a model: by the names of the parameters in them, as plans do."""

from typing import Any

from penzai_shard.model_variables.variables import is_parameter, variable_name
from penzai_shard.surgery.bare_paths import layer_name
from penzai_shard.surgery.tree_nodes import (
    Keys,
    children_of,
    is_layer,
    keys_text,
    nodes_of,
)
from penzai_shard.tree_paths import common_parts, join_paths


def layer_labels(model: Any) -> dict[str, str]:
    """A label for each layer of a model whose parameters have names.

    A layer is called by what the names of all parameters in it begin with. One that has none of its
    own, or shares those of a layer elsewhere, is called by the layer around it and by its type.

    Args:
        model: A model, or any tree with layers in it.

    Returns:
        Labels by the layers' paths; empty if no parameter has a name.

    >>> import jax
    >>> from penzai import pz
    >>> up = pz.nn.Linear.from_config("mlp/up", jax.random.key(0), {"a": 2}, {"b": 2})
    >>> layer_labels(pz.nn.Sequential([up, pz.nn.RenameAxes(old="b", new="a")]))
    {'': 'mlp/up', 'sublayers/0': 'mlp/up', 'sublayers/1': 'mlp/up/rename_axes'}
    """
    owners: dict[Keys, list[str]] = {}
    _add_owners(owners, model, ())
    if not owners:
        return {}
    labels: dict[Keys, str] = {}
    first_of: dict[str, Keys] = {}
    for keys, node in nodes_of(model):
        if not is_layer(node):
            continue
        around = next((labels[keys[:n]] for n in range(len(keys))[::-1] if keys[:n] in labels), "")
        label = "/".join(owners.get(keys, ()))
        first = first_of.setdefault(label, keys)
        if not label or keys[: len(first)] != first:
            label = join_paths(around, layer_name(node))
        labels[keys] = label
    return {keys_text(keys): label for keys, label in labels.items()}


def _add_owners(owners: dict[Keys, list[str]], node: Any, keys: Keys) -> list[str] | None:
    """Adds what the names of the parameters in each node have in common; None if it has none."""
    if is_parameter(node):
        return layer_of_parameter(variable_name(node, keys_text(keys)))
    below = [_add_owners(owners, child, (*keys, key)) for key, child in children_of(node)]
    found = [parts for parts in below if parts is not None]
    if not found:
        return None
    owners[keys] = common_parts(found)
    return owners[keys]


def layer_of_parameter(name: str) -> list[str]:
    """The parts of a parameter's name without its own.

    >>> layer_of_parameter("mlp/up.weights")
    ['mlp', 'up']
    """
    *around, last = name.split("/")
    layer, dot, _ = last.rpartition(".")
    return [*around, layer] if dot else around
