"""Compiles a layer that stays an ordinary part of the model.

One program is kept for each structure of a model, without its arrays: edits make new models all the
time, and most of them are built like one that is compiled already.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding
from penzai import pz

from penzai_shard.arrays.structure import Structure, flatten, leaves_of, variables_of
from penzai_shard.errors import Problem, Problems, RuleTypeError, ShardingError
from penzai_shard.layers.live_model import LiveModel
from penzai_shard.layers.pure_call import ASSIGNING, PureCall, assign
from penzai_shard.layers.wrapper import FAILURES, WrapperLayer, check_inputs
from penzai_shard.meshes import on_auto_twin
from penzai_shard.readers.reader import is_node

_LIVE = "_live_model"
_AT_ONCE = contextlib.nullcontext()
# What most calls get as argument, and what holds no variables.
_ARRAYS = (pz.nx.NamedArray, jax.Array)


@dataclasses.dataclass(frozen=True)
class _Options:
    """How a program is compiled: shardings by structure and values, so that they can be hashed."""

    name: str
    structure: Structure
    shardings: tuple[Any, ...]
    donates: bool


class _Program:
    """The compiled calls of all models of one structure.

    Attributes:
        run: Takes the arrays of the model, the argument and the side inputs (anything if ``more``
            has them), and the arrays of ``more``; see ``PureCall``.
        assigns: Whether some call assigns variables; None if that is not known.
    """

    def __init__(
        self,
        structure: Structure,
        numbers: Sequence[int],
        more: Structure | None,
        options: _Options,
    ) -> None:
        call = PureCall(structure, more)

        def run(values: Any, argument: Any, side_inputs: Any, more_values: Any) -> Any:
            by_number = dict(zip(numbers, values, strict=True))
            ordered = [by_number[i] for i in range(len(values))]
            others = {"argument": argument, "side_inputs": side_inputs}
            return call(ordered, more_values, others)

        run.__name__ = run.__qualname__ = options.name
        given = options.structure.fill(options.shardings)
        settings: dict[str, Any] = {"donate_argnums": 1} if options.donates else {}
        if given["in_shardings"] is not None:
            settings["in_shardings"] = (None, given["in_shardings"], None, None)
        if given["out_shardings"] is not None:
            settings["out_shardings"] = (given["out_shardings"], None)
        self.run: Callable[..., tuple[Any, dict[int, Any]]] = jax.jit(run, **settings)
        self.assigns: bool | None = None


_find_program = functools.lru_cache(128)(_Program)


@pz.pytree_dataclass
class Jitted(WrapperLayer):
    """Wraps a layer so that every call of it runs compiled.

    Output, gradients, parameter names and assignments of variables stay those of the layer. What
    changes is speed: a call costs about as much as one of a function under ``jax.jit`` that takes
    the model's arrays as a list. Models of one structure share a program; an edit compiles another,
    and new values do not. An edit in place of a list or dictionary of layers is noticed, unless it
    puts an equal layer there (``==``).

    Variables may be in the layer, in the argument and in the side inputs. Any number of threads may
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
            gone after the call.

    Raises:
        RuleTypeError: ``in_shardings`` or ``out_shardings`` hold something else than shardings.

    >>> layer = Jitted(pz.nn.Elementwise(jax.numpy.sin))
    >>> float(layer(0.0)), layer.body
    (0.0, Elementwise(fn=jax.numpy.sin))
    """

    body: Any
    in_shardings: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    out_shardings: Any = dataclasses.field(default=None, metadata={"pytree_node": False})
    donate_argument: bool = dataclasses.field(default=False, metadata={"pytree_node": False})

    def __post_init__(self) -> None:
        problems = Problems("Jitted:")
        for name in ("in_shardings", "out_shardings"):
            for leaf in jax.tree_util.tree_leaves(getattr(self, name)):
                if not isinstance(leaf, Sharding | PartitionSpec):
                    fix = f"Write {name}=NamedSharding(mesh, PartitionSpec('data'))."
                    problems.add(name, f"{leaf!r} is no sharding", fix)
        problems.raise_if_any(RuleTypeError)

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Runs the layer compiled; see ``WrapperLayer``."""
        try:
            return self._run(argument, side_inputs)
        except FAILURES as error:
            check_inputs(self, argument, side_inputs, error)
            raise

    def _run(self, argument: Any, side_inputs: dict[str, Any]) -> Any:
        inputs = {"argument": argument, "side_inputs": side_inputs}
        is_plain = not side_inputs and isinstance(argument, _ARRAYS)
        is_plain = is_plain or not _has_variables(inputs)
        while True:
            live, program, options = self.__dict__.get(_LIVE) or self._read_model()
            is_locked = not is_plain or self.donate_argument or program.assigns is not False
            with ASSIGNING if is_locked else _AT_ONCE:
                values = live.read_values()
                if values is None:
                    self.__dict__.pop(_LIVE, None)
                    continue
                if self.donate_argument:
                    paths = [live.structure.paths[i] for i in live.numbers]
                    _check_donated(paths, values, inputs)
                if not is_plain:
                    return self._run_with_variables(live, options, values, inputs)
                output, assigned = program.run(values, argument, side_inputs, ())
                program.assigns = bool(assigned or program.assigns)
                # With another argument a layer may assign what it did not assign before: its call
                # runs again, so that no other assigns between its reading and its assignment.
                if is_locked or not assigned:
                    assign(live.variables, assigned)
                    return output

    def _read_model(self) -> tuple[LiveModel, _Program, _Options]:
        """Reads the body, and keeps that until the body is edited or the layer is gone."""
        given = {name: getattr(self, name) for name in ("in_shardings", "out_shardings")}
        leaves, structure = flatten(on_auto_twin(given))
        shardings = tuple(leaf.value for leaf in leaves)
        name = f"Jitted_{type(self.body).__name__}"
        options = _Options(name, structure, shardings, self.donate_argument)
        with ASSIGNING:
            live = LiveModel(self.body)
            program = _find_program(live.structure, live.numbers, None, options)
        # No field: neither a part of the tree, nor compared, nor shown.
        self.__dict__[_LIVE] = live, program, options
        return live, program, options

    def _run_with_variables(
        self, live: LiveModel, options: _Options, values: list[Any], inputs: dict[str, Any]
    ) -> Any:
        """Runs with variables in the argument or the side inputs."""
        held = {name: tree for name, tree in inputs.items() if _has_variables(tree)}
        if "argument" in held and (self.donate_argument or self.in_shardings is not None):
            what = "it holds variables, which can be neither donated nor laid by in_shardings"
            problem = Problem("argument", what, "Give them as side inputs.")
            raise ShardingError("Jitted:", [problem])
        plain = [None if name in held else tree for name, tree in inputs.items()]
        known = {id(variable) for variable in live.variables}
        is_shared = not known.isdisjoint(map(id, variables_of(held)))
        if is_shared:
            # Taken apart without the body, they would part a variable that both have.
            held = {"body": self.body, **held}
        leaves, structure = flatten(held)
        variables, held_values = variables_of(held), [leaf.value for leaf in leaves]
        if is_shared:
            program = _find_program(structure, (*range(len(leaves)),), None, options)
            output, assigned = program.run(held_values, *plain, ())
        else:
            variables = [*live.variables, *variables]
            program = _find_program(live.structure, live.numbers, structure, options)
            output, assigned = program.run(values, *plain, held_values)
        assign(variables, assigned)
        return output

    def __getstate__(self) -> dict[str, Any]:
        """The fields, for ``copy`` and ``pickle``."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _has_variables(tree: Any) -> bool:
    return any(map(is_node, jax.tree_util.tree_leaves(tree)))


def _check_donated(paths: Sequence[str], values: list[Any], inputs: dict[str, Any]) -> None:
    """Refuses an argument whose memory something else needs.

    Raises:
        ShardingError: An array of it is one of the model or of the side inputs, too.
    """
    donated = {id(value) for value in jax.tree_util.tree_leaves(inputs["argument"])}
    if donated.isdisjoint(map(id, [*values, *jax.tree_util.tree_leaves(inputs["side_inputs"])])):
        return
    kept = [*zip(paths, values, strict=True)]
    kept += [(leaf.path, leaf.value) for leaf in leaves_of({"side_inputs": inputs["side_inputs"]})]
    problems = Problems("Jitted cannot donate its argument:")
    for path, value in kept:
        if id(value) in donated:
            problems.add(path, "it is in the argument too", "Leave out donate_argument=True.")
    problems.raise_if_any(ShardingError)
