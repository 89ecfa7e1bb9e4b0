"""Gives logical axes to arrays that carry none, by patterns of their paths; takes them off."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from penzai_shard.arrays.kinds import is_array
from penzai_shard.arrays.structure import Leaf, flatten, variables_of
from penzai_shard.errors import Problem, Problems, RuleTypeError, SelectionError, warn_caller
from penzai_shard.paths import matches, nearest
from penzai_shard.planning import arguments
from penzai_shard.readers.reader import is_node, reader_of


def name_axes(
    tree: Any, patterns: Mapping[str, Sequence[Hashable | None] | PartitionSpec | None]
) -> Any:
    """Gives logical axes to the arrays of a tree that have none.

    For dictionaries, weights of torch, modules of Equinox, and anything else without names. Each
    array becomes a ``pz.nx.NamedArray``, or a view where a nameless dimension follows a named one;
    variables of Flax NNX keep their kind and get the names as metadata. Arrays with names, numbers
    and what is no array stay as they are. ``without_names`` gives plain arrays back.

    Args:
        tree: A tree of arrays, shapes or tensors of torch.
        patterns: A name for each dimension by path pattern: ``*`` stands for a piece of a path, or
            a part of one, and ``**`` for any number of pieces; dots, slashes and brackets part
            pieces. The path of an array that is the whole tree is ``""``. None stands for a
            dimension without a name, and in place of the names for an array without any. A
            ``PartitionSpec`` makes its mesh axes the names, for rules None.

    Raises:
        SelectionError: An array fits no pattern or several, a pattern fits no array, or the number
            of names is not the array's rank; all at once.
        RuleTypeError: The names are not a sequence of hashable names.

    >>> import numpy as np
    >>> weights = {"layers.0.weight": np.ones((4, 3)), "layers.0.bias": np.ones(4)}
    >>> named = name_axes(weights, {"layers.*.weight": ("out", "in"), "layers.*.bias": ("out",)})
    >>> dict(named["layers.0.weight"].named_shape)
    {'out': 4, 'in': 3}
    """
    arguments.check_tree("name_axes", tree)
    check_names("name_axes", patterns)
    leaves, structure = flatten(tree)
    structure.check_paths()
    problems = Problems("cannot name the arrays of this tree:")
    problems.extend(structure.problems)
    unnamed = [leaf for leaf in leaves if leaf.names is None and is_array(leaf.value)]
    # Inferred names have all that a call takes, also what is called so already, and numbers.
    kept = {x.path for x in leaves if (x.names or ()) == patterns.get(x.path)}
    kept -= {leaf.path for leaf in unnamed}
    asked = {pattern: names for pattern, names in patterns.items() if pattern not in kept}
    found = match_names(unnamed, asked, problems)
    problems.raise_if_any(SelectionError)
    _warn_of_tied(unnamed)

    # Imported here: only those who name arrays need Penzai for it.
    from penzai_shard.readers.penzai import make_named

    # A variable of NNX holds its names itself; they are written when the tree is made again.
    values = []
    for leaf in leaves:
        is_own = leaf.variable is not None and _keeps_names(leaf.variable)
        is_named = leaf.path in found and leaf.names is None and not is_own
        values.append(make_named(leaf.value, found[leaf.path]) if is_named else leaf.value)
    made = structure.fill_alike(values)
    owners = variables_of(made) if structure.variables else []
    for variable, own in zip(structure.variables, owners, strict=True):
        for leaf in leaves[variable.leaves] if _keeps_names(own) else ():
            if leaf.path in found:
                reader_of(type(own)).set_names(own, found[leaf.path])  # type: ignore[union-attr]
    return made


def _keeps_names(variable: Any) -> bool:
    return hasattr(reader_of(type(variable)), "set_names")


def _names_for(
    leaf: Any, fitting: Sequence[str], patterns: Mapping[str, Any], problems: Problems
) -> tuple[Any, ...] | None:
    """The names of one array; None if it stays as it is, or cannot have any."""
    if not fitting:
        if leaf.shape:
            example = tuple(f"axis_{dim}" for dim in range(len(leaf.shape)))
            what = f"no pattern fits this array of shape {leaf.shape}"
            problems.add(leaf.path, what, f"Add {leaf.path!r}: {example}.")
        return None
    if len(fitting) > 1:
        which = " and ".join(map(repr, fitting))
        problems.add(leaf.path, f"{which} fit it", f"Leave out {fitting[-1]!r}, or narrow it.")
        return None
    given, rank = patterns[fitting[0]], len(leaf.shape)
    names: tuple[Any, ...] = () if given is None else tuple(given)
    # A spec may be shorter than the rank, and says nothing of the dimensions behind.
    if given is None or isinstance(given, PartitionSpec):
        names = (*names, *(None,) * (rank - len(names)))
    if len(names) != rank:
        fitted = (*names, *(None,) * rank)[:rank]
        problems.add(
            leaf.path,
            f"pattern {fitting[0]!r} gives {len(names)} names to {rank} dimensions {leaf.shape}",
            f"Write {leaf.path!r}: {fitted}.",
        )
        return None
    return names


def match_names(
    arrays: Sequence[Any], patterns: Mapping[str, Any], problems: Problems, some: bool = False
) -> dict[str, tuple[Any, ...]]:
    """The names that patterns give to arrays, by path; what does not fit becomes a problem.

    Args:
        arrays: What has a path and a shape.
        patterns: As ``name_axes`` takes them.
        problems: Where problems go.
        some: Whether arrays may fit no pattern.
    """
    paths = [each.path for each in arrays]
    fitting = [[x for x in patterns if matches(x, path)] for path in paths]
    # They come first, as they are why arrays fit no pattern.
    used = set(itertools.chain(*fitting))
    for pattern in (pattern for pattern in patterns if pattern not in used):
        near = nearest(pattern, paths)
        fix = f"Write {near!r}." if near else f"Paths are: {paths[:3]}."
        problems.add(pattern, "this pattern fits no array without names", fix)
    found: dict[str, tuple[Any, ...]] = {}
    for each, own in zip(arrays, fitting, strict=True):
        names = None if some and not own else _names_for(each, own, patterns, problems)
        if names is not None:
            found[each.path] = names
    return found


def check_names(called: str, patterns: Any) -> None:
    """Refuses what is no mapping from patterns to names that ``called`` can read."""
    example = "Write {'layers.*.weight': ('out', 'in')}."
    if not isinstance(patterns, Mapping):
        what = f"patterns are a mapping, and this is a {type(patterns).__name__}"
        raise RuleTypeError(f"{called}:", [Problem("", what, example)])
    problems = Problems("these names cannot be read:")
    for pattern, names in patterns.items():
        is_text = isinstance(names, str)
        is_tuple = isinstance(names, Sequence | PartitionSpec | None) and not is_text
        given = [name for name in names or () if name is not None] if is_tuple else []
        if not (isinstance(pattern, str) and is_tuple and all(map(_is_name, given))):
            fix = f"Write ({names!r},)." if is_text else example
            problems.add(str(pattern), f"{names!r} is no tuple of names for a pattern", fix)
        elif len(given) > len(set(given)):
            fix = "Write None for a dimension without a name."
            problems.add(pattern, f"{names!r} has a name twice", fix)
    problems.raise_if_any(RuleTypeError)


def _is_name(name: Any) -> bool:
    # Numbers would be taken for positions.
    is_open = name is PartitionSpec.UNCONSTRAINED
    return isinstance(name, Hashable) and not isinstance(name, int) and name != "" and not is_open


def _warn_of_tied(leaves: Sequence[Leaf]) -> None:
    """Tied weights of torch share memory, and become two arrays here."""
    groups: dict[Any, list[str]] = {}
    for leaf in leaves:
        if isinstance(leaf.value, np.ndarray) and leaf.value.size:
            key = (leaf.value.__array_interface__["data"][0], leaf.shape)
            groups.setdefault(key, []).append(leaf.path)
    warn_caller(
        f"name_axes: {' and '.join(map(repr, paths))} share their memory, as tied weights do. They "
        "become arrays of their own. Give one of them, and let the model use it twice."
        for paths in groups.values()
        if len(paths) > 1
    )


def without_names(tree: Any) -> Any:
    """The tree with plain arrays in place of Penzai's named arrays.

    For code that computes with plain arrays. It undoes ``name_axes`` in containers and in modules
    of Equinox; variables stay as they are. Nothing is moved or copied.

    >>> import numpy as np
    >>> named = name_axes({"w": np.ones((4, 3))}, {"w": ("out", "in")})
    >>> without_names(named)["w"].shape
    (4, 3)
    """
    from penzai import pz

    return jax.tree_util.tree_map(
        lambda node: node.data_array if pz.nx.is_namedarray(node) else node,
        tree,
        # Modules of NNX would lose what they share.
        is_leaf=is_node,
    )
