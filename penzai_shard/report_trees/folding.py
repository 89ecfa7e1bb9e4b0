"""Siblings that are equal but for the numbers in their names, as one node."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from penzai_shard.path_folding import folded_path, folding_key, ranged_paths
from penzai_shard.report_trees.nodes import TreeNode

# What separates the parts of a path goes with the part after it, and a closing bracket with that
# before it, so that each part ends where a longer path goes on.
_PARTS = re.compile(r"[./\[\]]*[^./\[\]]+\]?")
# A path with a slash, and not a length over a mesh axis as in a=8/data.
_PATHS_IN_TEXT = re.compile(r"(?<![^\s\"'(\[{])[^\s=]*/[^\s=,;]+")


def path_parts(path: str) -> list[str]:
    """A path cut before each separator; joined, they are the path again.

    >>> path_parts("lm/block_0/mlp.up"), path_parts("layers[0].w"), path_parts("//")
    (['lm', '/block_0', '/mlp', '.up'], ['layers', '[0]', '.w'], ['//'])
    """
    parts = _PARTS.findall(path)
    rest = path[sum(map(len, parts)) :]
    if not parts:
        return [path] if path else []
    return [*parts[:-1], parts[-1] + rest]


def folded(nodes: Sequence[TreeNode]) -> tuple[TreeNode, ...]:
    """Nodes, each for one place, with equal siblings put into one, at every depth.

    Only what is equal in all figures, texts and children goes together, so that a block that
    differs from the others stays in sight. Of paths in texts, which may be those of the blocks
    themselves, the numbers do not count.

    >>> blocks = [TreeNode(f"block_{i}", f"lm/block_{i}", "same") for i in range(3)]
    >>> [(node.label, node.path, node.count) for node in folded(blocks)]
    [('block_{0-2}', 'lm/block_{0-2}', 3)]
    """
    numbers: dict[Any, int] = {}
    likenesses: dict[int, int] = {}
    inside_out = [node for outer in nodes for node in outer.walk()][::-1]
    for node in inside_out:
        # In whatever order: equal blocks may ask for equal things in turn.
        inside = tuple(sorted(likenesses[id(child)] for child in node.children))
        likenesses[id(node)] = numbers.setdefault((_likeness(node), inside), len(numbers))
    return _folded_siblings([nodes], likenesses)


def _likeness(node: TreeNode) -> tuple[Any, ...]:
    """What is equal in nodes that go together, but for their children."""
    figures = tuple((figure.name, figure.value, figure.unit) for figure in node.figures)
    texts = tuple(
        _PATHS_IN_TEXT.sub(lambda path: folding_key(path[0]), text)
        for text in (node.line, *node.details)
    )
    return (folding_key(node.label), node.ok, figures, texts)


def _folded_siblings(
    families: Iterable[Iterable[TreeNode]], likenesses: dict[int, int]
) -> tuple[TreeNode, ...]:
    """The children of equal nodes as those of one, in the order of the first.

    Args:
        families: The children of each of them; of each likeness all have as many.
        likenesses: By the identity of a node, a number that equal ones have in common.
    """
    groups: dict[int, list[TreeNode]] = {}
    for family in families:
        for node in family:
            groups.setdefault(likenesses[id(node)], []).append(node)
    return tuple(_joined(group, likenesses) for group in groups.values())


def _joined(nodes: Sequence[TreeNode], likenesses: dict[int, int]) -> TreeNode:
    first = nodes[0]
    children = _folded_siblings([node.children for node in nodes], likenesses)
    if len(nodes) == 1:
        return _with_only_child(dataclasses.replace(first, children=children))
    node = TreeNode(
        label=_one_path([node.label for node in nodes]),
        path=_one_path([node.path for node in nodes]),
        line=_one_text([node.line for node in nodes]),
        figures=tuple(
            dataclasses.replace(figure, value=figure.value * len(nodes)) for figure in first.figures
        ),
        details=tuple(map(_one_text, zip(*(node.details for node in nodes), strict=True))),
        ok=first.ok,
        count=len(nodes),
        children=children,
    )
    return _with_only_child(node)


def _with_only_child(node: TreeNode) -> TreeNode:
    """A node that says nothing beside its only child in one with it, and any other as it is."""
    if len(node.children) != 1 or node.line or node.details:
        return node
    (child,) = node.children
    rest = child.path.removeprefix(node.path)
    if not node.path or rest in ("", child.path) or child.figures != node.figures:
        return node
    return dataclasses.replace(child, label=node.label + rest)


def _one_path(paths: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(paths))
    if len(distinct) == 1:
        return distinct[0]
    ranged = ranged_paths(distinct)
    return ranged[0] if len(ranged) == 1 else folded_path(distinct)


def _one_text(texts: Sequence[str]) -> str:
    """Texts that differ in the numbers of the paths in them only, as one.

    >>> _one_text(["a=8 as lm/block_0/w", "a=8 as lm/block_1/w"])
    'a=8 as lm/block_{0-1}/w'
    """
    found = zip(*map(_PATHS_IN_TEXT.findall, texts), strict=True)
    paths = map(_one_path, found)
    return _PATHS_IN_TEXT.sub(lambda _: next(paths), texts[0])
