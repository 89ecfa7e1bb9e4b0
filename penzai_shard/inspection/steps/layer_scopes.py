"""Layers that write their path on every operation, so that a compiled program says whose it is.

``scope_layers`` does so for people who read profiles. Here each path is a short mark, which no
other name contains and which stays readable however JAX and XLA nest and join names; the layers
of this library are marked too, since a constraint is to blame for what it moves.
"""

import dataclasses
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import jax
from penzai import pz

from penzai_shard.inspection.steps.layer_labels import layer_labels
from penzai_shard.inspection.steps.layer_outputs import LayerOutputs
from penzai_shard.inspection.steps.pinning_layers import PinningLayer
from penzai_shard.layers import RolledLayerStack, Scoped
from penzai_shard.model_variables import is_variable, variable_name
from penzai_shard.surgery.bare_paths import bare_paths, layer_name
from penzai_shard.surgery.places import find_predicate
from penzai_shard.surgery.rewriting import Rewriter
from penzai_shard.surgery.tree_nodes import Keys, is_layer, keys_text, nodes_of
from penzai_shard.tree_paths import array_path_text, join_paths

_MARK = re.compile(r"\bpzs_layer_(\d+)\b")


@dataclasses.dataclass
class LayerScopes:
    """The marks given so far: one per path, however often a model is marked.

    Attributes:
        paths: Which path each mark stands for, in the order of their numbers.
        of_step: Further scopes that a step writes itself, outside of all layers.
        is_on: Whether layers are marked at all.
        labels: What people call the layers, by their paths; see ``layer_labels``.
        holders: Which layers hold a variable, by its label, or another array, by its path.
        stack_axes: The logical axes that number the layers of a stack.
        pinning: The layers that pin layouts themselves, by their paths.
        outputs: What each layer gave when it was traced.

    >>> scopes = LayerScopes()
    >>> marked = scopes.marked(pz.nn.Sequential([pz.nn.Identity()]))
    >>> scopes.paths_in("jit(step)/transpose(jvp(pzs_layer_1))/pzs_layer_0/add")
    ('sequential', 'sublayers/0')
    """

    paths: list[str] = dataclasses.field(default_factory=list)
    of_step: tuple[str, ...] = ()
    is_on: bool = True
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    holders: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)
    stack_axes: set[Hashable] = dataclasses.field(default_factory=set)
    pinning: dict[str, PinningLayer] = dataclasses.field(default_factory=dict)
    outputs: LayerOutputs = dataclasses.field(default_factory=LayerOutputs)

    def __post_init__(self) -> None:
        self._numbers = {path: number for number, path in enumerate(self.paths)}

    def marked(self, model: Any, prefix: str = "") -> Any:
        """A model whose layers write their marks; everything else stays as it is.

        A layer goes by its path in the model as it was before anything was put in.

        Args:
            model: A model, or any tree with layers in it.
            prefix: Where it is, in front of the paths in it.
        """
        if not self.is_on or not has_layers(model):
            return model
        bare, labels = bare_paths(model), layer_labels(model)

        def marked_layer(layer: Any, keys: Keys) -> tuple[Any, ...]:
            text = keys_text(keys)
            path = join_paths(prefix, bare[text] or layer_name(layer))
            if isinstance(layer, pz.nn.LayerStack | RolledLayerStack):
                self.stack_axes.add(layer.stack_axis)
            if (pinning := PinningLayer.of(layer)) is not None:
                self.pinning[path] = pinning
            if text in labels:
                self.labels.setdefault(path, join_paths(prefix, labels[text]))
            for name in _names_held(layer, (text, bare[text])):
                self.holders.setdefault(join_paths(prefix, name), {})[path] = None
            return (self._marked_layer(layer, path),)

        return Rewriter(
            find_predicate(is_layer, layers_only=True),
            marked_layer,
            same_everywhere=False,
            enters=lambda layer: True,
        ).run(model)

    def unmarked(self, tree: Any) -> Any:
        """A tree without the marks in it."""
        return jax.tree.map(
            lambda node: self.unmarked(node.body) if _is_mark(node) else node,
            tree,
            is_leaf=_is_mark,
        )

    def paths_in(self, op_name: str) -> tuple[str, ...]:
        """The layers that an operation's name says, the outermost first."""
        return tuple(self.paths[int(number)] for number in _MARK.findall(op_name))

    def with_paths(self, op_name: str) -> str:
        """An operation's name for people: each layer's path in place of its mark.

        >>> LayerScopes(["up", "sublayers/0"]).with_paths("jit(step)/jvp(pzs_layer_1)/mul")
        'jit(step)/jvp(sublayers/0)/mul'
        """
        return _MARK.sub(lambda mark: self.paths[int(mark[1])], op_name)

    def label(self, owner: str) -> str:
        """What people call a layer, or another part of a step, that goes by its path.

        >>> LayerScopes(labels={"sublayers/0": "mlp/up"}).label("sublayers/0")
        'mlp/up'
        """
        return self.labels.get(owner, owner)

    def label_of_one(self, layer: str) -> str:
        """What people call a layer that pins layouts, by its path, and where it is if its label
        does not say.

        >>> pinning = {f"before_{n}/pin": PinningLayer("Pin", ()) for n in (1, 2)}
        >>> labels = dict.fromkeys(pinning, "pin") | {"0": "up", "1": "down"}
        >>> LayerScopes(labels=labels, pinning=pinning).label_of_one("before_2/pin")
        'pin after down'
        """
        alike = [each for each in self.pinning if self.label(each) == self.label(layer)]
        if len(alike) < 2:
            return self.label(layer)
        beside = self._label_beside(layer)
        is_one = [self._label_beside(each) for each in alike].count(beside) == 1
        return beside if is_one else layer

    def _label_beside(self, layer: str) -> str:
        """The label of a layer that was put in, with that of the layer before it or behind it."""
        parent, _, behind = layer.rpartition("/")[0].rpartition("before_")
        if not behind.isdecimal():
            return layer
        for word, number in (("after", int(behind) - 1), ("before", int(behind))):
            if other := self.labels.get(f"{parent}{number}"):
                return f"{self.label(layer)} {word} {other}"
        return layer

    def _marked_layer(self, layer: Any, path: str) -> Any:
        number = self._numbers.setdefault(path, len(self.paths))
        if number == len(self.paths):
            self.paths.append(path)
        return _Marked(layer, f"pzs_layer_{number}", path, self.outputs)


