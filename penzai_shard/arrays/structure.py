"""Takes any tree apart into arrays and a static rest, and joins them again.

This is the one mechanism of the library that does so. A tree is a model of any library, a train
state, what a plan or a checkpoint is for, or a layer with its inputs. A ``Structure`` holds no
array: it is compared by content and hashed, so that two builds of a model share their programs.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax

from penzai_shard.arrays.kinds import is_array, is_number
from penzai_shard.arrays.static_values import same_static
from penzai_shard.errors import Problem, Problems, ShardingError
from penzai_shard.paths import join_paths, path_text
from penzai_shard.readers.reader import Content, Reader, is_module, is_node, reader_of

_OPTIMIZER = "opt_state"


@dataclasses.dataclass(frozen=True, slots=True)
class Statistic:
    """Which dimensions of its parameter an array has that an optimizer keeps.

    Attributes:
        parameter: The parameter's path, ``""`` where its own names say which it is.
        names: The parameter's logical axes.
        sizes: The parameter's shape.
        kept: For each dimension of the array its number in the parameter, or None.
    """

    parameter: str
    names: tuple[Any, ...] | None
    sizes: tuple[int, ...] | None
    kept: tuple[int | None, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a tree.

    Attributes:
        path: The label of its variable, or where it stands.
        names: A logical axis for each dimension, None for a positional one; None altogether for an
            array without names.
        shape: Its shape.
        dtype: Its dtype; None for what is no array, a sharding for instance.
        value: What stands there: an array, a struct, a tracer, a number, a sharding.
        role: ``"parameter"``, ``"state"``, or ``""`` where the library says neither.
        variable: The mutable variable that holds it now, if one does.
        statistic: Of what an optimizer keeps, which dimensions of the parameter it has.
    """

    path: str
    names: tuple[Any, ...] | None
    shape: tuple[int, ...]
    dtype: Any
    value: Any
    role: str = ""
    variable: Any = None
    statistic: Statistic | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """A mutable variable of a tree, or its frozen value.

    Attributes:
        role: Its role.
        live: Whether it was mutable.
        leaves: Which leaves its value has.
    """

    role: str
    live: bool
    leaves: slice


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """An array with names, for readers of nodes whose arrays lie in plain containers.

    It stands in ``Content.data`` only: the walk makes a leaf of it, and ``close`` gets the array.

    Attributes:
        value: The array.
        names: As in ``Leaf``.
        role: As in ``Leaf``.
        statistic: As in ``Leaf``.
    """

    value: Any
    names: tuple[Any, ...] | None = None
    role: str = ""
    statistic: Statistic | None = None


# Inside a structure: what is known by number, a pytree, a node of a reader.


class _Known(NamedTuple):
    """A ``"leaf"``, a ``"static"`` value, or a ``"box"`` that occurred before."""

    kind: str
    number: int


class _Tree(NamedTuple):
    definition: Any
    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    number: int
    reader: Reader
    template: Any
    inner: Any
    role: str
    is_plain: bool
    # Compared by Structure.variables, where it counts.
    is_live: bool = dataclasses.field(compare=False)


