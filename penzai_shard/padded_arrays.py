"""A named array that is stored with padding, so that every device holds an equal part of it.

JAX takes and gives only arrays whose lengths divide over the mesh axes that they are split over;
inside of a compiled program any length can be split. A ``PaddedArray`` holds the one and computes
as the other: its only leaf is the padded array, and everything that computes with it gets the true
array, cut out of that and, inside of a program, kept split as it is stored.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz
from treescope import rendering_parts

from penzai_shard.array_kinds import (
    is_abstract,
    is_array_like,
    is_concrete,
    is_deleted,
    is_traced,
)
from penzai_shard.even_layouts import layouts_between, true_layout
from penzai_shard.library_apis.jax_api import runs_at_once
from penzai_shard.meshes import auto_context, onto_auto_twin
from penzai_shard.partition_specs import (
    canonical_spec,
    evenly_splitting,
    mesh_axes_used,
)
from penzai_shard.rule_kinds import LogicalAxis


@dataclasses.dataclass(frozen=True)
class Padding:
    """How a named array is stored.

    Attributes:
        lengths: For each of its logical axes the length that is stored, at least the true one.
        mesh_axes: For each of its logical axes the mesh axes that it is split over.
    """

    lengths: tuple[int, ...]
    mesh_axes: tuple[tuple[str, ...], ...]


@pz.pytree_dataclass(
    has_implicitly_inherited_fields=True,
    use_mutable_proxy_in_init=False,
    overwrite_parent_init=True,
)
class PaddedArray(pz.nx.NamedArray):
    """A named array whose stored data is padded at the end of some dimensions.

    It is a ``pz.nx.NamedArray`` of the true lengths to everything that computes with it. As a
    pytree it has one leaf, ``stored``, which may be anything: an array, a struct that describes
    one, a sharding. Gradients with respect to it are padded too, with zeros, since no result
    depends on the padding. What the padding holds never matters.

    ``data_array`` is the true array. Inside of a program it stays split as it is stored, which JAX
    allows for what is neither argument nor result. Outside, where a length that does not divide
    cannot be split, its mesh axes split another dimension instead, one that divides, and without
    one it is whole over them.

    Attributes:
        named_axes: Logical axes in the order of the data, with their true lengths. Positional
            dimensions come first, as in any ``NamedArray``, and have no padding.
        stored: The padded data.
        padding: The stored lengths, and which mesh axes split them.

    >>> padding = Padding((4,), (("data",),))
    >>> array = PaddedArray(np.array([1.0, 2.0, 3.0, 0.0]), {"a": 3}, padding)
    >>> array.named_shape, float(array.untag("a").sum().unwrap())
    ({'a': 3}, 6.0)
    >>> jax.tree.leaves(array)[0].shape
    (4,)
    """

    padding: Padding = dataclasses.field(metadata={"pytree_node": False})

    __eq__ = pz.nx.NamedArrayBase.__eq__

    def __init__(
        self, stored: Any, named_axes: Mapping[LogicalAxis, int], padding: Padding
    ) -> None:
        fields = {"named_axes": collections.OrderedDict(named_axes), "padding": padding}
        self.__dict__.update(fields, stored=stored)

    # A struct takes its leaves from its fields, and the field of the data is computed here.

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Its one child under the name that the data of every named array has; its statics."""
        (child,), static = self.tree_flatten()
        return ((self.key_for_field("data_array"), child),), static

    def tree_flatten(self) -> tuple[Any, Any]:
        """Its one child, what is stored; and its true lengths and padding."""
        return (self.stored,), (tuple(self.named_axes.items()), self.padding)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Sequence[Any]) -> "PaddedArray":
        """The array that these were taken from, whatever stands in place of what is stored."""
        return cls(children[0], dict(aux_data[0]), aux_data[1])

    @property
    def data_array(self) -> Any:
        """The true array; what is stored as it is, where that is not the padded array.

        Of a struct it is one without layout, as JAX has none for a length that does not divide.
        """
        if not is_array_like(self.stored) or self._unfit():
            return self.stored
        shape = (*self.positional_shape, *self.named_axes.values())
        if is_abstract(self.stored):
            return jax.ShapeDtypeStruct(shape, self.stored.dtype)
        if not isinstance(self.stored, jax.Array):
            return self.stored[tuple(map(slice, shape))]
        with auto_context():
            stored = onto_auto_twin(self.stored)
            if is_traced(stored):
                return _cut_in_program(stored, shape, self.spec)
            return _cut_outside(stored, shape)

    @property
    def spec(self) -> PartitionSpec:
        """How the stored data is split, as a spec without trailing ``None``."""
        positional = np.ndim(self.stored) - len(self.named_axes)
        return canonical_spec((*((),) * positional, *self.padding.mesh_axes))

    def as_namedarray(self) -> pz.nx.NamedArray:
        """The true array as an ordinary ``NamedArray``."""
        self.check_valid()
        return pz.nx.NamedArray(self.named_axes, self.data_array)

    def _unfit(self) -> bool:
        shape = tuple(np.shape(self.stored))
        return shape[len(shape) - len(self.named_axes) :] != self.padding.lengths

    # What a named array offers that reads its data.

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the data."""
        dtype: np.dtype = self.stored.dtype
        return dtype

    def check_valid(self) -> None:
        """Checks that what is stored is an array of the stored lengths.

        Raises:
            ValueError: It is not.
        """
        if not is_array_like(self.stored) or self._unfit():
            shape = getattr(self.stored, "shape", None)
            held = f"a {type(self.stored).__name__}" + (f" of shape {shape}" if shape else "")
            names = ", ".join(map(str, self.named_axes))
            raise ValueError(
                f"A PaddedArray with logical axes ({names}) of true lengths "
                f"{tuple(self.named_axes.values())} stores an array whose last lengths are "
                f"{self.padding.lengths}, and this holds {held}. Compute with the named array, or "
                "with as_namedarray(); its leaf is the padded data."
            )

    @property
    def positional_shape(self) -> tuple[int, ...]:
        """The lengths of the positional dimensions."""
        self.check_valid()
        shape = tuple(np.shape(self.stored))
        return shape[: len(shape) - len(self.named_axes)]

    def with_positional_prefix(self) -> pz.nx.NamedArray:
        """The true array: its positional dimensions come first already."""
        return self.as_namedarray()

    def as_namedarrayview(self) -> pz.nx.NamedArrayView:
        """A view of the true array."""
        return self.as_namedarray().as_namedarrayview()

    def unwrap(self, *names: LogicalAxis) -> jax.Array:
        """The true array with its dimensions in the order of the names."""
        return self.as_namedarray().unwrap(*names)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The true array, and that it is stored padded."""
        shown, gone = self, is_deleted(self.stored)
        if gone or (is_concrete(self.stored) and not self.stored.is_fully_addressable):
            # There is nothing to cut, or cutting it would need all processes.
            struct = jax.ShapeDtypeStruct(self.stored.shape, self.dtype)
            shown = PaddedArray(struct, self.named_axes, self.padding)
        part = pz.nx.NamedArrayBase.__treescope_repr__(shown, path, subtree_renderer)
        if part is NotImplemented:
            return part
        note = f"{padding_text(self)}{', deleted' if gone else ''}"
        comment = rendering_parts.comment_color(rendering_parts.text(f"  # {note}"))
        return rendering_parts.siblings_with_annotations(part, comment)


