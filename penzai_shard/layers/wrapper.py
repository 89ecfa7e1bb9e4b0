"""Gives the layers of this folder what they share: how they are called, and what they show.

A wrapper layer holds another in ``body``. One that transforms the call, as ``jax.checkpoint`` does,
overrides ``_transform``; one that does something around the call overrides ``_run``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from penzai import pz

from penzai_shard.arrays.inputs import find_mesh, run_inputs
from penzai_shard.arrays.structure import Structure, flatten, variables_of
from penzai_shard.errors import ShardingError
from penzai_shard.layers.pure_call import assign, find_pure_call, read_settings
from penzai_shard.meshes import auto_context

Call: TypeAlias = Callable[[Sequence[Any]], tuple[Any, dict[int, Any]]]


class WrapperLayer(pz.nn.Layer):  # type: ignore[misc]
    """A layer that runs another in another way.

    Public attributes that the wrapper itself has not are those of ``body``, so that code for the
    bare layer, such as Penzai's samplers, reads a wrapped one. They are for reading:
    ``dataclasses.replace`` takes fields of the wrapper, and a method of the body runs without it.

    A class that derives from it is decorated with ``pz.pytree_dataclass`` and declares ``body``.

    Attributes:
        body: The layer.

    >>> Scoped(pz.nn.ConstantRescale(by=2.0), "scale").by
    2.0
    """

    body: Any

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Runs the layer in the wrapper's way.

        Args:
            argument: The layer's input.
            **side_inputs: The layer's side inputs.

        Returns:
            The layer's output.

        Raises:
            ShardingError: Arrays of the layer or its inputs are deleted, or shapes.
            MeshError: They are not all on the same devices.
        """
        try:
            return self._run(argument, side_inputs)
        # What JAX raises for arrays that it cannot run on, and layers for reasons of their own.
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, ShardingError):
                raise
            # The arrays may be the reason.
            called = type(self).__name__
            inputs = {"argument": argument, "body": self.body, "side_inputs": side_inputs}
            find_mesh(run_inputs(inputs, called)[0], called)
            raise

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        """Calls the body. Whoever does so without ``_transform`` enters ``auto_context``."""
        inputs = {"argument": argument, "body": self.body, "side_inputs": side_inputs}
        leaves, structure = flatten(inputs)
        call = self._transform(find_pure_call(structure, read_settings(inputs)), structure)
        with auto_context():
            output, assigned = call([leaf.value for leaf in leaves])
        if assigned:
            assign(variables_of(inputs), assigned)
        return output

    def _transform(self, call: Call, structure: Structure) -> Call:
        """The body's call in another way.

        Args:
            call: A ``PureCall``, one object for all equal structures: a transformation of JAX that
                is applied to it finds what it has traced.
            structure: The structure of the arrays that it takes.
        """
        return call

    def __getattr__(self, name: str) -> Any:
        # A copy that is being made has no body yet. Names with an underscore, as __jax_array__,
        # ask an object what it is itself.
        if name.startswith("_") or "body" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["body"], name)


@pz.pytree_dataclass
class Scoped(WrapperLayer):
    """Wraps a layer so that its operations carry a name.

    Values, gradients, state and parameter names stay. The name shows in the profiler, in traced
    programs, and in the metadata of compiled operations, those of the backward pass included.

    Attributes:
        body: The layer.
        name: The name, a text; ``/`` in it nests.

    >>> layer = Scoped(pz.nn.Elementwise(jax.numpy.sin), "block_3")
    >>> "block_3" in jax.jit(layer).lower(1.0).as_text(debug_info=True)
    True
    """

    body: Any
    name: str = dataclasses.field(metadata={"pytree_node": False})

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        with auto_context(), jax.named_scope(self.name):
            return self.body(argument, **side_inputs)
