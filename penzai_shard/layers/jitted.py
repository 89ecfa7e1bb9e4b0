"""Compiles a layer that stays an ordinary part of the model.

One program is kept for each structure of a model, without its arrays: edits make new models all the
time, and most of them are built like one that is compiled already.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from penzai import pz

from penzai_shard.arrays.kinds import is_deleted
from penzai_shard.arrays.structure import Structure, flatten, variables_of
from penzai_shard.errors import Problem, ShardingError
from penzai_shard.jax_internals.tracing import count_signatures
from penzai_shard.layers.live_model import LiveModel
from penzai_shard.layers.pure_call import ASSIGNING, PureCall, assign, read_settings
from penzai_shard.layers.wrapper import WrapperLayer
from penzai_shard.meshes import on_auto_twin
from penzai_shard.readers.reader import is_node

_LIVE = "_live_model"
_AT_ONCE = contextlib.nullcontext()
# What most calls get, and what JAX takes as it is.
_ARRAYS = (pz.nx.NamedArray, jax.Array, np.ndarray, bool, int, float)
# A name and the fields of ``Jitted`` without the body, as structure and leaves: trees of shardings
# cannot be hashed.
_Options: TypeAlias = tuple[Structure, tuple[Any, ...]]


class _Program:
    """The compiled calls of all models of one structure.

    Args:
        call: The call.
        numbers: Which arrays of its structure it gets, in its order.
        options: How it is compiled.

    It takes the arrays of the model, the argument and the side inputs (anything if ``more`` has
    them), and the arrays of ``more``; see ``PureCall``.

    Attributes:
        assigns: Whether some call assigns variables; None if that is not known.
    """

    def __init__(self, call: PureCall, numbers: Sequence[int], options: _Options) -> None:
        def run(values: Any, argument: Any, side_inputs: Any, more_values: Any) -> Any:
            by_number = dict(zip(numbers, values, strict=True))
            ordered = [by_number[i] for i in range(len(values))]
            others = {"argument": argument, "side_inputs": side_inputs}
            return call(ordered, more_values, others)

        given = options[0].fill(options[1])
        run.__name__ = run.__qualname__ = given["name"]
        self._run: Callable[..., tuple[Any, dict[int, Any]]] = jax.jit(
            run,
            in_shardings=(None, given["in_shardings"], None, None),
            out_shardings=(given["out_shardings"], None),
            donate_argnums=(1,) if given["donate_argument"] else (),
        )
        self._is_spread, self._signatures = False, 0
        self.assigns: bool | None = None

    def __call__(self, *arguments: Any) -> tuple[Any, dict[int, Any]]:
        """Calls the model; for the arguments see the class."""
        # A program that JAX has run over several devices ends the process if it then gets an array
        # that was donated (jax 0.10.2). What went in over several devices comes out over them.
        if self._is_spread and any(map(is_deleted, jax.tree_util.tree_leaves(arguments))):
            raise RuntimeError("an array is deleted")
        result = self._run(*arguments)
        if (signatures := count_signatures(self._run)) != self._signatures:
            self._signatures = signatures
            outputs = jax.tree_util.tree_leaves(result)[:1]
            self._is_spread |= any(getattr(output, "committed", False) for output in outputs)
        return result


_find_program = functools.lru_cache(128)(_Program)
# What is kept of a model that was read.
_Read: TypeAlias = tuple[LiveModel, _Options, _Program]


@pz.pytree_dataclass
class Jitted(WrapperLayer):
    """Wraps a layer so that every call of it runs compiled.

    Output, gradients, parameter names and assignments of variables stay those of the layer. What
    changes is speed: a call costs about as much as one of a function under ``jax.jit`` that takes
    the model's arrays as a list. Models of one structure share a program; an edit compiles another,
    and new values do not. An edit in place of a list or dictionary of layers is noticed, unless it
    puts an equal layer there (``==``). After an edit in place of a setting, which is a field that
    holds no layers and no arrays, make the layer anew; what functions hold must stay as it is.

    Variables may be in the layer, in the argument and in the side inputs, not around them: what
    else a layer finds, as by a global name, is a constant of its program. Any number of threads may
    call one layer. Calls that assign variables run one after the other, also those of different
    layers; so does the first call of a structure. What they call back on another thread must not be
    such a call.

    Arrays of an Explicit mesh are relabelled onto its Auto twin, on which outputs are. Programs of
    the last 128 structures are kept, without arrays of a model.

    Attributes:
        body: The layer.
        in_shardings: Where the argument is laid: a sharding or a tree of them, as for ``jax.jit``.
        out_shardings: The same for the output.
        donate_argument: Whether the output may take the argument's memory; the argument is then
            gone after the call, and must not stand in the layer or its other inputs too.

    >>> layer = Jitted(pz.nn.Elementwise(jax.numpy.sin))
    >>> float(layer(0.0)), layer.body
    (0.0, Elementwise(fn=jax.numpy.sin))
    """

    body: Any
    in_shardings: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    out_shardings: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    donate_argument: bool = dataclasses.field(default=False, metadata={"pytree_node": False})

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        is_array = not side_inputs and isinstance(argument, _ARRAYS)
        inputs = {"argument": argument, "side_inputs": side_inputs}
        held = {} if is_array else {k: tree for k, tree in inputs.items() if _is_held(tree)}
        while True:
            read = self.__dict__.get(_LIVE) or self._read_model()
            live, _, program = read
            is_locked = held or self.donate_argument or program.assigns is not False
            with ASSIGNING if is_locked else _AT_ONCE:
                values = live.read_values()
                if values is None:
                    self.__dict__.pop(_LIVE, None)
                    continue
                if held:
                    return self._run_with_variables(read, values, inputs, held)
                output, assigned = program(values, argument, side_inputs, ())
                program.assigns = bool(assigned or program.assigns)
                # With another argument a layer may assign what it did not assign before: its call
                # runs again, so that no other assigns between its reading and its assignment.
                if is_locked or not assigned:
                    assign(live.variables, assigned)
                    return output

    def _read_model(self) -> _Read:
        """Reads the body, and keeps that until the body is edited or the layer is gone."""
        fields = {**self.__getstate__(), "body": None, "name": f"Jitted_{type(self.body).__name__}"}
        leaves, structure = flatten(on_auto_twin(fields))
        options = structure, tuple(leaf.value for leaf in leaves)
        with ASSIGNING:
            live = LiveModel(self.body)
            call = PureCall(live.structure, live.settings)
            program = _find_program(call, live.numbers, options)
        # No field: neither a part of the tree, nor compared, nor shown.
        self.__dict__[_LIVE] = read = live, options, program
        return read

    def _run_with_variables(self, read: _Read, values: list[Any], inputs: Any, held: Any) -> Any:
        """Runs with variables, or what is no array, in some of the inputs, those in ``held``."""
        live, options, _ = read
        if "argument" in held and (self.donate_argument or self.in_shardings is not None):
            what = "it holds more than arrays: that is neither donated nor laid by in_shardings"
            problem = Problem("argument", what, "Give them as side inputs.")
            raise ShardingError("Jitted:", [problem])
        plain = [None if name in held else tree for name, tree in inputs.items()]
        variables = variables_of(held)
        if {*map(id, live.variables)}.isdisjoint(map(id, variables)):
            leaves, structure = flatten(held)
            call = PureCall(live.structure, live.settings + read_settings(held), structure)
            program = _find_program(call, live.numbers, options)
            held_values = [leaf.value for leaf in leaves]
            output, assigned = program(values, *plain, held_values)
            variables = [*live.variables, *variables]
        else:
            # Taken apart without the body, they would part a variable that both have.
            held = {"body": self.body, **held}
            leaves, structure = flatten(held)
            call = PureCall(structure, read_settings(held))
            program = _find_program(call, tuple(range(len(leaves))), options)
            output, assigned = program([leaf.value for leaf in leaves], *plain, ())
            variables = variables_of(held)
        assign(variables, assigned)
        return output

    def __getstate__(self) -> dict[str, Any]:
        """The fields, for ``copy`` and ``pickle``."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _is_held(tree: Any) -> bool:
    """Whether a tree holds variables, or something that is no array, which JAX does not take."""
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_node)
    others = [leaf for leaf in leaves if not isinstance(leaf, _ARRAYS)]
    if not others:
        return False  # As nearly always: to take nothing apart costs a third of a short call.
    structure = flatten(others)[1]
    return bool(structure.statics) or any(variable.live for variable in structure.variables)