def pad_to(data: Any, shape: Sequence[int]) -> Any:
    """An array with zeros at the end of each dimension that is shorter than asked for.

    >>> pad_to(np.ones(2), (3,)).tolist()
    [1.0, 1.0, 0.0]
    """
    widths = [(0, want - have) for want, have in zip(shape, np.shape(data), strict=True)]
    return (jax.numpy if isinstance(data, jax.Array) else np).pad(data, widths)


def padded_like(array: pz.nx.NamedArray, like: PaddedArray) -> PaddedArray:
    """An array stored as another one is, with zeros in the padding.

    Inside of a program the stored data is split as that of ``like``, where its mesh is known.

    Args:
        array: An array with the logical axes and true lengths of ``like``.
        like: The other one; what it stores does not matter.

    >>> like = PaddedArray(None, {"a": 3}, Padding((4,), (("data",),)))
    >>> padded_like(pz.nx.wrap(np.ones(3), "a"), like).stored.tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    data = array.order_as(*like.named_axes).data_array
    positional = tuple(data.shape[: len(data.shape) - len(like.named_axes)])
    stored = pad_to(data, (*positional, *like.padding.lengths))
    padded = PaddedArray(stored, like.named_axes, like.padding)
    mesh = _mesh_of_program(stored, padded.spec)
    if mesh is not None:
        stored = jax.lax.with_sharding_constraint(stored, NamedSharding(mesh, padded.spec))
        padded = PaddedArray(stored, like.named_axes, like.padding)
    return padded


def is_padded(node: Any) -> bool:
    """Whether a node is stored padded.

    >>> is_padded(pz.nx.ones({"a": 2}))
    False
    """
    return isinstance(node, PaddedArray)


def without_padding(tree: Any) -> Any:
    """A tree with ordinary named arrays in place of those that are stored padded.

    Args:
        tree: A pytree. Mutable variables stay as they are.

    >>> array = PaddedArray(np.zeros(4), {"a": 3}, Padding((4,), (("data",),)))
    >>> without_padding([array])[0].data_array.shape
    (3,)
    """
    return jax.tree_util.tree_map(
        lambda node: node.as_namedarray() if is_padded(node) else node, tree, is_leaf=is_padded
    )


def padded_as(tree: Any, like: Any) -> Any:
    """A tree whose named arrays are stored padded where those of another one are.

    Args:
        tree: A pytree of true arrays.
        like: A tree of the same structure, but for what is padded; its arrays do not matter.

    >>> array = PaddedArray(None, {"a": 3}, Padding((4,), (("data",),)))
    >>> padded_as([pz.nx.wrap(np.ones(3), "a"), 1], [array, 2])[0].stored.tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    return jax.tree_util.tree_map(
        lambda like, node: padded_like(node, like) if is_padded(like) else node,
        like,
        tree,
        is_leaf=is_padded,
    )


