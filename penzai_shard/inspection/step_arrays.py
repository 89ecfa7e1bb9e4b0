"""Says what each array of a step is: a parameter, a statistic of an optimizer, an input, an output.

Train steps say so themselves. In the arguments of a function it is read from what stands there:
roles of variables, collections of Flax, states of optax, which repeat the tree of the parameters.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from penzai_shard import specs
from penzai_shard.arrays.kinds import itemsize
from penzai_shard.arrays.structure import Leaf, leaves_of
from penzai_shard.paths import join_paths
from penzai_shard.readers.reader import is_module, is_node

_STATISTICS = "optimizer state"
_PARTS_OF_ROLES = {"parameter": "parameters", "state": "state variables"}


@dataclasses.dataclass(frozen=True)
class StepArray:
    """An array that goes into a step or comes out of it.

    Attributes:
        path: Where it is; the first piece is the argument, or the field of a train state.
        part: What it is: ``"parameters"``, ``"optimizer state"``, ``"state variables"``,
            ``"constants"``, ``"inputs"`` or ``"outputs"``.
        names: Its logical axes, as in a plan.
        shape: Its shape.
        dtype: Its dtype.
        sharding: Where it lies; None if that is not known.
        name: What the program calls it; ``""`` of a result.
        donated: Whether a result may take its memory.
        is_weak: Whether its dtype gives way to that of what it meets.
        parameter: Of what an optimizer keeps of a parameter, the path of that.
    """

    path: str
    part: str
    names: tuple[Any, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None = None
    name: str = ""
    donated: bool = False
    is_weak: bool = False
    parameter: str = ""

    @property
    def spec(self) -> PartitionSpec | None:
        """Its canonical spec; None if it is over no mesh."""
        own = self.sharding
        return specs.canonical(own.spec) if isinstance(own, NamedSharding) else None

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the part that one device holds."""
        return self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)

    @property
    def bytes_per_device(self) -> int:
        """The bytes of it that one device holds."""
        return math.prod(self.shard_shape) * itemsize(self.dtype)

    @property
    def is_on_host(self) -> bool:
        """Whether it lies in the memory of the host."""
        return getattr(self.sharding, "memory_kind", None) == "pinned_host"


def describe_leaf(leaf: Leaf, part: str, name: str = "") -> StepArray:
    """What a leaf says of an array in the argument of a name."""
    path, parameter = join_paths(name, leaf.path), leaf.statistic and leaf.statistic.parameter
    array = StepArray(path, part, leaf.names, leaf.shape, leaf.dtype)
    return dataclasses.replace(array, parameter=join_paths(name, parameter)) if parameter else array


def read_arguments(trees: Mapping[str, Any], values: Sequence[Any]) -> list[StepArray]:
    """The arrays of a function's arguments.

    Args:
        trees: The arguments by name.
        values: The arrays, the same objects as in the trees, in the order of the program.
    """
    return _pair_statistics(_read_arrays(trees, values, "inputs"))


def read_results(tree: Any, values: Sequence[Any], name: str = "result") -> list[StepArray]:
    """The arrays of what a step returns, as ``read_arguments``."""
    return _read_arrays({name: tree}, values, "outputs")


def _read_arrays(trees: Mapping[str, Any], values: Sequence[Any], part: str) -> list[StepArray]:
    """What is known of arrays; ``part`` is that of those of which nothing else is known."""
    # An array that stands in several places is each of them in turn.
    found: dict[int, list[StepArray]] = collections.defaultdict(list)
    for name, tree in trees.items():
        leaves = leaves_of(tree)
        statistics, in_modules = _arrays_in(tree, _is_optimizer_state), _arrays_in(tree, _is_module)
        # Some libraries, as Equinox, do not say what is trained: all is.
        has_roles = any(leaf.role for leaf in leaves)
        has_collections = isinstance(tree, Mapping) and "params" in tree
        for leaf in leaves:
            own = _PARTS_OF_ROLES.get(leaf.role, part)
            if id(leaf.value) in statistics:
                own = _STATISTICS
            elif "params" in join_paths(name, leaf.path).split("/"):
                own = "parameters"
            elif has_collections:
                # Those of linen that are not trained.
                own = "state variables"
            elif not leaf.role and id(leaf.value) in in_modules:
                own = "constants" if has_roles else "parameters"
            found[id(leaf.value)].append(describe_leaf(leaf, own, name))
    return [found[id(value)].pop(0) for value in values]


def _arrays_in(tree: Any, is_wanted: Callable[[Any], bool]) -> set[int]:
    """The identities of the arrays in nodes of a kind."""
    nodes = filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_wanted))
    return {id(value) for value in jax.tree.leaves([*nodes])}


def _is_optimizer_state(node: Any) -> bool:
    return isinstance(node, tuple) and type(node).__module__.partition(".")[0] == "optax"


def _is_module(node: Any) -> bool:
    return is_module(type(node)) and not is_node(node)


def _pair_statistics(arrays: Sequence[StepArray]) -> list[StepArray]:
    """Finds the parameters of what an optimizer keeps, which is what makes them parameters.

    Below some path of an optimizer's state, such as ``mu``, there are the paths of the parameters.
    """
    # For each path of a tree the numbers of the arrays below it, by the rest of their paths.
    trees: dict[str, dict[str, int]] = collections.defaultdict(dict)
    tables: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for number, array in enumerate(arrays):
        # Counters are of no parameter.
        if jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
            places = tables if array.part == _STATISTICS else trees
            for end in _ends(array.path):
                places[array.path.removesuffix(f"/{end}")][end] = number
    paired = list(arrays)
    # Shorter paths come first: all that is below one of them is found together. Twice, since arrays
    # with labels as paths may stand among those of another table.
    for below in [*tables.values()] * 2:
        table = {end: number for end, number in below.items() if not paired[number].parameter}
        tree = next((tree for tree in trees.values() if table.keys() <= tree.keys()), {})
        for end in tree.keys() & table.keys():
            parameter, statistic = arrays[tree[end]], arrays[table[end]]
            paired[tree[end]] = dataclasses.replace(parameter, part="parameters")
            paired[table[end]] = dataclasses.replace(statistic, parameter=parameter.path)
    return paired


def _ends(path: str) -> Iterator[str]:
    """The ends of a path below its first piece, the longest first."""
    pieces = path.split("/")
    return ("/".join(pieces[start:]) for start in range(1, len(pieces)))


def find_next_arguments(
    arguments: Sequence[StepArray], results: Sequence[StepArray]
) -> dict[int, int]:
    """For arguments that are state the result that ends in the same path, if it is the only one."""
    numbers = {
        _state_key(array, array.path.partition("/")[2]): number
        for number, array in enumerate(arguments)
        if "/" in array.path and (array.donated or array.part != "inputs")
    }
    found: dict[int, list[int]] = collections.defaultdict(list)
    for number, array in enumerate(results):
        keys = (_state_key(array, end) for end in _ends(array.path))
        if (key := next((key for key in keys if key in numbers), None)) is not None:
            found[numbers[key]].append(number)
    return {own: several[0] for own, several in found.items() if len(several) == 1}


def _state_key(array: StepArray, end: str) -> tuple[Any, ...]:
    # With labels as paths, a statistic may have that of its parameter.
    return end, array.shape, array.part == _STATISTICS
