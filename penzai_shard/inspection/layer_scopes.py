"""Layers that write their path on every operation, so that a compiled program says whose it is.

``scope_layers`` does so for people who read profiles. Here each path is a short mark, which no
other name contains and which stays readable however JAX and XLA nest and join names.
"""

import dataclasses
import functools
import re
from typing import Any

import jax

from penzai_shard.layers import Scoped
from penzai_shard.surgery import Recipe, wrap
from penzai_shard.surgery.standard_recipes import is_model_layer, scoped_by_path
from penzai_shard.surgery.tree_nodes import nodes_of
from penzai_shard.tree_paths import join_paths

_MARK = re.compile(r"\bpzs_layer_(\d+)\b")


@dataclasses.dataclass
class LayerScopes:
    """The marks given so far: one per path, however often a model is marked.

    Attributes:
        paths: Which path each mark stands for, in the order of their numbers.
        of_step: Further scopes that a step writes itself, outside of all layers.
        is_on: Whether layers are marked at all.

    Attributes:
        paths: Which path each mark stands for, in the order of their numbers.
        of_step: Further scopes that a step writes itself, outside of all layers.

    >>> from penzai import pz
    >>> scopes = LayerScopes()
    >>> marked = scopes.marked(pz.nn.Sequential([pz.nn.Identity()]))
    >>> scopes.paths_in("jit(step)/transpose(jvp(pzs_layer_1))/pzs_layer_0/add")
    ('sequential', 'sublayers/0')
    """

    paths: list[str] = dataclasses.field(default_factory=list)
    of_step: tuple[str, ...] = ()
    is_on: bool = True

    def __post_init__(self) -> None:
        self._numbers = {path: number for number, path in enumerate(self.paths)}

    def marked(self, model: Any, prefix: str = "") -> Any:
        """A model whose layers write their marks; everything else stays as it is.

        Args:
            model: A model, or any tree with layers in it.
            prefix: Where it is, in front of the paths in it.
        """
        if not self.is_on or not has_layers(model):
            return model
        scoped = functools.partial(self._scoped, prefix)
        return Recipe(wrap(is_model_layer, scoped, nested=True)).apply(model)

    def unmarked(self, tree: Any) -> Any:
        """A tree without the marks in it."""
        return jax.tree.map(
            lambda node: self.unmarked(node.body) if _is_mark(node) else node,
            tree,
            is_leaf=_is_mark,
        )

    def paths_in(self, op_name: str) -> tuple[str, ...]:
        """The layers that an operation's name tells of, the outermost first."""
        return tuple(self.paths[int(number)] for number in _MARK.findall(op_name))

    def _scoped(self, prefix: str, layer: Any, path: str) -> Scoped:
        path = join_paths(prefix, scoped_by_path(layer, path).name)
        number = self._numbers.setdefault(path, len(self.paths))
        if number == len(self.paths):
            self.paths.append(path)
        return Scoped(layer, f"pzs_layer_{number}")


def has_layers(tree: Any) -> bool:
    """Whether there are layers of a model in a tree.

    >>> has_layers({"w": 1.0})
    False
    """
    return any(is_model_layer(node) for _, node in nodes_of(tree))


def _is_mark(node: Any) -> bool:
    return isinstance(node, Scoped) and _MARK.fullmatch(node.name) is not None