def has_layers(tree: Any) -> bool:
    """Whether there are layers of a model in a tree.

    >>> has_layers({"w": 1.0})
    False
    """
    return any(is_layer(node) for _, node in nodes_of(tree))


def _names_held(layer: Any, paths: Iterable[str]) -> Iterator[str]:
    """The names of what a layer at some paths holds; what is in its layers is theirs."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        layer, is_leaf=lambda node: _is_mark(node) or is_variable(node)
    )
    for key_path, leaf in leaves:
        if _is_mark(leaf):
            continue
        for path in paths:
            place = join_paths(path, array_path_text(key_path))
            yield variable_name(leaf, place) if is_variable(leaf) else place


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class DisguisedLayer(Scoped):
    """A layer around another that no other layer can tell from the one in it.

    Layers may take several arguments, ask each other's types and read each other's private names.
    """

    # What isinstance asks beside the type itself.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__dict__["body"].__class__ if "body" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__") and "body" in self.__dict__:
            return getattr(self.__dict__["body"], name)
        return super().__getattr__(name)


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class _Marked(DisguisedLayer):
    """A layer that writes its mark, and notes what comes out of it."""

    mark_path: str = dataclasses.field(metadata={"pytree_node": False})
    mark_outputs: LayerOutputs = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, /, *arguments: Any, **options: Any) -> Any:
        with jax.named_scope(self.name):
            output = self.body(*arguments, **options)
        self.mark_outputs.note(self.mark_path, output)
        return output


def _is_mark(node: Any) -> bool:
    return type(node) is _Marked
