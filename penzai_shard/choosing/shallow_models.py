"""A deep model cut to one and to two of its equal blocks, from which the cost of all follows.

What a step costs grows by the same with every further block, so that a program of one block and
one of two say what any number of them costs, in the time of three blocks.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.layers import RolledLayerStack
from penzai_shard.model_variables import is_variable, value_of, variable_name
from penzai_shard.named_arrays import dimension_names, with_shape
from penzai_shard.path_folding import folding_key
from penzai_shard.traced_programs import inner_programs, opened
from penzai_shard.training import TrainState, build_train_step_fn

# Of two blocks, one and two are no less work than the model itself.
_LEAST_BLOCKS = 3

_Products: TypeAlias = Mapping[Hashable, int]


@dataclasses.dataclass(frozen=True)
class Shallow:
    """A training step with fewer blocks, whose costs say that of all blocks.

    Attributes:
        problems: The step with one block and the step with two, for a model whose blocks are
            known; of any other the step itself alone. Where blocks are groups of layers of which
            the last is left unfinished, that part of one stands for the first block.
        blocks: How many blocks the model has, so that ``one.deeper(two, blocks)`` is its cost; 1
            if it is not cut.
        doubt: Why blocks that seem equal are not cut, in words; empty if they are, or there are
            none.
        deeper: The step with one block more than the last of these, from which costs follow more
            closely: the compiler orders what the first block does otherwise than what others do.
            None for a model that is not cut.
        is_loop: Whether all these blocks are the body of a loop (``RolledLayerStack``), so that a
            program of all of them is no longer than one of two. In those with fewer blocks the
            loop is unrolled, so that every block is in sight.
    """

    problems: tuple[TrainingProblem, ...]
    blocks: int
    doubt: str = ""
    is_loop: bool = False
    deeper: TrainingProblem | None = None


def shallow(problem: TrainingProblem) -> Shallow:
    """A training step whose model is cut to one and to two of its equal blocks.

    Blocks are the layers of a list or a tuple anywhere in the model that are alike but for the
    numbers in the labels of their parameters, or groups of layers that repeat as a whole, such as
    local and global attention in turn; and the layers of a ``LayerStack``. What is left keeps its
    labels, names and tags. Rules for arrays of a least size (``min_size``) see the shorter arrays
    of a stack.

    Whether the loss function runs on what is left is tried by tracing it, and where blocks are not
    those of a Penzai ``Sequential`` or ``LayerStack``, whether it then computes exactly that much
    less.

    Args:
        problem: The step; its model's arrays may be structs.

    Returns:
        The steps with fewer blocks, or the step itself.
    """
    names = collections.Counter(_names_in(problem.model))
    runs = [run for run in _runs_in(problem.model, is_sequential=False) if _is_apart(run, names)]
    chosen = _most_saving(runs)
    if not chosen:
        return Shallow((problem,), 1)
    # What stands for a block already is kept alone and with one more.
    fewest = 0 if all(run.is_continued for run in chosen) else 1
    blocks = chosen[0].count + 1 - fewest
    one, two, three = (
        dataclasses.replace(problem, model=_with_blocks(problem.model, chosen, kept))
        for kept in (fewest, fewest + 1, fewest + 2)
    )
    is_certain = all(run.is_sequential for run in chosen)
    try:
        of_one, of_two = _products(one), _products(two)
        whole = None if is_certain else _products(problem)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Shallow(
            (problem,), 1, f"the loss function does not run on fewer of the {blocks} blocks ({why})"
        )
    if whole is not None and whole != _products_of_all(of_one, of_two, blocks):
        return Shallow(
            (problem,),
            1,
            f"with fewer of the {blocks} blocks the loss function does not compute as much less",
        )
    is_loop = all(isinstance(run.container, RolledLayerStack) for run in chosen)
    return Shallow((one, two), blocks, is_loop=is_loop, deeper=three)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Equal blocks one behind the other.

    Attributes:
        container: The list, the tuple or the layer stack that they are in.
        count: How many there are.
        is_sequential: Whether they certainly run one after the other, each once.
        start: The number of the first one's first item.
        period: Of how many items a block is.
    """

    container: Any
    count: int
    is_sequential: bool
    start: int = 0
    period: int = 1

    def cut(self, kept: int) -> Any:
        """The container with so many of the blocks."""
        if isinstance(self.container, pz.nn.LayerStack):
            return _shorter_stack(self.container, kept)
        first, end = self.start + kept * self.period, self.start + self.count * self.period
        return self.container[:first] + self.container[end:]

    @property
    def is_continued(self) -> bool:
        """Whether a part of one more block is behind them, with every kind of their variables.

        Local and global layers of attention in turn are alike but for their masks, so that a few
        local ones have all arrays that a layout is about. None may be of several blocks.
        """
        if isinstance(self.container, pz.nn.LayerStack):
            return False
        end = self.start + self.count * self.period
        before, block, behind = (
            self.container[first : first + self.period]
            for first in (end - 2 * self.period, end - self.period, end)
        )
        is_shared = not set(_names_in(block)).isdisjoint(_names_in(before))
        return not is_shared and _kinds_of_variables(block) <= _kinds_of_variables(behind)

    @property
    def bytes(self) -> int:
        """The size of all its blocks."""
        if isinstance(self.container, pz.nn.LayerStack):
            return _bytes_of(self.container)
        return _bytes_of(self.container[self.start : self.start + self.count * self.period])