def padded_as_before(new: Any, old: Any) -> Any:
    """What replaces a value, its named arrays stored padded where they were and fit again.

    Args:
        new: The new value, of any form.
        old: What it replaces.

    >>> array = PaddedArray(np.zeros(4), {"a": 3}, Padding((4,), (("data",),)))
    >>> padded_as_before([pz.nx.wrap(np.ones(3), "a")], [array])[0].stored.tolist()
    [1.0, 1.0, 1.0, 0.0]
    >>> padded_as_before([pz.nx.wrap(np.ones(5), "a")], [array])[0].named_shape
    {'a': 5}
    """
    structure: Any
    olds, structure = jax.tree_util.tree_flatten(old, is_leaf=pz.nx.is_namedarray)
    nodes, other = jax.tree_util.tree_flatten(new, is_leaf=pz.nx.is_namedarray)
    if structure != other or not any(map(is_padded, olds)):
        return new
    return structure.unflatten(
        padded_like(node, like) if _fits(node, like) else node
        for node, like in zip(nodes, olds, strict=True)
    )


def _fits(node: Any, like: Any) -> bool:
    """Whether a node is a named array without padding that can be stored as another one is."""
    return (
        is_padded(like)
        and pz.nx.is_namedarray(node)
        and not is_padded(node)
        and node.named_shape == like.named_shape
        and node.positional_shape == like.positional_shape
    )


def pinned(array: Any, sharding: Any) -> Any:
    """``jax.lax.with_sharding_constraint``, also by a layout over which a length does not divide.

    Outside of programs JAX has no such arrays: there one stays as it is.

    Args:
        array: An array inside of a program, or outside.
        sharding: The layout.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    >>> layout = NamedSharding(mesh, PartitionSpec("data"))
    >>> jax.eval_shape(lambda array: pinned(array, layout), np.ones(3)).shape
    (3,)
    """
    if splits_unevenly(sharding, np.shape(array)):
        return array if runs_at_once(array) else _pinned_unevenly(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)


