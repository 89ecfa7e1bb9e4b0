"""Loads weights from safetensors files onto any mesh, into Penzai's models or models of one's own.

Each device gets its own part, read straight from the mapped file, in whatever shape and order the
model wants it. All that can be wrong is found from headers, before any weight is read.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from penzai_shard.checkpoints.matching import match, read_options
from penzai_shard.checkpoints.parameters import read_layout, read_tree, restore_tree
from penzai_shard.checkpoints.records import absolute_path, read_manifest
from penzai_shard.checkpoints.replacement import content_of
from penzai_shard.errors import CheckpointMismatchError, Problem, RuleTypeError
from penzai_shard.meshes import AnyMesh
from penzai_shard.paths import matches
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.pretrained.families import build_model, family_of
from penzai_shard.pretrained.model_configs import ModelConfig, read_config
from penzai_shard.pretrained.tensor_tables import match_tensors
from penzai_shard.processes.agreement import together
from penzai_shard.rules import OnIndivisible

CONFIG = "config.json"

_CALLED = "load_safetensors"
_WHICH_DTYPE = "Write dtype='bfloat16' or dtype='float32'."


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
    vocabulary: int | None = None,
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
    Gemma 1 to 3 and GPT-NeoX. With ``into`` it fills any model. Neither torch nor transformers is
    needed.

    Args:
        path: A safetensors file, an index of several, or their folder.
        mesh: A mesh, or a plan of the model. Without it arrays go to the default device, or where
            those of ``into`` are.
        rules: As for ``make_plan``.
        config: Attributes, the path of a ``config.json`` or of its folder, or a published name; by
            default the ``config.json`` beside the weights.
        into: A model to fill, as for ``restore_params``. It is not changed.
        dtype: What numbers with a fraction become while they are read. By default they stay what
            they are, or become what ``into`` has if ``allow="cast"`` lets them.
        use_layer_stack: Whether the blocks become one ``pz.nn.LayerStack``.
        upcast_activations: Whether the model computes with float32, whatever its parameters are.
        vocabulary: How many tokens the model has, if more than are stored, so that mesh axes
            divide them; those that are added are zeros. ``save_safetensors`` cuts them off.
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
        CheckpointMismatchError: Tensors are missing, left over, or of other shapes; or the
            configuration asks for what Penzai's model does not compute. All of them are in it.
        PlanError, MeshError, RuleTypeError: As ``make_plan``; or an option cannot be read.
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
    tolerance = {"allow": allow, "rename_axes": rename_axes, "names": names, "others": others}
    options = read_options(_CALLED, axes=axes or {}, **tolerance)
    building: dict[str, Any] = {
        "use_layer_stack": use_layer_stack,
        "upcast_activations": upcast_activations,
        "vocabulary": vocabulary,
    }
    given: tuple[Any, ...] = config, *building.values()
    what = "config, use_layer_stack, upcast_activations and vocabulary make another model"
    if into is None:
        given = options.names, options.axes, options.rename_axes, options.keeps_others
        what = "names, axes, rename_axes and others are options of into=model"
    if any(given):
        fix = "Give a model with them, into=model." if into is None else "Leave them out."
        problem = Problem("into", what, fix)
        raise RuleTypeError(f"{_CALLED} cannot read its options:", [problem])
    dtype = read_dtype(_CALLED, dtype)
    find: Any = match
    if into is None:
        with together("looking for the configuration of weights"):
            checked, found = _read_config(path, config, dtype)
        into = build_model(checked, dtype=found, **building)
        find = functools.partial(match_tensors, checked)

    leaves, structure = read_tree(_CALLED, into)
    if dtype is not None:
        options = dataclasses.replace(options, allow=(*options.allow, "cast"))
        leaves = [
            dataclasses.replace(x, dtype=dtype if _has_fractions(x.dtype) else x.dtype)
            for x in leaves
        ]
    relaxed = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed}
    layout = read_layout(_CALLED, into, mesh, rules, axis_name_to_mesh_name, plan=plan, **relaxed)
    reading: dict[str, Any] = {"shown": progress is not False, "find": find}
    return restore_tree(_CALLED, path, leaves, structure, layout, options, verify, **reading)


def read_dtype(called: str, dtype: Any) -> Any:
    """The dtype to which numbers with a fraction are cast, if one is given.

    Raises:
        RuleTypeError: It is none of such numbers.
    """
    try:
        if dtype is None or _has_fractions(dtype):
            return dtype and jnp.dtype(dtype)
    except TypeError:
        pass  # It is no dtype at all.
    problem = Problem("dtype", f"{dtype!r} has no numbers with a fraction", _WHICH_DTYPE)
    raise RuleTypeError(f"{called} cannot read its options:", [problem])


def _has_fractions(dtype: Any) -> bool:
    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))


def _read_config(path: Any, config: Any, dtype: Any) -> tuple[ModelConfig, Any]:
    """The configuration of weights, and the dtype of their model."""
    records = read_manifest(path).records
    content = content_of(absolute_path(path))
    beside = (content if content.is_dir() else content.parent) / CONFIG
    checked = read_config(beside if config is None else config)
    harmless = family_of(checked).harmless
    found = {
        record.dtype
        for name, record in records.items()
        if not any(matches(pattern, name) for pattern in harmless)
    }
    if dtype is None and found not in ({"bfloat16"}, {"float32"}):
        problem = Problem("", f"its tensors are {', '.join(sorted(found))}", _WHICH_DTYPE)
        raise CheckpointMismatchError(f"Penzai has no model like {path}:", [problem])
    return checked, dtype or found.pop()
