"""Making meshes, and the one place that knows about Auto and Explicit mesh axes.

Since jax 0.9 ``jax.make_mesh`` gives Explicit axes: the type of every array then carries its
layout, and an operation whose result could have several layouts is an error. Models that were not
written for that mode fail in it. This library therefore lays everything out on the *Auto twin* of
a mesh: the same devices in the same order under the same names, with Auto axes. Relabelling an
array from one to the other moves no data.
"""

import contextlib
import functools
import inspect
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from penzai_shard.array_kinds import is_abstract, is_traced
from penzai_shard.errors import MeshError, RuleTypeError

AnyMesh = Mesh | AbstractMesh


@overload
def make_mesh(
    shape: Mapping[str, int] | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    abstract: Literal[False] = False,
    **sizes: int,
) -> Mesh: ...
@overload
def make_mesh(
    shape: Mapping[str, int] | None = None,
    devices: None = None,
    *,
    abstract: Literal[True],
    **sizes: int,
) -> AbstractMesh: ...
def make_mesh(
    shape: Mapping[str, int] | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    abstract: bool = False,
    **sizes: int,
) -> AnyMesh:
    """Makes a mesh with Auto axes, its devices in JAX's topology-aware order.

    Args:
        shape: Size of each mesh axis by name, for instance ``{"data": 4, "model": 2}``.
        devices: The devices to use, all of ``jax.devices()`` by default. Their number must be
            the product of the sizes.
        abstract: Whether to make a mesh of devices that need not be there, of any number: to plan
            and to price a step on, not to run it.
        **sizes: The sizes of the mesh axes, in place of ``shape``: ``make_mesh(data=4, model=2)``.

    Returns:
        A ``jax.sharding.Mesh``, or an ``AbstractMesh``, whose axes are all ``AxisType.Auto``.

    Raises:
        MeshError: A size is not a positive integer, or the product of the sizes is not the
            number of devices; the message says how to get the right number.

    >>> dict(make_mesh({"data": 4, "model": 2}).shape)
    {'data': 4, 'model': 2}
    >>> make_mesh({"data": 16, "model": 16}, abstract=True).size
    256
    """
    shape = sizes if shape is None else shape
    if sizes and shape is not sizes:
        raise MeshError(
            f"the sizes of the mesh axes are given twice, as {shape!r} and as {sizes!r}. "
            "Give them once."
        )
    if not isinstance(shape, Mapping) or not shape:
        raise MeshError(
            f"a mesh is made from the sizes of its mesh axes by name, not from {shape!r}. "
            'Write for instance make_mesh({"data": 4, "model": 2}).'
        )
    problems = [
        f"mesh axis {name!r}: its size must be a positive integer, not {size!r}."
        for name, size in shape.items()
        if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 1
    ]
    if problems:
        raise MeshError("cannot make a mesh:", problems)
    shape = {name: int(size) for name, size in shape.items()}
    axis_types = (AxisType.Auto,) * len(shape)
    if abstract:
        if devices is not None:
            raise MeshError("an abstract mesh has no devices. Leave out devices, or abstract=True.")
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=axis_types)
    available = list(jax.devices() if devices is None else devices)
    wanted = math.prod(shape.values())
    if wanted != len(available):
        wanted_text = " x ".join(f"{name}={size}" for name, size in shape.items())
        fixes = []
        if wanted < len(available):
            fixes.append(f"Use fewer devices: make_mesh({dict(shape)}, jax.devices()[:{wanted}]).")
        elif available and available[0].platform == "cpu":
            fixes.append(
                "Simulate them, before Python imports jax: "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}."
            )
        fixes.append(f"Or choose sizes whose product is {len(available)}.")
        if wanted > len(available):
            fixes.append(
                "To plan and to price alone, the devices need not be there: "
                f"make_mesh({dict(shape)}, abstract=True)."
            )
        raise MeshError(
            f"cannot make a mesh {wanted_text}: it needs {wanted} devices, "
            f"and there are {len(available)}.",
            fixes,
        )
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=axis_types,
        devices=available,
    )


def mesh_shape_of(mesh: AnyMesh | Mapping[str, int]) -> Mapping[str, int]:
    """The axis sizes of a mesh by name; a mapping of them is returned as it is.

    >>> mesh_shape_of({"data": 4})
    {'data': 4}
    """
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def refuse_other_than_mesh(mesh: Any, called: str = "", beside: Sequence[Any] = ()) -> None:
    """Refuses what is given in the place of a mesh and is none.

    Args:
        mesh: What is given.
        called: How the function is called, for messages: ``"lint(model, mesh, rules)"``.
        beside: What else is given, one of which may be the mesh.

    Raises:
        RuleTypeError: It is something else.

    >>> refuse_other_than_mesh({"data": 8})
    Traceback (most recent call last):
    penzai_shard.errors.RuleTypeError: a mesh is needed, not dict: {'data': 8}. Make one: make_m...
    """
    if not _is_mesh(mesh):
        if any(map(_is_mesh, beside)):
            raise RuleTypeError(
                f"the arguments are mixed up: the mesh comes second. Write {called}."
            )
        if inspect.ismethod(mesh):
            raise RuleTypeError(
                f"the mesh is the method {mesh.__name__}, which was not called. Write "
                f".{mesh.__name__}()."
            )
        raise RuleTypeError(
            f"a mesh is needed, not {type(mesh).__name__}: {reprlib.repr(mesh)}. "
            "Make one: make_mesh({'data': 4, 'model': 2})."
        )


def _is_mesh(value: Any) -> bool:
    return hasattr(value, "axis_types") and hasattr(value, "shape")


