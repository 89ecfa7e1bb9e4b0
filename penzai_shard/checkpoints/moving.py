"""Moves the values of one live tree into another: onto other devices, other axes, other names.

Each part of an array is made on its device of what the device holds already and of pieces that
others send, so that nothing is sent that is there. The programs that XLA makes for this send up to
three times as much: they gather whole arrays, or send pieces twice (jax 0.10.2).
"""

import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from penzai_shard.arrays.inputs import bound_sharding, run_inputs
from penzai_shard.arrays.kinds import is_deleted, is_key_type, is_struct
from penzai_shard.arrays.statistics import name_statistics
from penzai_shard.arrays.structure import Leaf
from penzai_shard.checkpoints.filling import Bounds, Source
from penzai_shard.checkpoints.matching import match, read_options
from penzai_shard.checkpoints.parameters import (
    fill_tree,
    is_train_state,
    parameters_of,
    read_layout,
    read_tree,
)
from penzai_shard.checkpoints.records import make_record
from penzai_shard.checkpoints.value_checksums import compute_checksums, plain_context
from penzai_shard.errors import CheckpointMismatchError, Problem, Problems, ShardingError
from penzai_shard.paths import fold_paths
from penzai_shard.processes.arrays import put
from penzai_shard.reports.quantities import bytes_text
from penzai_shard.reports.report import Column, Report

