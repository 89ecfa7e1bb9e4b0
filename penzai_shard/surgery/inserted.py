"""Marks what edits put into a model, and takes it off again.

Everything is known by its type, so that it comes off in any process and after any rebuilding of the
tree. Layers of this library mark themselves. A layer of anybody else goes into an ``Inserted``; if
it was put around a layer of the model, that one is in it, in an ``Original``.
"""

import copy
import dataclasses
import functools
import itertools
from operator import is_
from typing import Any

from penzai import pz

from penzai_shard.arrays.structure import Leaf, Structure, flatten, leaves_of
from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.layers.constraints import ConstrainSharding, ConstrainShardingByName
from penzai_shard.layers.rolled_layer_stack import RolledLayerStack
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.surgery.rewriting import Finder, Keys, Refused, Rewriter, keys_text, kind_of

# Layers that pass their input on, and therefore come off wherever they stand.
CONSTRAINTS = (ConstrainSharding, ConstrainShardingByName)


class _Holder(WrapperLayer):
    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        return self.body(argument, **side_inputs)


@pz.pytree_dataclass
class Inserted(_Holder):
    """Holds a layer that an edit put into a model, so that ``strip`` can take it off again.

    The layer runs as it is, and its attributes are read through this one.

    Attributes:
        body: The layer.
        holds_original: Whether it was put around a layer of the model, which is then somewhere in
            it, in an ``Original``.

    >>> Inserted(pz.nn.ConstantRescale(by=2.0))(3.0)
    6.0
    """

    body: Any
    holds_original: bool = dataclasses.field(default=False, metadata={"pytree_node": False})


@pz.pytree_dataclass
class Original(_Holder):
    """Holds a layer of the model, inside of an ``Inserted`` that was put around it.

    The layer runs as it is, and its attributes are read through this one.

    Attributes:
        body: The layer.

    >>> Original(pz.nn.ConstantRescale(by=2.0))(3.0)
    6.0
    """

    body: Any


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class InsertedSequence(pz.nn.Sequential):  # type: ignore[misc]
    """A layer and what edits put before or after it, where no list of layers could take it.

    It runs as ``pz.nn.Sequential``, and ``strip`` puts the layer back in its place.

    Attributes:
        sublayers: The layers, in the order in which they run.
    """


def find_original(node: Any) -> Original | None:
    """The ``Original`` in a layer that was put around it, None if there is none.

    Pairs of ``Inserted`` and ``Original`` are nested like brackets: what an edit put around the
    layer later is passed.
    """
    if type(node) is Original:
        return node
    if type(node) is Inserted:
        # A pair on the way came later, and is around the Original that is looked for.
        own = find_original(node.body) if node.holds_original else None
        return own and find_original(own.body)
    found = (find_original(part) for _, part in kind_of(node).parts(node))
    return next(filter(None, found), None)


# Taking off


def strip(model: Any, *types: type) -> Any:
    """Takes off what edits put into a model, and gives the original back.

    Parts that nothing was put into are the same objects, and so are all parameters, with the values
    that they have now. A model that has nothing to take off comes back itself.

    A wrapper layer (also one that you derived from ``WrapperLayer``) leaves its body, constraint
    layers and inserted layers vanish, and a rolled layer stack becomes Penzai's. This does not
    depend on who put them there. What ``replace`` put in stays.

    Args:
        model: The model; it stays as it is.
        *types: Types of layers, to take off no others. A layer of yours that an edit put in counts.

    Raises:
        RuleTypeError: Somebody took the layer out that a layer was put around.

    >>> from penzai_shard import Checkpointed, Jitted
    >>> layer = pz.nn.Identity()
    >>> strip(Jitted(Checkpointed(layer))) is layer
    True
    >>> strip(Jitted(Checkpointed(layer)), Jitted) == Checkpointed(layer)
    True
    """

    def is_wanted(node: Any) -> bool:
        inside = node.body if type(node) is Inserted else node
        return not types or isinstance(node, types) or isinstance(inside, types)

    def find_rest(node: Any, keys: Keys) -> tuple[Any, ...]:
        """What is left of a node: itself, what it holds, or nothing."""
        kind = type(node)
        if kind is InsertedSequence:
            left = [rest for layer in node.sublayers for rest in find_rest(layer, keys)]
            is_same = len(left) == len(node.sublayers) and all(map(is_, left, node.sublayers))
            return tuple(left) if len(left) < 2 else (node if is_same else InsertedSequence(left),)
        if not is_wanted(node):
            return (node,)
        if _vanishes(node):
            return ()
        if isinstance(node, WrapperLayer):
            holder = find_original(node.body) if kind is Inserted else node
            if holder is None:
                what = f"{type(node.body).__name__} has lost the layer that it was put around"
                raise Refused(keys, what, "Put surgery.Original(layer) around what belongs there.")
            return find_rest(holder.body, keys)
        return (node.to_layer_stack(),) if isinstance(node, RolledLayerStack) else (node,)

    # Most models have nothing to take off: then this is one walk, which makes no object.
    finder = Finder(by_type=_may_come_off)
    rewriter = Rewriter(finder, find_rest, InsertedSequence, "outer first")
    stripped = rewriter.run(model)
    problems = Problems("strip:")
    problems.extend(refused.problem for refused in rewriter.refused)
    problems.raise_if_any(RuleTypeError)
    return stripped


