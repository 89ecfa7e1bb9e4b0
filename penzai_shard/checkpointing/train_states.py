"""Saving a whole training run, and going on with it on any mesh."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.checkpointing.array_records import record_of
from penzai_shard.checkpointing.arrays_by_name import ArraysByName, layouts_by_name
from penzai_shard.checkpointing.comparison import (
    AxisMismatch,
    BlockMismatch,
    DtypeMismatch,
    Extra,
    Tolerance,
)
from penzai_shard.checkpointing.locations import PathLike, absolute_path
from penzai_shard.checkpointing.name_matching import NameRules
from penzai_shard.checkpointing.orbax_store import PreparedSave, prepare_save
from penzai_shard.checkpointing.padded_layouts import Layout, layout_of, stored_by
from penzai_shard.checkpointing.parameter_dict import stored_params
from penzai_shard.checkpointing.restoring import refuse_other_arrays, restore_arrays
from penzai_shard.errors import RuleTypeError, raise_all, raised_by_the_call
from penzai_shard.planning import PlacingRequest, ShardingPlan
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed


def save_train_state(path: PathLike, train_state: Any, *, overwrite: bool = False) -> str:
    """Saves every array of a train state with Orbax, by its path.

    Layers that were put into the model do not count in paths, so that the state is restored into
    the same model under another layout, or with other edits.

    Args:
        path: The directory to make. In a job of several processes all must save, to the same
            shared path.
        train_state: A ``TrainState``, or any pytree of arrays and named arrays. Random keys keep
            their implementation.
        overwrite: Whether to replace a checkpoint at the path. The new one is written beside it
            and put in its place in one step, so that the path has a whole checkpoint at every
            moment, also if the process is killed or the disk fills.

    Returns:
        The absolute path.

    Raises:
        CheckpointExistsError: The path exists and may not be replaced.
        CheckpointMismatchError: Some arrays cannot be saved, for instance since the state was
            donated to a step.
        CheckpointWriteError: It cannot be written: no permission, a full disk.
        MissingExtraError: Orbax is not installed.

    >>> import tempfile
    >>> state = {"step": jax.numpy.int32(3), "root_rng": jax.random.key(0)}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_train_state(f"{directory}/state", state)
    ...     restored = restore_train_state(path, state, jax.make_mesh((8,), ("data",)))
    >>> int(restored["step"]), restored["root_rng"].dtype
    (3, key<fry>)
    """
    absolute_path(path)
    refuse_other_kinds("save_train_state", train_state)
    return prepare_train_state(path, train_state, overwrite).write()


def prepare_train_state(
    path: PathLike,
    train_state: Any,
    overwrite: bool,
    metadata: Mapping[str, Any] | None = None,
) -> PreparedSave:
    """What remains to be written of ``save_train_state``.

    Args:
        path: As there.
        train_state: As there.
        overwrite: As there.
        metadata: Further entries of Orbax' custom metadata, as JSON can hold them.
    """
    leaves = ArraysByName(train_state, "saving", without_inserted=True).leaves
    prepared = prepare_save(path, leaves, kind="train_state", overwrite=overwrite)
    return dataclasses.replace(prepared, metadata={**prepared.metadata, **(metadata or {})})


def refuse_other_state(path: PathLike, train_state: Any) -> None:
    """Refuses a state that a checkpoint does not fit, without reading an array.

    Args:
        path: The checkpoint's directory.
        train_state: The state, concrete or abstract; its arrays may be deleted.

    Raises:
        ShardingError: As ``restore_train_state`` does.
    """
    leaves = ArraysByName(train_state, "restoring", without_inserted=True).leaves
    refuse_other_arrays(path, "train_state", leaves, Tolerance())


@raised_by_the_call
def restore_train_state(
    path: PathLike,
    train_state: Any,
    mesh: Mesh | ShardingPlan | None = None,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    optimizer_rules: Any = None,
    plan: ShardingPlan | None = None,
    shardings: Any = None,
    on_axis_mismatch: AxisMismatch = "error",
    on_dtype_mismatch: DtypeMismatch = "error",
    on_extra: Extra = "error",
    rename_axes: Mapping[str, str] | None = None,
    names: NameRules | None = None,
    on_block_mismatch: BlockMismatch = "error",
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    verify: bool = True,
) -> Any:
    """Restores a train state straight onto a mesh, whatever mesh it was saved from.

    Every device reads its own part. All that can be wrong is found before any array is read.
    A run goes on in another layout: ``restore_train_state(path, state)`` with the state that
    ``Layout.build`` made for it, whose own layout the arrays then get.

    Args:
        path: The checkpoint's directory.
        train_state: A state of the same model and optimizer, concrete or abstract. What was put
            into its model, for another layout, does not count. It is not changed.
        mesh: The mesh to restore onto, or a plan. Of an Explicit mesh the Auto twin is used.
        rules: Which logical axis goes to which mesh axis; ``None`` maps each to the mesh axis of
            the same name.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        optimizer_rules: Other rules for the field ``opt_state``.
        plan: A plan of the state to carry out, instead of mesh, rules and options.
        shardings: In place of mesh and rules: a tree like the state with a sharding for each
            array, such as ``train_state_sharding`` gives. Without mesh, plan and shardings each
            array gets the sharding of the one in ``train_state``.
        on_axis_mismatch: ``"transpose"`` reorders arrays whose logical axes were saved in
            another order.
        on_dtype_mismatch: ``"cast"`` converts to the state's dtype while reading.
        on_extra: ``"ignore"`` leaves arrays in the checkpoint that the state does not have.
        rename_axes: Logical axis names in the checkpoint that have other names in the state, as
            ``{"old": "new"}``.
        names: For patterns of the parameters' names in the checkpoint, their names in the state, as
            for ``restore_params``. What the optimizer keeps for a parameter follows it.
        on_block_mismatch: ``"convert"`` stacks or unstacks the parameters of blocks, and what the
            optimizer keeps for them, as for ``restore_params``.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``, in all fields but ``root_rng``, which is replicated.
        verify: Whether to compare the numbers, as they are on the devices, with the checksums that
            were saved with them. Without it damaged numbers go unnoticed.

    Returns:
        A state of the same structure with the arrays from the checkpoint. Leaves that are not
        arrays come from ``train_state``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: The checkpoint is not as it was saved; with one line per array
            whose numbers are not.
        CheckpointMismatchError: With one line per array that is missing, superfluous, or of other
            logical axes, order, sizes or dtype.
        PlanError: Some array has no valid layout, or the plan is of another state.
        RuleTypeError: Mesh and shardings are both given, or neither and the state's arrays have no
            shardings.
        MissingExtraError: Orbax is not installed.

    Warns:
        ShardingWarning: The checkpoint was written by plain Orbax, without logical axis names, or
            in format 2, without checksums of its numbers; or ``verify=False`` was passed.
    """
    absolute_path(path)
    tolerance = Tolerance(
        on_axis_mismatch, on_dtype_mismatch, on_extra, rename_axes, names, on_block_mismatch
    )
    refuse_other_kinds("restore_train_state", train_state)
    state = ArraysByName(train_state, "restoring", without_inserted=True)
    if mesh is None and plan is None:
        if not (rules is axis_name_to_mesh_name is optimizer_rules is None):
            raise RuleTypeError("rules need a mesh: pass mesh=make_mesh({...}) too.")
        layouts = _layouts_without_plan(state, shardings)
    elif shardings is not None:
        raise RuleTypeError("give either a mesh with rules, or shardings, but not both.")
    else:
        request = PlacingRequest.read(
            "restore_train_state",
            mesh,
            rules,
            axis_name_to_mesh_name,
            on_indivisible,
            on_unnamed,
            plan,
        )
        # Leaves that are not arrays are not restored.
        request = dataclasses.replace(request, keep_others=True)
        state_plan = request.plan_state(train_state, optimizer_rules)
        layouts = _by_name(state, state_plan.starting_shardings())
    arrays = restore_arrays(path, "train_state", state.leaves, layouts, tolerance, verify=verify)
    return state.filled(stored_by(layouts, arrays, "restore_train_state"))


def refuse_other_kinds(called: str, train_state: Any) -> None:
    """Refuses a function, a trainer, and a model, which has a checkpoint of its own kind.

    Args:
        called: The function that was called.
        train_state: What it was given for a train state.

    Raises:
        RuleTypeError: It is one of these.
    """
    is_model = isinstance(train_state, pz.nn.Layer) and stored_params(train_state)
    if is_array_like(train_state) or not (is_model or jax.tree_util.all_leaves([train_state])):
        return
    if is_model:
        fix = (
            "Restore the model alone, of this checkpoint too, with "
            "restore_params(path, model, mesh, rules)."
            if "restore" in called
            else "Save a model with save_params(path, model)."
        )
    elif hasattr(train_state, "state") and not isinstance(train_state, type):
        fix = "Give its state: trainer.state."
    else:
        fix = "Make one: TrainState.initial_state(model, optimizer, root_rng)."
    raise RuleTypeError(f"{called} takes a TrainState, not a {type(train_state).__name__}. {fix}")


def _by_name(state: ArraysByName, tree: Any) -> dict[str, Layout]:
    """The layouts in a tree of shardings like the state, by the names of its arrays."""
    found = layouts_by_name(tree)
    return {name: found.get(path) for name, path in state.paths.items()}


def _layouts_without_plan(state: ArraysByName, shardings: Any) -> dict[str, Layout]:
    """The layout of every array in a tree of shardings, or else the one that it has already."""
    if shardings is None:
        headline = "some arrays of the state have no sharding:"
        layouts = {name: layout_of(leaf) for name, leaf in state.leaves.items()}
    else:
        headline = "the shardings say nothing of some arrays:"
        layouts = _by_name(state, shardings)
    problems = [
        f"{name}: no sharding for {record_of(leaf)}. Pass mesh and rules, or shardings made "
        "for this state."
        for name, leaf in state.leaves.items()
        if getattr(layouts.get(name), "sharding", layouts.get(name)) is None
    ]
    raise_all(RuleTypeError, headline, problems)
    return layouts
