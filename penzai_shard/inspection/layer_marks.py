"""Marks the layers of a model, so that the operations of a program say whose they are.

A mark is a wrapper around a layer that opens ``jax.named_scope("pzs_layer_N")``. The name is short
and part of no other, so that it stays readable however JAX and XLA nest and join names. Marks
change neither values nor what is compiled. Models of other libraries have none: Flax itself writes
the paths of its modules, and elsewhere the paths of the arrays tell.
"""

import dataclasses
import itertools
import posixpath
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from penzai import pz

from penzai_shard.arrays.structure import leaves_of
from penzai_shard.inspection.step_arrays import StepArray, describe_leaf
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.paths import join_paths
from penzai_shard.programs import GRADIENT, LOSS, OPTIMIZER
from penzai_shard.readers.reader import is_node
from penzai_shard.surgery.rewriting import flatten_once
from penzai_shard.surgery.where import snake_case

_MARK = re.compile(r"\bpzs_layer_(\d+)\b")
# Scopes that JAX writes for functions, loops and branches, and what it writes around other scopes.
_STRUCTURE = re.compile(
    r"p?jit\(.*|while|body|cond|scan|closed_call|checkpoint|rematted_computation|shard_map"
    r"|custom_[jv][jv]p_call|branch_\d+_fun|"
)
_AROUND = re.compile(r"^(?:\w+\()+|\)+$")
_V1_LAYERS = "penzai.deprecated.v1.core.layer"


class MarkedLayer(NamedTuple):
    """A layer that has a mark.

    Attributes:
        label: Its label.
        layer: The layer without its arrays.
        inputs: What it got while the step was traced, side inputs left out, those alike once.
        outputs: What it gave.
    """

    label: str
    layer: Any
    inputs: dict[StepArray, None]
    outputs: dict[StepArray, None]


class Layers:
    """The layers of a step: their labels, their marks, and the arrays that they hold.

    A layer's label is what the labels of all parameters in it begin with. One that has none of its
    own, or shares those of a layer elsewhere, is called by the layer around it and by its type.

    Attributes:
        order: The labels in the order of the model.
        is_differentiated: Whether the step computes gradients.
        marked: The layers, by the numbers of their marks.

    >>> layers = Layers()
    >>> up = pz.nn.Linear.from_config("mlp/up", jax.random.key(0), {"a": 2}, {"b": 2})
    >>> marked = layers.mark(pz.nn.Sequential([up, pz.nn.Identity()]))
    >>> layers.order, layers.holders("params/mlp/up.weights")
    (['mlp/up', 'mlp/up/identity'], ('mlp/up',))
    >>> layers.owner("jit(step)/transpose(jvp(pzs_layer_0))/pzs_layer_2/neg")
    'mlp/up/identity'
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.is_differentiated = False
        self.marked: list[MarkedLayer] = []
        # By the place of a layer the number of its mark.
        self._numbers: dict[str, int] = {}
        self._first_places: dict[str, str] = {}
        self._holders: dict[str, dict[str, None]] = {}
        # Of arrays that no marked layer holds.
        self._groups: set[str] = set()

    # Marking

    def mark(self, tree: Any, argument: str = "", prefix: str = "") -> Any:
        """A model, or any tree with layers in it, whose layers are marked.

        Args:
            tree: The model.
            argument: The name of the argument that it is, which the paths of its arrays begin with.
            prefix: What the labels begin with, where there are several models.
        """
        return self._mark(tree, "", prefix, argument, prefix)

    def _mark(self, node: Any, place: str, around: str, *names: str) -> Any:
        if is_node(node) or jax.tree_util.all_leaves([node]):
            return node
        label = self._add_layer(node, place, around, *names) if is_layer(node) else around
        parts, definition = flatten_once(node)
        children = (self._mark(x, join_paths(place, key), label, *names) for key, x in parts)
        marked = definition.unflatten(children)
        if not is_layer(node):
            return marked
        for leaf in leaves_of({place: without_marked(marked)}):
            self._holders.setdefault(join_paths(names[0], leaf.path), {})[label] = None
        return Mark(marked, self._numbers[join_paths(names[0], place)], self)

    def _add_layer(self, layer: Any, place: str, around: str, argument: str, prefix: str) -> str:
        """The label of a layer, which gets a number unless there is a layer at its place."""
        place = join_paths(argument, place)
        # JAX may trace a loss more than once, and keep another of these programs than the first.
        if place in self._numbers:
            return self.marked[self._numbers[place]].label
        holders = [layer_of_array(x.path) for x in leaves_of(layer) if x.role == "parameter"]
        label = join_paths(prefix, posixpath.commonpath(holders) if holders else "")
        first = self._first_places.setdefault(label, place)
        is_in_first = not first or f"{place}/".startswith(f"{first}/")
        if label == prefix or not is_in_first:
            label = join_paths(around, snake_case(type(layer).__name__))
        self._numbers[place] = len(self.marked)
        self.marked.append(MarkedLayer(label, jax.tree.map(lambda _: None, layer), {}, {}))
        if label not in self.order:
            self.order.append(label)
        return label

    def call_layer(
        self, number: int, layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls a marked layer, and notes what goes into it and comes out."""
        with jax.named_scope(f"pzs_layer_{number}"):
            output = layer(*args, **kwargs)
        marked = self.marked[number]
        for arrays, tree in ((marked.inputs, args), (marked.outputs, output)):
            arrays |= dict.fromkeys(describe_leaf(leaf, "outputs") for leaf in leaves_of(tree))
        return output

    # What is known of arrays and operations

    def add_array(self, path: str, parameter: str = "") -> None:
        """Notes an array that is part of a model, or belongs to one that is.

        Args:
            path: Its path; the first piece is the argument that it is in.
            parameter: Of what an optimizer keeps, the path of the parameter.
        """
        if found := self.holders(parameter) or self.holders(path):
            self._holders[path] = dict.fromkeys(found)
            return
        place = path.partition("/")[2] or path
        label = layer_of_array(place) or place
        # A layer of linen has arrays in several collections, under one name.
        other = join_paths("params", label.partition("/")[2])
        label = other if other in self.order else label
        self._holders[path] = {label: None}
        self._groups |= {*itertools.accumulate(label.split("/"), "{}/{}".format)}
        self.order += [label] if label not in self.order else []

    def holders(self, path: str) -> tuple[str, ...]:
        """The labels of the layers that hold the array of a path."""
        return tuple(self._holders.get(path) or self._holders.get(path.partition("/")[2]) or ())

    def owner(self, op_name: str) -> str | None:
        """The layer, or the part of the step, that an operation's name says.

        Args:
            op_name: The name, as the metadata of a compiled program have it.

        Returns:
            The label of the innermost layer, ``"loss"`` or ``"optimizer"``; None if it says none.
        """
        if numbers := self.find_marks(op_name):
            return self.marked[numbers[-1]].label
        scopes = _read_scopes(op_name)
        if OPTIMIZER in scopes:
            return OPTIMIZER
        if GRADIENT in scopes:
            names = scopes[scopes.index(GRADIENT) + 1 :]
            paths = ("/".join(["params", *names[:end]]) for end in range(len(names), 0, -1))
            return next((found[0] for path in paths if (found := self.holders(path))), None)
        is_loss = LOSS in scopes or (bool(self.marked) and "jvp(" in op_name)
        group = None if self.marked else self._find_group(scopes)
        return group or (LOSS if is_loss else None)

    def find_marks(self, op_name: str) -> list[int]:
        """The numbers of the marks in an operation's name, the outermost layer first."""
        return [int(number) for number in _MARK.findall(op_name)]

    def _find_group(self, scopes: Sequence[str]) -> str | None:
        """The one group of arrays that goes by the scopes of an operation.

        Modules of Flax write the names under which they keep their arrays, behind the name of the
        outermost one.
        """
        names = [name for name in scopes[:-1] if name != LOSS and not _STRUCTURE.fullmatch(name)]
        for end in range(len(names), 0, -1):
            for start in range(min(2, end)):
                tail = "/" + "/".join(names[start:end])
                found = [group for group in self._groups if f"/{group}".endswith(tail)]
                if found:
                    return found[0] if len(found) == 1 else None
        return None

    def phase(self, op_name: str) -> str | None:
        """When an operation runs: ``"forward"``, ``"backward"``, ``"optimizer"``, or None."""
        scopes = _read_scopes(op_name)
        if OPTIMIZER in scopes:
            return OPTIMIZER
        if GRADIENT in scopes or "transpose(" in op_name:
            return "backward"
        is_forward = "jvp(" in op_name or LOSS in scopes or _MARK.search(op_name)
        return "forward" if is_forward or not self.is_differentiated else None


