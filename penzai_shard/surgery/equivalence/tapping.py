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
from penzai_shard.surgery.inserted_layers import surrounded, vanishes
from penzai_shard.surgery.places import Finder
from penzai_shard.surgery.rewriting import SEQUENCE_FIELD, Rewriter
from penzai_shard.surgery.tree_nodes import Keys, keys_text


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
    paths: dict[tuple[Any, ...], str] = {}

    def is_tapped(node: Any, keys: Keys, place: _Place) -> bool:
        if not place.is_own or vanishes(node):
            return False
        paths[tuple(keys)] = keys_text(place.keys)
        return True

    return Rewriter(
        Finder(
            lambda node_type, is_layer: None if is_layer else False,
            is_tapped,
            _place_below,
            lambda node: _Place((), True, surrounded(node)),
        ),
        lambda node, keys: (Tap(node, paths[tuple(keys)], recorder),),
        same_everywhere=False,
        enters=lambda node: True,
    ).run(model)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a node is in the model without inserted layers.

    Attributes:
        keys: The keys of the node there; of the layer that it was put around, if it was.
        is_own: Whether the node is the outermost at these keys, and belongs to the model.
        inner: The layer at these keys, if what is on the way to it was put around it.
    """

    keys: tuple[Any, ...]
    is_own: bool
    inner: Any


def _place_below(place: _Place, parent: Any, keys: Keys, child: Any) -> _Place | None:
    """The place of a child; None where the model without inserted layers has nothing."""
    if vanishes(parent):
        return None
    if place.inner is not None:
        inner = surrounded(child) if child is place.inner else place.inner
        return _Place(place.keys, False, inner)
    key = keys[-1]
    if type(parent) in (list, tuple) and keys[-2:-1] == [SEQUENCE_FIELD]:
        key = sum(not vanishes(layer) for layer in parent[:key])
    return _Place((*place.keys, key), True, surrounded(child))
