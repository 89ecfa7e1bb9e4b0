"""Saving the parameters of a model, and restoring them onto any mesh."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from penzai_shard.checkpointing.arrays_by_name import ArraysByName, layouts_by_name
from penzai_shard.checkpointing.comparison import (
    AxisMismatch,
    BlockMismatch,
    DtypeMismatch,
    Extra,
    Tolerance,
)
from penzai_shard.checkpointing.locations import PathLike, absolute_path
from penzai_shard.checkpointing.name_matching import NameRules, Patterns, Selection
from penzai_shard.checkpointing.orbax_store import prepare_save
from penzai_shard.checkpointing.padded_layouts import stored_by, true_layouts
from penzai_shard.checkpointing.parameter_dict import (
    rebuilt,
    refuse_states_without_values,
    statistics_of,
    stored_params,
)
from penzai_shard.checkpointing.remaining_arrays import Others, supply_of
from penzai_shard.checkpointing.restoring import restore_arrays
from penzai_shard.errors import RuleTypeError, raised_by_the_call, warn_caller
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import PlacingRequest, PlanRequest, ShardingPlan
from penzai_shard.readers import without_repeats
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed
from penzai_shard.surgery import strip


def restore_structs(
    model: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
) -> dict[str, Any]:
    """What restoring should give: the parameters' shapes, dtypes and layouts, by name.

    Args:
        model: What ``param_dict`` takes; concrete or abstract.
        mesh: The mesh to restore onto.
        rules: Which logical axis goes to which mesh axis; ``None`` maps each to the mesh axis of
            the same name.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Returns:
        A dictionary from names to named arrays of ``jax.ShapeDtypeStruct`` with a sharding, such
        as Orbax' own functions take; of the padded ones where arrays are to be stored padded. For
        these Orbax pads what it reads, with ``enable_padding_and_truncation`` of its
        ``ArrayOptions.Loading``.

    Raises:
        PlanError: Some parameter has no valid layout.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> import jax
    >>> from penzai import pz
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> structs = restore_structs({"w": pz.nx.ones({"a": 2, "b": 8})}, mesh, {"b": "data"})
    >>> structs["w"].data_array.shape, structs["w"].data_array.sharding.spec
    ((2, 8), P(None, 'data'))
    """
    request = PlanRequest.read(
        "restore_structs", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed
    )
    return request.plan(stored_params(model)).restore_structs()


def save_params(
    path: PathLike,
    model: Any,
    *,
    only: Patterns | None = None,
    except_: Patterns | None = None,
    overwrite: bool = False,
) -> str:
    """Saves the parameters of a model with Orbax, by name.

    The arrays are stored as a flat dictionary, so that layers which are inserted later never
    matter. Their logical axis names are in the checkpoint's metadata, which ``restore_params``
    compares. What is stored padded is saved without; until it is saved it is there twice.

    Args:
        path: The directory to make. In a job of several processes all must save, to the same
            shared path.
        model: What ``param_dict`` takes: a model, or a dictionary of arrays by name. A value that
            is a tree of arrays is stored under ``name/path``.
        only: A pattern of names, or several: only what one of them matches is saved, such as the
            adapters of a model, ``"**/LoRA_?/**"``.
        except_: A pattern of names, or several: what none of them matches is saved.
        overwrite: Whether to replace a checkpoint at the path. The new one is written beside it
            and put in its place in one step, so that the path has a whole checkpoint at every
            moment, also if the process is killed or the disk fills.

    Returns:
        The absolute path.

    Raises:
        CheckpointExistsError: The path exists and may not be replaced.
        CheckpointMismatchError: Some parameters cannot be saved: they have no values, for
            instance; or a pattern matches nothing.
        CheckpointWriteError: It cannot be written: no permission, a full disk.
        MissingExtraError: Orbax is not installed.

    Warns:
        ShardingWarning: The model is of a library that says what is a statistic, and has some.

    >>> import tempfile
    >>> import jax
    >>> from penzai import pz
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_params(f"{directory}/params", {"w": pz.nx.ones({"a": 2})})
    ...     like = {"w": pz.nx.zeros({"a": 2})}
    ...     restored = restore_params(path, like, jax.make_mesh((8,), ("data",)), {})
    >>> restored["w"].unwrap("a").tolist()
    [1.0, 1.0]
    """
    values = stored_params(model)
    if not values:
        fix = "Give a model, or a dictionary of arrays by name; save any other tree with"
        bare = strip(model)
        if bare is not model and stored_params(bare):
            fix = f"Give the {type(bare).__name__} in it, strip(model), or save it all with"
        raise RuleTypeError(
            f"cannot save to {absolute_path(path)}: this {type(model).__name__} has no parameters. "
            f"{fix} save_train_state."
        )
    leaves = ArraysByName(values, "saving").leaves
    leaves = {name: leaves[name] for name in Selection.read(only, except_).of(leaves)}
    saved = prepare_save(path, leaves, kind="params", overwrite=overwrite).write()
    if left_out := statistics_of(model):
        listed = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        warn_caller(
            [
                "save_params stores parameters alone, and this model has statistics beside them "
                f"({listed}), which are left out. Save all of it with save_train_state(path, "
                "model), and read it with restore_train_state."
            ]
        )
    return saved


@raised_by_the_call
def restore_params(
    path: PathLike,
    model: Any,
    mesh: Mesh | ShardingPlan | None = None,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    plan: ShardingPlan | None = None,
    on_axis_mismatch: AxisMismatch = "error",
    on_dtype_mismatch: DtypeMismatch = "error",
    on_extra: Extra = "error",
    rename_axes: Mapping[str, str] | None = None,
    names: NameRules | None = None,
    only: Patterns | None = None,
    except_: Patterns | None = None,
    others: Others = "error",
    on_block_mismatch: BlockMismatch = "error",
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    verify: bool = True,
) -> Any:
    """Restores parameters straight onto a mesh, whatever mesh they were saved from.

    Every device reads its own part. All that can be wrong is found before any array is read.

    Args:
        path: The checkpoint's directory. Of a whole train state the parameters are taken.
        model: What ``param_dict`` takes: a model, an abstract model, or a dictionary of named
            arrays or structs. It is not changed.
        mesh: The mesh to restore onto, or a plan. Of an Explicit mesh the Auto twin is used.
        rules: Which logical axis goes to which mesh axis; ``None`` maps each to the mesh axis of
            the same name.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        plan: A plan of the model to carry out, instead of mesh, rules and options: everything
            is then laid out as the plan says.
        on_axis_mismatch: ``"transpose"`` reorders parameters whose logical axes were saved in
            another order. Each device transposes its own part.
        on_dtype_mismatch: ``"cast"`` converts to the model's dtype while reading.
        on_extra: ``"ignore"`` leaves parameters in the checkpoint that the model does not have.
        rename_axes: Logical axis names in the checkpoint that have other names in the model, as
            ``{"old": "new"}``.
        names: For patterns of the checkpoint's names, the names in the model:
            ``{"model.layers.*.mlp.w": "blocks/block_*/mlp.w"}``. Each wildcard (``*``, ``?``, and
            ``**`` for any number of parts) is carried over, in order. With None in place of a name
            the parameters stay in the checkpoint; what no pattern matches keeps its name.
        only: A pattern of the model's names, or several: only what one of them matches is restored.
        except_: A pattern of the model's names, or several: what none of them matches is restored.
        others: What the parameters get that are not restored, because of ``only`` or ``except_``,
            or, without these, because the checkpoint does not have them. ``"keep"``: the model's
            own values. A function without arguments that builds the model: what ``sharded_init``
            would give them; no other parameter is computed.
        on_block_mismatch: ``"convert"`` stacks the parameters of blocks, ``block_0/...`` and so on,
            where the model has them stacked, ``blocks/...`` as in ``pz.nn.LayerStack``, and the
            reverse; see ``stack_blocks``.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``, also of constants and state variables.
        verify: Whether to compare the numbers, as they are on the devices, with the checksums that
            were saved with them. Without it damaged numbers go unnoticed.

    Returns:
        The same kind of thing, filled, everything in it in the layout that ``make_plan`` gives.
        Of a model: a new model with new variables of the same metadata and sharing. What was
        frozen stays frozen; the parameters of an abstract model become mutable ones. Constants
        and state variables keep their values, and are put where the plan says.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: The checkpoint is not as it was saved; with one line per parameter
            whose numbers are not.
        CheckpointMismatchError: With one line per parameter that is missing, superfluous, or of
            other logical axes, order, sizes or dtype; with all that is wrong with ``names``; with
            the patterns that match nothing; with those that others have no value for.
        PlanError: Some array has no valid layout, or the plan is of another model.
        MissingExtraError: Orbax is not installed.

    Warns:
        ShardingWarning: The checkpoint was written by plain Orbax, without logical axis names, or
            in format 2, without checksums of its numbers; ``verify=False`` was passed; the
            checkpoint lacks some parameters, which ``others`` supplies, and has some that
            ``on_extra`` leaves; or a rule is nearly the name of a logical axis, as ``make_plan``
            says.

    >>> import tempfile
    >>> import jax
    >>> from penzai import pz
    >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_params(f"{directory}/params", {"w": pz.nx.ones({"a": 4, "b": 8})})
    ...     wanted = {"w": pz.nx.ones({"b": 8, "a": 4})}
    ...     restored = restore_params(
    ...         path, wanted, mesh, {"b": "data"}, on_axis_mismatch="transpose")
    >>> restored["w"].data_array.sharding.spec
    P('data',)
    """
    absolute_path(path)
    tolerance = Tolerance(
        on_axis_mismatch, on_dtype_mismatch, on_extra, rename_axes, names, on_block_mismatch
    )
    selection = Selection.read(only, except_)
    request = PlacingRequest.read(
        "restore_params", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed, plan
    )
    model = without_repeats(model)
    own = ArraysByName(stored_params(model), "restoring")
    refuse_states_without_values(model, "restoring parameters leaves these without values:")
    model_plan = request.plan(model)
    if not own.leaves and not isinstance(model, Mapping):
        raise RuleTypeError(
            f"cannot restore parameters into this {type(model).__name__}: it has none. Give a "
            "model, or a dictionary of arrays by name; restore any other tree with "
            "restore_train_state."
        )
    layouts = layouts_by_name(stored_params(model_plan.starting_shardings()))
    arrays = restore_arrays(
        path,
        "params",
        own.leaves,
        layouts,
        tolerance,
        verify=verify,
        selection=selection,
        supply=supply_of(others, own.leaves, true_layouts(layouts, own.leaves), request.mesh),
    )
    values = own.filled(stored_by(layouts, arrays, "restore_params"))
    return rebuilt(model, values, model_plan.sharding_tree())