def splits_unevenly(sharding: Any, shape: Sequence[int]) -> bool:
    """Whether some length does not divide over a layout, so that only programs can have it.

    >>> layout = NamedSharding(jax.sharding.AbstractMesh((2,), ("data",)), PartitionSpec("data"))
    >>> splits_unevenly(layout, (3,)), splits_unevenly(layout, (4,))
    (True, False)
    """
    if not isinstance(sharding, NamedSharding):
        return False
    even = evenly_splitting(sharding.spec, shape, sharding.mesh.shape)
    return even != canonical_spec(sharding.spec)


# Compiled on its own where it is not in a program: no operation gives a result of uneven parts.
@functools.partial(jax.jit, static_argnums=1)
def _pinned_unevenly(array: Any, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(array, sharding)


def uneven_lengths(tree: Any) -> tuple[frozenset[int], Any]:
    """The true lengths of padded dimensions in a tree, inside of a program; and their mesh.

    Args:
        tree: A pytree.

    Returns:
        The lengths, and the mesh that they are split over. Outside of programs there are none.

    >>> uneven_lengths([PaddedArray(np.zeros(4), {"a": 3}, Padding((4,), (("data",),)))])
    (frozenset(), None)
    """
    found: set[int] = set()
    mesh = None
    for node in filter(is_padded, jax.tree.leaves(tree, is_leaf=is_padded)):
        if (own := _mesh_of_program(node.stored, node.spec)) is not None:
            pairs = zip(node.named_axes.values(), node.padding.lengths, strict=True)
            found.update(true for true, stored in pairs if true != stored)
            mesh = own
    return frozenset(found), mesh


def _mesh_of_program(stored: Any, spec: PartitionSpec) -> Any:
    """The mesh of a traced array, if the compiler lays out its arrays over all axes of a spec."""
    if not is_traced(stored):
        return None
    mesh = jax.typeof(stored).sharding.mesh
    automatic = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Auto
    }
    return mesh if mesh_axes_used(spec) <= automatic else None


def _cut_in_program(stored: Any, shape: tuple[int, ...], spec: PartitionSpec) -> Any:
    mesh = _mesh_of_program(stored, spec)
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    # What jax.grad follows outside of programs is a result of each operation.
    return _cut(stored, shape, sharding, not runs_at_once(stored))


# Compiled on its own, as a program that was traced may be run one operation after the other, and
# no operation gives a result that is split unevenly.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _cut(
    stored: Any, shape: tuple[int, ...], sharding: NamedSharding | None, stays_split: bool
) -> Any:
    if sharding is not None:
        # Its gradient too is laid out like this.
        stored = jax.lax.with_sharding_constraint(stored, sharding)
    true = jax.lax.slice(stored, (0,) * len(shape), shape)
    if sharding is None or not stays_split:
        return true
    return jax.lax.with_sharding_constraint(true, sharding)


def _cut_outside(stored: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    own = stored.sharding
    return _cut_to(shape, true_layout(own, shape), layouts_between(own, shape))(stored)


@functools.lru_cache(maxsize=4096)
def _cut_to(shape: tuple[int, ...], layout: Any, between: tuple[NamedSharding, ...] = ()) -> Any:
    def cut(stored: Any) -> Any:
        for step in between:
            stored = jax.lax.with_sharding_constraint(stored, step)
        return jax.lax.slice(stored, (0,) * len(shape), shape)

    return jax.jit(cut, out_shardings=layout)


def padding_text(array: PaddedArray) -> str:
    """How an array is stored, in words.

    >>> padding_text(PaddedArray(None, {"a": 3, "b": 2}, Padding((4, 2), (("x", "y"), ()))))
    "stored padded: 'a' as 4 over 'x' and 'y'"
    """
    stored = zip(
        array.named_axes.items(), array.padding.lengths, array.padding.mesh_axes, strict=True
    )
    return "stored padded: " + ", ".join(
        f"{name!r} as {length}" + (f" over {' and '.join(map(repr, axes))}" if axes else "")
        for (name, true), length, axes in stored
        if length != true
    )
