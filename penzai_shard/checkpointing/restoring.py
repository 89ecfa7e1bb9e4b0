"""The one way arrays are restored from a checkpoint: compare everything, read, reorder."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from penzai_shard.checkpointing.array_reading import load_arrays
from penzai_shard.checkpointing.array_records import ArrayRecord, record_of
from penzai_shard.checkpointing.comparison import RESTORING, RESTORING_STATE, Tolerance
from penzai_shard.checkpointing.correspondence import Correspondence, Part, correspond
from penzai_shard.checkpointing.landing import landings_of
from penzai_shard.checkpointing.locations import PathLike, absolute_path
from penzai_shard.checkpointing.manifest import Manifest, identity_of, read_manifest
from penzai_shard.checkpointing.name_matching import EVERYTHING, Selection
from penzai_shard.checkpointing.orbax_store import mesh_context
from penzai_shard.checkpointing.padded_layouts import Layout, true_layouts
from penzai_shard.checkpointing.remaining_arrays import Supply
from penzai_shard.checkpointing.taking_part import restore_together
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    ShardingError,
    warn_caller,
)
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.partition_specs import permuted_spec
from penzai_shard.processes import any_process, failing_together, under_way

_ATTEMPTS = 5
_WORDINGS = {"params": RESTORING, "train_state": RESTORING_STATE}


def restore_arrays(
    path: PathLike,
    kind: str,
    leaves: Mapping[str, NamedLeaf],
    layouts: Mapping[str, Layout],
    tolerance: Tolerance,
    *,
    verify: bool,
    selection: Selection = EVERYTHING,
    supply: Supply | None = None,
) -> dict[str, jax.Array]:
    """Restores arrays by name, each device reading its own part.

    If a save replaces the checkpoint meanwhile, the new one is read instead.

    Args:
        path: The checkpoint's directory.
        kind: What is restored: ``"params"`` or ``"train_state"``.
        leaves: The arrays to be filled, by name.
        layouts: By name, where each is to be.
        tolerance: What may differ.
        verify: Whether to refuse numbers that are not those saved.
        selection: Which of the arrays are restored.
        supply: Gives the values of those that are not, or that the checkpoint does not have.

    Returns:
        The arrays by name, exactly in the layouts asked for; of those that are to be padded some
        in ``true_layout``, without padding.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: It is not as it was saved, or was replaced over and over.
        CheckpointMismatchError: Something differs that may not; nothing has been read then.

    Warns:
        ShardingWarning: The checkpoint was written without axis names or without checksums of
            its numbers, or they were not to be verified; or other values are taken for what it
            does not have, while it has something that is left there.
    """
    part = Part(selection, has_others=supply is not None)
    records = {name: record_of(leaf) for name, leaf in leaves.items()}
    options = f"verify={verify}, {tolerance}, {part}"
    shardings = true_layouts(layouts, leaves)
    restore_together(absolute_path(path), kind, records, shardings, options)
    with under_way(f"restoring the checkpoint at {absolute_path(path)}"):
        return _restored(path, kind, leaves, layouts, tolerance, part, supply, verify=verify)


def _restored(
    path: PathLike,
    kind: str,
    leaves: Mapping[str, NamedLeaf],
    layouts: Mapping[str, Layout],
    tolerance: Tolerance,
    part: Part,
    supply: Supply | None,
    *,
    verify: bool,
) -> dict[str, jax.Array]:
    for _ in range(_ATTEMPTS):
        before = identity_of(path)
        try:
            # What can be wrong is found before any process waits for another.
            with failing_together("restoring a checkpoint"):
                found = _compared(read_manifest(path), kind, leaves, tolerance, part)
                others = supply(found[1].others) if supply and found[1].others else {}
            with failing_together("reading a checkpoint"):
                arrays = others | _restored_once(*found, leaves, layouts, verify=verify)
        except ShardingError:
            if not _was_replaced(path, before):
                raise
        else:
            if not _was_replaced(path, before):
                return arrays
    raise CheckpointDamagedError(
        f"the checkpoint at {absolute_path(path)} was replaced {_ATTEMPTS} times while it was "
        "being read. Restore it once the saves are done."
    )


def _was_replaced(path: PathLike, before: Any) -> bool:
    """Whether any process sees another checkpoint at a path than before."""
    return any_process(identity_of(path) != before, "looking for a newer checkpoint")


def refuse_other_arrays(
    path: PathLike, kind: str, leaves: Mapping[str, NamedLeaf], tolerance: Tolerance
) -> None:
    """Compares arrays with those of a checkpoint, and reads none.

    Args:
        path: The checkpoint's directory.
        kind: What is to be restored: ``"params"`` or ``"train_state"``.
        leaves: The arrays to be filled, by name.
        tolerance: What may differ.

    Raises:
        ShardingError: As ``restore_arrays`` does, but for what is found while reading arrays.
    """
    _compared(read_manifest(path), kind, leaves, tolerance, Part())


def _restored_once(
    manifest: Manifest,
    found: Correspondence,
    leaves: Mapping[str, NamedLeaf],
    layouts: Mapping[str, Layout],
    *,
    verify: bool,
) -> dict[str, jax.Array]:
    if manifest.caveat:
        warn_caller([f"the checkpoint at {manifest.path} {manifest.caveat}"])
    elif not verify:
        warn_caller(
            [
                f"the numbers of the checkpoint at {manifest.path} were not compared with their "
                "checksums, as verify=False says: damaged ones go unnoticed."
            ]
        )
    if found.others and found.left:
        warn_caller([_left_on_both_sides(manifest, found)])
    landings = landings_of(found, leaves, layouts)
    structs = {
        name: _struct_as_stored(landing.struct, manifest.records[name], found.orders.get(name))
        for name, landing in landings.items()
    }
    restored: dict[str, jax.Array] = {}

    def take(name: str, array: Any) -> None:
        wanted = landings[name].struct
        array = _as_wanted(array, found.orders.get(name), wanted.dtype, wanted.sharding)
        restored.update(landings[name].land(array))

    load_arrays(manifest, structs, verify=verify, take=take)
    return restored


def _left_on_both_sides(manifest: Manifest, found: Correspondence) -> str:
    lacking, left = (
        f"{len(names)} of {whose} ({', '.join(map(repr, names[:3]))}"
        f"{', ...' if len(names) > 3 else ''})"
        for names, whose in ((found.others, "the model's arrays"), (found.left, "its own"))
    )
    return (
        f"the checkpoint at {manifest.path} lacks {lacking}, which got other values, and {left} "
        "are left there. If some of them are the same, say so with names=; if not, say which get "
        "other values with except_=."
    )


def _compared(
    manifest: Manifest,
    kind: str,
    leaves: Mapping[str, NamedLeaf],
    tolerance: Tolerance,
    part: Part,
) -> tuple[Manifest, Correspondence]:
    """What of a checkpoint is to be read, and what becomes of it."""
    if kind == "params" and manifest.kind == "train_state":
        manifest = _part_of_model(manifest, leaves)
    if kind == "train_state" and manifest.kind == "params":
        raise CheckpointMismatchError(
            f"the checkpoint at {manifest.path} holds parameters alone, as save_params writes "
            "them, and not a train state. Restore them and begin a new state with them: "
            "restore_params(path, model, mesh, rules)."
        )
    manifest = manifest.called_as(leaves)
    wording = _WORDINGS[kind]
    try:
        found = correspond(
            manifest.records,
            {name: record_of(leaf) for name, leaf in leaves.items()},
            part=part,
            headline=f"the checkpoint at {manifest.path} does not fit {wording.target}:",
            wording=wording,
            tolerance=tolerance,
        )
    except CheckpointMismatchError as error:
        if kind == "train_state":
            _name_another_optimizer(manifest, leaves, error)
        raise
    return manifest.renamed(found.stored_names), found


def _part_of_model(manifest: Manifest, leaves: Mapping[str, NamedLeaf]) -> Manifest:
    """The parameters in the checkpoint of a train state.

    State variables are among them where they are wanted by their names, as a dictionary of
    collections of Flax linen has both.
    """
    part = manifest.part("params")
    if any(
        name not in part.records and f"state_vars/{name}" in manifest.records for name in leaves
    ):
        part = manifest.part("params", "state_vars")
    return part


def _name_another_optimizer(
    manifest: Manifest, leaves: Mapping[str, NamedLeaf], error: CheckpointMismatchError
) -> None:
    """Says it first where a checkpoint has the state of another optimizer than is wanted.

    Raises:
        CheckpointMismatchError: The two have the same parameters, and their optimizers differ.
    """
    unequal = manifest.records.keys() ^ leaves.keys()
    of_optimizer = sorted(name for name in unequal if name.startswith("opt_state/"))
    if not of_optimizer or any(name.startswith("params/") for name in unequal):
        return
    others = [p for p in error.problems if p.partition(": ")[0] not in of_optimizer]
    stored = [name for name in of_optimizer if name in manifest.records]
    wanted = [name for name in of_optimizer if name in leaves]
    raise CheckpointMismatchError(
        f"the checkpoint at {manifest.path} has the state of another optimizer than the train "
        "state. Build the train state with the optimizer that it was saved with. To go on "
        "with another one, which begins anew, take the parameters alone: "
        "restore_params(path, model, mesh, rules).",
        [
            *others,
            *(f"{name}: is in the checkpoint alone." for name in stored),
            *(f"{name}: is in the train state alone." for name in wanted),
        ],
    ) from error


def _struct_as_stored(
    struct: jax.ShapeDtypeStruct, record: ArrayRecord, order: tuple[int, ...] | None
) -> jax.ShapeDtypeStruct:
    """What to read: dtype and order of the axes as stored, laid out so that putting them into the
    order that is wanted moves no data."""
    shape, sharding = struct.shape, struct.sharding
    if order is not None:
        inverse = [order.index(i) for i in range(len(shape))]
        shape = tuple(shape[i] for i in inverse)
        if isinstance(sharding, NamedSharding):
            spec = permuted_spec(sharding.spec, inverse)
            sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    dtype = struct.dtype if record.key_impl else jnp.dtype(record.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _as_wanted(
    array: Any, order: tuple[int, ...] | None, dtype: Any, sharding: Sharding | None
) -> Any:
    """An array as it was read, in the order of axes, the dtype and the sharding that are wanted."""
    if isinstance(array, np.ndarray):
        # Without an order NumPy would reverse it.
        host = np.transpose(array, order or range(array.ndim)).astype(dtype)
        if sharding is None:
            return host
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    if order is None and array.dtype == dtype:
        return array
    assert sharding is not None
    with mesh_context(sharding):
        return _converter(sharding)(array, order, dtype)


@functools.lru_cache(maxsize=256)
def _converter(sharding: Sharding) -> Any:
    def converted(array: jax.Array, order: tuple[int, ...] | None, dtype: Any) -> jax.Array:
        return jnp.transpose(array, order or range(array.ndim)).astype(dtype)

    return jax.jit(converted, static_argnums=(1, 2), out_shardings=sharding)