_CALLED, _LOST = "move", "did not arrive"
_Row = tuple[str, str, str, int]


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

    From a trainer to a rollout, from another library's model to one of Penzai. What moved is logged
    at level INFO of the logger "penzai_shard": its argument is a ``Report`` with a row per array,
    how many bytes devices sent for it, and whether it arrived as it was.

    Args:
        tree: A model, a tree of arrays, or a train state, with values. It is not changed.
        into: A tree of the same kind, with arrays or structs, which says where each array goes and
            how it is called. What is bound to no device, as a model that was just built, stays
            where the values are. It is not changed.
        names: For a path of ``tree``, or a pattern, the path in ``into``; see ``restore_params``.
            Of train states they are paths of parameters, and what the optimizer keeps follows.
        rename_axes: For a logical axis of ``tree`` its name in ``into``.
        only: As for ``restore_params``.
        except_: As for ``restore_params``.
        others: ``"keep"`` leaves their own values to arrays that are not asked for, or, where all
            are, that ``tree`` does not have.
        allow: As for ``restore_params``; ``"blocks"`` stacks blocks, or takes them apart.

    Returns:
        ``into`` with the values of parameters, and of state variables that both have under one
        path; of train states with all. Its variables are new. An array that lies right is the same
        one as in ``tree``, and one that keeps its values the same as in ``into``: donating the
        result deletes it there too. ``place(moved, plan, owned=True)`` copies them.

    Raises:
        CheckpointMismatchError: Paths, axes, lengths, dtypes or keys differ; with a problem for
            each difference.
        ShardingError: Arrays have no values, or did not arrive as they were.
        MeshError: ``into`` lies on a mesh without devices.
        RuleTypeError, SelectionError: As for ``restore_params``.

    >>> from penzai import pz
    >>> blocks = {f"block_{i}/w": pz.nx.ones({"a": 2}) * i for i in range(3)}
    >>> stacked = move(blocks, {"blocks/w": pz.nx.zeros({"blocks": 3, "a": 2})}, allow="blocks")
    >>> stacked["blocks/w"].unwrap("blocks", "a").tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """
    tolerance = {"allow": allow, "rename_axes": rename_axes, "names": names}
    options = read_options(_CALLED, only=only, except_=except_, others=others, **tolerance)
    (given, _), (leaves, structure) = read_tree(_CALLED, tree), read_tree(_CALLED, into)
    given, leaves = name_statistics(given), name_statistics(leaves)
    is_state, headline = is_train_state(given), "these values do not fit into the tree:"
    if is_state != is_train_state(leaves):
        fix = "Write move(state.model, into)." if is_state else "Write move(tree, into.model)."
        problem = Problem("", "only one of the two is a train state", fix, "kind")
        raise CheckpointMismatchError(headline, [problem])
    stored, wanted = _choose(given, leaves, is_state), _choose(leaves, given, is_state)
    has, needs = ({leaf.path: make_record(leaf) for leaf in side} for side in (stored, wanted))
    own = [x.path for x in wanted if not (is_struct(x.value) or is_deleted(x.value))]
    more: dict[str, Any] = {"own": own, "is_state": is_state, "holder": "the tree"}
    sources = match(has, needs, options, headline=headline, **more)

    found, _ = run_inputs({leaf.path: leaf.value for leaf in stored}, _CALLED)
    kept, _ = run_inputs({x.path: x.value for x in leaves if x.path not in sources}, _CALLED)
    arrays, values = ({leaf.path: leaf.value for leaf in side} for side in (found, kept))
    layout = read_layout(_CALLED, into, None)
    rows: list[_Row] = [(leaf.path, "", "keep their values", 0) for leaf in kept]
    with plain_context(_CALLED):
        for leaf in wanted:
            if source := sources.get(leaf.path):
                target = layout[leaf.path] if bound_sharding(leaf.value) else None
                values[leaf.path], row = _move_array(leaf, source, arrays, target)
                rows.append(row)
    _report(rows)
    return fill_tree(leaves, structure, values)


def _choose(leaves: Sequence[Leaf], others: Sequence[Leaf], is_state: bool) -> list[Leaf]:
    """The arrays of one side that are matched with those of the other."""
    if is_state:
        return [leaf for leaf in leaves if leaf.role != "constant"]
    chosen = {leaf.path: leaf for leaf in parameters_of(leaves)}
    paths = {leaf.path for leaf in others}
    return [x for x in leaves if x.path in chosen or (x.role == "state" and x.path in paths)]


def _report(rows: Sequence[_Row]) -> None:
    """Logs what moved, and refuses what did not arrive as it was."""
    counts = Counter(what for _, _, what, _ in rows)
    said = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    verdict = f"arrays: {said}; devices sent {bytes_text(sum(row[-1] for row in rows))}"
    columns = Column("path", "path"), Column("from"), Column("what"), Column("sent", "bytes")
    report = Report(_CALLED, verdict, columns, rows, ok=_LOST not in counts)
    logging.getLogger("penzai_shard").info("%s", report)
    problems = Problems("these arrays are not what was sent:")
    for path, _, what, _ in rows:
        if what == _LOST:
            problems.add(path, "its checksum has changed", "Move it again, from a checkpoint.")
    problems.raise_if_any(ShardingError)


# One array


def _move_array(
    leaf: Leaf, source: Source, given: Mapping[str, Any], target: Sharding | None
) -> tuple[Any, _Row]:
    """The array of a leaf where the target says, and its row."""
    # JAX would use the memory of NumPy arrays, which others can write to.
    arrays = [
        x if isinstance(x, jax.Array) else jnp.array(x) for x in map(given.get, source.stored)
    ]
    array = arrays[0]
    if len(arrays) > 1 or source.pick or [*source.order] != sorted(source.order):
        dim, position = source.pick or (None, 0)
        array = _arrange(arrays, position, source.order, source.stack, dim)
    # The fewer bytes are sent.
    if is_key_type(leaf.dtype) or leaf.dtype.itemsize < array.dtype.itemsize:
        array = _cast(leaf, array)
    what, sent = "lie right" if array is given[source.stored[0]] else "arranged", 0
    if target and array.sharding.is_equivalent_to(target, array.ndim):
        array = jax.device_put(array, target)  # The same memory, under the mesh of the target.
    elif target:
        impl = jax.random.key_impl(array) if is_key_type(array.dtype) else None
        numbers = array if impl is None else jax.random.key_data(array)
        moved, sent = _send(numbers, target)
        is_same = compute_checksums({"": numbers}) == compute_checksums({"": moved})
        what = "arrived" if is_same else _LOST
        array = moved if impl is None else jax.random.wrap_key_data(moved, impl=impl)
    array = _cast(leaf, array)
    return array, (leaf.path, fold_paths(source.stored), what, sent)


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
        what = f"it has numbers of {array.dtype} that {leaf.dtype} cannot hold"
        problem = Problem(leaf.path, what, f"Give an array of {array.dtype}.")
        raise CheckpointMismatchError("numbers do not fit:", [problem])
    return cast


# Between devices


def _send(array: jax.Array, target: Sharding) -> tuple[jax.Array, int]:
    """An array on other devices, in memory of its own, and the bytes that devices sent for it."""
    shardings = array.sharding, target
    is_here = all(sharding.is_fully_addressable for sharding in shardings)
    if not (is_here and array.size and len({s.memory_kind for s in shardings}) == 1):
        # JAX moves them between processes, and to the memory of the host.
        return put([array], [target])[0], 0

    held: dict[Bounds, dict[jax.Device, jax.Array]] = {}
    for shard in array.addressable_shards:
        held.setdefault(_bounds(shard.index, array.shape), {})[shard.device] = shard.data
    parts, sent = [], 0
    for number, (device, index) in enumerate(target.devices_indices_map(array.shape).items()):
        part = _bounds(index, array.shape)
        pieces, starts = [], []
        for box, copies in held.items():
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            # Of several devices that hold it, each sends to others.
            sender = device if device in copies else [*copies][number % len(copies)]
            piece = _cut(copies[sender], _starts(both, box), tuple(b - a for a, b in both))
            sent += 0 if sender == device else piece.nbytes
            pieces.append(jax.device_put(piece, device))
            starts.append(_starts(both, part))
        parts.append(_join(pieces, starts, tuple(stop - start for start, stop in part)))
    return jax.make_array_from_single_device_arrays(array.shape, target, parts), sent


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _starts(inner: Sequence[tuple[int, int]], outer: Bounds) -> np.ndarray:
    return np.array([a - b for (a, _), (b, _) in zip(inner, outer, strict=True)], np.int32)


@functools.partial(jax.jit, static_argnums=2)
def _cut(part: jax.Array, starts: Any, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(part, starts, shape)


@functools.partial(jax.jit, static_argnums=2)
def _join(pieces: Sequence[jax.Array], starts: Any, shape: tuple[int, ...]) -> jax.Array:
    # Also of one piece: what comes from another device of a CPU shares memory with it.
    whole = jnp.zeros(shape, pieces[0].dtype)
    for piece, start in zip(pieces, starts, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, start)
    return whole
