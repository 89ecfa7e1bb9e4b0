"""Drawing the sharding of whatever has one."""

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec, Sharding

from penzai_shard.array_kinds import is_abstract, is_concrete, is_traced
from penzai_shard.errors import PlanError, RuleTypeError
from penzai_shard.library_apis.treescope_api import show_own_parts
from penzai_shard.named_leaves import NamedLeaf, leaves_of
from penzai_shard.planning import LeafPlan, ShardingPlan
from penzai_shard.views.array_parts import array_parts
from penzai_shard.views.sharding_drawing import ShardingDrawing

_WHAT_IS_DRAWN = (
    "Give an array of JAX, a named array or a parameter that holds one, a jax.ShapeDtypeStruct "
    "with a sharding, an array of a plan, or a shape with its sharding: "
    "show_sharding((shape, sharding))."
)


def show_sharding(array: Any) -> ShardingDrawing:
    """Draws which device holds which part of an array, by logical axis name where it has them.

    It shows how each dimension is split and over which mesh axes, what each device holds in bytes,
    and along which mesh axes devices hold the same part. Any kind of sharding and any number of
    dimensions and devices can be drawn, on Auto, Explicit, Manual and abstract meshes, and arrays
    of which this process has only a part, or nothing. Nothing runs on a device, and no data is
    read, so that a deleted array can be drawn as well.

    Treescope's own view of an array raises an error where parts are on other processes: its
    ``JAXArrayAdapter.get_array_data_with_truncation`` makes a NumPy array of the whole, which
    needs all parts. This drawing needs the sharding alone. From the first drawing of such an array
    on, treescope's view shows the parts that this process has.

    Args:
        array: A JAX array; a ``NamedArray``, parameter, variable or array of another library that
            holds one; a ``jax.ShapeDtypeStruct`` with a sharding, alone or in a named array; a
            ``LeafPlan`` of a plan; or a shape and its sharding in a tuple. In a traced function
            an array can be drawn as far as its type says its layout, on Explicit mesh axes.

    Returns:
        A value that ``print``, ``rich.print`` and notebooks draw; its ``table(collapse=False)``
        has every part, and so has its ``to_json()``, in bytes.

    Raises:
        RuleTypeError: There is no array, or there are several.
        PlanError: The array has no layout yet, or none that is known.
        ShardingError: The sharding is not one of an array of this shape.

    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "model"))
    >>> print(show_sharding(jax.ShapeDtypeStruct((8, 512), "float32", sharding=sharding)))
    float32[8, 512], 16.0 KiB, is in 2 parts; 4 devices hold each, 8.0 KiB on each device
    dimension    length  parts     mesh axes
    -----------  ------  --------  ---------
    dimension 0       8  whole
    dimension 1     512  2 of 256  model=2
    replicated over data=4: 4 devices hold the same part
    in each cell the devices that hold the part, by their places in the mesh
    dimension 1    0:256        256:512
    dimension 0  ┌────────────┬────────────┐
    0:8          │ 0, 2, 4, 6 │ 1, 3, 5, 7 │
                 └────────────┴────────────┘
    """
    described = _described(array)
    parts = array_parts(described.shape, described.sharding, described.names)
    if parts.is_on_others:
        show_own_parts()
    return ShardingDrawing(
        parts, described.dtype, described.path, described.is_traced, described.stored_shape
    )


class _Described(NamedTuple):
    """What is known of an array without its data."""

    shape: tuple[int, ...]
    sharding: Sharding
    names: Sequence[Any] | None = None
    dtype: Any = None
    path: str = ""
    is_traced: bool = False
    stored_shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, leaf: NamedLeaf | LeafPlan, sharding: Sharding) -> "_Described":
        """An array of a tree or of a plan."""
        is_traced_leaf = isinstance(leaf, NamedLeaf) and is_traced(leaf.array)
        stored = None
        if leaf.padding is not None:
            stored = leaf.stored_shape if isinstance(leaf, LeafPlan) else np.shape(leaf.array)
        return cls(leaf.shape, sharding, leaf.names, leaf.dtype, leaf.path, is_traced_leaf, stored)


