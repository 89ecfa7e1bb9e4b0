"""Regions of a program that run per device, and what JAX tracks of the arrays in them.

Inside ``jax.shard_map`` some mesh axes are *manual*: the code says what each device along them
computes. A value's type says along which of them it *varies*, which is to say that devices may
hold different ones.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from penzai_shard.errors import MeshError, RuleTypeError, ShardingError, raise_all
from penzai_shard.library_apis.jax_api import automatic_mesh_axes, manual_mesh_axes
from penzai_shard.meshes import AnyMesh
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.traced_programs import equations, opened


def manual_axes() -> frozenset[str]:
    """The mesh axes that a surrounding ``jax.shard_map`` has taken over; empty outside.

    >>> manual_axes()
    frozenset()
    """
    return manual_mesh_axes()


def varying_axes(value: Any) -> frozenset[str]:
    """The manual mesh axes along which devices may hold different values.

    Args:
        value: An array, a tracer, or what stands for its type.

    >>> varying_axes(jax.numpy.ones(2))
    frozenset()
    """
    kind = jax.typeof(value) if isinstance(value, jax.Array | np.ndarray) else value
    tracked = getattr(kind, "manual_axis_type", None) or getattr(kind, "mat", None)
    varying = getattr(kind, "vma", None) if tracked is None else tracked.varying
    return frozenset(varying or ())


def hides_what_differs(program: Any, mesh_axes: Iterable[str]) -> bool:
    """Whether a program of a region holds what differs between devices for the same on all.

    JAX does so where a branch or the end of a loop depends on it, and for callbacks.

    Args:
        program: A program, traced with checks of what varies.
        mesh_axes: The manual mesh axes of interest.

    >>> hides_what_differs(jax.make_jaxpr(jax.numpy.sin)(1.0), ("data",))
    False
    """
    names = frozenset(mesh_axes)
    for equation in equations(program):
        kind = equation.primitive.name
        deciding: Sequence[Any] = ()
        if kind == "cond":
            deciding = equation.invars[:1]
        elif kind == "while":
            deciding = opened(equation.params["cond_jaxpr"])[0].outvars
        elif kind in ("pure_callback", "io_callback"):
            deciding = equation.invars
        differing = names & frozenset().union(*(varying_axes(atom.aval) for atom in deciding))
        if any(not differing <= varying_axes(result.aval) for result in equation.outvars):
            return True
    return False


def as_varying(array: Any, mesh_axes: Iterable[str]) -> Any:
    """The same array, typed as varying along more mesh axes.

    The transpose of this is the sum over those axes: a gradient that differs between devices
    becomes that of the one value that they all hold.

    Args:
        array: An array inside ``jax.shard_map``.
        mesh_axes: Manual mesh axes.

    >>> float(as_varying(jax.numpy.ones(()), ()))
    1.0
    """
    missing = tuple(sorted(set(mesh_axes) - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def with_all_mesh_axes(
    function: Callable[[Any], Any], array: Any, spec: PartitionSpec, *, tracked: bool = True
) -> Any:
    """A function that moves data over manual mesh axes, run with the other ones taken over too.

    The compiler does not know how to gather or scatter an array that it has split itself: it
    gathers it whole first, and cuts it up again. And on CPUs it aborts the process where numbers
    of 16 bits are to be added up while mesh axes are left to it.

    Args:
        function: The function of one array.
        array: The array.
        spec: How array and result are split over the mesh axes that are left to the compiler.
        tracked: Whether JAX tracks what varies.
    """
    others = automatic_mesh_axes()
    if not others:
        return function(array)
    return jax.shard_map(
        function, in_specs=spec, out_specs=spec, axis_names=set(others), check_vma=tracked
    )(array)


def device_position(mesh_axes: Sequence[str]) -> Any:
    """The device's position along some manual mesh axes, the first of them counting most."""
    found: Any = 0
    for name in mesh_axes:
        found = found * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return found


