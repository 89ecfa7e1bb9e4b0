"""Loads weights from safetensors files onto any mesh, into Penzai's models or models of one's own.

Each device gets its own part, read straight from the mapped file, in whatever shape and order the
model wants it. All that can be wrong is found from headers, before any weight is read.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from penzai_shard.arrays.structure import Leaf
from penzai_shard.checkpoints.matching import Options, read_options
from penzai_shard.checkpoints.parameters import (
    complete_tree,
    parameters_of,
    read_layout,
    read_tree,
    restore_tree,
)
from penzai_shard.checkpoints.records import ArrayRecord, Manifest, absolute_path, make_record
from penzai_shard.checkpoints.replacement import content_of
from penzai_shard.checkpoints.restoring import restore
from penzai_shard.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    Problem,
    Problems,
    RuleTypeError,
)
from penzai_shard.meshes import AnyMesh
from penzai_shard.paths import matches, nearest
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.pretrained.families import build_model
from penzai_shard.pretrained.model_configs import ModelConfig, read_config
from penzai_shard.pretrained.tensor_tables import match_tensors
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
    options = read_options(
        _CALLED, allow=allow, rename_axes=rename_axes, names=names, others=others
    )
    building: dict[str, Any] = {
        "use_layer_stack": use_layer_stack,
        "upcast_activations": upcast_activations,
        "vocabulary": vocabulary,
    }
    if into is None:
        given: dict[str, Any] = {"names": names, "axes": axes, "rename_axes": rename_axes}
        given["others"] = None if others == "error" else others
        _refuse_options(given, "Give the model too: into=model.")
    else:
        _refuse_options({"config": config, **building}, "Leave out one of it and into=.")
    dtype, axes = _read_dtype(dtype), _read_axes(axes)

    def lay_out(model: Any) -> dict[str, Any]:
        relaxed = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed}
        return read_layout(
            _CALLED, model, mesh, rules, axis_name_to_mesh_name, plan=plan, **relaxed
        )

    reading: dict[str, Any] = {"verify": verify, "shown": progress is not False}
    if into is not None:
        return _fill(path, into, lay_out, options, axes, dtype, reading)

    def build(dtype: Any) -> Any:
        found = _find_config(path) if config is None else config
        return read_config(found), build_model(read_config(found), dtype=dtype, **building)

    return _build_and_fill(path, build, lay_out, options.allow, dtype, reading)


def _refuse_options(given: Mapping[str, Any], fix: str) -> None:
    problems = Problems(f"{_CALLED} cannot take these options together:")
    for name, value in given.items():
        if value:
            problems.add(name, "it is of another kind of model", fix)
    problems.raise_if_any(RuleTypeError)


def _read_dtype(dtype: Any) -> Any:
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = jnp.dtype(int)
    if found is not None and not jnp.issubdtype(found, jnp.floating):
        problem = Problem("dtype", f"{dtype!r} has no numbers with a fraction", _WHICH_DTYPE)
        raise RuleTypeError(f"{_CALLED} cannot read its options:", [problem])
    return found


# Penzai's models


def _build_and_fill(
    path: Any,
    build: Callable[[Any], tuple[ModelConfig, Any]],
    lay_out: Callable[[Any], dict[str, Any]],
    allow: Sequence[str],
    dtype: Any,
    reading: Mapping[str, Any],
) -> Any:
    """The model of a configuration, which is looked for where the weights turn out to be."""
    model: Any = None
    layout: dict[str, Any] = {}

    def choose(manifest: Manifest) -> Any:
        nonlocal model, layout
        headline = f"the weights at {manifest.path} are not those of their configuration:"
        if manifest.kind != "tensors":
            problem = Problem("", "it is a checkpoint", "Write restore_params(path, model).")
            raise CheckpointMismatchError(headline, [problem])
        # Most weights are of bfloat16; paths and shapes are the same in any dtype.
        config, model = build(dtype or "bfloat16")
        records = {leaf.path: make_record(leaf) for leaf in _read_parameters(model)}
        sources = match_tensors(config, manifest.records, records, headline=headline, allow=allow)
        used = {name for source in sources.values() for name in source.stored}
        stored = {name: manifest.records[name].dtype for name in manifest.records if name in used}
        if (found := _find_dtype(stored, dtype, headline)) != "bfloat16":
            _, model = build(found)
        layout = lay_out(model)
        structs = {
            leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout[leaf.path])
            for leaf in _read_parameters(model)
        }
        return sources, structs

    values = restore(_CALLED, path, choose, **reading)
    return complete_tree(*read_tree(_CALLED, model), layout, values)


def _read_parameters(model: Any) -> list[Leaf]:
    return parameters_of(read_tree(_CALLED, model)[0])


def _find_config(path: Any) -> pathlib.Path:
    content = content_of(absolute_path(path))
    file = (content if content.is_dir() else content.parent) / CONFIG
    if not file.is_file():
        fix = "Write config= with its path, its attributes, or a published name."
        problem = Problem(str(file), "it is missing", fix)
        raise CheckpointNotFoundError("the weights have no configuration:", [problem])
    return file


def _find_dtype(stored: Mapping[str, str], wanted: Any, headline: str) -> str:
    """The dtype of the parameters: the one that is asked for, or that of all tensors."""
    problems = Problems(headline)
    for name, dtype in stored.items():
        if not jnp.issubdtype(dtype, jnp.floating):
            fix = "Give weights that are not quantized."
            problems.add(name, f"{dtype} has no numbers with a fraction", fix, "dtype")
    found = {*stored.values()}
    if wanted is None and len(found) > 1:
        what = f"tensors are of several dtypes: {', '.join(sorted(found))}"
        problems.add("", what, _WHICH_DTYPE, "cast")
    elif wanted is None and not found <= {"bfloat16", "float32"}:
        problems.add("", f"Penzai has no models of {found.pop()}", _WHICH_DTYPE, "cast")
    problems.raise_if_any(CheckpointMismatchError)
    return str(wanted or found.pop())


# Models of one's own


def _fill(
    path: Any,
    into: Any,
    lay_out: Callable[[Any], dict[str, Any]],
    options: Options,
    axes: Mapping[str, Any],
    dtype: Any,
    reading: Mapping[str, Any],
) -> Any:
    """A model that is given with values of the tensors."""
    leaves, structure = read_tree(_CALLED, into)
    options = dataclasses.replace(options, finds_order=True)
    if dtype is not None:
        options = dataclasses.replace(options, allow=(*options.allow, "cast"))
        leaves = [
            dataclasses.replace(leaf, dtype=dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
            for leaf in leaves
        ]
    layout, namer = lay_out(into), functools.partial(_name_axes, axes)
    return restore_tree(
        _CALLED, path, leaves, structure, layout, options, name_axes=namer, **reading
    )


def _read_axes(axes: Any) -> Mapping[str, Any]:
    problems = Problems(f"{_CALLED} cannot read its options:")
    fix = "Write axes={'layers.*.weight': ('out', 'in')}, None for a dimension without a name."
    if not isinstance(axes, Mapping | None):
        problems.add("axes", f"it is {axes!r}", fix)
    for pattern, names in (axes or {}).items() if not problems else ():
        if not isinstance(pattern, str) or not isinstance(names, list | tuple):
            problems.add("axes", f"it has {pattern!r}: {names!r}", fix)
    problems.raise_if_any(RuleTypeError)
    return axes or {}


def _name_axes(
    axes: Mapping[str, Sequence[Any]], records: Mapping[str, ArrayRecord]
) -> dict[str, ArrayRecord]:
    """Records of tensors with the logical axes that are given for them."""
    problems = Problems("these logical axes are not those of the tensors:")
    found, used = {}, set()
    for name, record in records.items():
        fitting = [pattern for pattern in axes if matches(pattern, name)]
        used.update(fitting)
        names = tuple(axes[fitting[0]]) if fitting else record.names
        if names is not None and len(names) != len(record.shape):
            fix = f"Give {len(record.shape)} names, None for a dimension without one."
            problems.add(name, f"axes= gives it {names}, and it is {record}", fix, "axes")
        elif record.names not in (None, names):
            what = f"axes= gives it {names}, and it was saved as {record}"
            problems.add(name, what, "Leave it out of axes=; rename_axes= renames.", "axes")
        else:
            found[name] = dataclasses.replace(record, names=names)
    for pattern in axes.keys() - used:
        fix = f"Write {nearest(pattern, records) or next(iter(records), '')!r}."
        problems.add(pattern, "no tensor fits it", fix, "axes")
    problems.raise_if_any(CheckpointMismatchError)
    return found
