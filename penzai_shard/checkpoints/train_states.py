"""Saves and restores whole train states, and any other tree of arrays, by path.

A train state is a tree like any other, of this library or of another: its arrays are known by their
paths, and those that an optimizer keeps have the logical axes of their parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

from penzai_shard.checkpoints.matching import OPTIMIZER, Options
from penzai_shard.checkpoints.parameters import read_layout, read_tree, restore_tree
from penzai_shard.checkpoints.saving import begin_save
from penzai_shard.errors import check_arguments
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.rules import OnIndivisible


def save_train_state(path: Any, train_state: Any, *, overwrite: bool = False) -> str:
    """Saves every array of a train state but the constants of its model.

    Args:
        path: As for ``save_params``.
        train_state: A ``TrainState``, one of Flax, or any other tree of arrays, for instance a
            model with its state variables.
        overwrite: As for ``save_params``.

    Returns:
        The absolute path.

    Raises:
        CheckpointWriteError: The path is taken, or cannot be written.
        ShardingError: Some arrays have no values, as they are shapes, or were donated.
        RuleTypeError: It has no arrays.

    >>> import tempfile
    >>> import jax
    >>> import penzai_shard as pzs
    >>> state = {"step": jax.numpy.int32(3), "root_rng": jax.random.key(0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_train_state(f"{folder}/state", state)
    ...     restored = restore_train_state(path, state, pzs.make_mesh({"data": 8}))
    >>> int(restored["step"]), restored["root_rng"].dtype
    (3, key<fry>)
    """
    return begin_save_train_state("save_train_state", path, train_state, overwrite=overwrite)()


def begin_save_train_state(
    called: str, path: Any, train_state: Any, **options: Any
) -> Callable[[], str]:
    """Begins what ``save_train_state`` does, with options of ``begin_save``."""
    leaves, _ = read_tree(called, train_state)
    saved = [leaf for leaf in leaves if leaf.role != "constant"]
    return begin_save(called, path, saved, "train_state", **options)


def restore_train_state(
    path: Any,
    train_state: Any,
    mesh: AnyMesh | ShardingPlan | None = None,
    rules: Any = None,
    *,
    plan: ShardingPlan | None = None,
    shardings: Any = None,
    optimizer_rules: Any = None,
    axis_name_to_mesh_name: Any = None,
    rename_axes: Mapping[str, str] | None = None,
    names: Mapping[str, str | None] | None = None,
    allow: Any = (),
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
    verify: bool = True,
    free: Any = (),
    progress: bool | None = None,
) -> Any:
    """Restores a train state straight onto a mesh, whatever mesh it was saved from.

    Args:
        path: A checkpoint of ``save_train_state``, or of plain Orbax.
        train_state: A state of the same model and optimizer, with arrays, also donated ones, or
            structs. It is not changed.
        mesh: A mesh, or a plan of the state. Without it arrays go where those of the state are.
        rules: As for ``make_plan``.
        plan: A plan of the state, in place of mesh, rules and options.
        shardings: In place of mesh and rules, a tree like the state with a sharding for each array,
            as ``train_state_sharding`` gives it.
        optimizer_rules: Other rules for what the optimizer keeps, below ``opt_state``.
        axis_name_to_mesh_name: The rules under Penzai's name.
        rename_axes: As for ``restore_params``.
        names: As for ``restore_params``; with ``**/`` in front a rule is one for a parameter and
            for what the optimizer keeps of it: ``{"**/up/w": "**/net/up/w"}``.
        allow: As for ``restore_params``.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        verify: As for ``restore_params``.
        free: Arrays of the state, as a tree, that are deleted once the checkpoint is found to fit,
            so that no device has to hold them and those that are read.
        progress: Whether to show a bar; by default in a terminal.

    Returns:
        A state of the same kind. Constants of the model, functions and settings are its own.

    Raises:
        CheckpointNotFoundError, CheckpointMismatchError, CheckpointDamagedError: As for
            ``restore_params``.
        PlanError, MeshError, RuleTypeError: As ``make_plan``; or an option cannot be read.

    Warns:
        ShardingWarning: The checkpoint stores no logical axes, as those of plain Orbax.

    >>> import tempfile
    >>> import penzai_shard as pzs
    >>> from penzai import pz
    >>> state, mesh = {"w": pz.nx.ones({"features": 8})}, pzs.make_mesh({"data": 8})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_train_state(f"{folder}/state", state)
    ...     restored = restore_train_state(path, state, mesh, {"features": "data"})
    >>> restored["w"].data_array.sharding.spec
    P('data',)
    """
    called = "restore_train_state"
    options = Options(called, allow, rename_axes, names, verify=verify, progress=progress)
    leaves, structure = read_tree(called, train_state)
    if shardings is not None:
        layout = read_layout(called, shardings, None)
        given = mesh, rules, plan, optimizer_rules, axis_name_to_mesh_name
        is_right = layout.keys() == set(structure.paths) and all(x is None for x in given)
        fix = "shardings=train_state_sharding(state, mesh, rules), without these"
        check_arguments(called, {"shardings": (shardings, is_right, fix)})
        return restore_tree(path, leaves, structure, layout, options, is_state=True, free=free)
    relaxed = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed, "plan": plan}
    layout = read_layout(called, train_state, mesh, rules, axis_name_to_mesh_name, **relaxed)
    if optimizer_rules is not None:
        others = read_layout(called, train_state, mesh, optimizer_rules, **relaxed)
        layout |= {path: others[path] for path in others if path.startswith(OPTIMIZER)}
    return restore_tree(path, leaves, structure, layout, options, is_state=True, free=free)
