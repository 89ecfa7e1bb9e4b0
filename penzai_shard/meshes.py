"""Makes meshes, and relabels what lies on an Explicit mesh onto its Auto twin.

``jax.make_mesh`` gives Explicit axes: the type of every array carries its layout, and an operation
that allows several layouts is an error. Most models were not written for that. The *Auto twin* of a
mesh has the same devices in the same order under the same names, with Auto axes; no data moves
between the two.
"""

import contextlib
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from penzai_shard.errors import MeshError, Problem, Problems

AnyMesh: TypeAlias = Mesh | AbstractMesh


def make_mesh(
    shape: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
    *,
    abstract: bool = False,
    explicit: bool = False,
) -> AnyMesh:
    """Makes a mesh, with Auto axes unless asked otherwise.

    Args:
        shape: The size of each mesh axis by name, the major one first.
        devices: The devices of the mesh; all of ``jax.devices()`` by default.
        abstract: Make a mesh without devices, of any number: to plan and to price, not to run.
        explicit: Give it Explicit axes, as ``jax.make_mesh`` does.

    Raises:
        MeshError: A size is no natural number, a name is no text, or there are more or fewer
            devices than the sizes need.

    >>> make_mesh({"data": 4, "model": 2}).size
    8
    >>> make_mesh({"data": 16, "model": 16}, abstract=True).size
    256
    """
    problems = Problems("cannot make a mesh:")
    sizes = dict(shape) if isinstance(shape, Mapping) else {}
    if not sizes:
        what = f"the sizes of the mesh axes by name are needed, not {shape!r}"
        problems.add("", what, "Write for instance make_mesh({'data': 4, 'model': 2}).")
    if abstract and devices is not None:
        problems.add("", "an abstract mesh has no devices", "Leave out devices or abstract=True.")
    for name, size in sizes.items():
        is_number = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if not isinstance(name, str) or not is_number or size < 1:
            what = f"{{{name!r}: {size!r}}} is not a text with a natural number"
            problems.add("", what, "Write for instance {'data': 4}.")
    problems.raise_if_any(MeshError)

    # Reports write the sizes as JSON, which knows no NumPy integers.
    sizes = {name: int(size) for name, size in sizes.items()}
    names, lengths = tuple(sizes), tuple(sizes.values())
    axis_types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes)
    if abstract:
        return AbstractMesh(lengths, names, axis_types=axis_types)
    available = list(jax.devices() if devices is None else devices)
    wanted = math.prod(lengths)
    if wanted != len(available):
        what = f"the number of devices is {len(available)}, and {mesh_text(sizes)} needs {wanted}"
        fitting = dict.fromkeys(sizes, 1) | {names[0]: len(available)}
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} JAX_PLATFORMS=cpu"
        other = f"or start Python, or the kernel of a notebook, with {flag}."
        if wanted < len(available):
            other = f"or make_mesh({sizes}, jax.devices()[:{wanted}])."
        fix = f"Use the sizes {fitting}, {other}"
        raise MeshError(problems.headline, [Problem("", what, fix)])
    return jax.make_mesh(lengths, names, axis_types=axis_types, devices=available)


def axis_sizes(mesh: AnyMesh | Mapping[str, int]) -> Mapping[str, int]:
    """The size of each mesh axis by name; a mapping of them is returned as it is."""
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def mesh_text(mesh: AnyMesh | Mapping[str, int]) -> str:
    """The sizes of a mesh for people.

    >>> mesh_text(make_mesh({"data": 4, "model": 2}))
    'data=4, model=2'
    """
    return ", ".join(f"{name}={size}" for name, size in axis_sizes(mesh).items())