def _described(array: Any) -> _Described:
    """What is known of an array without its data, from all that stands for one."""
    if isinstance(array, ShardingPlan):
        raise RuleTypeError(
            f"a plan is of several arrays ({len(array.leaves)}), and one is drawn at a time. Give "
            "one of plan.leaves, or a parameter: param_dict(plan.restore_structs())[name]."
        )
    if isinstance(array, LeafPlan):
        if array.sharding is None:
            raise PlanError(
                f"{array.path}: the plan leaves its layout to JAX, so that there is nothing to "
                "draw before it is placed. Draw the placed array, or give its axes rules."
            )
        return _Described.of(array, array.sharding)
    if len(_items(array)) == 2 and isinstance(array[1], Sharding):
        what, sharding = array
        if _is_shape(what):
            return _Described(tuple(map(int, what)), sharding)
        return _Described.of(_only_leaf(what), sharding)
    if len(_items(array)) == 2 and isinstance(array[0], Sharding):
        raise RuleTypeError(
            "the sharding comes after the shape: show_sharding((shape, sharding)), not "
            "show_sharding((sharding, shape))."
        )
    if isinstance(array, Sharding):
        raise RuleTypeError(
            f"{array} has no shape, so that it has no parts to draw. Give the shape of an array "
            "with it: show_sharding((shape, sharding))."
        )
    if any(isinstance(each, PartitionSpec) for each in (array, *_items(array))):
        raise RuleTypeError(
            "a spec alone says nothing of devices. Give its mesh with it: "
            "show_sharding((shape, NamedSharding(mesh, spec)))."
        )
    leaf = _only_leaf(array)
    return _Described.of(leaf, _sharding_of(leaf))


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(length, numbers.Integral) and not isinstance(length, bool) for length in value
    )


def _only_leaf(value: Any) -> NamedLeaf:
    """The one array in a value."""
    leaves = [leaf for leaf in leaves_of(value) if leaf.dtype is not None]
    if len(leaves) == 1 and not leaves[0].problem:
        return leaves[0]
    kind = type(value).__name__
    if not leaves:
        raise RuleTypeError(f"{kind} holds no array that could be drawn. {_WHAT_IS_DRAWN}")
    if len(leaves) == 1:
        raise PlanError(f"cannot draw {kind}:", [f"{leaves[0].path or kind}: {leaves[0].problem}."])
    shown = ", ".join(leaf.path for leaf in leaves[:3]) + (", ..." if len(leaves) > 3 else "")
    raise RuleTypeError(
        f"{kind} holds {len(leaves)} arrays, and one is drawn at a time: {shown}. Give one of "
        "them, such as a parameter by its name: param_dict(model)[name]."
    )


def _sharding_of(leaf: NamedLeaf) -> Sharding:
    """The sharding of an array, if it has one that is known."""
    what = f"{leaf.path}: it" if leaf.path else "the array"
    if is_traced(leaf.array):
        return _sharding_of_type(what, leaf.array)
    if is_concrete(leaf.array):
        return leaf.array.sharding
    if not is_abstract(leaf.array):
        raise PlanError(
            f"{what} is in the memory of this process, not on devices "
            f"({type(leaf.array).__name__}). Place it first: place(tree, mesh, rules)."
        )
    if leaf.array.sharding is None:
        raise PlanError(
            f"{what} is a jax.ShapeDtypeStruct without a sharding. Plan it, and draw an array of "
            "the plan: show_sharding(make_plan(tree, mesh, rules).leaves[0])."
        )
    return leaf.array.sharding


def _sharding_of_type(what: str, array: Any) -> Sharding:
    """The sharding that the type of a traced array says, if it says all of it."""
    sharding = jax.typeof(array).sharding
    mesh = sharding.mesh
    decided_later = [
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Auto
    ]
    if mesh.empty or decided_later:
        over = f" over {', '.join(map(repr, decided_later))}" if decided_later else ""
        raise PlanError(
            f"{what} is traced, and the compiler decides its layout{over} later. Draw what the "
            "compiled function returns, or use a mesh with Explicit axes."
        )
    return sharding
