"""Compiling a layer while it stays an ordinary part of the model."""

import dataclasses
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.layers import variable_threading
from penzai_shard.layers.model_reading import Inputs, ModelReading
from penzai_shard.layers.wrapper_layer import WrapperLayer

_READING = "_model_reading"
# Arguments of these types hold no variable.
_PLAIN_ARGUMENTS = (pz.nx.NamedArray, jax.Array, np.ndarray)


@pz.pytree_dataclass
class Jitted(WrapperLayer):
    """Wraps a layer so that every call of it runs compiled.

    Output, gradients, parameter names and the updates of variables stay those of the wrapped
    layer, which ``.body`` gives back as it is. What changes is speed. Models with the same
    structure share what was compiled; an edit compiles again, one made in place in a list of
    sublayers too, and new values do not. The time that a call needs beyond its computation is
    about that of passing a flat list of the model's arrays to a function under ``jax.jit``. A
    call makes new buffers for its output and for the variables that it assigns, and for nothing
    else.

    Variables may live in the layer, in the argument and in the side inputs. Arrays of an Explicit
    mesh are relabelled onto its Auto twin inside the compiled function, so outputs lie on the
    Auto twin. Works eagerly and inside other transformations, and in and around layers of
    ``penzai.deprecated.v1``.

    What is compiled stays in memory for the last structures used; it holds no arrays of a model.

    Attributes:
        body: The layer.
        in_shardings: Sharding of the argument, or a tree of shardings, as ``jax.jit`` takes it;
            None leaves it as it comes. Shardings of an Explicit mesh mean its Auto twin.
        out_shardings: The same for the output; None leaves the choice to the compiler.
        donate_argument: Whether the argument's buffers may be used for the output; the argument
            is then gone after the call.

    >>> layer = Jitted(pz.nn.Elementwise(jax.numpy.sin))
    >>> float(layer(0.0)), layer.body
    (0.0, Elementwise(fn=jax.numpy.sin))
    """

    body: Any
    in_shardings: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    out_shardings: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    donate_argument: bool = dataclasses.field(default=False, metadata={"pytree_node": False})

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Runs the layer compiled.

        Args:
            argument: The layer's input: a tree of arrays and variables.
            **side_inputs: The layer's side inputs: trees of arrays and variables.

        Returns:
            The layer's output.

        Raises:
            ValueError: The layer returned a mutable variable.
            VariableConflictError: Two different variables have the same label.
        """
        reading: ModelReading | None = self.__dict__.get(_READING)
        inputs = None if reading is None else reading.inputs()
        if reading is None or inputs is None:
            reading, inputs = self._read()
        arrays, constants, variables = inputs
        extras = None
        if (
            side_inputs or not isinstance(argument, _PLAIN_ARGUMENTS)
        ) and variable_threading.contains_variable((argument, side_inputs)):
            (argument, side_inputs), outer = pz.unbind_variables((argument, side_inputs))
            own = set(map(id, variables))
            added = [variable for variable in outer if id(variable) not in own]
            variables = [*variables, *added]
            variable_threading.check_distinct_slots(variables)
            extras = tuple(variable.freeze() for variable in added)
        output, changed = reading.compiled(arrays, constants, argument, side_inputs, extras)
        for index, content in changed.items():
            variable_threading.assign(variables[index], content)
        return output

    def _read(self) -> tuple[ModelReading, Inputs]:
        """Reads the body, and keeps the reading until the body is edited or garbage collected."""
        reading = ModelReading(
            self.body, self.in_shardings, self.out_shardings, self.donate_argument
        )
        inputs = reading.inputs()
        if inputs is None:
            raise RuntimeError("the model changed while it was being read")
        # Not a field: no part of the tree, of ==, of copies or of what is pickled or shown.
        self.__dict__[_READING] = reading
        return reading, inputs

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, for ``copy`` and ``pickle``."""
        return self.attributes_dict()