@jax.tree_util.register_static
class Structure:
    """Everything of a tree but its arrays; to JAX itself a tree without arrays.

    Two structures are equal if paths, static values and containers are, also settings of modules,
    where ``2`` and ``2.0`` differ. Lengths and positional dimensions of arrays are not part of it.

    Attributes:
        paths: The path of each leaf.
        names: The logical axes of each leaf.
        statics: Path and value of each leaf that is no array, such as a function.
        variables: The variables, each once, in the order of their first leaves.
        empty: The places of variables that are empty; not part of equality.
        problems: What is wrong with names that a library gives, and, of a tree without arrays, with
            empty places; not part of equality.
    """

    def __init__(self, root: Any, walk: "_Walk") -> None:
        self._root = root
        self.paths = tuple(leaf.path for leaf in walk.leaves)
        self.names = tuple(leaf.names for leaf in walk.leaves)
        self.statics = tuple(walk.statics)
        self.variables = tuple(walk.variables)
        self.empty = tuple(x for x in walk.problems if x.kind == "empty")
        # Beside its variables a model that they were taken out of is whole.
        self.problems = tuple(x for x in walk.problems if not walk.leaves or x.kind != "empty")
        # Functions and settings of two builds may hash differently and be equal all the same.
        self._hash = hash((self.paths, tuple(path for path, _ in self.statics)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure)
            and self.variables == other.variables
            and self.is_like(other)
        )

    def is_like(self, other: "Structure") -> bool:
        """Whether the two differ at most in which variables are mutable."""
        own, found = (self.statics, self._root), (other.statics, other._root)
        return self.paths == other.paths and same_static(own, found)

    def fill_alike(self, values: Sequence[Any]) -> Any:
        """The tree with other values, whose variables are mutable where they were."""
        return self.fill(values, live=None)

    def fill(
        self,
        values: Sequence[Any],
        *,
        live: Collection[str] | None = (),
        plain: bool = False,
        settings: bool = True,
    ) -> Any:
        """The tree with other values in the places of its leaves.

        Args:
            values: One value for each leaf, in their order: arrays, structs, tracers, shardings.
            live: The roles of the variables that become mutable; others are frozen. None for those
                that were.
            plain: Whether nodes are left out without which code of their library computes.
            settings: Whether numbers that are settings of modules stay. JAX, which counts them as
                leaves, would take them for shardings; it takes None for its own choice.

        >>> leaves, structure = flatten({"w": 1.0, "name": "up"})
        >>> structure.fill([2.0])
        {'name': 'up', 'w': 2.0}
        """
        made: dict[int, Any] = {}
        statics = [value if settings or not is_number(value) else None for _, value in self.statics]
        known: dict[str, Any] = {"leaf": values, "static": statics, "box": made}

        def join(part: Any) -> Any:
            if isinstance(part, _Known):
                return known[part.kind][part.number]
            if isinstance(part, _Tree):
                return part.definition.unflatten(map(join, part.parts))
            node = join(part.inner)
            if part.template is not None and not (plain and part.is_plain):
                node = part.reader.close(part.template, node)
                is_live = part.is_live if live is None else part.role in live
                if is_live and hasattr(part.reader, "thaw"):
                    node = part.reader.thaw(node)
            made[part.number] = node
            return node

        return join(self._root)

    def read(self, tree: Any) -> list[Any]:
        """The arrays of a tree of this structure, for instance after a call has assigned some.

        Which variables are mutable does not matter.

        Raises:
            ShardingError: The tree has another structure; the first path that differs is named.
        """
        leaves, other = flatten(tree)
        if not self.is_like(other):
            raise ShardingError("the tree has another structure:", [self._first_difference(other)])
        return [leaf.value for leaf in leaves]

    def check_paths(self) -> None:
        """Refuses a tree in which two arrays have one path, for those who find arrays by path.

        Raises:
            ShardingError: Some have; all of them are in it.
        """
        problems = Problems("each array needs a path of its own:")
        for path, count in Counter(self.paths).items():
            if count > 1:
                problems.add(path, f"{count} arrays have this path", "Rename a key.", "unreadable")
        problems.raise_if_any(ShardingError)

    def _first_difference(self, other: "Structure") -> Problem:
        own, found = (
            dict([*zip(s.paths, s.names, strict=True), *s.statics]) for s in (self, other)
        )
        for path in own | found:
            here, there = (known.get(path, "nothing") for known in (own, found))
            if not same_static(here, there):
                what = f"axes or setting: one tree has {here}, and the other has {there}"
                return Problem(path, what, "Keep all as it was.")
        return Problem("", "a container or a setting of a module differs", "Keep it as it was.")


def flatten(tree: Any) -> tuple[list[Leaf], Structure]:
    """The arrays of a tree in the order of ``jax.tree.leaves``, and the rest.

    A variable that occurs twice is one leaf.

    >>> leaves, structure = flatten({"w": jax.numpy.ones((2, 3)), "act": jax.nn.relu})
    >>> [(leaf.path, leaf.shape) for leaf in leaves], [path for path, _ in structure.statics]
    ([('w', (2, 3))], ['act'])
    """
    walk = _Walk()
    root = walk.tree(tree, "", _Context())
    return walk.leaves, Structure(root, walk)


def leaves_of(tree: Any) -> list[Leaf]:
    """The arrays of a tree."""
    return flatten(tree)[0]


def variables_of(tree: Any) -> list[Any]:
    """The variables of a tree, or their frozen values, in the order of ``Structure.variables``."""
    walk = _Walk()
    walk.tree(tree, "", _Context())
    return walk.nodes


def read_variables(tree: Any) -> list[Any]:
    """What each variable of a tree holds now, in the order of ``Structure.variables``.

    A value may be a tree of arrays, and another one than when the tree was taken apart.
    """
    return [reader_of(type(node)).open(node).data for node in variables_of(tree)]  # type: ignore[union-attr]


# Taking a tree apart


@dataclasses.dataclass(frozen=True, slots=True)
class _Context:
    """What is known of a part of a tree from the nodes around it."""

    role: str = ""
    variable: Any = None
    # Of arrays that are statistics of a named one.
    statistic: Statistic | None = None
    # Numbers in modules are settings; those in a variable of a module are not.
    in_module: bool = False


