"""Listening to the layers that two models have in common, to find where they part.

A tap sits around a layer and sends what goes in and what comes out to a recorder on the host. It
is called by its layer's path in the model without inserted layers, so that an edited model and
its original use the same names.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.library_apis.jax_api import manual_mesh_axes
from penzai_shard.surgery.equivalence.comparable_arrays import canonical_leaves, to_numpy
from penzai_shard.surgery.inserted_layers import surrounded, vanishes, with_surrounded
from penzai_shard.surgery.rewriting import SEQUENCE_FIELD
from penzai_shard.surgery.tree_nodes import LEAF, children_of, keys_text, kind_of, with_children


@dataclasses.dataclass
class Recording:
    """What went through one layer, once per call of it.

    Attributes:
        layer: Name of the layer's type.
        inputs: For each call the arrays that went in, by name.
        outputs: For each call the arrays that came out, by name.
    """

    layer: str
    inputs: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    outputs: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Recorder:
    """Collects what the taps of one model send.

    Attributes:
        recordings: One per layer by path, in the order in which the layers ended.
    """

    recordings: dict[str, Recording] = dataclasses.field(default_factory=dict)


@pz.pytree_dataclass
class Tap(pz.nn.Layer):
    """Runs a layer and sends its input and output to a recorder.

    Attributes:
        body: The layer.
        path: The layer's path.
        recorder: The recorder.
    """

    body: Any
    path: str = dataclasses.field(metadata={"pytree_node": False})
    recorder: Recorder = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, *args: Any, **side_inputs: Any) -> Any:
        """Runs the layer.

        Args:
            *args: The layer's inputs.
            **side_inputs: The layer's side inputs.

        Returns:
            The layer's output.
        """
        output = self.body(*args, **side_inputs)
        if manual_mesh_axes():
            # Each device has a part of its own, which the original has nothing to compare with.
            return output
        recording = self.recorder.recordings.setdefault(self.path, Recording(_name_of(self.body)))

        def receive(inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
            recording.inputs.append(_copied(inputs))
            recording.outputs.append(_copied(outputs))

        jax.debug.callback(receive, dict(canonical_leaves(args)), dict(canonical_leaves(output)))
        return output

    def __getattr__(self, name: str) -> Any:
        """Anything else that code asks the layer for."""
        if name.startswith("__") or "body" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["body"], name)


def _copied(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays on the host; the program may use their memory for others after the callback."""
    return {name: to_numpy(array).copy() for name, array in arrays.items()}


def _name_of(layer: Any) -> str:
    """The name of the layer's type, without what this library put around it."""
    inner = layer.body if isinstance(layer, Tap) else surrounded(layer)
    return type(layer).__name__ if inner is None else _name_of(inner)


def tapped(model: Any, recorder: Recorder) -> Any:
    """A model with a tap around each of its layers.

    Args:
        model: The model; it stays as it is.
        recorder: What the taps send to.

    Returns:
        The model with taps. Layers that this library put in have none of their own: what is
        around a layer is inside the layer's tap.

    >>> recorder = Recorder()
    >>> model = tapped(pz.nn.Sequential([pz.nn.ConstantRescale(by=2.0)]), recorder)
    >>> float(model(jax.numpy.float32(3.0)))
    6.0
    >>> jax.effects_barrier()
    >>> [(path, found.layer) for path, found in recorder.recordings.items()]
    [('sublayers/0', 'ConstantRescale'), ('', 'Sequential')]
    """
    return _tapped(model, (), recorder)


def _tapped(node: Any, keys: tuple[Any, ...], recorder: Recorder) -> Any:
    kind = kind_of(node)
    if kind.shape == LEAF or vanishes(node):
        return node
    inside = _tapped_inside(node, keys, recorder)
    return Tap(inside, keys_text(keys), recorder) if kind.is_layer else inside


def _tapped_inside(node: Any, keys: tuple[Any, ...], recorder: Recorder) -> Any:
    """A node with taps below it, and none of its own at these keys."""
    if vanishes(node):
        return node
    inner = surrounded(node)
    if inner is not None:
        return with_surrounded(node, _tapped_inside(inner, keys, recorder))
    children = []
    for name, child in children_of(node):
        if name == SEQUENCE_FIELD and type(child) in (list, tuple):
            # Layers are counted as if those that were put in were not among them.
            layers: list[Any] = []
            count = 0
            for layer in child:
                layers.append(_tapped(layer, (*keys, name, count), recorder))
                count += not vanishes(layer)
            children.append(layers if type(child) is list else tuple(layers))
        else:
            children.append(_tapped(child, (*keys, name), recorder))
    return with_children(node, children)