def mesh_text(mesh: AnyMesh | Mapping[str, int]) -> str:
    """The sizes of a mesh for messages.

    Args:
        mesh: The mesh, or its axis sizes by name.

    >>> mesh_text(make_mesh({"data": 4, "model": 2}))
    'data=4, model=2'
    """
    return ", ".join(f"{name}={size}" for name, size in mesh_shape_of(mesh).items())


def has_explicit_axes(mesh: AnyMesh) -> bool:
    """Whether any axis of the mesh is Explicit.

    >>> has_explicit_axes(make_mesh({"data": 8}))
    False
    """
    return AxisType.Explicit in mesh.axis_types


@functools.lru_cache(maxsize=256)
def auto_twin(mesh: AnyMesh) -> AnyMesh:
    """The same devices, names and order with Auto axes; the mesh itself if none is Explicit.

    Manual axes, those that a surrounding ``jax.shard_map`` has taken over, stay Manual.

    >>> explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    >>> has_explicit_axes(auto_twin(explicit))
    False
    """
    if not has_explicit_axes(mesh):
        return mesh
    axis_types = tuple(
        AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types
    )
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=axis_types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)


def is_same_mesh(own: AnyMesh, other: AnyMesh) -> bool:
    """Whether what is laid out over one mesh is laid out over the other too.

    Two meshes of devices must have the same devices, in the same order; where one is abstract,
    the same mesh axes will do. Whether mesh axes are Auto or Explicit makes no difference.

    >>> mesh, abstract = (make_mesh({"data": 8}, abstract=kind) for kind in (False, True))
    >>> is_same_mesh(mesh, abstract), is_same_mesh(mesh, make_mesh({"model": 8}))
    (True, False)
    """
    if isinstance(own, Mesh) and isinstance(other, Mesh):
        return auto_twin(own) == auto_twin(other)
    return mesh_shape_of(own) == mesh_shape_of(other)


def shardings_on_auto_twin(shardings: Any) -> Any:
    """The same tree of shardings, each ``NamedSharding`` of an Explicit mesh on its Auto twin.

    Args:
        shardings: A pytree of shardings; anything else in it stays as it is.

    Returns:
        A tree of the same structure. Shardings without Explicit axes are the same objects.

    >>> explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    >>> moved = shardings_on_auto_twin({"x": NamedSharding(explicit, PartitionSpec("data"))})
    >>> moved["x"].mesh == auto_twin(explicit), moved["x"].spec
    (True, P('data',))
    """
    return jax.tree_util.tree_map(
        lambda sharding: (
            NamedSharding(auto_twin(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)
            if isinstance(sharding, NamedSharding) and has_explicit_axes(sharding.mesh)
            else sharding
        ),
        shardings,
    )


def onto_auto_twin(tree: Any) -> Any:
    """The same tree with each array of an Explicit mesh relabelled onto the mesh's Auto twin.

    No data moves: each array keeps its layout, and only the type that JAX checks operations
    against changes. Works on concrete arrays and inside ``jax.jit``, ``jax.grad`` and
    ``jax.vmap``; gradients come back with the type that the original array had.

    Args:
        tree: Any pytree. Leaves that are not JAX arrays or structs, or have no Explicit axes, stay
            the same objects; so do mutable variables, whose values this function does not look
            into.

    Returns:
        A tree of the same structure.

    >>> explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    >>> x = jax.device_put(jax.numpy.ones(8), NamedSharding(explicit, PartitionSpec("data")))
    >>> moved = onto_auto_twin(x)
    >>> has_explicit_axes(moved.sharding.mesh), moved.sharding.spec
    (False, P('data',))
    """
    return jax.tree_util.tree_map(_array_onto_auto_twin, tree)


def _array_onto_auto_twin(leaf: Any) -> Any:
    if is_abstract(leaf):
        twin = shardings_on_auto_twin(leaf.sharding)
        return leaf if twin is leaf.sharding else leaf.update(sharding=twin)
    if not isinstance(leaf, jax.Array):
        return leaf
    if not is_traced(leaf):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding) and has_explicit_axes(sharding.mesh):
            return jax.device_put(leaf, shardings_on_auto_twin(sharding))
        return leaf
    kind = jax.typeof(leaf)
    if not has_explicit_axes(kind.sharding.mesh):
        return leaf
    twin = auto_twin(kind.sharding.mesh)
    # Resharding changes the type, and drops from it the layout, which an Auto mesh does not
    # track; the constraint says it again to the compiler. Unlike a constraint alone, both
    # have a transpose that gives the Explicit type back.
    untyped = jax.sharding.reshard(leaf, NamedSharding(twin, PartitionSpec(*(None,) * kind.ndim)))
    return jax.lax.with_sharding_constraint(untyped, NamedSharding(twin, kind.sharding.spec))


def auto_context() -> contextlib.AbstractContextManager[Any]:
    """A context in which operations on arrays of an Auto mesh are allowed.

    Under ``jax.set_mesh(mesh)`` with an Explicit mesh, JAX refuses operations on arrays of the
    mesh's Auto twin. Code that owns a whole call runs it inside this context. It does nothing
    where the ambient mesh has no Explicit axes, and works eagerly and while tracing.

    Returns:
        A context manager, to be entered once.

    >>> explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    >>> with jax.set_mesh(explicit), auto_context():
    ...     has_explicit_axes(jax.sharding.get_abstract_mesh())
    False
    """
    twin = auto_twin(ambient := jax.sharding.get_abstract_mesh())
    if twin is not ambient and isinstance(twin, AbstractMesh):
        return jax.sharding.use_abstract_mesh(twin)
    return contextlib.nullcontext()
