"""Naming the operations of a layer in profiles and compiled programs."""

import dataclasses
from typing import Any

import jax
from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers.wrapper_layer import WrapperLayer


@pz.pytree_dataclass
class Scoped(WrapperLayer):
    """Wraps a layer so that its operations carry a name.

    The name shows in the profiler, in jaxprs and in the metadata of compiled operations, those
    of the backward pass included. Values, gradients, state and parameter names stay as they are.

    Attributes:
        body: The layer.
        name: The name; ``/`` in it nests.

    >>> layer = Scoped(pz.nn.Elementwise(jax.numpy.sin), "block_3")
    >>> "block_3" in jax.jit(layer).lower(1.0).as_text(debug_info=True)
    True
    """

    body: Any
    name: str = dataclasses.field(metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        """Refuses a name that is not text where it is written, not where the model runs."""
        if not isinstance(self.name, str):
            raise RuleTypeError(
                f"the name of a Scoped layer is text, not {self.name!r}. "
                "Write for instance Scoped(layer, 'block_3')."
            )

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        with jax.named_scope(self.name):
            return self.body(argument, **side_inputs)
