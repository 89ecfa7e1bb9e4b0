"""Traces a call ``function(params, *inputs)``, and finds weights and inputs in its program.

Nothing runs, and no device is needed: the program is lowered for shapes and brought into the form
in which XLA has it. Calls are inlined there, so that two calls of one function tie nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.structure import Leaf, leaves_of
from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.naming.cuts import tie_cuts
from penzai_shard.naming.ties import AxisClass, Dims, Parts, Ties, number_classes, tie_operations
from penzai_shard.paths import join_paths
from penzai_shard.propagation.flat import Propagated, propagate_lowered
from penzai_shard.readers.reader import find_refusal

AxisNames = Sequence[Any]

OF_TOKENS: tuple[AxisNames | None, ...] = (("batch", "seq"),)
"""Default of ``input_names``: the first input holds tokens."""

# How JAX calls what goes back over an operation for a gradient; its own transpose has no bracket.
_BACKWARD = "transpose("


@dataclasses.dataclass(frozen=True, eq=False)
class CalledArray:
    """An array that a function is called with.

    Attributes:
        path: Where it is; of an input, ``"inputs[0]"`` and its path in that.
        shape: Its shape.
        names: The logical axes that it is known to have, None for those that are not known.
        value: Its number in the program; None if the program does not use it.
        parts: The parts of each dimension; none if the program does not use it.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[Any, ...]
    value: int | None
    parts: tuple[Parts, ...]

    @functools.cached_property
    def classes(self) -> tuple[AxisClass, ...]:
        """The classes of all its dimensions, in order."""
        return tuple(part for parts in self.parts for part in parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A traced call.

    Attributes:
        program: Its operations, without those that go back over others for a gradient.
        dims: For each value of the program the parts of each of its dimensions.
        weights: The arrays of the first argument.
        inputs: Those of the others.
    """

    program: Propagated
    dims: Dims
    weights: tuple[CalledArray, ...]
    inputs: tuple[CalledArray, ...]


def trace_call(
    function: Callable[..., Any],
    params: Any,
    *inputs: Any,
    input_names: Sequence[AxisNames | None] = OF_TOKENS,
) -> Call:
    """Traces a call, and ties the dimensions in its program.

    Args:
        function: What is called; what it returns counts, and what leads to that.
        params: A tree of weights of any library, arrays or structs.
        inputs: Trees of further arguments.
        input_names: The logical axes of each input, None for one that is not known; an input's own
            names win. By default the first input has tokens, batch and seq.

    Raises:
        RuleTypeError: Arguments do not fit; all of them are in it.
        ShardingError: What stands for an array is none; all such are in it.
        PropagationError: Shapes are unknown, or this jaxlib has other passes.

    >>> up, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 32), (4, 8)))
    >>> names = [("batch", "embedding")]
    >>> call = trace_call(lambda params, x: x @ params["up"], {"up": up}, x, input_names=names)
    >>> [each.path for each in call.weights], call.weights[0].parts[0] == call.inputs[0].parts[1]
    (['up'], True)
    """
    problems = Problems("infer_names cannot trace this call:")
    _check_function(function, params, problems)
    trees = [run_inputs(tree, "infer_names", allow_structs=True) for tree in (params, *inputs)]
    names = _read_input_names(input_names, [leaves for leaves, _ in trees[1:]], problems)
    problems.raise_if_any(RuleTypeError)

    def compute(arrays: Sequence[Sequence[Any]]) -> list[Any]:
        given = zip(trees, arrays, strict=True)
        returned = function(*(structure.fill(values) for (_, structure), values in given))
        return [leaf.value for leaf in leaves_of(returned) if leaf.dtype is not None]

    structs = [
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves] for leaves, _ in trees
    ]
    traced = jax.jit(compute, keep_unused=True).trace(structs)
    if not jax.tree.leaves(traced.out_info):
        fix = "Return what it computes, best the logits."
        problems.add("function", "returns no arrays, so nothing in it counts", fix, "no arrays")
        problems.raise_if_any(RuleTypeError)
    lowered = traced.lower(lowering_platforms=("cpu",))
    program = propagate_lowered(lowered, notes=False)
    return _read_call(program, [leaves for leaves, _ in trees], names)


# Arguments


def _check_function(function: Any, params: Any, problems: Problems) -> None:
    fix = "Write lambda params, *inputs: params(*inputs), and give the model as params."
    if isinstance(function, type) or not callable(function) or leaves_of(function):
        name = getattr(function, "__name__", type(function).__name__)
        what = f"{name} is no function of weights, or holds its own"
        problems.add("function", what, fix, "no function")
    if refusal := find_refusal(params):
        problems.add("params", *refusal, kind="no arrays")


def _read_input_names(
    given: Any, inputs: Sequence[Sequence[Leaf]], problems: Problems
) -> list[AxisNames | None]:
    """The names that are given to each input, if they fit all its arrays without names."""
    kinds, fix = (list, tuple), "Write for instance input_names=[('batch', 'seq'), None]."
    is_read = isinstance(given, kinds) and all(n is None or isinstance(n, kinds) for n in given)
    if not is_read or (len(given) > len(inputs) and given is not OF_TOKENS):
        what = f"has a tuple of names, or None, for each of {len(inputs)} inputs, and not {given!r}"
        problems.add("input_names", what, fix, "unreadable")
        return []
    names = [*given, *[None] * len(inputs)][: len(inputs)]
    for number, leaves in enumerate(inputs):
        own = names[number]
        for leaf in leaves if own is not None else ():
            rank, start = len(leaf.shape), f"input_names={[None] * number + ['']!r}"[:-3]
            path = f"inputs[{number}]"
            if leaf.names is None and rank != len(own):
                what = f"has rank {rank}, and {own!r} are {len(own)} names"
                fix = f"Write {start}{(*own, *[None] * rank)[:rank]!r}]."
                problems.add(path, what, fix, "misfit")
            elif given is OF_TOKENS and jnp.issubdtype(leaf.dtype, jnp.inexact):
                what = f"is of {leaf.dtype}, and by default inputs are tokens, batch and seq"
                fix = f"Write {start}{('batch', *[None] * rank)[:rank]!r}]."
                problems.add(path, what, fix, "misfit")
    return names


# Results


def _read_call(
    program: Propagated, trees: Sequence[Sequence[Leaf]], input_names: Sequence[AxisNames | None]
) -> Call:
    kept = [each for each in program.operations if _BACKWARD not in each.name]
    forward = dataclasses.replace(program, operations=kept)
    ties = Ties()
    elements = [tuple(map(ties.new, value.shape)) for value in program.values]
    tie_operations(program, ties, elements)
    tie_cuts(forward, ties, elements)
    dims = number_classes(ties, elements)
    used = {value for operation in program.operations for value in operation.operands}
    values = iter(program.arguments)

    def read(leaves: Sequence[Leaf], names: AxisNames | None, prefix: str) -> list[CalledArray]:
        found = []
        for leaf, value in zip(leaves, values, strict=False):
            rank, is_used = len(leaf.shape), value in used
            own = tuple(leaf.names or names or (None,) * rank)
            # A random key is lowered to numbers: more dimensions, behind its own.
            parts = dims[value][:rank] if is_used else ()
            path = join_paths(prefix, leaf.path)
            found.append(CalledArray(path, leaf.shape, own, value if is_used else None, parts))
        return found

    weights = read(trees[0], None, "")
    pairs = enumerate(zip(trees[1:], input_names, strict=True))
    inputs = [each for n, pair in pairs for each in read(*pair, f"inputs[{n}]")]
    return Call(forward, dims, tuple(weights), tuple(inputs))
