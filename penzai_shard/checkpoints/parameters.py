"""Saves and restores the parameters of a model by path, and exchanges them in memory.

A parameter is known by its path: the label of its variable, or where it stands. State variables,
constants and settings are the model's own: they are not in a checkpoint of parameters.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh

from penzai_shard import errors
from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.kinds import device_dtype, is_deleted, is_struct
from penzai_shard.arrays.statistics import name_statistics
from penzai_shard.arrays.structure import Leaf, Structure
from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.matching import OPTIMIZER, PARAMETERS, Options, match
from penzai_shard.checkpoints.records import ArrayRecord, Manifest, make_record, read_manifest
from penzai_shard.checkpoints.restoring import read_arrays
from penzai_shard.checkpoints.saving import begin_save
from penzai_shard.checkpoints.value_checksums import plain_context
from penzai_shard.errors import Problem, Problems
from penzai_shard.meshes import AnyMesh, auto_context, on_auto_twin
from penzai_shard.placement.place import check_devices
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import plan_tree
from penzai_shard.processes.agreement import together
from penzai_shard.processes.arrays import put
from penzai_shard.rules import OnIndivisible
from penzai_shard.surgery.inserted import flatten_bare

# In memory


def param_dict(model: Any) -> dict[str, Any]:
    """The parameters of a model by path.

    For another library's checkpoints, and to look at them. Layers that are inserted or wrapped do
    not change it.

    Args:
        model: A model of any library, with arrays, structs, or uninitialised parameters of
            Penzai's first API; or a tree of arrays, all of which are then parameters.

    Returns:
        Arrays with names as ``pz.nx.NamedArray``, others as plain arrays.

    Raises:
        ShardingError: Two parameters have one path, or names cannot be read.
        RuleTypeError: It is no model, or has no arrays.

    >>> from penzai import pz
    >>> layer = pz.nn.AddBias.from_config("up", jax.random.key(0), {"neurons": 8})
    >>> {path: dict(value.named_shape) for path, value in param_dict(layer).items()}
    {'up.bias': {'neurons': 8}}
    """
    from penzai_shard.readers.penzai import make_named

    return {
        leaf.path: leaf.value if leaf.names is None else make_named(leaf.value, leaf.names)
        for leaf in parameters_of(read_tree("param_dict", model)[0])
    }


def with_params(model: Any, params: Any) -> Any:
    """The model with other values in its parameters.

    Args:
        model: As for ``param_dict``. It is not changed, and shares no variable with the result.
        params: A value for each parameter by path, with the same axes and lengths; dtypes may
            differ. Or another model with the same parameters.

    Returns:
        A model of the same kind. Shared parameters stay shared, frozen ones frozen; parameters that
        were structs are mutable, and those of Penzai's first API are initialised.

    Raises:
        CheckpointMismatchError: With a problem for each parameter that is missing, superfluous, or
            of other axes or lengths.

    >>> from penzai import pz
    >>> layer = pz.nn.AddBias.from_config("up", jax.random.key(0), {"neurons": 2})
    >>> other = with_params(layer, {"up.bias": pz.nx.ones({"neurons": 2})})
    >>> param_dict(other)["up.bias"].unwrap("neurons").tolist()
    [1.0, 1.0]
    """
    leaves, structure = read_tree("with_params", model)
    given = parameters_of(read_tree("with_params", params)[0])
    own, others = (
        {leaf.path: ArrayRecord(leaf.shape, "array", leaf.names) for leaf in side}
        for side in (parameters_of(leaves), given)
    )
    problems = Problems("these values are not those of the model's parameters:")
    what = "the model has {}, and the values have {}"
    problems.compare(own, others, what, "Give the paths and axes of param_dict(model).")
    problems.raise_if_any(errors.CheckpointMismatchError)
    return fill_tree(leaves, structure, {leaf.path: leaf.value for leaf in given})


def restore_structs(
    model: Any,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
) -> dict[str, Any]:
    """What Orbax needs to restore ``param_dict(model)`` onto a mesh.

    Args:
        model: As for ``param_dict``; values are not looked at.
        mesh: A mesh.
        rules: As for ``make_plan``.
        axis_name_to_mesh_name: The same under Penzai's name.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Returns:
        ``param_dict(model)`` with a ``jax.ShapeDtypeStruct``, which carries its sharding, in place
        of each array: for ``checkpointer.restore(path, args=StandardRestore(structs))``, where
        ``param_dict(model)`` was saved. What ``save_params`` wrote, ``restore_params`` restores.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``.

    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 4}, abstract=True)
    >>> structs = restore_structs({"w": pz.nx.ones({"a": 2, "b": 8})}, mesh, {"b": "data"})
    >>> structs["w"].data_array.sharding.spec
    P(None, 'data')
    """
    relaxed = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed}
    request = arguments.read("restore_structs", mesh, rules, axis_name_to_mesh_name, **relaxed)
    structs: dict[str, Any] = plan_tree(param_dict(model), request).restore_structs()
    return structs


# On the disk


def save_params(
    path: Any, model: Any, *, only: Any = None, except_: Any = None, overwrite: bool = False
) -> str:
    """Saves the parameters of a model.

    State variables, such as the running means of a batch norm, are not among them:
    ``save_train_state(path, model)`` saves every array of a tree.

    Args:
        path: The directory to make; with several processes, one that all of them see. With one,
            also a url of an object store, ``gs://bucket/run`` or ``s3://bucket/run``, at which
            nothing is yet.
        model: As for ``param_dict``, with values.
        only: A pattern of paths, or several: what one of them fits is saved, for instance the
            adapters of a model, ``"**/LoRA_?/**"``.
        except_: A pattern of paths, or several, that are not saved.
        overwrite: Whether to replace a checkpoint at the path. It holds a whole checkpoint, the old
            one or the new one, at every moment.

    Returns:
        The absolute path.

    Raises:
        CheckpointWriteError: The path is taken, or cannot be written.
        ShardingError: Some parameters have no values, as they are shapes, or deleted.
        SelectionError: A pattern fits no parameter.
        RuleTypeError: It is no model, or has no arrays.

    >>> import tempfile
    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_params(f"{folder}/params", {"w": pz.nx.ones({"a": 8})})
    ...     restored = restore_params(path, {"w": pz.nx.zeros({"a": 8})}, mesh, {"a": "data"})
    >>> restored["w"].data_array.sharding.spec, float(restored["w"].data_array.sum())
    (P('data',), 8.0)
    """
    called = "save_params"
    options = Options(called, only=only, except_=except_)
    parameters = parameters_of(read_tree(called, model)[0])
    chosen = set(options.choose([leaf.path for leaf in parameters]))
    saved = [leaf for leaf in parameters if leaf.path in chosen]
    return begin_save(called, path, saved, "params", overwrite=overwrite)()


def restore_params(
    path: Any,
    model: Any,
    mesh: AnyMesh | ShardingPlan | None = None,
    rules: Any = None,
    *,
    plan: ShardingPlan | None = None,
    axis_name_to_mesh_name: Any = None,
    rename_axes: Mapping[str, str] | None = None,
    names: Mapping[str, str | None] | None = None,
    only: Any = None,
    except_: Any = None,
    others: Literal["error", "keep"] = "error",
    allow: Any = (),
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
    verify: bool = True,
) -> Any:
    """Restores parameters straight onto a mesh, whatever mesh they were saved from.

    Each device reads its own part. Nothing is read before every difference between the checkpoint
    and the model is known.

    Args:
        path: A checkpoint of ``save_params``, of ``save_train_state``, whose parameters are taken,
            or of plain Orbax; one of ours in an object store, ``gs://bucket/run`` or
            ``s3://bucket/run``; or a safetensors file, an index of several, or their folder. If
            a safetensors file is cut while it is read, the system ends the process by SIGBUS.
        model: As for ``param_dict``, also with structs for arrays. It is not changed.
        mesh: A mesh, or a plan of the model. Without it arrays go where those of the model are.
        rules: As for ``make_plan``.
        plan: A plan of the model, in place of mesh, rules and options.
        axis_name_to_mesh_name: The rules under Penzai's name.
        rename_axes: For a logical axis of the checkpoint its name in the model.
        names: For a path of the checkpoint, or a pattern, the path in the model, with the
            wildcards of the pattern in their order: ``{"layers.*.w": "net/block_*/w"}``; None
            leaves the array in the checkpoint.
        only: A pattern of the model's paths, or several, that are restored.
        except_: A pattern of the model's paths, or several, that are not.
        others: ``"keep"`` leaves their own values to parameters that are not asked for, or, where
            all are, not stored: the adapters of a model whose base is restored.
        allow: What may differ: ``"transpose"`` another order of axes, ``"cast"`` another dtype,
            ``"extra"`` arrays that the model does not have, ``"blocks"`` blocks that are stacked
            on one side only.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        verify: Whether to compare the numbers that are read with the checksums of those saved.

    Returns:
        A model of the same kind with new variables: mutable where they were mutable or structs.
        State variables and constants are the model's own, laid out too.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointMismatchError: Paths, axes, lengths, dtypes or keys differ; with a problem for
            each difference.
        CheckpointDamagedError: The checkpoint is not as it was saved.
        PlanError, MeshError, RuleTypeError: As ``make_plan``; or an option cannot be read.
        SelectionError: A pattern of ``only`` or ``except_`` fits no parameter.

    Warns:
        ShardingWarning: The checkpoint stores no logical axes, as those of plain Orbax, or as
            safetensors files of others.

    >>> import tempfile
    >>> from penzai import pz
    >>> weights = {"w": pz.nx.ones({"a": 8, "b": 2})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_params(f"{folder}/params", weights)
    ...     turned = {"w": pz.nx.zeros({"b": 2, "a": 8})}
    ...     restored = restore_params(path, turned, allow="transpose")
    >>> dict(restored["w"].named_shape)
    {'b': 2, 'a': 8}
    """
    called, relaxed = "restore_params", {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed}
    options = Options(called, allow, rename_axes, names, only, except_, others, verify=verify)
    leaves, structure = read_tree(called, model)
    layout = read_layout(called, model, mesh, rules, axis_name_to_mesh_name, plan=plan, **relaxed)
    return restore_tree(path, leaves, structure, layout, options)


# Any tree


def read_tree(called: str, tree: Any) -> tuple[list[Leaf], Structure]:
    """Takes a tree apart whose arrays are known by path, whatever edits put around its layers.

    What an optimizer keeps has the logical axes of its parameters.

    Raises:
        RuleTypeError: It has no arrays, or something stands where one should be.
        ShardingError: Two arrays have one path.
    """
    arguments.check_tree(called, tree)
    leaves, structure = flatten_bare(tree)
    structure.check_paths()
    problems = Problems(f"{called} needs a model, or a dictionary of arrays:")
    problems.extend(structure.problems)
    for leaf in leaves or [Leaf("", None, (), None, tree)]:
        if leaf.dtype is None or not leaf.path:
            what = f"this {type(leaf.value).__name__} is not one"
            fix = "Write {'name': array}."
            if leaf.dtype is None and called.startswith(("save_", "restore_")) and not leaf.path:
                fix = f"Write {called}(path, tree): the path stands first, then the tree."
            problems.add(leaf.path, what, fix)
    problems.raise_if_any(errors.RuleTypeError)
    leaves = [dataclasses.replace(leaf, dtype=device_dtype(leaf.dtype)) for leaf in leaves]
    return name_statistics(leaves), structure


def parameters_of(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The parameters among the arrays of a model: all arrays, if its library tells no roles."""
    has_roles = any(leaf.role for leaf in leaves)
    return [leaf for leaf in leaves if leaf.role == "parameter" or not has_roles]


def paths_with_values(leaves: Sequence[Leaf]) -> list[str]:
    """The paths of arrays that are neither structs nor donated."""
    return [x.path for x in leaves if not (is_struct(x.value) or is_deleted(x.value))]


def is_train_state(paths: Collection[str]) -> bool:
    """Whether the arrays are those of a train state, of this library or of another."""
    return "step" in paths and any(path.startswith((PARAMETERS, OPTIMIZER)) for path in paths)


def refuse_other_kind(headline: str, first: Collection[str], second: Collection[str]) -> None:
    """Refuses two sides of which only one has the arrays of a train state.

    Raises:
        CheckpointMismatchError: They are so.
    """
    if is_train_state(first) != is_train_state(second):
        fix = "Give the model: restore_params(path, state.model), or move(state.model, into)."
        problem = Problem("", "only one of the two is a train state", fix, "kind")
        raise errors.CheckpointMismatchError(headline, [problem])


def fill_tree(leaves: Sequence[Leaf], structure: Structure, values: Mapping[str, Any]) -> Any:
    """The tree with other values by path, in new variables; those around structs become mutable."""
    filled = [values.get(leaf.path, leaf.value) for leaf in leaves]
    # Structs can only be frozen.
    if any(is_struct(leaf.value) for leaf in leaves):
        return structure.fill(filled, live=("parameter", "state"))
    return structure.fill_alike(filled)


def read_layout(
    called: str, tree: Any, mesh: Any, *rules: Any, plan: Any = None, **relaxed: Any
) -> dict[str, Any]:
    """The sharding of each array by path: planned, or else the one that it has already.

    Args:
        called: The function that was called, for messages.
        tree: The arrays, or their shardings.
        mesh: A mesh, or None.
        *rules: Rules, or None, under each of their two names.
        plan: A plan, or None.
        **relaxed: What to do with arrays that rules do not fit.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``.
    """
    if all(given is None for given in (mesh, plan, *rules)):
        own = {
            leaf.path: leaf.value if leaf.dtype is None else getattr(leaf.value, "sharding", None)
            for leaf in flatten_bare(tree)[0]
        }
        if any(isinstance(getattr(s, "mesh", None), AbstractMesh) for s in own.values()):
            what, fix = "arrays lie on a mesh without devices", "Give mesh=make_mesh({...})."
            raise errors.MeshError(f"{called}:", [Problem("", what, fix)])
        # None is the default device.
        return {path: on_auto_twin(sharding) for path, sharding in own.items()}
    request = arguments.read(called, mesh, *rules, plan=plan, **relaxed)
    check_devices(request)
    planned = zip(flatten_bare(tree)[0], plan_tree(tree, request).leaves, strict=True)
    return {leaf.path: own.sharding for leaf, own in planned}


def find_parameters(
    stored: Mapping[str, ArrayRecord], wanted: Collection[str], others: Collection[str]
) -> tuple[str, dict[str, ArrayRecord]]:
    """The parameters in a checkpoint of a whole tree, and what their names begin with there."""
    start = len(PARAMETERS)
    below = {name[start:]: x for name, x in stored.items() if name.startswith(PARAMETERS)}
    if below and stored.keys().isdisjoint(wanted):
        return PARAMETERS, below
    # It was a model, with its state variables.
    return "", {name: record for name, record in stored.items() if name not in others}


def restore_tree(
    path: Any,
    leaves: Sequence[Leaf],
    structure: Structure,
    layout: Mapping[str, Any],
    options: Options,
    *,
    is_state: bool = False,
    free: Any = (),
    find: Callable[..., dict[str, Source]] = match,
) -> Any:
    """A tree with the arrays of a checkpoint, read straight onto their devices.

    Args:
        path: The checkpoint, or what it holds.
        leaves: The arrays of the tree.
        structure: The rest of the tree.
        layout: The sharding of each array by path.
        options: See ``match``; and whether to compare checksums.
        is_state: Whether all arrays but constants are read, or parameters only; the tree gets
            copies of its own other arrays.
        free: Arrays that are deleted once the checkpoint is found to fit.
        find: Finds what fills each array, like ``match``.

    Raises:
        CheckpointMismatchError: The checkpoint does not fit.
        ShardingError: Arrays that are not read have no values.
    """
    wanted = [x for x in leaves if x.role != "constant"] if is_state else parameters_of(leaves)
    records = {leaf.path: make_record(leaf) for leaf in wanted}
    others = {leaf.path: leaf.value for leaf in leaves if leaf.path not in records}
    run_inputs(others, options.called)
    own = paths_with_values(wanted)

    with together("reading what a checkpoint holds"), plain_context(options.called):
        manifest = path if isinstance(path, Manifest) else read_manifest(path)
        headline = f"the checkpoint at {manifest.path} does not fit:"
        start, stored = "", manifest.records
        if not options.names and (is_state or is_train_state(structure.paths)):
            refuse_other_kind(headline, stored, structure.paths)
        if manifest.kind == "train_state" and not is_state:
            start, stored = find_parameters(stored, records, others)
        sources = find(stored, records, options, headline=headline, own=own)
    first = {name: stored[source.stored[0]] for name, source in sources.items()}
    # What others wrote has no checksums, and no names that could be absent on purpose.
    if any(
        x.names is None and (options.axes is None if records[name].names else not x.values)
        for name, x in first.items()
    ):
        what = "stores no logical axis names of these arrays: only their shapes were compared"
        errors.warn_caller([f"the checkpoint at {manifest.path} {what}."])
    pairs = {}
    for leaf in wanted:
        if source := sources.get(leaf.path):
            source = dataclasses.replace(source, stored=tuple(start + x for x in source.stored))
            sharding = layout[leaf.path]
            struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            pairs[leaf.path] = source, struct
    values: dict[str, Any] = read_arrays(manifest, pairs, options, free)
    with auto_context():
        for leaf in leaves:
            if leaf.path not in values:
                target = layout[leaf.path]
                value = put([leaf.value], [target])[0] if target else leaf.value
                # Without a copy, donating the new tree would delete arrays of the given one.
                values[leaf.path] = jax.device_put(value, target, may_alias=False)
    return fill_tree(leaves, structure, values)