def same_devices(a: AnyMesh, b: AnyMesh) -> bool:
    """Whether what lies over one mesh lies over the other too.

    Meshes of devices must have the same devices in the same order under the same names. Where one
    is abstract, the same mesh axes are enough. Auto or Explicit makes no difference.

    >>> mesh, abstract = (make_mesh({"data": 8}, abstract=kind) for kind in (False, True))
    >>> same_devices(mesh, abstract), same_devices(mesh, make_mesh({"model": 8}))
    (True, False)
    """
    if isinstance(a, Mesh) and isinstance(b, Mesh):
        return auto_twin(a) == auto_twin(b)
    return tuple(a.shape.items()) == tuple(b.shape.items())


# Auto and Explicit


@functools.lru_cache(maxsize=256)
def auto_twin(mesh: AnyMesh) -> AnyMesh:
    """The mesh with its Explicit axes as Auto ones; the mesh itself if it has none.

    Manual axes, those that a surrounding ``jax.shard_map`` has taken over, stay Manual.

    >>> auto = make_mesh({"data": 8})
    >>> auto_twin(make_mesh({"data": 8}, explicit=True)) == auto, auto_twin(auto) is auto
    (True, True)
    """
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    auto, explicit = AxisType.Auto, AxisType.Explicit
    axis_types = tuple(auto if kind is explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)
    twin: AbstractMesh = mesh.update(axis_types=axis_types)
    return twin


def _relabel_tracer(x: Any) -> Any:
    sharding = jax.typeof(x).sharding
    twin = auto_twin(sharding.mesh)
    if twin is sharding.mesh:
        return x
    # Resharding gives the type of the twin, which has no layout, so the constraint says the layout
    # to the compiler. A constraint by itself would give gradients the type of the twin.
    whole = jax.sharding.reshard(x, NamedSharding(twin, PartitionSpec(*(None,) * x.ndim)))
    return jax.lax.with_sharding_constraint(whole, NamedSharding(twin, sharding.spec))


def _relabel(leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        return _relabel_tracer(leaf)
    own = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
    if not isinstance(own, NamedSharding) or auto_twin(own.mesh) is own.mesh:
        return leaf
    sharding = NamedSharding(auto_twin(own.mesh), own.spec, memory_kind=own.memory_kind)
    if isinstance(leaf, NamedSharding):
        return sharding
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    return jax.device_put(leaf, sharding) if isinstance(leaf, jax.Array) else leaf


def on_auto_twin(tree: Any) -> Any:
    """The same tree, with what lies on an Explicit mesh relabelled onto the mesh's Auto twin.

    No data moves; only the type changes that JAX checks operations against. This works for values
    and inside ``jax.jit``, ``jax.grad`` and ``jax.vmap`` (with jax 0.12 not where ``jax.vmap`` maps
    a split dimension); gradients come back with the type of the original array. Under
    ``jax.set_mesh`` with an Explicit mesh, trace within ``auto_context``.

    Args:
        tree: A pytree of arrays, structs and shardings. Whatever has no Explicit axes stays the
            same object; mutable variables are not looked into.

    >>> mesh = make_mesh({"data": 8}, explicit=True)
    >>> x = jax.device_put(jax.numpy.ones(8), NamedSharding(mesh, PartitionSpec("data")))
    >>> on_auto_twin(x).sharding.mesh == auto_twin(mesh)
    True
    """
    return jax.tree.map(_relabel, tree)


def auto_context() -> contextlib.AbstractContextManager[Any]:
    """A context in which operations on arrays of an Auto mesh are allowed.

    Under ``jax.set_mesh`` with an Explicit mesh, JAX refuses operations on arrays of the mesh's
    Auto twin. The context does nothing where the ambient mesh has no Explicit axes; it works
    while tracing, too, and is entered once.

    >>> with jax.set_mesh(make_mesh({"data": 8}, explicit=True)), auto_context():
    ...     print(jax.sharding.get_abstract_mesh().axis_types)
    (Auto,)
    """
    ambient = jax.sharding.get_abstract_mesh()
    twin = auto_twin(ambient)
    if twin is ambient or not isinstance(twin, AbstractMesh):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(twin)
