"""Whatever can be called, traced for arguments that may be abstract, its layers marked."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from penzai import pz
from penzai.core.variables import AbstractVariable, AbstractVariableValue

from penzai_shard.array_kinds import is_array_like, is_deleted
from penzai_shard.equinox_modules import are_arrays
from penzai_shard.inspection.steps.layer_scopes import LayerScopes, has_layers
from penzai_shard.inspection.steps.step_arguments import (
    check_arrays,
    check_call,
    check_callable,
    refuse_variables,
)
from penzai_shard.inspection.steps.step_arrays import StepArray, read_in
from penzai_shard.inspection.steps.step_parts import is_optimizer_state, paths_and_parts
from penzai_shard.layers import Jitted
from penzai_shard.library_apis.compiler_api import compiler_options_of, traced_arguments
from penzai_shard.model_variables import thawed
from penzai_shard.model_variables.slots import StaticLeaf, fill_slots
from penzai_shard.placement import described_array
from penzai_shard.planning import bytes_text
from penzai_shard.report_trees import count_text
from penzai_shard.surgery.tree_nodes import is_layer
from penzai_shard.traced_programs import opened
from penzai_shard.training.train_state import TrainState, peek
from penzai_shard.tree_paths import join_paths, path_endings, paths_and_leaves

WITHOUT_MARKS = (
    "layers could not be marked, so that nothing of the program is known to be a layer's: {error}"
)
JITTED_HERE = (
    "the function is not compiled by itself, so it was put under jax.jit without options: nothing "
    "is donated, and what comes out is laid out as the compiler chooses"
)
# From so many bytes on it is said what a function closes over.
MUCH_HELD = 4096
DECIDED_BY = (
    "It was traced as under jax.jit, where an array has no value. What the function decides by is "
    "no array: bind it, functools.partial(function, train=True), or give the function under "
    "jax.jit(function, static_argnames=...)."
)


def with_marks(
    trace: Callable[[LayerScopes], jax.stages.Traced], of_step: tuple[str, ...] = ()
) -> tuple[jax.stages.Traced, LayerScopes, tuple[str, ...]]:
    """What a step is traced to with marks in its layers; without, where it does not take them.

    Args:
        trace: Traces the step, its layers marked as it is told.
        of_step: Scopes that the step writes itself.

    Returns:
        What was traced, the marks, and a note if there are none.
    """
    scopes = LayerScopes(of_step=of_step)
    try:
        return trace(scopes), scopes, ()
    except Exception as error:
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        note = WITHOUT_MARKS.format(error=first_line)
    scopes = LayerScopes(of_step=of_step, is_on=False)
    return trace(scopes), scopes, (note,)


def traced_function(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[jax.stages.Traced, LayerScopes, tuple[str, ...]]:
    """A function, compiled or not, or a layer, traced.

    Args:
        step: A function under ``jax.jit``, another function, or a layer.
        args: What it is called with.
        kwargs: The same by keyword.

    Returns:
        As ``with_marks`` does.

    Raises:
        RuleTypeError: It cannot be called, or not so.
        ShardingError: Arrays that do not go together, or layouts that do not fit.
    """
    if isinstance(step, functools.partial):
        return traced_function(step.func, (*step.args, *args), {**step.keywords, **kwargs})
    if isinstance(step, types.MethodType) and _is_jitted(step.__func__):
        return traced_function(step.__func__, (step.__self__, *args), kwargs)
    check_callable(step)
    check_call(step, args, kwargs)
    frozen = _as_arrays(args, kwargs)
    check_arrays(_named_arrays(step, *frozen))
    if _is_jitted(step):
        given = jax.tree.map(_without_deleted, (tuple(args), dict(kwargs)))
        try:
            return with_marks(lambda scopes: _traced_jitted(step, given[0], given[1], scopes))
        except TypeError as error:
            refuse_variables(_named_arrays(step, tuple(args), dict(kwargs)), error)
            raise
    if not is_layer(step) or hasattr(step, "__wrapped__"):
        try:
            traced, scopes, notes = with_marks(
                lambda scopes: _traced_plain(step, args, kwargs, scopes, {})
            )
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(DECIDED_BY)
            raise
        return traced, scopes, (JITTED_HERE, *notes)
    options = {"donate_argnums": 1} if isinstance(step, Jitted) and step.donate_argument else {}
    function = _call_layer if isinstance(step, pz.Struct) else _call_other_layer
    return with_marks(
        lambda scopes: _traced_plain(function, (step, *args), kwargs, scopes, options)
    )


def _is_jitted(step: Any) -> bool:
    """Whether a function is under ``jax.jit`` itself, and not what other libraries make of it."""
    return isinstance(step, type(jax.jit(_call_layer)))


def _call_layer(model: Any, argument: Any, /, **side_inputs: Any) -> Any:
    return model(argument, **side_inputs)


def _call_other_layer(model: Any, /, *inputs: Any, **options: Any) -> Any:
    return model(*inputs, **options)


def _named_arrays(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """The arrays that a function was given, each with its path."""
    named = [*zip(_names(step, len(args)), args, strict=True), *kwargs.items()]
    return [
        (join_paths(name, path), leaf)
        for name, value in named
        for path, leaf in paths_and_leaves(value)
    ]


def _without_deleted(leaf: Any) -> Any:
    """A struct in place of an array that was donated, which still says what it was."""
    if not is_deleted(leaf):
        return leaf
    return described_array(leaf, leaf.sharding if leaf.committed else None)


def _traced_jitted(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scopes: LayerScopes
) -> jax.stages.Traced:
    marked = _marked(step, args, kwargs, scopes)
    traced: jax.stages.Traced = step.trace(*marked[0], **marked[1])
    return traced


def _traced_plain(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scopes: LayerScopes,
    options: dict[str, Any],
) -> jax.stages.Traced:
    """A function traced with only arrays for arguments: what else there is stays outside."""
    frozen = _as_arrays(args, kwargs)
    leaves = jax.tree.leaves((args, kwargs))
    mutable = {leaf.get_slot() for leaf in leaves if isinstance(leaf, AbstractVariable)}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, variables = _put_back((args, kwargs), mutable)
        args, kwargs = _marked(function, args, kwargs, scopes)
        output = pz.freeze_variables(scopes.unmarked(function(*args, **kwargs)))
        return _WithVariables(output, [variable.freeze() for variable in variables])

    return jax.jit(call, **options).trace(*frozen[0], **frozen[1])


class _WithVariables(NamedTuple):
    """What a function returns, and the state variables that it may have changed."""

    result: Any
    state_vars: list[Any]


def _as_arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Arguments as JAX can trace them: frozen variables, and nothing else but arrays."""
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    # A number in a module of Equinox is an option of it.
    kept = are_arrays((tuple(args), dict(kwargs)))
    arrays = [_as_array(leaf, is_array) for leaf, is_array in zip(leaves, kept, strict=True)]
    return jax.tree.unflatten(treedef, arrays)


