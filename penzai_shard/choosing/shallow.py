"""Cuts a deep model to one and to two of its equal blocks, from which the cost of all follows.

With each block a step computes, sends and holds as much more, so that programs of one block and of
two say what any number costs, in the time of three blocks. Blocks in a loop are not cut: a program
of all of them is no longer than one of two, and what a loop sends is another matter.
"""

import collections
import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import jax
from penzai import pz

from penzai_shard.arrays.kinds import is_array, itemsize
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.workload import Workload
from penzai_shard.paths import fold_key
from penzai_shard.programs import inner_programs, open_program
from penzai_shard.training.step import build_eval_step_fn
from penzai_shard.training.train_state import TrainState

_LABEL = re.compile(r"'[^']*'|\"[^\"]*\"")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Of three blocks, one and two are no less work than all of them.
_LEAST_BLOCKS = 4


class Cut(NamedTuple):
    """What a model is priced by.

    Attributes:
        models: The model with one of its blocks, and with two of them; or only the whole model.
        blocks: How many it has; 1 if it is not cut.
    """

    models: tuple[Any, ...]
    blocks: int


class _Run(NamedTuple):
    """Equal blocks, one after the other.

    Attributes:
        node: What they are in.
        blocks: How many there are.
        is_certain: Whether ``pz.nn.Sequential`` runs them, each once.
        cut: Gives the node with so many of them.
    """

    node: Any
    blocks: int
    is_certain: bool
    cut: Callable[[int], Any]


@functools.lru_cache(maxsize=4)
def cut_model(workload: Workload) -> Cut:
    """The model of a workload with one and with two of its equal blocks.

    Blocks are items of a list or of a dictionary, one after the other, that are alike but for the
    numbers in their labels; also groups of items that repeat. All series of one length are cut
    together. Penzai's ``LayerStack`` is not cut: what ``roll_layer_stacks`` makes of it is a loop.

    Args:
        workload: The step.

    Returns:
        The models; the whole one if there are fewer than four blocks, if they run in a loop, or if
        the loss function, which is traced, does not take fewer of them or does not compute that
        much less.
    """
    model, by_count = workload.model, collections.defaultdict(list)
    whole = Cut((model,), 1)
    for run in _find_runs(model):
        by_count[run.blocks].append(run)
    ones = {blocks: _cut_runs(model, runs, 1) for blocks, runs in by_count.items()}
    blocks = min(ones, key=lambda count: _count_bytes(ones[count])["bytes"], default=0)
    if not blocks:
        return whole
    runs = by_count[blocks]
    one, two, three = (_cut_runs(model, runs, kept) for kept in (1, 2, 3))
    # Of parameters that some blocks share there are not as many more with each block.
    if not _is_linear([_count_bytes(each) for each in (one, two, model)], blocks):
        return whole
    # To trace all of eighty blocks takes as long as to price them.
    last, depth = (three, 3) if all(run.is_certain for run in runs) else (model, blocks)
    try:
        products = [_count_products(_trace_loss(workload, each)) for each in (one, two, last)]
    except Exception:
        # Whatever a loss function raises for a model of another depth, it does not take one.
        return whole
    return Cut((one, two), blocks) if _is_linear(products, depth) else whole


def _is_linear(counts: Sequence[Mapping[Hashable, int]], blocks: int) -> bool:
    """Whether what many blocks have follows from what one has and two have."""
    one, two, many = counts
    return all(
        one[key] + (blocks - 1) * (two[key] - one[key]) == many[key] for key in {*one, *two, *many}
    )


def _count_bytes(model: Any) -> Mapping[Hashable, int]:
    return {"bytes": sum(math.prod(x.shape) * itemsize(x.dtype) for x in leaves_of(model))}


def _cut_runs(model: Any, runs: Sequence[_Run], kept: int) -> Any:
    new = {id(run.node): run.cut(kept) for run in runs}
    return jax.tree.map(lambda x: new.get(id(x), x), model, is_leaf=lambda x: id(x) in new)


# Equal blocks


def _find_runs(node: Any, is_certain: bool = False) -> Iterator[_Run]:
    """The runs of equal blocks in a tree, none of them inside a block of another."""
    if isinstance(node, pz.nn.LayerStack):
        return
    rest, is_list = node, type(node) in (list, tuple) or isinstance(node, MutableSequence)
    if is_list or isinstance(node, dict):
        keys = [*range(len(node))] if is_list else [*node]
        start, period, blocks = _find_repetition([_kind_of(node[key]) for key in keys])

        def cut(kept: int) -> Any:
            gone = {*keys[start + kept * period : start + blocks * period]}
            if is_list:
                return type(node)([x for i, x in enumerate(node) if i not in gone])
            return {key: x for key, x in node.items() if key not in gone}

        if blocks:
            yield _Run(node, blocks, is_certain, cut)
            rest = cut(0)
    for inner in jax.tree.leaves(rest, is_leaf=lambda inner: inner is not rest):
        if inner is not rest:
            # A class of its own may run some of them twice.
            is_sequence = isinstance(node, pz.nn.Sequential)
            is_sequence = is_sequence and type(node).__call__ is pz.nn.Sequential.__call__
            yield from _find_runs(inner, is_sequence)


def _find_repetition(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Where items repeat: the first of them, how many are one block, and how many blocks."""
    best = 0, 0, 0
    for period in range(1, len(kinds) // _LEAST_BLOCKS + 1):
        start, pairs = 0, zip(kinds, kinds[period:], strict=False)
        for is_equal, group in itertools.groupby(itertools.starmap(operator.eq, pairs)):
            length = len([*group])
            blocks = (length + period) // period
            if is_equal and blocks >= _LEAST_BLOCKS and blocks * period > best[1] * best[2]:
                best = start, period, blocks
            start += length
    return best


def _kind_of(item: Any) -> Hashable:
    """Equal for items that are alike but for the values of arrays and the numbers in labels."""
    leaves, structure = jax.tree.flatten(item)
    kinds = [(x.shape, x.dtype) if is_array(x) else _fold_labels(repr(x)) for x in leaves]
    return _fold_labels(str(structure)), *kinds


def _fold_labels(text: str) -> str:
    """A text without numbers in quotes, which count blocks; other numbers are settings.

    Functions that are made anew for each block are not equal, but written alike.
    """
    return _LABEL.sub(lambda found: fold_key(found[0]), _ADDRESS.sub("", text))


# What they compute


def _trace_loss(workload: Workload, model: Any) -> Any:
    options = workload.step_options
    state = TrainState.initial_state(
        model, workload.optimizer, jax.random.key(0), plain_arrays=options["plain_arrays"]
    )
    evaluate = build_eval_step_fn(workload.loss_fn, batch_axis=options["batch_axis"])
    return evaluate.trace(state, **workload.as_given(workload.inputs)).jaxpr


def _count_products(program: Any) -> collections.Counter[Hashable]:
    """How often a traced program computes which products and convolutions."""
    found: collections.Counter[Hashable] = collections.Counter()
    for equation in open_program(program)[0].eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            found[tuple(str(operand.aval) for operand in equation.invars)] += 1
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in inner_programs(equation):
            found.update({key: times * n for key, n in _count_products(inner).items()})
    return found
