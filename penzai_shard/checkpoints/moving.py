"""Moves the values of one live tree into another: onto other devices, other axes, other names.

Each part of an array is made on its device of what the device holds already and of pieces that
others send, so that nothing is sent that is there. The programs that XLA makes for this send up to
three times as much: they gather whole arrays, or send pieces twice (jax 0.10.2).
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from penzai_shard.arrays.inputs import bound_sharding, find_mesh, run_inputs
from penzai_shard.arrays.kinds import is_key_type, is_struct, itemsize
from penzai_shard.arrays.structure import Leaf
from penzai_shard.checkpoints import parameters
from penzai_shard.checkpoints.filling import Bounds, Source, find_bounds, refuse_numbers
from penzai_shard.checkpoints.matching import Options, match
from penzai_shard.checkpoints.records import make_record
from penzai_shard.checkpoints.value_checksums import plain_context
from penzai_shard.processes.arrays import put

_CALLED = "move"


def move(
    tree: Any,
    into: Any,
    *,
    names: Mapping[str, str | None] | None = None,
    rename_axes: Mapping[str, str] | None = None,
    only: Any = None,
    except_: Any = None,
    others: Literal["error", "keep"] = "error",
    allow: Any = (),
) -> Any:
    """The values of one live tree in another: on another mesh, in other blocks, under other names.

    From a trainer to a rollout, from another library's model to one of Penzai.

    Args:
        tree: A model, a tree of arrays, or a train state, with values. It is not changed.
        into: A tree of the same kind, with arrays or structs, which says where each array goes and
            how it is called. What is bound to no device, as a model that was just built, stays
            where the values are. It is not changed.
        names: For a path of ``tree``, or a pattern, the path in ``into``; see ``restore_params``,
            of train states ``restore_train_state``.
        rename_axes: For a logical axis of ``tree`` its name in ``into``.
        only: As for ``restore_params``.
        except_: As for ``restore_params``.
        others: ``"keep"`` leaves their own values to arrays that are not asked for, or, where all
            are, that ``tree`` does not have.
        allow: As for ``restore_params``; ``"blocks"`` stacks blocks, or takes them apart.

    Returns:
        ``into`` with the values of parameters, and of state variables that both have under one
        path; of train states with all. Constants are those of ``into``, unless they are structs
        there. Its variables are new. An array that lies right is the same
        one as in ``tree``, and one that keeps its values the same as in ``into``: donating the
        result deletes it there too. ``place(moved, plan, owned=True)`` copies them.

    Raises:
        CheckpointMismatchError: Paths, axes, lengths, dtypes or keys differ; with a problem for
            each difference.
        ShardingError: Arrays have no values.
        MeshError: ``into`` lies on a mesh without devices.
        RuleTypeError, SelectionError: As for ``restore_params``.

    >>> from penzai import pz
    >>> blocks = {f"block_{i}/w": pz.nx.ones({"a": 2}) * i for i in range(3)}
    >>> stacked = move(blocks, {"blocks/w": pz.nx.zeros({"blocks": 3, "a": 2})}, allow="blocks")
    >>> stacked["blocks/w"].unwrap("blocks", "a").tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]

    Onto another mesh, of which no array is made first:

    >>> import penzai_shard as pzs
    >>> plan = pzs.make_plan(stacked, pzs.make_mesh({"data": 2, "rest": 4}), {"a": "data"})
    >>> moved = move(stacked, plan.restore_structs())
    >>> moved["blocks/w"].data_array.sharding.spec
    P(None, 'data')
    """
    options = Options(_CALLED, allow, rename_axes, names, only, except_, others)
    given, _ = parameters.read_tree(_CALLED, tree)
    leaves, structure = parameters.read_tree(_CALLED, into)
    here, there = ({leaf.path for leaf in side} for side in (given, leaves))
    is_state, headline = parameters.is_train_state(here), "these values do not fit into the tree:"
    parameters.refuse_other_kind(headline, here, there)
    # State variables that both have, and what only the tree can give.
    both = {x.path for x in leaves if x.role == "state" or is_struct(x.value)} & here
    stored, wanted = (_choose(side, both, is_state) for side in (given, leaves))
    has, needs = ({leaf.path: make_record(leaf) for leaf in side} for side in (stored, wanted))
    own = parameters.paths_with_values(wanted)
    sources = match(has, needs, options, headline=headline, own=own, holder="the tree")

    found, _ = run_inputs({leaf.path: leaf.value for leaf in stored}, _CALLED)
    kept, _ = run_inputs({x.path: x.value for x in leaves if x.path not in sources}, _CALLED)
    layout = parameters.read_layout(_CALLED, into, None)
    arrays, values = {leaf.path: leaf for leaf in found}, {leaf.path: leaf.value for leaf in kept}
    with plain_context(_CALLED):
        for leaf in wanted:
            if source := sources.get(leaf.path):
                target = layout[leaf.path] if bound_sharding(leaf.value) else None
                parts = [arrays[path] for path in source.stored]
                values[leaf.path] = _move_array(leaf, source, parts, target)
    return parameters.fill_tree(leaves, structure, values)


def _choose(leaves: Sequence[Leaf], more: Collection[str], is_state: bool) -> list[Leaf]:
    """The arrays of one side that are matched with those of the other."""
    chosen = leaves if is_state else parameters.parameters_of(leaves)
    paths = {leaf.path for leaf in chosen if leaf.role != "constant"}.union(more)
    return [leaf for leaf in leaves if leaf.path in paths]


# One array


def _move_array(
    leaf: Leaf, source: Source, parts: Sequence[Leaf], target: Sharding | None
) -> jax.Array:
    """The array of a leaf where the target says."""
    # JAX would use the memory of NumPy arrays, which others can write to.
    arrays = [x.value if isinstance(x.value, jax.Array) else jnp.array(x.value) for x in parts]
    array = arrays[0]
    if len(arrays) > 1 or source.pick or [*source.order] != sorted(source.order):
        find_mesh(parts, _CALLED)
        dim, position = source.pick or (None, 0)
        array = _arrange(arrays, position, source.order, source.stack, dim)
    # The fewer bytes are sent.
    if itemsize(leaf.dtype) < itemsize(array.dtype):
        array = _cast(leaf, array)
    if target and array.sharding.is_equivalent_to(target, array.ndim):
        array = jax.device_put(array, target)  # The same memory, under the mesh of the target.
    elif target:
        array = _send(array, target)
    return _cast(leaf, array)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _arrange(
    arrays: Sequence[jax.Array], position: Any, order: Any, stack: Any, picked: Any
) -> jax.Array:
    """What a source says of whole arrays; each device has what it had."""
    if picked is not None:
        arrays = [jax.lax.dynamic_index_in_dim(x, position, picked, False) for x in arrays]
    kept = sorted(order)
    arrays = [x.transpose([kept.index(dim) for dim in order]) for x in arrays]
    return arrays[0] if stack is None else jnp.stack(arrays, stack)


def _cast(leaf: Leaf, array: jax.Array) -> jax.Array:
    if array.dtype == leaf.dtype:
        return array
    cast = array.astype(leaf.dtype)
    # JAX wraps integers, and cuts off what is behind the point.
    if leaf.dtype.kind in "iu" and bool((cast != array).any()):
        refuse_numbers(leaf.path, array.dtype, leaf.dtype)
    return cast


# Between devices


def _send(array: jax.Array, target: Sharding) -> jax.Array:
    """An array on other devices, in memory of its own."""
    shardings = array.sharding, target
    is_far = not all(sharding.is_fully_addressable for sharding in shardings)
    is_far |= shardings[0].memory_kind != target.memory_kind
    if is_far or is_key_type(array.dtype) or not array.size:
        # JAX moves between processes, to the memory of the host, and what is small.
        return put([array], [target])[0]

    parts, held = [], [*array.addressable_shards]
    for number, (device, index) in enumerate(target.devices_indices_map(array.shape).items()):
        part = find_bounds(index, array.shape)
        pieces: dict[Bounds, jax.Array] = {}
        # What a device holds comes first. Of several that hold the rest, each sends to others.
        turn = number % len(held)
        turned = sorted(held[turn:] + held[:turn], key=lambda shard: shard.device != device)
        for shard in turned:
            box = find_bounds(shard.index, array.shape)
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True))
            if both not in pieces and all(start < stop for start, stop in both):
                ends = zip(both, box, strict=True)
                piece = shard.data[tuple(slice(a - c, b - c) for (a, b), (c, _) in ends)]
                pieces[both] = jax.device_put(piece, device)
        starts = [[a - b for (a, _), (b, _) in zip(x, part, strict=True)] for x in pieces]
        parts.append(_join([*pieces.values()], starts, tuple(b - a for a, b in part)))
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


@functools.partial(jax.jit, static_argnums=2)
def _join(pieces: Sequence[jax.Array], starts: Any, shape: tuple[int, ...]) -> jax.Array:
    # Also of one piece: what comes from another device of a CPU shares memory with it.
    whole = jnp.zeros(shape, pieces[0].dtype)
    for piece, start in zip(pieces, starts, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, start)
    return whole
