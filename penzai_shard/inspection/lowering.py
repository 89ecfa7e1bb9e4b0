"""Lowers a step for the compiler, and says what each of its arrays is; nothing runs or moves.

A step is whatever can be called: an object with ``lowerable``, as the train steps of this package,
a function under ``jax.jit``, another function, or a layer. Its arrays may be structs, its mesh
abstract. Layers of Penzai are marked while the step is traced.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from penzai_shard.arrays.inputs import Lowerable, bound_sharding, find_mesh, make_struct, run_inputs
from penzai_shard.arrays.kinds import is_array, is_deleted, is_traced
from penzai_shard.arrays.structure import flatten, read_variables, variables_of
from penzai_shard.errors import MeshError, Problem, Problems, RuleTypeError, ShardingError
from penzai_shard.inspection.layer_marks import Layers, has_layers, is_layer, unmark
from penzai_shard.inspection.step_arrays import (
    StepArray,
    describe_leaf,
    find_next_arguments,
    read_arguments,
    read_results,
)
from penzai_shard.jax_internals import compiler
from penzai_shard.layers.pure_call import PureCall, assign, read_settings
from penzai_shard.meshes import AnyMesh, auto_twin, mesh_text, on_auto_twin
from penzai_shard.programs import equations_in

_PARTS_OF_FIELDS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "constants": "constants",
    "inputs": "inputs",
}
_JITTED = type(jax.jit(lambda: None))
# Layers call their argument differently.
_OF_LAYERS = inspect.signature(lambda argument, /, *args, **side_inputs: None)


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A step as the compiler gets it.

    Attributes:
        lowered: What JAX lowered.
        mesh: The mesh that its arrays lie over, or None.
        arguments: What goes in, in the order of the program.
        results: What comes out, in the order of the program.
        layers: Its layers.
        next_arguments: By the number of an argument that of the result which is its next value.
        options: The compiler options that the step itself brings along.
        notes: What could not be done as it should, in sentences.
    """

    lowered: jax.stages.Lowered
    mesh: AnyMesh | None
    arguments: tuple[StepArray, ...]
    results: tuple[StepArray, ...]
    layers: Layers
    next_arguments: Mapping[int, int]
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()


class _Trace(NamedTuple):
    """A traced step, and what its arrays are before the program is asked.

    In place of a result that is the next value of an argument stands the number of that.
    """

    traced: Any
    mesh: AnyMesh | None
    arguments: Sequence[StepArray]
    results: Sequence[StepArray | int]


def lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    called: str,
    platform: str | None = None,
    with_layers: bool = True,
) -> LoweredStep:
    """Lowers a step for structs in place of its arrays.

    Args:
        step: The step.
        args: What it is called with, arrays or structs.
        kwargs: The same by keyword.
        called: The function that was called, for messages.
        platform: What it is lowered for: ``"cpu"``, ``"tpu"``, ``"cuda"``; by default for the
            devices of the mesh, and for CPUs if the mesh is abstract.
        with_layers: Whether layers are marked, which takes as long as the rest.

    Raises:
        RuleTypeError: It is no step.
        ShardingError: Arrays are traced, no arrays, or do not divide over the mesh; or the step
            assigns variables that are in none of its arguments.
        MeshError: They lie over different devices.
    """
    step, args, kwargs = _open(step, tuple(args), dict(kwargs))
    _check_step(step, called)
    given = step, args, kwargs
    if any(map(is_deleted, jax.tree.leaves(given))):
        # Of what an earlier step has donated the shape and layout are left, which are enough.
        step, args, kwargs = jax.tree.map(lambda x: make_struct(x) if is_deleted(x) else x, given)
    layers, found, notes = Layers(), None, []
    unmarked: Any = lambda tree, *_: tree  # noqa: E731
    with _keep_variables(step, called):
        try:
            mark = layers.mark if with_layers else unmarked
            found = _trace(step, args, kwargs, mark, called)
        except ShardingError:
            raise
        except Exception as error:
            # Some functions ask for the very type of a layer, or take a model apart by hand.
            reason = str(error).partition("\n")[0]
            notes.append(f"nothing is known of its layers: with marks in them it fails ({reason})")
        if found is None:
            layers = Layers()
            found = _trace(step, args, kwargs, unmarked, called)
    traced, mesh = found.traced, found.mesh or _find_other_mesh(found.traced, called)
    platform = platform or ("cpu" if isinstance(mesh, AbstractMesh) else None)
    lowered = traced.lower(lowering_platforms=platform and (platform,))

    values = on_auto_twin(compiler.program_values(traced))
    arguments = _add_values(found.arguments, values[0])
    known = [found.arguments[own] if isinstance(own, int) else own for own in found.results]
    results = _add_values(known, values[1])
    following = {own: i for i, own in enumerate(found.results) if isinstance(own, int)}
    following = following or find_next_arguments(arguments, results)
    _add_arrays(layers, arguments, traced)
    chosen = [x.path for x in arguments if x.shape and x.sharding is None]
    if mesh is not None and mesh.size > 1 and chosen:
        some = ", ".join(chosen[:3]) + f" and {len(chosen) - 3} more" * (len(chosen) > 3)
        notes.append(f"these arguments are on no mesh, so the compiler chose where: {some}")
    options = compiler.function_options(traced)
    return LoweredStep(lowered, mesh, arguments, results, layers, following, options, tuple(notes))


