"""Loads weights from safetensors files onto any mesh, into Penzai's models or models of one's own.

Each device gets its own part, read straight from the mapped file, in whatever shape and order the
model wants it. All that can be wrong is found from headers, before any weight is read.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penzai_shard.checkpoints.filling import Source, Store, read_checksum
from penzai_shard.checkpoints.matching import Options, match
from penzai_shard.checkpoints.parameters import read_layout, read_tree, restore_tree
from penzai_shard.checkpoints.records import ArrayRecord, read_manifest
from penzai_shard.errors import CheckpointMismatchError, Problem, Problems
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.pretrained import models
from penzai_shard.pretrained.model_configs import CONFIG, ModelConfig, read_config
from penzai_shard.processes.agreement import together
from penzai_shard.rules import OnIndivisible

_CALLED = "load_safetensors"


def load_safetensors(
    path: Any,
    mesh: AnyMesh | ShardingPlan | None = None,
    rules: Any = None,
    *,
    config: Any = None,
    into: Any = None,
    dtype: Any = None,
    use_layer_stack: bool = False,
    upcast_activations: bool = False,
    plan: ShardingPlan | None = None,
    axis_name_to_mesh_name: Any = None,
    names: Mapping[str, str | None] | None = None,
    axes: Mapping[str, Sequence[str | None]] | None = None,
    rename_axes: Mapping[str, str] | None = None,
    others: Literal["error", "keep"] = "error",
    allow: Any = (),
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
    verify: bool = True,
    progress: bool | None = None,
) -> Any:
    """Loads weights as Hugging Face has them straight onto a mesh.

    Without ``into`` it makes Penzai's model of the weights' ``config.json``: of Llama, Mistral,
    Gemma 1 to 3 and GPT-NeoX. The logical axes of its arrays are ``vocabulary``, ``embedding``,
    ``neurons`` and ``projection``, and ``heads`` or, where several queries share keys,
    ``head_groups`` and ``query_heads``; a stack has ``blocks``, too. With ``into`` it fills any
    model. Neither torch nor transformers is needed.

    Args:
        path: A safetensors file, an index of several, or their folder.
        mesh: A mesh, or a plan of the model. Without it arrays go to the default device, or where
            those of ``into`` are.
        rules: As for ``make_plan``.
        config: Attributes, the path of a ``config.json`` or of its folder, or a published name; by
            default the ``config.json`` in the weights' folder.
        into: A model to fill, as for ``restore_params``. It is not changed.
        dtype: Without ``into``: what numbers with a fraction become while they are read, bfloat16
            or float32; by default they stay what they are. With it they become what it has if
            ``allow="cast"`` lets them.
        use_layer_stack: Whether the blocks become one ``pz.nn.LayerStack``.
        upcast_activations: Whether the model computes with float32, whatever its parameters are.
        plan: A plan of the model, in place of mesh, rules and options.
        axis_name_to_mesh_name: The rules under Penzai's name.
        names: With ``into``: as for ``restore_params``, ``{"layers.*.weight": "block_*/w"}``.
        axes: With ``into``: the logical axes of stored tensors by their names or patterns, of which
            the first that fits counts: ``{"layers.*.weight": ("out", "in")}``. Others get theirs
            from their lengths, where these tell.
        rename_axes: With ``into``: for a stored logical axis its name in the model.
        others: With ``into``: ``"keep"`` leaves their values to parameters that are not stored.
        allow: What may differ: ``"extra"`` tensors of which no parameter is made; with ``into`` all
            words of ``restore_params``.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        verify: Whether to compare numbers with the checksums that ``save_safetensors`` keeps.
        progress: Whether to show a bar; by default in a terminal.

    Returns:
        The model, with mutable variables; of ``into`` one of the same kind, as ``restore_params``
        gives it. Any of its arrays can be donated.

    Raises:
        CheckpointNotFoundError: There are no weights, or no configuration.
        CheckpointDamagedError: Files are not whole, or not as they were saved.
        CheckpointMismatchError: Tensors are missing, left over, of other shapes, or differ though
            they are tied; or the configuration asks for what Penzai's model does not compute. All
            of them are in it.
        PlanError, MeshError, RuleTypeError: As ``make_plan``; or options cannot be read, all of
            which are in it; or Penzai has no models of the weights' dtype.
        MissingExtraError: safetensors is not installed.

    >>> import tempfile
    >>> import numpy as np
    >>> from penzai import pz
    >>> from safetensors.numpy import save_file
    >>> model = {"up": pz.nx.zeros({"embedding": 4, "neurons": 8})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"mlp.up.weight": np.ones((8, 4), np.float32)}, f"{folder}/model.safetensors")
    ...     loaded = load_safetensors(
    ...         folder, into=model, names={"mlp.*.weight": "*"}, allow="transpose"
    ...     )
    >>> dict(loaded["up"].named_shape)
    {'embedding': 4, 'neurons': 8}
    """
    building = {"use_layer_stack": use_layer_stack, "upcast_activations": upcast_activations}
    filling = {"rename_axes": rename_axes, "names": names, "others": others, "axes": axes or {}}
    dtype = models.name_dtype(dtype)
    checks = {"dtype": (dtype, dtype in (None, *models.DTYPES), models.DTYPE_FIX)}
    # Some options are those of models that are built, others of models that are filled.
    useless = {"config": config, "dtype": dtype, **building}
    if into is None:
        useless = {**filling, "others": others != "error"}
    fix = f"it only {'with' if into is None else 'without'} into="
    checks |= {name: (value, not value, fix) for name, value in useless.items()}
    options = Options(_CALLED, allow, **filling, verify=verify, progress=progress, more=checks)

    find: Any = match
    with together("looking for weights and their configuration"):
        manifest = read_manifest(path)
        content = pathlib.Path(manifest.path)
        beside = (content if content.is_dir() else content.parent) / CONFIG
        if into is None:
            checked = read_config(beside if config is None else config)
            dtype = dtype or models.find_dtype(checked, manifest.records)
            into = models.model_of_config(checked, dtype=dtype, **building)
            find = functools.partial(_match_tensors, checked, manifest.store)

    leaves, structure = read_tree(_CALLED, into)
    own = {path for path in structure.paths if path.startswith("transformer/")}
    if find is match and not names and own and own.isdisjoint(manifest.records) and beside.exists():
        what = "the tensors have Hugging Face's names, and the model has Penzai's"
        given = repr(str(path)) + (", mesh, rules" if mesh is not None else "")
        fix = f"Write move(load_safetensors({given}), into=model)."
        raise CheckpointMismatchError(f"{_CALLED}:", [Problem("", what, fix)])
    relaxed = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed, "plan": plan}
    layout = read_layout(_CALLED, into, mesh, rules, axis_name_to_mesh_name, **relaxed)
    return restore_tree(manifest, leaves, structure, layout, options, find=find)


def _match_tensors(
    config: ModelConfig,
    store: Store,
    stored: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
    options: Options,
    *,
    headline: str,
    **_: Any,
) -> dict[str, Source]:
    """What each parameter of a configuration's model is read from; otherwise like ``match``.

    Raises:
        CheckpointMismatchError: Tensors are missing, left over, of other shapes, or not tied.
    """
    sources, shapes = models.read_tables(config, wanted)
    tied = models.find_tied(config)
    names = {x: x if x in stored else tied.get(x, x) for x in shapes}
    problems = Problems(headline)
    for tensor, shape in shapes.items():
        record = stored.get(names[tensor])
        if record is None:
            fix = "Give all files of these weights, with the config.json that belongs to them."
            problems.add(tensor, "no file has it", fix, "missing")
        elif record.shape != shape:
            what = f"it is {record}, and {config.source} makes it {[*shape]}"
            problems.add(tensor, what, "Give config= the config.json of these weights.", "sizes")
    left = models.without_buffers(stored).keys() - {*names, *names.values()}
    for tensor in sorted(left) if "extra" not in options.allow else ():
        what = f"no parameter of {config.family} is made of it"
        problems.add(tensor, what, f"Write allow={(*options.allow, 'extra')}.", "extra")
    models.check_tied(config, stored, lambda x: read_checksum(store, x, stored[x].shape), problems)
    problems.raise_if_any(CheckpointMismatchError)
    return {
        path: dataclasses.replace(source, stored=tuple(names[name] for name in source.stored))
        for path, source in sources.items()
    }
