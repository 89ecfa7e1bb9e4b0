"""Initialisers as programs: what they compute, and the tree that they return."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding, Sharding

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import ShardingError
from penzai_shard.initializer_splitting import (
    no_mesh_context,
    run_split,
    split_initializer,
    without_layouts,
)
from penzai_shard.meshes import AnyMesh, auto_twin, has_explicit_axes


@dataclasses.dataclass(frozen=True)
class TracedInitializer:
    """An initialiser that was traced with its arguments.

    Attributes:
        program: What it computes: its arrays, in the order of the tree.
        leaves: What it returns: a ``jax.ShapeDtypeStruct`` for each array, and everything else,
            such as functions and strings, as it is.
        treedef: The structure of what it returns.
    """

    program: jex_core.ClosedJaxpr
    leaves: tuple[Any, ...]
    treedef: Any

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
        leaves = tuple(next(remaining) if other is None else other for other in others)
        devices = frozenset(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        return cls(without_layouts(program, devices), leaves, treedef)

    @property
    def arrays(self) -> tuple[int, ...]:
        """Which of the leaves are arrays."""
        return tuple(i for i, leaf in enumerate(self.leaves) if is_array_like(leaf))

    @property
    def tree(self) -> Any:
        """What the initialiser returns, with structs in place of arrays."""
        return self.filled({})

    @property
    def numbered(self) -> Any:
        """What the initialiser returns, with its number among the leaves in place of each array."""
        return self.filled({i: i for i in self.arrays})

    def filled(self, values: dict[int, Any]) -> Any:
        """What the initialiser returns, with values in place of some leaves."""
        leaves = [values.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def run(
        self, shardings: Sequence[Sharding | None], wanted: Collection[int] | None = None
    ) -> dict[int, jax.Array]:
        """Computes the arrays.

        Args:
            shardings: Where each of ``arrays`` is to lie; None where JAX may choose.
            wanted: Which of the leaves to compute; all arrays by default.

        Returns:
            The arrays by their number among the leaves.
        """
        arrays = self.arrays
        position_of = {index: position for position, index in enumerate(arrays)}
        chosen = None if wanted is None else {position_of[index] for index in wanted}
        with no_mesh_context():
            results = run_split(split_initializer(self.program, shardings, chosen))
        return {arrays[position]: array for position, array in results.items()}


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
    relabelled = [_relabelled(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(relabelled, leaves, strict=True)):
        return tree
    return jax.tree_util.tree_unflatten(treedef, relabelled)


def _relabelled(leaf: Any) -> Any:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or not has_explicit_axes(sharding.mesh):
        return leaf
    return jax.device_put(leaf, NamedSharding(auto_twin(sharding.mesh), sharding.spec))


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
