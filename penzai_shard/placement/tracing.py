"""Initialisers as programs: what they compute, and the tree that they return."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import ShardingError
from penzai_shard.library_apis.jax_api import ClosedJaxpr
from penzai_shard.meshes import AnyMesh, auto_twin, onto_auto_twin
from penzai_shard.placement.initializer_splitting import (
    flat_program,
    no_mesh_context,
    run_split,
    split_initializer,
)


@dataclasses.dataclass(frozen=True)
class TracedInitializer:
    """An initialiser that was traced with its arguments.

    Attributes:
        program: What it computes: its arrays, in the order of the tree.
        structs: A ``jax.ShapeDtypeStruct`` for each of these arrays, an object of its own.
        tree: What it returns, with these structs in place of arrays. Everything else, such as
            functions and strings, is as it is.
    """

    program: ClosedJaxpr
    structs: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any

    @classmethod
    def trace(
        cls,
        initializer: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: AnyMesh | None = None,
    ) -> "TracedInitializer":
        """Traces ``initializer(*args, **kwargs)``.

        Args:
            initializer: The initialiser.
            args: Its arguments; arrays and anything else.
            kwargs: Its keyword arguments.
            mesh: The mesh that the arrays are for, if it is known.

        Raises:
            MeshError: It constrains values to other devices than those of the mesh.
            ShardingError: This is called while JAX traces something else.
        """
        _refuse_other_traces()
        args, kwargs = _with_auto_axes((args, kwargs))
        returned: list[Any] = []

        def arrays_only() -> list[Any]:
            leaves, treedef = jax.tree_util.tree_flatten(initializer(*args, **kwargs))
            others = [None if is_array_like(leaf) else leaf for leaf in leaves]
            returned[:] = [others, treedef]
            return [leaf for leaf in leaves if is_array_like(leaf)]

        with _auto_axes_context(mesh):
            program, structs = jax.make_jaxpr(arrays_only, return_shape=True)()
        others, treedef = returned
        remaining = iter(structs)
        leaves = [next(remaining) if other is None else other for other in others]
        devices = frozenset(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        return cls(
            flat_program(program, devices),
            tuple(structs),
            jax.tree_util.tree_unflatten(treedef, leaves),
        )

    def run(self, layouts: Mapping[int, Sharding | None]) -> Any:
        """Computes arrays.

        Args:
            layouts: Where each of the arrays to compute is laid out, by the ``id`` of its struct;
                None where JAX may choose.

        Returns:
            ``tree`` with these arrays in place of their structs.
        """
        positions = {
            id(struct): i for i, struct in enumerate(self.structs) if id(struct) in layouts
        }
        shardings = {position: layouts[struct] for struct, position in positions.items()}
        with no_mesh_context():
            arrays = run_split(split_initializer(self.program, shardings))
        leaves, treedef = jax.tree_util.tree_flatten(self.tree)
        filled = [arrays.get(positions.get(id(leaf), -1), leaf) for leaf in leaves]
        return jax.tree_util.tree_unflatten(treedef, filled)


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
