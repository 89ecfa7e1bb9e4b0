"""Compiling a layer while it stays an ordinary part of the model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from penzai import pz

from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import variable_threading
from penzai_shard.layers.compiled_structure import CompiledStructure, this_thread
from penzai_shard.layers.model_reading import ModelReading, same_objects
from penzai_shard.layers.unfit_calls import UNFIT_CALL, explain_unfit_call
from penzai_shard.layers.wrapper_layer import WrapperLayer
from penzai_shard.library_apis.jax_api import Format
from penzai_shard.meshes import shardings_on_auto_twin

_READING = "_model_reading"
# After this many runs in vain, a call keeps the others out while it runs.
_MOST_OVERTAKEN = 16
# Arguments of these types do not hold variables.
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
    mesh are relabelled onto its Auto twin inside the compiled function, so outputs are on the
    Auto twin. Works eagerly and inside other transformations, and in and around layers of
    ``penzai.deprecated.v1``.

    Any number of threads may call one layer, or layers that share variables. Calls that assign
    variables have the effect of calls one after the other: one that another overtook runs again.

    What is compiled stays in memory for the last structures used; it holds no arrays of a model.
    What is removed from the body in place is let go by the next call.

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

    def __post_init__(self) -> None:
        """Refuses what is not a sharding where it is written, not where the model runs."""
        for name in ("in_shardings", "out_shardings"):
            wrong = [
                leaf
                for leaf in jax.tree_util.tree_leaves(getattr(self, name))
                if not isinstance(leaf, Sharding | PartitionSpec | Format)
            ]
            if wrong:
                raise RuleTypeError(
                    f"{name} takes a sharding or a tree of them, not {wrong[0]!r}. Write for "
                    "instance NamedSharding(mesh, PartitionSpec('data'))."
                )

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
            RuleTypeError: The model is abstract, an input is not an array, or an array was donated.
            MeshError: Parameters and inputs are not all on the same devices.
        """
        for _ in range(_MOST_OVERTAKEN):
            reading: ModelReading | None = self.__dict__.get(_READING)
            arrays = None if reading is None else reading.current_arrays()
            if reading is None or arrays is None:
                reading, arrays = self._read()
            given, variables = (argument, side_inputs), reading.variables
            added, extras = (), None
            if (
                side_inputs or not isinstance(argument, _PLAIN_ARGUMENTS)
            ) and variable_threading.contains_variable(given):
                given, added = _without_variables(given, variables)
                variables = [*variables, *added]
                extras = variable_threading.frozen_together(added)
            if self.donate_argument and variables and not this_thread.is_alone:
                break  # It could not be run again.
            compiled = reading.compiled
            if compiled.key in this_thread.tracing:
                # JAX refuses to trace a function inside its own trace, as a layer asks for that
                # compiles itself in its own call.
                compiled = CompiledStructure(compiled.structure)
            try:
                output, changed = compiled.run(arrays, reading.constants, *given, extras)
            except UNFIT_CALL as error:
                explain_unfit_call(error, self, argument, side_inputs)
                raise
            if not changed:
                return output
            with variable_threading.EXCHANGE:
                if this_thread.is_alone or _same_values(reading, added, arrays, extras):
                    variable_threading.assign(variables, changed)
                    return output
            # Another thread gave a variable a new value while this call computed with the old
            # one. Its own update would be lost if this call assigned; so it starts from the new.
        return self._call_alone(argument, side_inputs)

    def _call_alone(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        """A call during which no other thread's call reads or assigns variables."""
        with variable_threading.EXCHANGE:
            this_thread.is_alone = True
            try:
                return self(argument, **side_inputs)
            finally:
                this_thread.is_alone = False

    def _read(self) -> tuple[ModelReading, list[Any]]:
        """Reads the body, and keeps the reading until the body is edited or the layer is gone."""
        options: dict[str, Any] = {}
        if self.in_shardings is not None:
            of_argument = shardings_on_auto_twin(self.in_shardings)
            options["in_shardings"] = (None, None, of_argument, None, None)
        if self.out_shardings is not None:
            options["out_shardings"] = (shardings_on_auto_twin(self.out_shardings), None)
        if self.donate_argument:
            options["donate_argnums"] = (2,)
        with variable_threading.EXCHANGE:
            reading = ModelReading(self.body, options)
            arrays = reading.current_arrays()
        if arrays is None:
            raise RuntimeError("the model changed while it was being read")
        # Not a field: not a part of the tree, of ==, of copies or of what is pickled or shown.
        self.__dict__[_READING] = reading
        return reading, arrays

    def __hash__(self) -> int:
        """The hash of the fields, as Penzai's layers have it.

        Raises:
            RuleTypeError: A field cannot be hashed. ``jax.jit(layer)`` asks for it.
        """
        try:
            return hash((type(self), *self.attributes_dict().values()))
        except TypeError:
            raise RuleTypeError(
                f"Jitted({type(self.body).__name__}) cannot be hashed, as jax.jit(layer) and "
                "jax.checkpoint(layer) ask for, because it holds lists. It is compiled as it is: "
                "call layer(argument). Inside a larger compiled function, give it the model as an "
                "argument: jax.jit(lambda model, x: model(x))(pz.freeze_variables(layer), x)."
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, for ``copy`` and ``pickle``."""
        return self.attributes_dict()


def _without_variables(
    inputs: tuple[Any, dict[str, Any]], known: Sequence[Any]
) -> tuple[tuple[Any, dict[str, Any]], tuple[Any, ...]]:
    """The inputs with slots for the variables in them, and those of these that are not known."""
    unbound, found = pz.unbind_variables(inputs)
    known_ids = set(map(id, known))
    added = tuple(variable for variable in found if id(variable) not in known_ids)
    variable_threading.check_distinct_slots((*known, *added))
    return unbound, added


def _same_values(
    reading: ModelReading, added: Sequence[Any], arrays: Sequence[Any], extras: Any
) -> bool:
    """Whether the variables of a call still hold the arrays that it computed with."""

    def now() -> list[Any] | None:
        own = reading.arrays()
        if own is None:
            return None
        return own + jax.tree_util.tree_leaves(variable_threading.frozen_together(added))

    before, first = [*arrays, *jax.tree_util.tree_leaves(extras)], now()
    if first is None or same_objects(first, before):
        return first is not None
    # Variables of other libraries may make new arrays whenever they are read: no sign of a change.
    again = now()
    return again is not None and not same_objects(first, again)
