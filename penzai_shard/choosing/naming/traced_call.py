"""A call of a function with weights and inputs, traced: which values of the program they are."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.choosing.dimensions import DimensionClass, ProgramDimensions
from penzai_shard.choosing.naming.called_functions import call_problem, refuse_module
from penzai_shard.equinox_modules import are_arrays
from penzai_shard.errors import RuleTypeError, naming_extras, raise_all
from penzai_shard.named_leaves import NamedLeaf, map_arrays
from penzai_shard.planning.axis_naming import unreadable_names
from penzai_shard.readers import without_bare_arrays
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.sharding_propagation import PropagatedProgram
from penzai_shard.tree_arguments import refuse_builder

AxisNames = Sequence[LogicalAxis | None]

OF_TOKENS: tuple[AxisNames, ...] = (("batch", "seq"),)
"""The names of inputs for which nothing is said."""


@dataclasses.dataclass(frozen=True)
class CalledArray:
    """An array that a function is called with.

    Attributes:
        path: Where it is.
        shape: Its shape.
        names: The logical axes that it is known to have, None for those that are not known.
        parts: The classes of each dimension; none if the program does not use it.
        value: Its number in the program; None if the program does not use it.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[LogicalAxis | None, ...]
    parts: tuple[tuple[DimensionClass, ...], ...]
    value: int | None

    @functools.cached_property
    def classes(self) -> tuple[DimensionClass, ...]:
        """The classes of all its dimensions, in order."""
        return tuple(part for parts in self.parts for part in parts)


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A traced call.

    Attributes:
        weights: The arrays of the first argument.
        inputs: Those of the others.
        dimensions: Which dimensions in the program are one logical axis.
    """

    weights: tuple[CalledArray, ...]
    inputs: tuple[CalledArray, ...]
    dimensions: ProgramDimensions


def traced_call(
    function: Callable[..., Any],
    params: Any,
    inputs: Sequence[Any],
    input_names: Sequence[AxisNames | None],
) -> TracedCall:
    """Traces ``function(params, *inputs)``; no values are needed, and no device.

    Raises:
        RuleTypeError: The names of an input are not as many as it has dimensions, or the function
            is none, or a model that holds its arrays itself, or the weights are not a tree.
        PropagationError: This jaxlib does not say which dimensions belong together.
    """
    refuse_module(function)
    refuse_builder("infer_names", params)
    trees = [_Arrays(pz.freeze_variables(tree)) for tree in (params, *inputs)]
    named = _names_of_inputs(trees[1:], input_names)

    def called(weights: list[Any], inputs: list[list[Any]]) -> list[Any]:
        given = [
            tree.filled(arrays) for tree, arrays in zip(trees, [weights, *inputs], strict=True)
        ]
        returned = jax.tree_util.tree_leaves(function(*given))
        arrays = [leaf for leaf in returned if hasattr(leaf, "shape")]
        if not arrays:
            raise RuleTypeError(
                f"infer_names: {_name(function)} returns no arrays, so that nothing of its program "
                "counts. Return what it computes, best the logits."
            )
        return arrays

    structs = [tree.structs for tree in trees]
    try:
        with naming_extras():
            traced = jax.jit(called).trace(structs[0], structs[1:])
    except Exception as error:
        # Only now: what a decorated function says it takes may be what is beneath it.
        if isinstance(error, TypeError) and (
            problem := call_problem(_name(function), function, len(inputs))
        ):
            raise RuleTypeError(problem) from error
        error.add_note(f"This was raised while infer_names traced {_call_text(function, trees)}.")
        known = [leaf.names for tree in trees[1:] for leaf in tree.leaves if leaf.names]
        if known:
            error.add_note(
                "Inputs with logical axis names stay named in the function. If it takes plain ones,"
                f" give it these, and their names apart: input_names=[{known[0]!r}]."
            )
        raise
    program = PropagatedProgram.of(traced.lower(lowering_platforms=("cpu",)))
    dimensions = ProgramDimensions.of(program)
    called_array = functools.partial(_called_array, dimensions)
    weights = [
        called_array(leaf, leaf.names, f"weights[{number}]")
        for number, leaf in enumerate(trees[0].leaves)
    ]
    of_inputs = [
        called_array(leaf, names, f"inputs[{i}][{number}]")
        for i, leaves in enumerate(named)
        for number, (leaf, names) in enumerate(leaves)
    ]
    return TracedCall(tuple(weights), tuple(of_inputs), dimensions)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _called_array(
    dimensions: ProgramDimensions, leaf: NamedLeaf, names: AxisNames | None, argument: str
) -> CalledArray:
    # JAX leaves out arguments that change nothing.
    value = dimensions.program.arguments.get(argument)
    return CalledArray(
        leaf.path,
        leaf.shape,
        (None,) * len(leaf.shape) if names is None else tuple(names),
        # A random key is lowered to an array of numbers: more dimensions, after its own.
        () if value is None else dimensions.of_value(value)[: len(leaf.shape)],
        value,
    )


class _Arrays:
    """The arrays of a tree, apart from all else in it."""

    def __init__(self, tree: Any) -> None:
        tree = without_bare_arrays(tree, "infer_names")
        self._leaves, self._treedef = jax.tree_util.tree_flatten(tree)
        self._places = [
            number
            for number, (leaf, is_array) in enumerate(
                zip(self._leaves, are_arrays(tree), strict=True)
            )
            if is_array and hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        ]
        # Objects of their own, by which each is known again.
        self.structs = [
            jax.ShapeDtypeStruct(self._leaves[place].shape, self._leaves[place].dtype)
            for place in self._places
        ]
        found: dict[int, NamedLeaf] = {}
        map_arrays(self.filled(self.structs), lambda leaf: found.setdefault(id(leaf.array), leaf))
        self.leaves = [found[id(struct)] for struct in self.structs if id(struct) in found]

    def shape_meant(self, rank: int) -> tuple[int, ...]:
        """The shape that a tree of numbers was meant to be, or one of that rank."""
        numbers = tuple(leaf for leaf in self._leaves if isinstance(leaf, int))
        return numbers if len(numbers) == rank else (8, 16, 32, 64)[:rank]

    def filled(self, arrays: Sequence[Any]) -> Any:
        """The tree with other arrays in their places."""
        leaves = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        return jax.tree_util.tree_unflatten(self._treedef, leaves)


def _names_of_inputs(
    inputs: Sequence[_Arrays], input_names: Sequence[AxisNames | None]
) -> list[list[tuple[NamedLeaf, AxisNames | None]]]:
    """The arrays of each input with their names: their own, or those that were given."""
    _check_names(input_names, inputs)
    problems = []
    named = []
    if len(input_names) > len(inputs):
        given = f"{len(inputs)}" if inputs else "none"
        fix = (
            f"Write input_names={list(input_names[: len(inputs)])!r}."
            if inputs
            else "Give them after the weights: infer_names(function, params, tokens), tokens being "
            "an array or for instance jax.ShapeDtypeStruct((8, 16), 'int32')."
        )
        problems.append(
            f"input_names: names of {len(input_names)} are given, and of inputs there are {given}. "
            f"{fix}"
        )
    for number, arrays in enumerate(inputs):
        names = input_names[number] if number < len(input_names) else None
        plain = [leaf for leaf in arrays.leaves if leaf.names is None]
        if names is not None and not arrays.leaves:
            problems.append(
                f"input {number}: has no arrays, and input_names gives it {len(names)} logical "
                f"axes {tuple(names)}. Give an array or a struct, for instance "
                f"jax.ShapeDtypeStruct({arrays.shape_meant(len(names))}, 'int32'); or no names, "
                f"as in input_names={[*input_names[:number], None]!r}."
            )
        if names is not None and plain and all(len(leaf.shape) != len(names) for leaf in plain):
            shape = plain[0].shape
            example = tuple((*names, *["..."] * len(shape))[: len(shape)])
            problems.append(
                f"input {number}: has rank {len(shape)}, shape {shape}, and input_names gives it "
                f"{len(names)} logical axes {tuple(names)}. Give {len(shape)}, None for one "
                f"without name, as in input_names={[None] * number + [example]}."
            )
        named.append(
            [
                (leaf, names if leaf.names is None and _fits(leaf, names) else leaf.names)
                for leaf in arrays.leaves
            ]
        )
    raise_all(RuleTypeError, "the names of inputs do not fit them:", problems)
    return named


def _check_names(input_names: Any, inputs: Sequence[_Arrays]) -> None:
    """Refuses what says no names, in an order, of each input; and the default for no tokens."""
    if (
        not isinstance(input_names, list | tuple)
        or any(not (names is None or isinstance(names, list | tuple)) for names in input_names)
    ):  # fmt: skip
        raise RuleTypeError(
            f"input_names has a tuple of names for each input, not {input_names!r}. "
            "Write for instance input_names=[('batch', 'seq')], or None for an input without names."
        )
    problems = [
        f"input {number}: in input_names, {problem}"
        for number, names in enumerate(input_names)
        if (problem := unreadable_names(names or ()))
    ]
    if input_names is OF_TOKENS and inputs:
        structs = {leaf.dtype: leaf for leaf in inputs[0].leaves if leaf.names is None}
        floating = [leaf for dtype, leaf in structs.items() if jnp.issubdtype(dtype, jnp.floating)]
        problems += [
            f"input 0: is of {leaf.dtype}, shape {leaf.shape}, and by default inputs are tokens, "
            "batch x seq. Say what its dimensions are, None for one without a name: "
            f"input_names=[{('batch', *(None,) * (len(leaf.shape) - 1))!r}]."
            for leaf in floating
            if leaf.shape
        ]
    raise_all(RuleTypeError, "the names of inputs do not fit them:", problems)


def _fits(leaf: NamedLeaf, names: AxisNames | None) -> bool:
    return names is not None and len(names) == len(leaf.shape)


def _call_text(function: Callable[..., Any], trees: Sequence[_Arrays]) -> str:
    """A call as people write it, such as ``logits(weights=params, tokens=int32[4,16])``."""
    inputs = [
        ", ".join(f"{struct.dtype}[{','.join(map(str, struct.shape))}]" for struct in tree.structs)
        for tree in trees[1:]
    ]
    given = ["params", *inputs]
    try:
        taken = list(inspect.signature(function).bind(*given).arguments)
    except (TypeError, ValueError):
        taken = []  # It does not say what it takes.
    if len(taken) == len(given):
        given = [
            each if name == each else f"{name}={each}"
            for name, each in zip(taken, given, strict=True)
        ]
    return f"{_name(function)}({', '.join(given)})"
