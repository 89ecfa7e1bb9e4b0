"""A layer that is any function."""

import dataclasses
from typing import Any

from penzai import pz


@pz.pytree_dataclass
class Calls(pz.nn.Layer):
    """Calls a function of what it holds, of its input and of its side inputs."""

    function: Any = dataclasses.field(metadata={"pytree_node": False})
    held: Any = ()

    def __call__(self, x, /, **side_inputs):
        return self.function(self.held, x, **side_inputs)