def _most_saving(runs: Sequence[_Run]) -> list[_Run]:
    """The runs that are cut together: those of one number of blocks, which save the most."""
    by_count: dict[int, list[_Run]] = {}
    for run in runs:
        if run.count >= _LEAST_BLOCKS:
            by_count.setdefault(run.count, []).append(run)

    def saved(item: tuple[int, list[_Run]]) -> tuple[float, int]:
        count, members = item
        return sum(run.bytes for run in members) * (count - 1) / count, count

    return max(by_count.items(), key=saved)[1] if by_count else []


def _with_blocks(model: Any, runs: Sequence[_Run], kept: int) -> Any:
    cut = {id(run.container): run.cut(kept) for run in runs}
    return jax.tree_util.tree_map(
        lambda node: cut.get(id(node), node), model, is_leaf=lambda node: id(node) in cut
    )


def _runs_in(node: Any, is_sequential: bool) -> Iterator[_Run]:
    """The runs of equal blocks in a tree, none of them inside a block of another."""
    if isinstance(node, pz.nn.LayerStack):
        yield _Run(node, node.stack_axis_size, is_sequential=True)
        return
    if isinstance(node, pz.nn.Sequential):
        yield from _runs_in(node.sublayers, is_sequential=True)
        return
    if _is_series(node):
        run = _longest_run(node, is_sequential)
        outside = list(node)
        if run is not None:
            yield run
            outside = run.cut(0)
        for item in outside:
            yield from _runs_in(item, is_sequential=False)
        return

    def is_inner(inner: Any) -> bool:
        return inner is not node and (_may_hold_runs(inner) or is_variable(inner))

    for inner in jax.tree_util.tree_leaves(node, is_leaf=is_inner):
        if _may_hold_runs(inner):
            yield from _runs_in(inner, is_sequential=False)


def _is_series(node: Any) -> bool:
    return type(node) in (list, tuple)


def _may_hold_runs(node: Any) -> bool:
    return _is_series(node) or isinstance(node, pz.nn.Sequential | pz.nn.LayerStack)


def _longest_run(items: Sequence[Any], is_sequential: bool) -> _Run | None:
    """The equal blocks in a list of which fewest are left when one of each is kept."""
    kinds = _kinds_of(items)
    best, most = None, 0
    for period in range(1, len(items) // _LEAST_BLOCKS + 1):
        start = 0
        pairs = zip(kinds, kinds[period:], strict=False)
        for is_equal, members in itertools.groupby(pair[0] == pair[1] for pair in pairs):
            length = len(list(members))
            count = (length + period) // period
            saved = (count - 1) * period
            run = _Run(items, count, is_sequential, start, period)
            if is_equal and saved > most and count >= _LEAST_BLOCKS:
                best, most = run, saved
            start += length
    return best


def _kinds_of(items: Sequence[Any]) -> list[int]:
    """For each item the number of its kind; items of one kind are equal but for their values."""
    known: dict[Hashable, list[tuple[Any, int]]] = {}
    kinds = []
    for number, item in enumerate(items):
        leaves: list[Any]
        leaves, structure = jax.tree_util.tree_flatten(item, is_leaf=is_variable)
        alike = known.setdefault(tuple(map(_kind_of_leaf, leaves)), [])
        same = (kind for other, kind in alike if _are_equal_structures(structure, other))
        kind = next(same, number)
        if kind == number:
            alike.append((structure, number))
        kinds.append(kind)
    return kinds


def _kinds_of_variables(tree: Any) -> set[Hashable]:
    """The kinds of variables and of other arrays in a tree, whatever else is in it."""
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_variable)
    return {_kind_of_leaf(leaf) for leaf in leaves if is_variable(leaf) or _is_array(leaf)}


