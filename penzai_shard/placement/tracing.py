"""Running initialisers part by part: from the call of one to the tree that it returns."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from penzai_shard.equinox_modules import are_arrays
from penzai_shard.errors import ShardingError, naming_extras
from penzai_shard.meshes import AnyMesh, auto_twin, onto_auto_twin
from penzai_shard.placement.initializer_splitting import (
    flat_program,
    no_mesh_context,
    run_split,
    split_initializer,
)
from penzai_shard.readers import without_bare_arrays

Layouts = Mapping[int, Sharding | None]
"""Where arrays are laid out, by the ``id`` of their structs; None where JAX may choose."""


def initialized(
    initializer: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layouts_of: Callable[[Any], Layouts],
    mesh: AnyMesh | None = None,
) -> Any:
    """What ``initializer(*args, **kwargs)`` returns, its arrays computed part by part.

    Args:
        initializer: The initialiser. It is traced once.
        args: Its arguments; arrays and anything else.
        kwargs: Its keyword arguments.
        layouts_of: Gives the layouts of the arrays to compute, for what the initialiser returns
            with a ``jax.ShapeDtypeStruct``, an object of its own, in place of each array.
        mesh: The mesh that the arrays are for, if it is known.

    Returns:
        The same tree with arrays in place of the structs that have a layout. Leaves that are not
        arrays, such as functions and strings, are as they are.

    Raises:
        MeshError: The initialiser constrains values to other devices than those of the mesh.
        ShardingError: This is called while JAX traces something else.

    >>> initialized(dict, (), {"a": 1.5, "b": "text"}, lambda tree: {id(tree["a"]): None})
    {'a': Array(1.5, dtype=float32, weak_type=True), 'b': 'text'}
    """
    _refuse_other_traces()
    args, kwargs = _with_auto_axes((args, kwargs))
    returned: list[Any] = []

    def arrays_only() -> list[Any]:
        with naming_extras():
            built = initializer(*args, **kwargs)
        tree = without_bare_arrays(built, "the initializer")
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        arrays = are_arrays(tree)
        # A traced array must not outlive the trace.
        others = [None if is_array else leaf for leaf, is_array in zip(leaves, arrays, strict=True)]
        returned[:] = others, treedef
        return [leaf for leaf, is_array in zip(leaves, arrays, strict=True) if is_array]

    with _auto_axes_context(mesh):
        traced, structs = jax.make_jaxpr(arrays_only, return_shape=True)()
    devices = frozenset(mesh.devices.flat) if isinstance(mesh, Mesh) else None
    program = flat_program(traced, devices)
    others, treedef = returned
    remaining = iter(structs)
    leaves = [next(remaining) if other is None else other for other in others]
    layouts = layouts_of(jax.tree_util.tree_unflatten(treedef, leaves))
    shardings = {
        position: layouts[id(struct)]
        for position, struct in enumerate(structs)
        if id(struct) in layouts
    }
    with no_mesh_context():
        arrays = run_split(split_initializer(program, shardings))
    computed = {id(structs[position]): array for position, array in arrays.items()}
    return jax.tree_util.tree_unflatten(treedef, [computed.get(id(leaf), leaf) for leaf in leaves])


def _refuse_other_traces() -> None:
    try:
        jax.sharding.get_mesh()
    except ValueError as error:
        raise ShardingError(
            "models are built outside of jax.jit and other transformations: the arrays of this one "
            "would be constants of the program that is being traced. Build the model before, and "
            "pass it as an argument; inside, call the initialiser itself."
        ) from error


def _with_auto_axes(tree: Any) -> Any:
    """The tree with arrays on meshes with Explicit axes relabelled; the tree itself if none is."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    relabelled = onto_auto_twin(leaves)
    if all(map(operator.is_, relabelled, leaves)):
        return tree
    return jax.tree_util.tree_unflatten(treedef, relabelled)


@contextlib.contextmanager
def _auto_axes_context(mesh: AnyMesh | None) -> Iterator[None]:
    """In a context mesh (``jax.set_mesh``), that of the arrays to be made, with Auto axes.

    Initialisers are written for arrays without a layout in their type, and arrays of one mesh
    cannot be made in the context of another. Outside any context mesh, nothing is changed.
    """
    current = jax.sharding.get_mesh()
    if current.empty:
        yield
        return
    twin: Any = auto_twin(current if mesh is None else mesh)
    with jax.set_mesh(twin):
        yield