def is_layer(value: Any) -> bool:
    """Whether a value is a layer of Penzai."""
    v1 = sys.modules.get(_V1_LAYERS)
    return isinstance(value, pz.nn.Layer) or (v1 is not None and isinstance(value, v1.Layer))


def has_layers(tree: Any) -> bool:
    """Whether there are layers of Penzai in a tree."""
    return any(map(is_layer, jax.tree.leaves(tree, is_leaf=is_layer)))


def unmark(tree: Any) -> Any:
    """The same tree without marks."""
    return jax.tree.map(
        lambda node: unmark(node.body) if _is_mark(node) else node, tree, is_leaf=_is_mark
    )


def without_marked(tree: Any) -> Any:
    """The same tree without the layers in it that are marked: their arrays are theirs."""
    return jax.tree.map(lambda node: None if _is_mark(node) else node, tree, is_leaf=_is_mark)


def layer_of_array(path: str) -> str:
    """The path of the layer that has an array of this path.

    >>> layer_of_array("mlp/up.weights"), layer_of_array("params/Dense_0/kernel")
    ('mlp/up', 'params/Dense_0')
    """
    around, _, last = path.rpartition("/")
    return join_paths(around, last.rpartition(".")[0])


def _read_scopes(op_name: str) -> list[str]:
    """The scopes of an operation, the outermost first, and its own name.

    >>> _read_scopes("jit(step)/transpose(jvp(loss))/Dense_0/dot_general")
    ['jit(step)', 'loss', 'Dense_0', 'dot_general']
    """
    pieces = op_name.split("/")
    return [p if p.startswith(("jit(", "pjit(")) else _AROUND.sub("", p) for p in pieces]


# The layer that is put around each


@pz.pytree_dataclass
class Mark(WrapperLayer):
    """A layer around another, which no other layer can tell from it, and whose calls are observed.

    Layers may take several arguments, ask for each other's types and read private attributes.

    Attributes:
        body: The layer.
        mark_key: What the observer knows it by.
        mark_observer: Its ``call_layer(key, layer, args, kwargs)`` calls the layer.
    """

    body: Any
    mark_key: Hashable = dataclasses.field(metadata={"pytree_node": False})
    mark_observer: Any = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Has the observer call the layer."""
        return self.mark_observer.call_layer(self.mark_key, self.body, args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__dict__["body"].__class__ if "body" in self.__dict__ else type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__") and "body" in self.__dict__:
            return getattr(self.__dict__["body"], name)
        return super().__getattr__(name)


def _is_mark(value: Any) -> bool:
    return type(value) is Mark
