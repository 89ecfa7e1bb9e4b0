"""Which collectives belong together in a table: of equal blocks, and of layers side by side."""

from collections.abc import Collection, Iterable, Sequence

from penzai_shard.path_folding import folding_key, ranged_paths
from penzai_shard.tree_paths import common_parts

UNATTRIBUTED = "unattributed"
# What may own a collective and is not a layer.
OTHER_OWNERS = ("loss", "optimizer")
# More layers than this are counted, not named.
MOST_NAMED_LAYERS = 3


def owners_text(labels: Iterable[str]) -> str:
    """Owners of collectives in a short text: what their labels have in common, then the rest.

    >>> owners_text(["block_0/attention/query", "block_0/attention/key"])
    'block_0/attention/{query, key}'
    >>> owners_text([*(f"block_{i}/mlp" for i in range(8)), "loss"])
    '(8 layers) + loss'
    >>> owners_text([])
    'unattributed'
    """
    labels = tuple(labels)
    layers = [label for label in labels if label not in OTHER_OWNERS]
    return _joined(layers, labels, len(layers))


def folded_owners_text(labels: Iterable[str]) -> str:
    """The same, with the numbers of equal blocks as ranges.

    >>> folded_owners_text(f"block_{i}/mlp/{name}" for i in range(8) for name in ("up", "down"))
    'block_{0-7}/mlp/{down, up}'
    """
    labels = set(labels)
    layers = labels.difference(OTHER_OWNERS)
    return _joined(ranged_paths(layers), labels, len(layers))


def group_of(labels: Sequence[str], root: Sequence[str]) -> tuple[str, ...]:
    """What collectives have in common that belong together.

    Those of layers side by side in a block belong together, and so do those of equal blocks; the
    parts that the whole model has, such as its embedding, stay apart.

    Args:
        labels: The owners of a collective.
        root: What all labels of a model begin with, as ``common_parts`` gives it.

    >>> group_of(["model/block_3/mlp/up"], ["model"])
    ('model/block_*/mlp',)
    >>> group_of(["model/lm_head", "loss"], ["model"])
    ('model/lm_head', 'loss')
    """
    return tuple(map(folding_key, parts_of_model(labels, root)))


def parts_of_model(labels: Sequence[str], root: Sequence[str]) -> tuple[str, ...]:
    """The same, with the numbers of blocks: the part of the model around layers side by side.

    >>> parts_of_model(["model/block_3/mlp/up"], ["model"])
    ('model/block_3/mlp',)
    """
    layers = [label.split("/") for label in labels if label not in OTHER_OWNERS]
    around = common_parts(layers)
    if len(layers) == 1 and len(around) > len(root) + 1:
        around = around[:-1]
    others = [name for name in OTHER_OWNERS if name in labels]
    return (*(["/".join(around)] if layers else []), *others)


def _joined(layers: Sequence[str], labels: Collection[str], count: int) -> str:
    others = [name for name in OTHER_OWNERS if name in labels]
    return " + ".join([_layers_text(layers, count)] * bool(layers) + others) or UNATTRIBUTED


def _layers_text(layers: Sequence[str], count: int) -> str:
    if len(layers) == 1:
        return layers[0]
    paths = [layer.split("/") for layer in layers]
    common = common_parts(paths)
    if len(paths) > MOST_NAMED_LAYERS:
        return " ".join(["/".join(common), f"({count} layers)"]).strip()
    rests = ["/".join(path[len(common) :]) for path in paths]
    if not all(rests) or not common:
        return " + ".join(layers)
    return f"{'/'.join(common)}/{{{', '.join(rests)}}}"