def _as_array(leaf: Any, is_array: bool) -> Any:
    if isinstance(leaf, AbstractVariable):
        return leaf.freeze()
    return _without_deleted(leaf) if is_array and is_array_like(leaf) else StaticLeaf(leaf)


def _put_back(arguments: Any, mutable: set[Any]) -> tuple[Any, Any, list[Any]]:
    """The arguments as the function takes them, and the state variables among them."""
    variables: dict[Any, Any] = {}

    def is_value(node: Any) -> bool:
        return isinstance(node, AbstractVariableValue)

    def bound(node: Any) -> Any:
        if not is_value(node) or node.get_slot() not in mutable:
            return node
        return variables.setdefault(node.get_slot(), thawed(node))

    args, kwargs = jax.tree.map(
        bound,
        fill_slots(arguments, {}),
        is_leaf=is_value,
    )
    states = [v for v in variables.values() if isinstance(v, pz.StateVariable)]
    return args, kwargs, states


def _marked(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scopes: LayerScopes,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, the layers in them marked with their paths.

    If one argument alone has layers, they go by their paths in it, and else its name is put first.
    What an optimizer keeps in the form of a model is marked as that model, so that both still fit.
    """
    named = [*zip(_names(function, len(args)), args, strict=True), *kwargs.items()]
    aside = [(name, _with_states_aside(value)) for name, value in named]
    several = sum(has_layers(value) for _, value in aside) > 1

    def marked(name: str, value: Any) -> Any:
        prefix = name if several else ""
        if not isinstance(value, TrainState):
            return scopes.marked(value, prefix)
        # Of a copy, since a state notes which of its trees were read.
        model = scopes.marked(peek(value, "unbound_model"), prefix)
        return dataclasses.replace(copy.copy(value), unbound_model=model)

    values = [marked(name, value) for name, value in aside]
    models = [
        pair
        for (_, bare), value in zip(aside, values, strict=True)
        for pair in zip(
            jax.tree.leaves(bare, is_leaf=is_layer),
            jax.tree.leaves(value, is_leaf=is_layer),
            strict=True,
        )
        if is_layer(pair[0])
    ]
    values = [_with_states_back(value, models) for value in values]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


@dataclasses.dataclass
class _OptimizerState:
    """An optimizer's state, out of sight of JAX."""

    state: Any


def _with_states_aside(tree: Any) -> Any:
    if not any(map(is_optimizer_state, jax.tree.leaves(tree, is_leaf=is_optimizer_state))):
        return tree
    return jax.tree.map(
        lambda node: _OptimizerState(node) if is_optimizer_state(node) else node,
        tree,
        is_leaf=is_optimizer_state,
    )


def _with_states_back(tree: Any, models: Sequence[tuple[Any, Any]]) -> Any:
    """A tree with optimizers' states, in which what has a model's structure is marked as that."""

    def is_none(node: Any) -> bool:
        return node is None

    def marked_as_model(node: Any) -> Any:
        leaves, structure = jax.tree.flatten(node, is_leaf=is_none)
        for bare, marked in structures:
            if bare == structure:
                return jax.tree.unflatten(marked, leaves)
        return node

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, _OptimizerState):
            return leaf
        return jax.tree.map(marked_as_model, leaf.state, is_leaf=is_layer)

    if not any(isinstance(leaf, _OptimizerState) for leaf in jax.tree.leaves(tree)):
        return tree
    structures: list[tuple[Any, Any]] = [
        (jax.tree.structure(bare, is_leaf=is_none), jax.tree.structure(marked, is_leaf=is_none))
        for bare, marked in models
    ]
    return jax.tree.map(back, tree)


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of a function's positional arguments."""
    names: list[str] = []
    parameters: Iterable[inspect.Parameter] = ()
    # Functions written in C may have no signature.
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}/{i}" for i in range(count - len(names))]
        names.append(parameter.name)
    names += [f"args/{i}" for i in range(len(names), count)]
    return names[:count]