def _open(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function in partials and bound methods, with all that it is called with."""
    while True:
        if isinstance(step, functools.partial):
            step, args, kwargs = step.func, (*step.args, *args), {**step.keywords, **kwargs}
        elif not isinstance(step, types.MethodType):
            return step, args, kwargs
        elif step.__name__ == "step" and hasattr(step.__self__, "lowerable"):
            step = step.__self__
        else:
            step, args = step.__func__, (step.__self__, *args)


def _check_step(step: Any, called: str) -> None:
    stages = jax.stages.Lowered | jax.stages.Compiled | jax.stages.Traced
    is_step = callable(step) or hasattr(step, "lowerable")
    if isinstance(step, type | stages) or not is_step:
        what = f"a {type(step).__name__} is no function under jax.jit, other function, or layer"
        fix = f"Give a function and its arguments: {called}(jax.jit(function), x, y=y)."
        raise RuleTypeError(f"{called}:", [Problem("", what, fix)])


@contextlib.contextmanager
def _keep_variables(step: Any, called: str) -> Iterator[None]:
    """Refuses a function that assigns variables which it finds by itself, and restores these.

    While it is traced it assigns tracers, with which no later call of the model could compute.
    """
    function, models = inspect.unwrap(step), []
    if isinstance(function, types.FunctionType):
        around = inspect.getclosurevars(function)
        found = {**around.globals, **around.nonlocals}
        models = [model for model in found.values() if is_layer(model)]
    variables, before = variables_of(models), read_variables(models)
    try:
        yield
    finally:
        pairs = enumerate(zip(before, read_variables(models), strict=True))
        changed = {number: old for number, (old, new) in pairs if new is not old}
        assign(variables, changed)
    problems = Problems(f"{called} would lose what the function does:")
    for number in changed:
        what = "the function assigns this variable, which is in none of its arguments"
        fix = "Give the model to the function as an argument."
        problems.add(str(variables[number].label), what, fix)
    problems.raise_if_any(ShardingError)


def _find_other_mesh(traced: Any, called: str) -> AnyMesh | None:
    """The mesh of a program whose arguments are on none: of its options, or of what is in it."""
    meshes = [getattr(x.sharding, "mesh", None) for x in compiler.program_values(traced)[1]]
    for equation in equations_in(traced.jaxpr):
        inside = equation.params.get("sharding")
        meshes += [getattr(inside, "mesh", None), equation.params.get("mesh")]
    # An operation without a mesh may have an empty one.
    mesh = next((auto_twin(mesh) for mesh in meshes if mesh is not None and mesh.size), None)
    if isinstance(mesh, AbstractMesh) and mesh.size > 1:
        # JAX lowers it for one device.
        what = f"inside it arrays lie over a mesh without devices ({mesh_text(mesh)})"
        fix = "Lay an argument over that mesh too, as a struct."
        raise MeshError(f"{called}:", [Problem("", what, fix)])
    return mesh


def _add_values(
    arrays: Sequence[StepArray], values: Sequence[compiler.ProgramValue]
) -> tuple[StepArray, ...]:
    """Arrays with what the program says of them."""
    pairs = zip(arrays, values, strict=True)
    return tuple(dataclasses.replace(array, **value._asdict()) for array, value in pairs)


def _add_arrays(layers: Layers, arguments: Sequence[StepArray], traced: Any) -> None:
    """Tells the layers which arrays are theirs."""
    scopes = (str(equation.source_info.name_stack) for equation in equations_in(traced.jaxpr))
    layers.is_differentiated = any("jvp(" in scope for scope in scopes)
    others = [array for array in arguments if array.part != "optimizer state"]
    kept = [array for array in others if "/" in array.path and array.part != "inputs"]
    if layers.is_differentiated and not (kept or layers.order):
        # Nothing says what is trained.
        kept = others
    for array in sorted(kept, key=lambda array: array.part != "parameters"):
        layers.add_array(array.path)
    for array in arguments:
        if array.parameter:
            layers.add_array(array.path, array.parameter)


# Steps of each kind


def _trace(step: Any, args: Any, kwargs: Any, mark: Callable[..., Any], called: str) -> _Trace:
    if hasattr(step, "lowerable"):
        return _trace_lowerable(step, args, kwargs, mark, called)
    signature = _OF_LAYERS if is_layer(step) else inspect.signature(step)
    call = signature.bind(*args, **kwargs)
    own = "model" + "_" * ("model" in call.arguments)
    given = {own: step, **call.arguments}
    mesh = _check_arrays([{name: tree} for name, tree in given.items()], called)

    several = sum(map(has_layers, given.values())) > 1
    marked = {name: mark(tree, name, name if several else "") for name, tree in given.items()}
    step = marked.pop(own)
    call.arguments.update(marked)
    trace = _trace_jitted if isinstance(step, _JITTED) else _trace_call
    return trace(step, call, given, mesh)


def _trace_lowerable(
    step: Any, args: Any, kwargs: Any, mark: Callable[..., Any], called: str
) -> _Trace:
    """Traces an object that says itself what it would compile."""
    _check_arrays([*args, kwargs], called)
    lowerable: Lowerable = step.lowerable(*args, wrap=mark, **kwargs)
    traced = lowerable.trace()
    arguments = [
        describe_leaf(x, _PARTS_OF_FIELDS.get(x.path.split("/")[0], "state variables"))
        for x in lowerable.leaves
    ]
    firsts = [0, *itertools.accumulate(len(jax.tree.leaves(tree)) for tree in lowerable.args)]
    results: list[StepArray | int] = []
    for own, tree in zip(lowerable.results, traced.out_info, strict=True):
        if isinstance(own, int):
            results += range(firsts[own], firsts[own + 1])
        else:
            results += _read_output(tree, own)
    return _Trace(traced, find_mesh(lowerable.leaves, called), arguments, results)


def _trace_jitted(
    step: Any, call: inspect.BoundArguments, given: Mapping[str, Any], mesh: AnyMesh | None
) -> _Trace:
    """Traces a function under ``jax.jit``, with its options."""
    args, kwargs = jax.tree.map(
        # All else may be static, also a number of NumPy.
        lambda x: make_struct(x) if is_array(x) and not isinstance(x, np.generic) else x,
        [call.args, call.kwargs],
    )
    traced = step.trace(*args, **kwargs)
    # Static arguments are none of the program.
    by_name = {
        compiler.name_value(name, keys): value
        for name, tree in call.arguments.items()
        for keys, value in jax.tree.leaves_with_path(tree)
    }
    values = [by_name[value.name] for value in compiler.program_values(traced)[0]]
    return _Trace(traced, mesh, read_arguments(given, values), _read_output(traced.out_info))


def _trace_call(
    step: Any, call: inspect.BoundArguments, given: Mapping[str, Any], mesh: AnyMesh | None
) -> _Trace:
    """Traces another function, or a layer, as a pure function of the arrays in its arguments."""
    argument = {"args": call.args, "step": step}
    tree = {"argument": argument, "body": _call, "side_inputs": call.kwargs}
    leaves, structure = flatten(tree)
    pure_call = PureCall(structure, read_settings(tree))
    structs = [make_struct(leaf.value) for leaf in leaves]

    def run(*values: Any) -> tuple[Any, dict[int, Any]]:
        # A model is no output of jax.jit where it has functions in it.
        output, assigned = pure_call(values)
        results, form = flatten(output)
        return jax.tree_util.Partial(form.fill_alike, [leaf.value for leaf in results]), assigned

    traced = jax.jit(run).trace(*structs)
    if donated := compiler.donated_arguments(traced):
        traced = jax.jit(run, donate_argnums=donated).trace(*structs)
    output, assigned = traced.out_info
    results: list[StepArray | int] = [
        *read_results(unmark(output.func(*output.args)), output.args[0])
    ]
    for number in sorted(assigned):
        results += range(len(leaves))[structure.variables[number].leaves]
    arguments = read_arguments(given, [leaf.value for leaf in leaves])
    return _Trace(traced, mesh, arguments, results)


def _call(argument: dict[str, Any], /, **kwargs: Any) -> Any:
    """Calls a step in the form in which a ``PureCall`` calls."""
    return argument["step"](*argument["args"], **kwargs)


def _check_arrays(trees: Iterable[Any], called: str) -> AnyMesh | None:
    """The mesh of the arrays in arguments; refuses those for which nothing can be compiled."""
    problems, leaves = Problems(f"{called} cannot compile for these arrays:"), []
    # One by one, since several models may have the same labels.
    for tree in trees:
        try:
            leaves += run_inputs(tree, called, allow_structs=True)[0]
        except ShardingError as error:
            problems.extend(error.problems)
    for leaf in leaves:
        if is_traced(leaf.value):
            problems.add(leaf.path, "it is being traced", "Call it outside of jax.jit.")
        elif sharding := bound_sharding(leaf.value):
            try:
                sharding.shard_shape(leaf.shape)
            except ValueError as error:
                problems.add(leaf.path, str(error), "Leave the dimension whole.", "indivisible")
    problems.raise_if_any(ShardingError)
    return find_mesh(leaves, called)


def _read_output(tree: Any, name: str = "result") -> list[StepArray]:
    return read_results(unmark(tree), jax.tree.leaves(tree), name)