def _kind_of_leaf(leaf: Any) -> Hashable:
    if is_variable(leaf):
        values, structure = jax.tree_util.tree_flatten(value_of(leaf))
        label = folding_key(str(getattr(leaf, "label", "")))
        metadata = folding_key(str(getattr(leaf, "metadata", "")))
        return type(leaf), label, metadata, str(structure), tuple(map(_kind_of_leaf, values))
    if _is_array(leaf):
        return "array", tuple(leaf.shape), str(leaf.dtype)
    return "other", folding_key(repr(leaf))


def _are_equal_structures(one: Any, other: Any) -> bool:
    # Partial functions that are made anew for each block are not equal, but written alike.
    return bool(one == other) or folding_key(str(one)) == folding_key(str(other))


def _is_apart(run: _Run, names: Mapping[str, int]) -> bool:
    """Whether each variable of a run is one block's alone, or in all of its blocks.

    A run without arrays is none.

    Args:
        run: The run.
        names: How often each variable is in the model.
    """
    if isinstance(run.container, pz.nn.LayerStack):
        return True
    starts = range(run.start, run.start + run.count * run.period, run.period)
    blocks = [run.container[start : start + run.period] for start in starts]
    if not any(map(_is_array, jax.tree_util.tree_leaves(blocks[0]))):
        return False
    held = [collections.Counter(_names_in(block)) for block in blocks]
    return all(
        names[name] == times or all(other[name] == times for other in held)
        for block in held
        for name, times in block.items()
    )


def _names_in(tree: Any) -> Iterator[str]:
    for leaf in jax.tree_util.tree_leaves(tree, is_leaf=is_variable):
        if is_variable(leaf):
            yield variable_name(leaf) or f"object {id(leaf)}"


def _shorter_stack(stack: Any, length: int) -> Any:
    axis = stack.stack_axis

    def shorter(array: Any) -> Any:
        names = dimension_names(array) if pz.nx.is_namedarray(array) else None
        if names is None or axis not in names:
            return array
        data, position = array.data_array, names.index(axis)
        shape = tuple(length if i == position else n for i, n in enumerate(data.shape))
        return with_shape(array, shape, jax.ShapeDtypeStruct(shape, data.dtype))

    layers = jax.tree_util.tree_map(
        shorter, pz.freeze_variables(stack.stacked_sublayers), is_leaf=pz.nx.is_namedarray
    )
    if isinstance(stack, RolledLayerStack):
        stack = dataclasses.replace(stack, unroll=length)
    return dataclasses.replace(stack, stacked_sublayers=layers, stack_axis_size=length)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, and not a number as modules of Equinox have in their fields."""
    return is_array_like(leaf) and hasattr(leaf, "shape")


def _bytes_of(tree: Any) -> int:
    arrays = filter(_is_array, jax.tree_util.tree_leaves(tree))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def _products(problem: TrainingProblem) -> _Products:
    """How often a training step computes which matrix products and convolutions, traced."""
    state = TrainState.initial_state(
        pz.freeze_variables(problem.model), problem.optimizer, jax.random.key(0)
    )
    traced = build_train_step_fn(problem.loss_fn).trace(state, **problem.inputs)
    found: dict[Hashable, int] = collections.Counter()
    _count_products(traced.jaxpr, 1, found)
    return found


def _count_products(program: Any, times: int, found: dict[Hashable, int]) -> None:
    for equation in opened(program)[0].eqns:
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            shapes = tuple(str(operand.aval) for operand in equation.invars)
            found[name, shapes, str(equation.params["dimension_numbers"])] += times
        inside = times * equation.params["length"] if name == "scan" else times
        for inner in inner_programs(equation):
            _count_products(inner, inside, found)


def _products_of_all(one: _Products, two: _Products, blocks: int) -> _Products:
    """What a model of many blocks computes, from what it does with one and with two."""
    return collections.Counter(
        {
            key: count
            for key in (*one, *two)
            if (count := one.get(key, 0) + (blocks - 1) * (two.get(key, 0) - one.get(key, 0)))
        }
    )