class _Walk:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.statics: list[tuple[str, Any]] = []
        self.variables: list[Variable] = []
        self.nodes: list[Any] = []
        self.problems: list[Problem] = []
        self._boxes = 0
        # By identity: box and data of a variable or module that was met.
        self._seen: dict[Any, tuple[int, Any]] = {}
        # By role and label: where a variable stands, and whether it is mutable.
        self._places: dict[tuple[str, str], tuple[str, bool]] = {}

    def tree(self, tree: Any, path: str, context: _Context) -> Any:
        """Takes a pytree apart whose root is at ``path``."""
        is_end = _is_end if context.in_module else _is_end_or_module
        keyed, definition = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_end)
        parts = [
            self._part(value, join_paths(path, path_text(keys)), context) for keys, value in keyed
        ]
        if len(parts) == 1 and keyed[0][1] is tree:
            return parts[0]
        return _Tree(definition, tuple(parts))

    def _part(self, value: Any, path: str, context: _Context) -> Any:
        if isinstance(value, Named):
            inner = _Context(value.role or context.role, context.variable, value.statistic)
            return self._slot(value.value, path, value.names, inner)
        reader = reader_of(type(value))
        if reader is not None:
            return self._box(reader, value, path, context)
        # Inside of modules numbers are settings, as for Equinox.
        if not context.in_module and is_module(type(value)):
            return self.tree(value, path, dataclasses.replace(context, in_module=True))
        if hasattr(value, "shape") and hasattr(value, "dtype") and not is_array(value):
            what = f"a {type(value).__name__} of dtype {value.dtype} is no array of JAX or NumPy"
            self.problems.append(Problem(path, what, "Give an array of numbers.", "unreadable"))
        is_value = is_array(value) or isinstance(value, jax.sharding.Sharding)
        if is_value or (is_number(value) and not context.in_module):
            return self._slot(value, path, None, context)
        self.statics.append((path, value))
        return _Known("static", len(self.statics) - 1)

    def _slot(
        self, value: Any, path: str, names: Any, context: _Context, shape: tuple[int, ...] = ()
    ) -> _Known:
        dtype, shape = None, tuple(getattr(value, "shape", shape))
        if is_array(value):
            dtype = value.dtype
        elif is_number(value):
            dtype = jax.dtypes.canonicalize_dtype(type(value))
        known = context.role, context.variable, context.statistic
        self.leaves.append(Leaf(path, names, shape, dtype, value, *known))
        return _Known("leaf", len(self.leaves) - 1)

    def _box(self, reader: Reader, node: Any, path: str, context: _Context) -> Any:
        content = reader.open(node)
        # An optimizer keeps values of variables, under the labels of the parameters.
        label = "" if _OPTIMIZER in path.split("/") else content.label
        place, path = path, label or path
        if content.identity is not None:
            number, data = self._seen.setdefault(content.identity, (self._boxes, content.data))
            is_kept = _OPTIMIZER in place.split("/")
            if number < self._boxes and _same_arrays(content.data, data, is_kept):
                return _Known("box", number)
        is_variable = hasattr(reader, "is_live")
        is_live = is_variable and reader.is_live(node)  # type: ignore[attr-defined]
        if content.identity is not None and label:
            known = (content.role, label)
            other, is_other_live = self._places.setdefault(known, (place, is_live))
            if other != place and is_live and is_other_live:
                what = f"the variables at {other!r} and {place!r} have this label and differ"
                self.problems.append(Problem(place, what, "Give each its own label.", "unreadable"))
            path = path if other == place else place
        if content.problem is not None:
            # A place that can be closed without data is one that a variable was taken out of.
            is_empty = content.data is None and content.template is not None
            kind = "empty" if is_empty else "unreadable"
            self.problems.append(Problem(path, *content.problem, kind=kind))
        number, self._boxes = self._boxes, self._boxes + 1
        first, position = len(self.leaves), len(self.variables)
        variable = node if is_live else context.variable
        inner = _Context(content.role or context.role, variable, context.statistic)
        part = self._content(content, path, inner)
        if is_variable:
            # In front of the variables that it holds.
            leaves = slice(first, len(self.leaves))
            self.variables.insert(position, Variable(content.role, is_live, leaves))
            self.nodes.insert(position, node)
        return _Box(number, reader, content.template, part, content.role, content.is_plain, is_live)

    def _content(self, content: Content, path: str, context: _Context) -> Any:
        """What a node holds: one array with the node's names, or a tree."""
        data, names = content.data, content.names
        if names is None:
            # A variable mostly holds one node, which needs no walk through a tree.
            walk = self._part if _is_end(data) else self.tree
            return walk(data, path, context)
        if is_array(data) and content.sizes is None and len(names) <= data.ndim:
            # As in a PartitionSpec, dimensions behind the last name have none.
            names = (*names, *(None,) * (data.ndim - len(names)))
            return self._slot(data, path, names, context)
        if not is_array(data) and jax.tree_util.all_leaves([data]):
            # A sharding, which has no shape: the node tells the lengths.
            return self._slot(data, path, names, context, content.sizes or ())
        # What an optimizer keeps of a named array: other dimensions, or several arrays.
        statistic = Statistic("", names, content.sizes)
        return self.tree(data, path, _Context(context.role, context.variable, statistic))


def _same_arrays(a: Any, b: Any, is_kept: bool) -> bool:
    """Whether two values of variables are one: the same node, or nodes of the same arrays."""
    # Shardings tell nothing, equal ones are one object; nor do the structs that an optimizer keeps.
    kinds = jax.Array if is_kept else jax.Array | jax.ShapeDtypeStruct
    own, other = jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b)
    return a is b or (
        len(own) == len(other)
        and all(x is y and isinstance(x, kinds) for x, y in zip(own, other, strict=True))
    )


def _is_end(value: Any) -> bool:
    return type(value) is Named or is_node(value)


def _is_end_or_module(value: Any) -> bool:
    return _is_end(value) or is_module(type(value))
