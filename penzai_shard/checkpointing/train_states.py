"""Saving a whole training run, and going on with it on any mesh."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, Sharding
from penzai import pz
from penzai.core.variables import LabeledVariable

from penzai_shard.array_kinds import is_array_like
from penzai_shard.checkpointing.array_records import record_of, refuse_permuted_positions
from penzai_shard.checkpointing.comparison import (
    RESTORING_STATE,
    AxisMismatch,
    DtypeMismatch,
    Extra,
    Tolerance,
)
from penzai_shard.checkpointing.locations import PathLike, absolute_path
from penzai_shard.checkpointing.manifest import Manifest
from penzai_shard.checkpointing.orbax_store import save_arrays
from penzai_shard.checkpointing.parameter_dict import param_dict
from penzai_shard.checkpointing.restoring import from_checkpoint, restore_arrays
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.model_variables import thawed, with_own_label
from penzai_shard.named_leaves import NamedLeaf, map_arrays
from penzai_shard.planning import PlacingRequest, PlanRequest, ShardingPlan
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed
from penzai_shard.tree_paths import array_path_text


def save_train_state(path: PathLike, train_state: Any, *, overwrite: bool = False) -> str:
    """Saves every array of a train state with Orbax, by its path.

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
    _refuse_other_kinds("save_train_state", train_state)
    refuse_permuted_positions(train_state, "saving")
    return save_arrays(
        path, _leaves_by_key_path(train_state), kind="train_state", overwrite=overwrite
    )


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
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
) -> Any:
    """Restores a train state straight onto a mesh, whatever mesh it was saved from.

    Every device reads its own part. All that can be wrong is found before any array is read.

    Args:
        path: The checkpoint's directory.
        train_state: A state of the same structure, concrete or abstract. It is not changed.
        mesh: The mesh to restore onto, or a plan. Of an Explicit mesh the Auto twin is used.
        rules: Which logical axis goes to which mesh axis; ``None`` maps each to the mesh axis of
            the same name.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        optimizer_rules: Other rules for the field ``opt_state``.
        plan: A plan of the state to carry out, instead of mesh, rules and options.
        shardings: In place of mesh and rules: a tree like the state with a sharding for each
            array, such as ``train_state_sharding`` gives. Without mesh, plan and shardings each
            array goes where the one in ``train_state`` lies.
        on_axis_mismatch: ``"transpose"`` puts arrays right whose logical axes were saved in
            another order.
        on_dtype_mismatch: ``"cast"`` converts to the state's dtype while reading.
        on_extra: ``"ignore"`` leaves arrays in the checkpoint that the state does not have.
        rename_axes: Logical axis names in the checkpoint that have other names in the state, as
            ``{"old": "new"}``.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``, in all fields but ``root_rng``, which is replicated.

    Returns:
        A state of the same structure with the arrays from the checkpoint. Leaves that are no
        arrays come from ``train_state``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: The checkpoint is not as it was saved.
        CheckpointMismatchError: With one line per array that is missing, superfluous, or of other
            logical axes, order, sizes or dtype.
        PlanError: Some array has no valid layout, or the plan is of another state.
        RuleTypeError: Mesh and shardings are both given, or neither and the state lies nowhere.
        MissingExtraError: Orbax is not installed.
    """
    absolute_path(path)
    tolerance = Tolerance(on_axis_mismatch, on_dtype_mismatch, on_extra)
    _refuse_other_kinds("restore_train_state", train_state)
    refuse_permuted_positions(train_state, "restoring")
    leaves = _leaves_by_key_path(train_state)
    has_rules = not (rules is axis_name_to_mesh_name is optimizer_rules is None)
    if mesh is not None or plan is not None:
        if shardings is not None:
            raise RuleTypeError("give either a mesh with rules, or shardings, but not both.")
        request = PlacingRequest.read(
            "restore_train_state",
            mesh,
            rules,
            axis_name_to_mesh_name,
            on_indivisible,
            on_unnamed,
            plan,
        )
        places = _planned(request, train_state, optimizer_rules)
    elif has_rules:
        raise RuleTypeError("rules need a mesh: pass mesh=make_mesh({...}) too.")
    elif shardings is not None:
        places = _given(shardings, leaves)
    else:
        places = _present(leaves)

    def read(manifest: Manifest) -> dict[str, jax.Array]:
        if manifest.kind == "params":
            raise CheckpointMismatchError(
                f"the checkpoint at {manifest.path} holds parameters alone, as save_params writes "
                "them, and not a train state. Restore them and begin a new state with them: "
                "restore_params(path, model, mesh, rules)."
            )
        with _naming_another_optimizer(manifest, leaves):
            return restore_arrays(
                manifest,
                leaves,
                places,
                wording=RESTORING_STATE,
                tolerance=tolerance,
                rename_axes=rename_axes,
            )

    return _with_arrays(train_state, from_checkpoint(path, read))


def _refuse_other_kinds(called: str, train_state: Any) -> None:
    """Refuses a function, a trainer, and a model, which has a checkpoint of its own kind."""
    is_model = isinstance(train_state, pz.nn.Layer) and param_dict(train_state)
    if not is_model and not jax.tree_util.all_leaves([train_state]):
        return
    if is_array_like(train_state):
        return
    if is_model:
        fix = {
            "save_train_state": "Save a model with save_params(path, model).",
            "restore_train_state": "Restore the model alone, of this checkpoint too, with "
            "restore_params(path, model, mesh, rules).",
        }[called]
    elif hasattr(train_state, "state") and not isinstance(train_state, type):
        fix = "Give its state: trainer.state."
    else:
        fix = "Make one: TrainState.initial_state(model, optimizer, root_rng)."
    raise RuleTypeError(f"{called} takes a TrainState, not a {type(train_state).__name__}. {fix}")


