"""Cuts a deep model to one and to two of its equal blocks, from which the cost of all follows.

With each block a step computes, sends and holds as much more, so that programs of one block and of
two say what any number costs, in the time of three blocks. Blocks in a loop are not cut: a program
of all of them is no longer than one of two, and what a loop sends is another matter.
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Hashable, Iterator, MutableSequence, Sequence
from typing import Any, NamedTuple

import jax
from penzai import pz

from penzai_shard.arrays.kinds import is_array, itemsize
from penzai_shard.arrays.structure import Leaf, flatten, leaves_of
from penzai_shard.choosing.problem import Problem
from penzai_shard.layers.rolled_layer_stack import RolledLayerStack
from penzai_shard.paths import fold_key
from penzai_shard.programs import inner_programs, open_program
from penzai_shard.training.step import build_eval_step_fn
from penzai_shard.training.train_state import TrainState

# Of three blocks, one and two are no less work than all of them.
_LEAST_BLOCKS = 4


class Cut(NamedTuple):
    """A model with fewer blocks.

    Attributes:
        one: The model with one of its blocks.
        two: The model with two of them.
        blocks: How many it has.
    """

    one: Any
    two: Any
    blocks: int


class _Run(NamedTuple):
    """Equal blocks, one after the other.

    Attributes:
        node: What they are in.
        count: How many there are.
        cut: Gives the node with so many of them.
        is_certain: Whether each of them surely runs once, after the one before.
    """

    node: Any
    count: int
    cut: Callable[[int], Any]
    is_certain: bool


@functools.lru_cache(maxsize=4)
def cut_model(problem: Problem) -> Cut | None:
    """The model of a problem with one and with two of its equal blocks.

    Blocks are items of a list, or of a dictionary with numbered keys, that are alike but for the
    numbers in their labels; also groups of items that repeat; and the layers of Penzai's
    ``LayerStack``. All series of one length are cut together.

    Args:
        problem: The step.

    Returns:
        The models; None if there are fewer than four blocks, if they run in a loop, or if the loss
        function, which is traced, does not take fewer of them or does not compute that much less.
    """
    by_count = collections.defaultdict(list)
    for run in _find_runs(problem.model):
        by_count[run.count].append(run)
    if not by_count:
        return None
    whole = _count_bytes(problem.model)
    ones = {count: _cut_runs(problem.model, runs, 1) for count, runs in by_count.items()}
    blocks, one = min(ones.items(), key=lambda item: _count_bytes(item[1]))
    runs = by_count[blocks]
    two, three = (_cut_runs(problem.model, runs, kept) for kept in (2, 3))

    # A parameter of some of the blocks is none of each.
    first, second = _count_bytes(one), _count_bytes(two)
    if first + (blocks - 1) * (second - first) != whole:
        return None
    # To trace all of a hundred blocks takes longer than to price them.
    is_certain = all(run.is_certain for run in runs)
    third, depth = (three, 3) if is_certain else (problem.model, blocks)
    try:
        found = [_count_products(_trace_loss(problem, model)) for model in (one, two, third)]
    except Exception:
        # Whatever a loss function raises for a model of another depth, it does not take one.
        return None
    is_linear = all(
        found[0][key] + (depth - 1) * (found[1][key] - found[0][key]) == found[2][key]
        for key in {*found[0], *found[1], *found[2]}
    )
    return Cut(one, two, blocks) if is_linear else None


def _cut_runs(model: Any, runs: Sequence[_Run], kept: int) -> Any:
    new = {id(run.node): run.cut(kept) for run in runs}
    return jax.tree.map(
        lambda node: new.get(id(node), node), model, is_leaf=lambda node: id(node) in new
    )


def _count_bytes(model: Any) -> int:
    return sum(math.prod(leaf.shape) * itemsize(leaf.dtype) for leaf in leaves_of(model))


# Equal blocks


def _find_runs(node: Any, is_certain: bool = False) -> Iterator[_Run]:
    """The runs of equal blocks in a tree, none of them inside a block of another."""
    inside = jax.tree.leaves(node, is_leaf=lambda inner: inner is not node)
    is_list = type(node) in (list, tuple) or isinstance(node, MutableSequence)
    if isinstance(node, pz.nn.LayerStack):
        inside, count = [], node.stack_axis_size
        if not isinstance(node, RolledLayerStack) and count >= _LEAST_BLOCKS:
            yield _Run(node, count, functools.partial(_cut_stack, node), True)
    elif is_list or isinstance(node, dict):
        keys = [*range(len(node))] if is_list else _find_numbered(node)
        start, period, count = _find_repetition([_kind_of(node[key]) for key in keys])
        if count:

            def cut(kept: int) -> Any:
                gone = {*keys[start + kept * period : start + count * period]}
                if is_list:
                    return type(node)([x for i, x in enumerate(node) if i not in gone])
                return {key: x for key, x in node.items() if key not in gone}

            yield _Run(node, count, cut, is_certain)
            inside = jax.tree.leaves(rest := cut(0), is_leaf=lambda inner: inner is not rest)
    for inner in inside:
        if inner is not node:
            yield from _find_runs(inner, isinstance(node, pz.nn.Sequential))


def _find_numbered(node: dict[Any, Any]) -> list[Any]:
    """The keys of a dictionary that differ in their numbers only, in the order of these."""
    groups = collections.defaultdict(list)
    for key in node:
        groups[fold_key(str(key))].append(key)
    keys = max(groups.values(), key=len, default=[])
    return sorted(keys, key=lambda key: [int(number) for number in re.findall(r"\d+", str(key))])


def _find_repetition(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Where items repeat: the first of them, how many are one block, and how many blocks."""
    best = 0, 0, 0
    for period in range(1, len(kinds) // _LEAST_BLOCKS + 1):
        start = 0
        are_equal = itertools.starmap(operator.eq, zip(kinds, kinds[period:], strict=False))
        for is_equal, group in itertools.groupby(are_equal):
            length = len([*group])
            count = (length + period) // period
            if is_equal and count >= _LEAST_BLOCKS and count * period > best[1] * best[2]:
                best = start, period, count
            start += length
    return best


def _kind_of(item: Any) -> Hashable:
    """Equal for items that are alike but for the values of their arrays and numbers in labels."""
    leaves, structure = jax.tree.flatten(item)
    kinds = [(x.shape, x.dtype) if is_array(x) else fold_key(repr(x)) for x in leaves]
    # Functions that are made anew for each block are not equal, but written alike.
    return fold_key(str(structure)), tuple(kinds)


def _cut_stack(stack: Any, kept: int) -> Any:
    leaves, structure = flatten(stack.stacked_sublayers)

    def shorten(leaf: Leaf) -> Any:
        if stack.stack_axis not in (leaf.names or ()):
            return leaf.value
        pairs = zip(leaf.names or (), leaf.shape, strict=True)
        shape = tuple(kept if name == stack.stack_axis else size for name, size in pairs)
        return leaf.value.update(shape=shape)

    layers = structure.fill([shorten(leaf) for leaf in leaves])
    return dataclasses.replace(stack, stacked_sublayers=layers, stack_axis_size=kept)


# What they compute


def _trace_loss(problem: Problem, model: Any) -> Any:
    options = dict(problem.step_options)
    state = TrainState.initial_state(
        model, problem.optimizer, jax.random.key(0), plain_arrays=options.get("plain_arrays")
    )
    evaluate = build_eval_step_fn(problem.loss_fn, batch_axis=options["batch_axis"])
    return evaluate.trace(state, **problem.loss_inputs).jaxpr


def _count_products(program: Any) -> collections.Counter[Hashable]:
    """How often a traced program computes which products and convolutions."""
    found: collections.Counter[Hashable] = collections.Counter()
    for equation in open_program(program)[0].eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            found[tuple(str(operand.aval) for operand in equation.invars)] += 1
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in inner_programs(equation):
            for key, count in _count_products(inner).items():
                found[key] += times * count
    return found
