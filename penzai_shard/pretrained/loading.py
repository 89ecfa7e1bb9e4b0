"""Weights from safetensors files straight onto a mesh: the one public way in."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax.sharding import Mesh

from penzai_shard.checkpointing.comparison import DtypeMismatch, Extra
from penzai_shard.checkpointing.locations import PathLike, absolute_path
from penzai_shard.checkpointing.name_matching import NameRules, matched_names
from penzai_shard.checkpointing.taking_part import all_restore, layouts_over_processes
from penzai_shard.errors import RuleTypeError, raised_by_the_call, warn_caller
from penzai_shard.planning import PlacingRequest, ShardingPlan
from penzai_shard.pretrained.byte_progress import byte_progress
from penzai_shard.pretrained.conversion import converted_model
from penzai_shard.pretrained.filled_models import ModelToFill
from penzai_shard.pretrained.filling import filled_arrays
from penzai_shard.pretrained.floating_dtypes import floating_dtype
from penzai_shard.pretrained.tensor_files import SafetensorsReader, open_tensors, read_config
from penzai_shard.pretrained.tensor_matching import AxesByPattern, Matching
from penzai_shard.pretrained.tensor_views import TensorView
from penzai_shard.pretrained.verified_reading import VerifyingReader
from penzai_shard.processes import failing_together, refuse_differences
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed

Missing = Literal["error", "keep"]


@raised_by_the_call
def load_safetensors(
    path_or_dir: PathLike,
    mesh: Mesh | ShardingPlan | None = None,
    rules: Any = None,
    *,
    config: Any = None,
    dtype: Any = None,
    into: Any = None,
    use_layer_stack: bool = False,
    upcast_activations_to_float32: bool = False,
    axis_name_to_mesh_name: Any = None,
    plan: ShardingPlan | None = None,
    names: NameRules | None = None,
    axes: AxesByPattern | None = None,
    rename_axes: Mapping[str, str] | None = None,
    on_missing: Missing = "error",
    on_extra: Extra = "error",
    on_dtype_mismatch: DtypeMismatch = "error",
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    verify: bool = True,
    progress: Any = None,
) -> Any:
    """Loads weights from safetensors files, as Hugging Face has them, straight onto a mesh.

    Without ``into`` it makes the Penzai model that ``config.json`` describes, for the families that
    Penzai converts: Llama, Mistral, Gemma 1 to 3, GPT-NeoX. With ``into`` it fills any model.

    Every device gets its own part alone, and every process reads the parts of its own devices.
    All that can be wrong is found from the files' headers, before any weight is read. Neither
    torch nor transformers is needed.

    Args:
        path_or_dir: A safetensors file, an index, or a directory with one file, or several and
            ``model.safetensors.index.json``.
        mesh: The mesh to load onto, or a plan. Of an Explicit mesh the Auto twin is used.
        rules: Which logical axis goes to which mesh axis; ``None`` maps each to the mesh axis of
            the same name.
        config: The configuration of the model, a dictionary or the path of a JSON file; by default
            the ``config.json`` beside the weights.
        dtype: What all floating numbers become, such as ``"bfloat16"``; each part is cast as it is
            read. By default they keep what is stored, and must have the dtypes of ``into``.
        into: The model to fill: a model, an abstract model, or a dictionary of named arrays or
            structs; what ``param_dict`` takes. It is not changed.
        use_layer_stack: Whether the blocks of the model that is made are one
            ``pz.nn.LayerStack``, with the parameters of all blocks in one array.
        upcast_activations_to_float32: Whether the model that is made computes in float32, whatever
            its parameters are.
        axis_name_to_mesh_name: The same as rules under Penzai's name; give one of the two.
        plan: A plan of the model to carry out, instead of mesh, rules and options.
        names: Stored names by pattern, with the names in ``into``, as
            ``{"layers.*.weight": "block_*/w"}``; None leaves tensors in the file.
        axes: The logical axes of stored tensors, by patterns of their names, as for ``name_axes``:
            ``{"layers.*.weight": ("out", "in")}``. A tensor whose axes have another order than
            those of ``into`` is put right. Needed where lengths alone do not show the order; None
            in place of the axes says that it is the one of ``into``. What ``save_safetensors``
            wrote says its axes itself.
        rename_axes: Logical axis names in the files that have other names in ``into``, as
            ``{"old": "new"}``.
        on_missing: ``"keep"`` leaves parameters of ``into`` their values that no tensor goes to.
        on_extra: ``"ignore"`` leaves tensors in the files that the model does not have.
        on_dtype_mismatch: ``"cast"`` converts to the dtypes of ``into`` while reading.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``, also of constants and state variables.
        verify: Whether to compare the numbers with the checksums that ``save_safetensors`` kept;
            files of others have none.
        progress: Whether to show how many bytes are read. By default in a terminal and a notebook;
            True shows lines elsewhere too. Or the ``rich.console.Console`` to show it on.

    Returns:
        The model, everything in it in the layout that ``make_plan`` gives. Of ``into`` the same
        kind of thing, filled, as ``restore_params`` gives it.

    Raises:
        CheckpointNotFoundError: There are no weights at the path.
        CheckpointDamagedError: With one line per file that is not whole, or not as its index says,
            or per tensor whose numbers are not those that were saved.
        CheckpointMismatchError: With one line per parameter or tensor that has no counterpart, or
            one of other axes, sizes or dtype; or whose axes are not clear. Or the configuration is
            of no family that Penzai converts, or asks for what Penzai's model does not do.
        PlanError: Some array has no valid layout, or the plan is of another model.
        MissingExtraError: safetensors is not installed.

    Warns:
        ShardingWarning: A rule is nearly the name of a logical axis, as ``make_plan`` says; or
            ``verify=False`` was passed for files that have checksums.

    >>> import tempfile
    >>> import jax
    >>> import numpy as np
    >>> from penzai import pz
    >>> from safetensors.numpy import save_file
    >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
    >>> wanted = {"up": pz.nx.zeros({"embedding": 4, "neurons": 8})}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     file = f"{directory}/model.safetensors"
    ...     save_file({"mlp.up.weight": np.ones((8, 4), np.float32)}, file)
    ...     loaded = load_safetensors(
    ...         file, mesh, {"neurons": "data"}, into=wanted, names={"mlp.up.weight": "up"},
    ...         axes={"mlp.up.weight": ("neurons", "embedding")})
    >>> loaded["up"].named_shape, loaded["up"].data_array.sharding.spec
    ({'embedding': 4, 'neurons': 8}, P(None, 'data'))
    """
    absolute_path(path_or_dir)  # Refuses what is not a path, before what comes after it.
    request = PlacingRequest.read(
        "load_safetensors", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed, plan
    )
    wanted = _Wanted(
        into,
        config,
        floating_dtype(dtype),
        {
            "use_layer_stack": use_layer_stack,
            "upcast_activations_to_float32": upcast_activations_to_float32,
        },
        {
            "names": names,
            "axes": axes,
            "rename_axes": rename_axes,
            "on_missing": on_missing,
            "on_extra": on_extra,
            "on_dtype_mismatch": on_dtype_mismatch,
        },
    )
    all_restore(str(path_or_dir))
    with failing_together("opening weights"):
        reader = open_tensors(path_or_dir)
        target, views = wanted.matched(reader, request)
        structs = target.structs(views, wanted.dtype)
    refuse_differences(
        "loading weights",
        f"the files at {reader.where} differ between processes:",
        reader.description(),
        "Copy the same files to every host, or read them from a shared disk.",
    )
    refuse_differences(
        "loading weights",
        "the processes of this job do not load the same onto devices of several of them:",
        layouts_over_processes(
            {name: f"{struct.dtype}{list(struct.shape)}" for name, struct in structs.items()},
            {name: struct.sharding for name, struct in structs.items()},
        ),
        "Give the same model, mesh and rules in every process.",
    )
    verifying = VerifyingReader(reader, reader.records if verify else {})
    with failing_together("reading weights"), byte_progress(progress, "loading") as shown:
        arrays = filled_arrays(
            reader, views, structs, shown, verifying, lambda view: reader.forget(view.tensors)
        )
    if verify:
        read = {name: view.tensors[0] for name, view in views.items()}
        verifying.refuse_damaged(read, reader.where)
    elif any(record.values is not None for record in reader.records.values()):
        warn_caller(
            [
                f"the numbers in the weights at {reader.where} are not compared with their "
                "checksums, as verify=False says: damaged ones go unnoticed."
            ]
        )
    return target.filled(arrays)


# What an option is that concerns a model given with into alone.
_DEFAULTS = {
    "names": None,
    "axes": None,
    "rename_axes": None,
    "on_missing": "error",
    "on_dtype_mismatch": "error",
}


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What a caller of ``load_safetensors`` wants to have, and how it is to be found.

    Attributes:
        into: The model to fill, None for the one that the configuration describes.
        config: The configuration, None for the one beside the weights.
        dtype: The dtype of floating numbers, None for that which is stored.
        building: Options for the model that a configuration describes.
        matching: Options for a model that is given.
    """

    into: Any
    config: Any
    dtype: Any
    building: Mapping[str, Any]
    matching: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.into is None:
            given = [name for name, default in _DEFAULTS.items() if self.matching[name] != default]
            why = "of a model of your own; give it too: into=model"
        else:
            given = [name for name, value in self.building.items() if value]
            given += ["config"] if self.config is not None else []
            why = "of the model that a configuration describes, and into is a model already"
        if given:
            are = "is an option" if len(given) == 1 else "are options"
            raise RuleTypeError(f"load_safetensors: {', '.join(given)} {are} {why}.")
        on_missing = self.matching["on_missing"]
        if on_missing not in ("error", "keep"):
            raise RuleTypeError(f"on_missing={on_missing!r}: choose one of 'error', 'keep'.")

    def matched(
        self, reader: SafetensorsReader, request: PlacingRequest
    ) -> tuple[ModelToFill, Mapping[str, TensorView]]:
        """The model, and how its parameters are made of tensors.

        Raises:
            ShardingError: They do not fit, or there is no valid layout.
        """
        if self.into is None:
            config, source = read_config(self.config, reader.where)
            model, views = converted_model(
                config,
                reader.tensors,
                dtype=self.dtype,
                on_extra=self.matching["on_extra"],
                source=source,
                **self.building,
            )
            return ModelToFill(model, request), views
        target = ModelToFill(self.into, request)
        options = dict(self.matching)
        keeps = options.pop("on_missing") == "keep"
        names = matched_names(
            reader.tensors,
            target.leaves,
            options.pop("names"),
            leave_unknown=options["on_extra"] == "ignore",
            source="the file",
        )
        if keeps:
            target.keep([name for name in target.leaves if name not in names])
        views = Matching(names=names, dtype=self.dtype, **options).views(
            reader.tensors,
            reader.records,
            target.leaves,
            f"the weights at {reader.where} do not fit the model:",
        )
        return target, views