def arguments_of(traced: jax.stages.Traced, scopes: LayerScopes) -> dict[str, StepArray]:
    """The arrays that go into a traced function, by the name that its program gives each."""
    args, kwargs = traced.args_info
    described = iter(traced_arguments(traced))
    found: dict[str, StepArray] = {}
    for argument in (*args, *kwargs.values()):
        flat, _ = jax.tree_util.tree_flatten_with_path(argument)
        here = list(itertools.islice(described, len(flat)))
        if not flat:
            continue
        path = _readable(here[0].name.removesuffix(jax.tree_util.keystr(flat[0][0])))
        argument = scopes.unmarked(argument)
        places = paths_and_parts(argument, path, "inputs")
        structs = [jax.ShapeDtypeStruct(info.shape, info.dtype) for _, info in flat]
        named = read_in(jax.tree.unflatten(jax.tree.structure(argument), structs))
        for (place, part), array, struct, read in zip(places, here, structs, named, strict=True):
            found[array.name] = StepArray(
                place, part, struct.shape, struct.dtype, array.sharding, array.donated
            ).known_as(read)
    return _with_trained_parameters(found)


def _with_trained_parameters(arrays: dict[str, StepArray]) -> dict[str, StepArray]:
    """Arguments that an optimizer keeps an array of the same path and shape for are parameters."""
    kept = [array for array in arrays.values() if array.part == "optimizer state"]
    ends = {(end, array.shape) for array in kept for end in path_endings(array.path)}
    return {
        name: dataclasses.replace(array, part="parameters")
        if array.part == "inputs" and (array.path.partition("/")[2], array.shape) in ends
        else array
        for name, array in arrays.items()
    }


def results_of(traced: jax.stages.Traced, scopes: LayerScopes) -> tuple[StepArray, ...]:
    """The arrays that come out of a traced function, in the program's order."""
    own = scopes.unmarked(traced.out_info)
    root = "" if isinstance(own, _WithVariables) else "result"
    places = paths_and_parts(own, root, "outputs")
    return tuple(
        StepArray.of(path, part, leaf, read)
        for (path, part), leaf, read in zip(places, jax.tree.leaves(own), read_in(own), strict=True)
    )


def notes_on(traced: jax.stages.Traced) -> list[str]:
    """What is said of a traced function that its program does not show as it is."""
    notes = []
    held = [constant for constant in opened(traced.jaxpr)[1] if hasattr(constant, "nbytes")]
    size = sum(constant.nbytes for constant in held)
    if size >= MUCH_HELD:
        largest = max(held, key=lambda constant: constant.nbytes)
        notes.append(
            f"the function closes over {count_text(len(held), 'array')} ({bytes_text(size)}), such "
            f"as {largest.dtype}{list(largest.shape)}, in the program itself, whole on every "
            "device and in no figure of arguments; give them, or the model that has them, as "
            "arguments"
        )
    if options := compiler_options_of(traced):
        notes.append(
            f"compiled without the function's own compiler_options: {', '.join(options)}; put them "
            "into XLA_FLAGS, or into the options of JAX, for everything"
        )
    return notes


def _readable(name: str) -> str:
    """A name of JAX as a path.

    >>> _readable("rest[0]['a'].b")
    'rest/0/a/b'
    """
    return "/".join(re.findall(r"[^\[\]'\".]+", name))
