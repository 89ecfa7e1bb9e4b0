"""Finding the layers of a model that look tokens up and give logits."""

import dataclasses
from typing import Any

from penzai import pz

from penzai_shard.model_variables import is_parameter, value_of
from penzai_shard.named_leaves import leaves_of
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.surgery import ROOT
from penzai_shard.surgery.tree_nodes import kind_of, names_of

_BY_TYPE = (pz.nn.EmbeddingLookup, pz.nn.EmbeddingDecode)


@dataclasses.dataclass(frozen=True)
class VocabularyLayer:
    """A layer that has a parameter with the logical axis of the vocabulary.

    Attributes:
        place: Where it is, as a place of an edit.
        path: Its readable path.
        looks_up: Whether tokens flow into it, and not activations.
    """

    place: Any
    path: str
    looks_up: bool


def vocabulary_layers(model: Any, vocabulary: LogicalAxis) -> list[VocabularyLayer]:
    """The innermost layers with a parameter that has the logical axis of the vocabulary.

    Args:
        model: The model.
        vocabulary: The logical axis.

    Returns:
        The layers, one for each place: Penzai's own are found by type, others by path.

    >>> import jax
    >>> key = jax.random.key(0)
    >>> head = pz.nn.Linear.from_config("head", key, {"embedding": 2}, {"vocabulary": 4})
    >>> model = pz.nn.Sequential([pz.nn.Softmax("vocabulary"), head])
    >>> vocabulary_layers(model, "vocabulary")[0].place
    'sublayers/linear'
    """
    found: dict[Any, VocabularyLayer] = {}
    for path, layer, place in _innermost(model, vocabulary, (), None)[0]:
        looks_up = isinstance(layer, pz.nn.EmbeddingLookup)
        wanted = next((kind for kind in _BY_TYPE if isinstance(layer, kind)), place)
        found.setdefault(wanted, VocabularyLayer(wanted, path, looks_up))
    return list(found.values())


def _innermost(
    node: Any, vocabulary: LogicalAxis, keys: tuple[Any, ...], parent: Any
) -> tuple[list[tuple[str, Any, Any]], bool]:
    """Such layers at or below a node, and whether the node has the axis in no layer below it."""
    if is_parameter(node):
        return [], any(vocabulary in (leaf.names or ()) for leaf in leaves_of(value_of(node)))
    kind = kind_of(node)
    found: list[tuple[str, Any, Any]] = []
    is_owner = False
    for key, child in () if kind.is_leaf else kind.parts(node):
        below, owns = _innermost(child, vocabulary, (*keys, key), node)
        found += below
        is_owner = is_owner or owns
    if is_owner and kind.is_layer:
        found.append(("/".join(map(str, keys)), node, _place(node, keys, parent)))
        is_owner = False
    return found, is_owner


def _place(node: Any, keys: tuple[Any, ...], parent: Any) -> Any:
    """A path pattern: by the type's name in a list where no other layer has it, else by the key.

    A type's name still means the same layer in a deeper model.
    """
    if not keys:
        return ROOT
    last = str(keys[-1])
    if isinstance(parent, list):
        for name in names_of(node):
            if sum(name in names_of(sibling) for sibling in parent) == 1:
                last = name
    return "/".join([*map(str, keys[:-1]), last])