@contextlib.contextmanager
def _naming_another_optimizer(
    manifest: Manifest, leaves: Mapping[str, NamedLeaf]
) -> Iterator[None]:
    """Says it first where a checkpoint has the state of another optimizer than is wanted.

    Raises:
        CheckpointMismatchError: The two fit as well as before, and their optimizers do not.
    """
    try:
        yield
    except CheckpointMismatchError as error:
        stored, wanted = (
            {name for name in names if name.startswith("opt_state/")}
            for names in (manifest.records, leaves)
        )
        same_params = all(
            (name in manifest.records) == (name in leaves)
            for name in {*manifest.records, *leaves}
            if name.startswith("params/")
        )
        if stored == wanted or not same_params:
            raise
        others = [p for p in error.problems if p.partition(": ")[0] not in stored ^ wanted]
        raise CheckpointMismatchError(
            f"the checkpoint at {manifest.path} has the state of another optimizer than the train "
            "state. Build the train state with the optimizer that it was saved with. To go on "
            "with another one, which begins anew, take the parameters alone: "
            "restore_params(path, model, mesh, rules).",
            [
                *others,
                *(f"{name}: is in the checkpoint alone." for name in sorted(stored - wanted)),
                *(f"{name}: is in the train state alone." for name in sorted(wanted - stored)),
            ],
        ) from error


def _leaves_by_key_path(train_state: Any) -> dict[str, NamedLeaf]:
    """The arrays of a state by where they are in it."""
    return {name: leaf for name, leaf in _visited(train_state) if name is not None}


def _visited(train_state: Any) -> list[tuple[str | None, NamedLeaf]]:
    """All leaves in the order of visiting, with their names; None for what is no array.

    The label of a state variable can be a number of this process alone, so arrays are named by
    their key paths throughout. A variable that occurs several times is named by its first place.
    """
    leaves: list[NamedLeaf] = []

    def number(leaf: NamedLeaf) -> int:
        leaves.append(leaf)
        return len(leaves) - 1

    names: list[str | None] = []
    for key_path, index in jax.tree_util.tree_leaves_with_path(map_arrays(train_state, number)):
        if index == len(names):
            names.append(None if leaves[index].dtype is None else array_path_text(key_path))
    counts = collections.Counter(name for name in names if name is not None)
    raise_all(
        CheckpointMismatchError,
        "cannot tell arrays apart by path:",
        [
            f"{name}: {count} arrays have this path. Rename all but one of them."
            for name, count in counts.items()
            if count > 1
        ],
    )
    return list(zip(names, leaves, strict=True))


def _with_arrays(train_state: Any, arrays: Mapping[str, Any]) -> Any:
    """The state with other arrays by path; mutable variables come back as new mutable ones."""
    names = (name for name, _ in _visited(train_state))
    frozen = map_arrays(
        train_state, lambda leaf: leaf.array if (name := next(names)) is None else arrays[name]
    )
    fresh: dict[int, Any] = {}

    def unfreeze(leaf: Any, value: Any) -> Any:
        if not isinstance(leaf, LabeledVariable):
            return value
        if id(leaf) not in fresh:
            fresh[id(leaf)] = with_own_label(thawed(value))
        return fresh[id(leaf)]

    return jax.tree_util.tree_map(unfreeze, train_state, frozen)


def _planned(request: PlanRequest, train_state: Any, optimizer_rules: Any) -> dict[str, Sharding]:
    """The planned place of every array, the optimizer's part under its own rules."""
    plan = dataclasses.replace(request, keep_others=True).plan_state(train_state, optimizer_rules)
    return {
        array_path_text(key_path): sharding
        for key_path, sharding in jax.tree_util.tree_leaves_with_path(plan.starting_shardings())
    }


def _given(shardings: Any, leaves: Mapping[str, NamedLeaf]) -> dict[str, Sharding]:
    """The place of every array in a tree of shardings, or of structs that have one."""
    places = {
        array_path_text(key_path): leaf
        if isinstance(leaf, Sharding)
        else getattr(leaf, "sharding", None)
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(shardings)
    }
    return _complete(places, leaves, "the shardings say nothing of some arrays:")


def _present(leaves: Mapping[str, NamedLeaf]) -> dict[str, Sharding]:
    """The place that every array has already."""
    places = {name: getattr(leaf.array, "sharding", None) for name, leaf in leaves.items()}
    return _complete(places, leaves, "some arrays of the state lie nowhere:")


def _complete(
    places: Mapping[str, Sharding | None], leaves: Mapping[str, NamedLeaf], headline: str
) -> dict[str, Sharding]:
    raise_all(
        RuleTypeError,
        headline,
        [
            f"{name}: no sharding for {record_of(leaf)}. Pass mesh and rules, or shardings made "
            "for this state."
            for name, leaf in leaves.items()
            if places.get(name) is None
        ],
    )
    return {name: place for name, place in places.items() if place is not None}
