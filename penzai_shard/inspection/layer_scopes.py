"""Layers that write their path on every operation, so that a compiled program says whose it is.

``scope_layers`` does so for people who read profiles. Here each path is a short mark, which no
other name contains and which stays readable however JAX and XLA nest and join names.
"""

import dataclasses
import re
from typing import Any

from penzai_shard.layers import Scoped
from penzai_shard.surgery import Recipe, wrap
from penzai_shard.surgery.standard_recipes import is_model_layer, scoped_by_path

_MARK = re.compile(r"\bpzs_layer_(\d+)\b")


@dataclasses.dataclass
class LayerScopes:
    """The marks given so far: one per path, however often a model is marked.

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

    def __post_init__(self) -> None:
        self._numbers = {path: number for number, path in enumerate(self.paths)}

    def marked(self, model: Any) -> Any:
        """A model whose layers write their marks; everything else stays as it is."""
        return Recipe(wrap(is_model_layer, self._scoped, nested=True)).apply(model)

    def paths_in(self, op_name: str) -> tuple[str, ...]:
        """The layers that an operation's name tells of, the outermost first."""
        return tuple(self.paths[int(number)] for number in _MARK.findall(op_name))

    def _scoped(self, layer: Any, path: str) -> Scoped:
        path = scoped_by_path(layer, path).name
        number = self._numbers.setdefault(path, len(self.paths))
        if number == len(self.paths):
            self.paths.append(path)
        return Scoped(layer, f"pzs_layer_{number}")
