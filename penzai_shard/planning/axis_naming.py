"""Logical axis names for arrays that carry none, by path."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.equinox_modules import is_module_value, leaves_in_modules
from penzai_shard.errors import RuleTypeError, SelectionError, raise_all
from penzai_shard.fused_axes import FusedAxes, factors_of
from penzai_shard.named_arrays import named_array, unnamed_data
from penzai_shard.named_leaves import is_named_unit, leaves_of
from penzai_shard.readers import (
    is_bare_array,
    reader_of,
    warn_of_tied_arrays,
    with_repeats,
    without_repeats,
)
from penzai_shard.rule_kinds import LogicalAxis, nearest_name
from penzai_shard.tree_arguments import refuse_builder
from penzai_shard.tree_paths import path_matches, path_text

AxisNames = Sequence[LogicalAxis | None] | None


class NamesByPath(Mapping[str, AxisNames]):
    """Names that were found for the arrays of one tree, by path; not patterns.

    None stands in place of a name, or of all names of an array, that could not be found.
    ``name_axes`` leaves arrays without any name as they are, so that a plan reports them.
    """

    given_for_arrays = (
        "says what arrays are called, and is none itself. Give the arrays with these names: "
        "name_axes(params, names)"
    )

    @property
    def found_by(self) -> str:
        """The call that finds such names, for messages."""
        return "infer_names(...)"


def name_axes(tree: Any, patterns: Mapping[str, AxisNames]) -> Any:
    """Gives logical axis names to the arrays of a tree, by path pattern or as they were inferred.

    For raw dictionaries, state dictionaries of torch, and anything else whose arrays carry no
    names. Values, shapes and the containers stay; every array becomes a ``NamedArray``, or a
    ``NamedArrayView`` where a nameless dimension follows a named one. Arrays that are named
    already, scalars that no pattern matches, and leaves that are not arrays, stay as they are. In a
    module of Equinox only arrays are: numbers and texts in its fields stay too. Variables of Flax
    NNX keep their kind and get the names as metadata.

    ``without_names`` gives the arrays back. Code that computes with plain arrays needs them so. In
    training, a loss function gets modules of Equinox with plain arrays, and anything else too with
    ``plain_arrays=True``; see ``TrainState.initial_state``.

    Tensors of torch are not copied: the named array holds NumPy's view of their memory, which the
    tensor shares until it is placed or a train state is made. Those on other devices are copied to
    the host, those on ``meta`` become ``jax.ShapeDtypeStruct`` objects, and 64-bit integers become
    32-bit ones, unless ``jax_enable_x64`` is set.

    Args:
        tree: A pytree of arrays, ``jax.ShapeDtypeStruct`` objects or tensors of torch, such as
            ``module.state_dict()``.
        patterns: Names of the dimensions by path pattern, None for a dimension that stays
            positional; None in place of the names for an array whose dimensions all do. ``*``
            stands for one part of a path and ``**`` for any number; dots, slashes and brackets all
            separate parts. The path of an array alone is ``""``. Or what ``infer_names`` found for
            this tree: arrays of which it knows no name stay as they are, and a plan reports them.

    Returns:
        The tree with named arrays.

    Raises:
        SelectionError: An array is matched by no pattern or by several, a pattern matches
            nothing, or the number of names is not the array's rank; or the lengths that a name was
            fused of are not those of its dimension; or a tensor is not one that JAX can hold. All
            are reported at once.
        RuleTypeError: The names are not a sequence of hashable names, or the tree is a module of
            torch or the path of a file.

    Warns:
        ShardingWarning: Two tensors of torch are one, as tied weights are. Each of the two named
            arrays would be trained by itself.

    >>> weights = {"layers.0.weight": np.ones((4, 3)), "layers.0.bias": np.ones(4)}
    >>> named = name_axes(weights, {"layers.*.weight": ("out", "in"), "layers.*.bias": ("out",)})
    >>> dict(named["layers.0.weight"].named_shape)
    {'out': 4, 'in': 3}
    """
    refuse_builder("name_axes", tree)
    check_names(patterns)
    tree = without_repeats(tree)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named_unit)
    problems: list[str] = []
    names_of = (
        _Found(patterns, tree) if isinstance(patterns, NamesByPath) else NamesByPattern(patterns)
    )
    tensors: dict[str, Any] = {}
    named = [leaf for _, leaf in leaves]
    in_modules = leaves_in_modules(tree, is_named_unit)
    for index, (key_path, node) in enumerate(leaves):
        if in_modules[index] and is_module_value(node):
            continue
        path = path_text(key_path)
        array, problem = _unnamed_array(node)
        if problem:
            problems.append(f"{path or 'the array'}: {problem}.")
        if array is None:
            continue
        if is_bare_array(node):
            tensors[path] = node
        names, problem = names_of.array(path, tuple(np.shape(array)))
        if problem:
            problems.append(f"{path or 'the array'}: {problem}")
        elif names is not None:
            named[index] = _with_names(node, array, names)
        elif is_bare_array(node):
            named[index] = array
    problems += names_of.unused()
    raise_all(SelectionError, "cannot name the arrays of this tree:", problems)
    warn_of_tied_arrays("name_axes", tensors)
    return with_repeats(jax.tree_util.tree_unflatten(treedef, named))


def check_names(patterns: Any) -> None:
    """Refuses what cannot be read as names by path pattern.

    Raises:
        RuleTypeError: The names of some pattern are not a sequence of hashable names.
    """
    if not isinstance(patterns, Mapping):
        raise RuleTypeError(
            "patterns must be a mapping from path pattern to names, not "
            f"{type(patterns).__name__}. "
            "Write for instance {'layers.*.weight': ('out', 'in')}."
        )
    problems = []
    for pattern, names in patterns.items():
        if not isinstance(pattern, str):
            problems.append(f"pattern {pattern!r}: patterns are text, such as 'layers.*.weight'.")
        if names is None:
            continue
        if isinstance(names, str) or not isinstance(names, Sequence):
            problems.append(
                f"pattern {pattern!r}: names must be a tuple, not {names!r}. Write ({names!r},)."
            )
            continue
        if problem := unreadable_names(names):
            problems.append(f"pattern {pattern!r}: {problem}")
    raise_all(RuleTypeError, "these names cannot be read:", problems)


def unreadable_names(names: Sequence[Any]) -> str:
    """What is wrong with the names of an array's dimensions, as a sentence; empty if nothing is.

    >>> unreadable_names(("embedding", None)), unreadable_names(("heads", 3))
    ('', "integers cannot name an axis, in ('heads', 3).")
    """
    given = [name for name in names if name is not None]
    if not all(isinstance(name, Hashable) for name in given):
        return f"names must be hashable, not {tuple(names)}."
    if any(isinstance(name, int) for name in given):
        return f"integers cannot name an axis, in {tuple(names)}."
    factors = [factor for name in given for factor in factors_of(name) or (name,)]
    if "" in factors:
        return f"an empty text names no axis, in {tuple(names)}. Write None for one without a name."
    if len(set(factors)) < len(factors):
        return f"{tuple(names)} uses a logical axis twice. Write None for one without a name."
    return ""


class NamesByPattern:
    """Names by path pattern, and which patterns were of use."""

    def __init__(self, patterns: Mapping[str, AxisNames]) -> None:
        self.patterns = patterns
        self.used: set[str] = set()
        self.paths: list[str] = []

    def array(self, path: str, shape: tuple[int, ...]) -> tuple[AxisNames, str]:
        """The names of an array, None if it stays as it is; and why it cannot have them."""
        self.paths.append(path)
        matching = {
            pattern: names
            for pattern, names in self.patterns.items()
            if path_matches(pattern, path)
        }
        self.used.update(matching)
        example = tuple(f"axis_{i}" for i in range(len(shape)))
        if not matching:
            missing = f"no pattern matches this array of shape {shape}. Add {path!r}: {example}."
            return None, missing if shape else ""
        if len(matching) > 1:
            which = " and ".join(map(repr, matching))
            return None, f"matched by {which}. Make the patterns exclude each other."
        ((pattern, names),) = matching.items()
        names = (None,) * len(shape) if names is None else names
        return names, _mismatch(f"pattern {pattern!r} gives", names, shape)

    def unused(self) -> list[str]:
        """Why each pattern that matches nothing does not."""
        problems = []
        for pattern in self.patterns:
            if pattern not in self.used:
                near = nearest_name(pattern, self.paths)
                hint = f"The nearest path is {near!r}" if near else f"There are {_some(self.paths)}"
                problems.append(f"pattern {pattern!r} matches no array. {hint}.")
        return problems


class _Found:
    """Names that were found for the arrays of a tree, and which of them are in this one."""

    def __init__(self, found: NamesByPath, tree: Any) -> None:
        self.found = found
        self.tree = tree
        self.again = (
            f"The names were found for another tree. Find those of this one: {found.found_by}"
        )

    def array(self, path: str, shape: tuple[int, ...]) -> tuple[AxisNames, str]:
        """The names of an array, None if it stays as it is; and why it cannot have them."""
        if path not in self.found:
            missing = (
                f"this array of shape {shape} is not among those that have names. {self.again}."
            )
            return None, missing if shape else ""
        names = self.found[path]
        if names is None or all(name is None for name in names):
            return None, ""
        problem = _mismatch("it was found to have", names, shape)
        return names, problem and f"{problem} {self.again}."

    def unused(self) -> list[str]:
        """The paths that are not in this tree."""
        # Arrays that keep names of their own are in it too; Penzai's parameters by their label.
        paths = {leaf.path for leaf in leaves_of(self.tree)}
        return [
            f"{path or 'the array'}: is not in this tree. {self.again}."
            for path in self.found
            if path not in paths
        ]


def _mismatch(gives: str, names: Sequence[LogicalAxis | None], shape: tuple[int, ...]) -> str:
    """Why an array cannot have names; empty if it can."""
    if len(names) != len(shape):
        return (
            f"{gives} {len(names)} logical axes {tuple(names)} to an array of rank "
            f"{len(shape)}, shape {shape}. Give {len(shape)}, None for a positional dimension."
        )
    unfit = [
        f"{name!r} ({name.lengths_text}) to a dimension of {size}"
        for name, size in zip(names, shape, strict=True)
        if isinstance(name, FusedAxes) and name.size != size
    ]
    if not unfit:
        return ""
    return f"{gives} {' and '.join(unfit)}, shape {shape}. Give the lengths that it is fused of."


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(repr(path) for path in paths[:3])
    return (shown + (", ..." if len(paths) > 3 else "")) or "no arrays without names"


def _unnamed_array(node: Any) -> tuple[Any, str]:
    """The array without names that a node is or holds, or None; and why it cannot be read."""
    reader = reader_of(node)
    if reader is None:
        return (node if not is_named_unit(node) and is_array_like(node) else None), ""
    if not reader.bare and not reader.takes_names:
        return None, ""
    held = reader.read(node)
    if reader.bare:
        return (None if held.problem else held.data), held.problem
    return (held.data if held.names is None and is_array_like(held.data) else None), ""


def _with_names(node: Any, array: Any, names: Sequence[LogicalAxis | None]) -> Any:
    """What stands in place of a node once its array has names."""
    reader = reader_of(node)
    if reader is not None and reader.takes_names:
        return reader.named(node, names)
    if isinstance(array, bool | int | float | complex):
        array = np.asarray(array)
    return named_array(array, tuple(names))


def without_names(tree: Any) -> Any:
    """A tree with plain arrays in place of Penzai's named arrays: the inverse of ``name_axes``.

    For code that computes with plain arrays, ``self.weight @ x``. No data is moved or copied, and
    arrays stay where they are placed.

    Args:
        tree: A pytree with ``NamedArray`` and ``NamedArrayView`` objects in it; their data may be
            arrays, ``jax.ShapeDtypeStruct`` objects, tracers or shardings. Mutable variables of
            Penzai stay as they are.

    Returns:
        The tree with the data of each, its dimensions in the order of the data, which is the one
        that ``name_axes`` was given. Anything else is as it was.

    >>> weights = {"weight": np.ones((4, 3)), "scale": 2.0}
    >>> named = name_axes(weights, {"weight": ("out", "in")})
    >>> {name: np.shape(array) for name, array in without_names(named).items()}
    {'scale': (), 'weight': (4, 3)}
    >>> import equinox as eqx
    >>> linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    >>> named = name_axes(linear, {"weight": ("out", "in"), "bias": ("out",)})
    >>> without_names(named)(np.ones(3)).shape
    (4,)
    """
    return jax.tree_util.tree_map(unnamed_data, tree, is_leaf=pz.nx.is_namedarray)