def fold_rng_over_axis(rng: jax.Array, mesh_axis: str | Sequence[str]) -> jax.Array:
    """Another random key on every device along a mesh axis, in code that runs per device.

    A key is a copy on every device, so that under ``jax.shard_map`` all draw the same numbers.
    For dropout each data shard needs its own, and for parameters that are split by hand each
    part. Devices at one position along the mesh axis still share their key.

    The loss function of ``build_train_step_fn(..., manual_axes=("data",))`` gets an ``rng`` that
    is folded already. Where the compiler splits the work, nothing is to be folded: a key then
    gives the numbers of the whole array, of which each device makes its part.

    Source: Lippe, "UvA Deep Learning Tutorials", training models at scale.

    Args:
        rng: A random key.
        mesh_axis: A mesh axis of the surrounding ``jax.shard_map``, or several, which count as
            one: the first is the major one.

    Returns:
        The key folded with the device's position along the mesh axes.

    Raises:
        ShardingError: The code does not run per device along the mesh axis.
        RuleTypeError: ``rng`` is not a random key.

    >>> from jax.sharding import PartitionSpec
    >>> from penzai_shard.meshes import make_mesh
    >>> def noise(rng):
    ...     return jax.random.uniform(fold_rng_over_axis(rng, "data"), (1,))
    >>> per_device = jax.shard_map(
    ...     noise, mesh=make_mesh({"data": 8}), in_specs=PartitionSpec(),
    ...     out_specs=PartitionSpec("data"),
    ... )
    >>> len(set(per_device(jax.random.key(0)).tolist()))
    8
    """
    mesh_axes = mesh_axis_names("mesh_axis", mesh_axis)
    dtype = getattr(rng, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != jnp.uint32:
        raise RuleTypeError(
            f"rng must be a random key, not a {type(rng).__name__}. Pass a key, such as the rng "
            "of a loss function, and make streams of what comes back: "
            "pz.RandomStream.from_base_key(fold_rng_over_axis(rng, mesh_axis))."
        )
    try:
        position = device_position(mesh_axes)
    except NameError as error:
        manual = ", ".join(map(repr, sorted(manual_axes()))) or "none"
        raise ShardingError(
            f"fold_rng_over_axis(rng, {mesh_axis!r}) needs code that runs per device along mesh "
            f"axis {mesh_axis!r}; the mesh axes taken over here: {manual}. In a loss function, "
            f"build_train_step_fn(..., manual_axes={mesh_axes!r}) runs it so, and folds its rng "
            "already; elsewhere jax.shard_map does. Where the compiler splits the work, use rng "
            "as it is: every shard draws numbers of its own from it."
        ) from error
    return jax.random.fold_in(rng, position)


def mesh_axis_names(option: str, names: Any) -> tuple[str, ...]:
    """Mesh axes as a tuple, from one name or several.

    Args:
        option: What they were given as, for messages.
        names: What was given.

    Raises:
        RuleTypeError: It is something else.

    >>> mesh_axis_names("manual_axes", "data")
    ('data',)
    """
    found = (names,) if isinstance(names, str) else names
    if not isinstance(found, Sequence) or not all(isinstance(name, str) for name in found):
        raise RuleTypeError(
            f"{option} must be a name or a sequence of names, not {names!r}. Write for instance "
            f"{option}=('data',)."
        )
    return tuple(found)


def check_manual_axes(wanted: Sequence[str], mesh: AnyMesh) -> None:
    """Checks that a mesh has the mesh axes that are to be taken over.

    Raises:
        MeshError: It does not; all are reported.
    """
    problems = []
    for name in wanted:
        if name not in mesh.axis_names:
            near = nearest_name(name, mesh.axis_names)
            fix = f"Did you mean {near!r}?" if near else f"Use some of {tuple(mesh.axis_names)}."
            problems.append(f"manual_axes: the mesh has no mesh axis {name!r}. {fix}")
    raise_all(MeshError, "cannot take over mesh axes:", problems)