@functools.cache
def _may_come_off(kind: type) -> bool:
    return issubclass(kind, (WrapperLayer, InsertedSequence, RolledLayerStack, *CONSTRAINTS))


def _vanishes(node: Any) -> bool:
    """Whether nothing of the model is in a node."""
    return isinstance(node, CONSTRAINTS) or (type(node) is Inserted and not node.holds_original)


def _find_part(node: Any, key: Any) -> Any:
    return (node if type(node) in (list, tuple) else dict(kind_of(node).parts(node)))[key]


def follow(tree: Any, keys: Keys) -> list[Any]:
    """The nodes from the root to the node with these keys, both with them."""
    return [*itertools.accumulate(keys, _find_part, initial=tree)]


def locate(tree: Any, keys: Keys) -> str:
    """The path in ``strip(tree)`` of the node with these keys; of an inserted one, where it stands.

    >>> tree = Original([Inserted(pz.nn.Identity()), pz.nn.Identity()])
    >>> locate(tree, ["body", 1])
    '0'
    """
    found: list[Any] = []
    starts: list[int] = []
    nodes, sequence = follow(tree, keys), None
    for key, parent, node in zip(keys, nodes, nodes[1:], strict=False):
        if type(parent) is Inserted:
            starts.append(len(found))
        elif type(parent) is Original and starts:
            # What was put around the layer is no part of its path.
            del found[starts.pop() :]
        is_own = parent is sequence or (key == "body" and isinstance(parent, WrapperLayer))
        if isinstance(parent, InsertedSequence):
            sequence = node
        elif not is_own:
            gone = sum(map(_vanishes, parent[:key])) if type(parent) in (list, tuple) else 0
            found.append(key - gone if gone else key)
    return keys_text(found)


def flatten_bare(tree: Any) -> tuple[list[Leaf], Structure]:
    """``flatten``, but each array has the path that it has in ``strip(tree)``.

    So no edit changes what an array is called. Arrays of inserted layers keep their own path.

    >>> import numpy as np
    >>> leaves, structure = flatten_bare(Original({"w": np.ones(3)}))
    >>> leaves[0].path, structure.paths
    ('w', ('w',))
    """
    leaves, structure = flatten(tree)
    bare = strip(tree)
    if bare is tree:
        return leaves, structure

    # An object that stands in several places has them in the same order in both.
    places: dict[tuple[int, int], list[str]] = {}
    for leaf in reversed(leaves_of(bare)):
        places.setdefault((id(leaf.variable), id(leaf.value)), []).append(leaf.path)
    renamed = []
    for leaf in leaves:
        paths = places.get((id(leaf.variable), id(leaf.value)))
        renamed.append(dataclasses.replace(leaf, path=paths.pop() if paths else leaf.path))
    structure = copy.copy(structure)
    structure.paths = tuple(leaf.path for leaf in renamed)
    return renamed, structure
