"""Saves models as safetensors files: with Hugging Face's tensors, or with one's own paths and axes.

Tensors are made one by one in host memory and written at once. The path has its old content or the
whole new one at every moment.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from penzai_shard import errors
from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.matching import Options, name_arrays
from penzai_shard.checkpoints.parameters import parameters_of, read_tree
from penzai_shard.checkpoints.records import ArrayRecord, absolute_path, make_record, write_texts
from penzai_shard.checkpoints.replacement import Replacement
from penzai_shard.checkpoints.saving import refuse_existing, undo_on_failure
from penzai_shard.checkpoints.tensor_files import DTYPES, FRACTIONS, INDEX, SUFFIX, is_tensors
from penzai_shard.checkpoints.value_checksums import compute_checksums, plain_context
from penzai_shard.pretrained import models
from penzai_shard.pretrained.families import ApplyScaledRoPE
from penzai_shard.pretrained.model_configs import CONFIG, ModelConfig, read_config
from penzai_shard.progress import progress as draw_progress

_CALLED = "save_safetensors"
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NO_CHECKSUM = "0" * 16  # As long as one.
Records = Mapping[str, ArrayRecord]
# An array that goes into a tensor: its path, its source, and which of that one's tensors it is.
Part = tuple[str, Source, int]

_OTHER_CONFIG = "Give config= the configuration of this model."

# The numbers with which layers compute besides their parameters.
_NUMBERS = (
    (pz.nn.ApplyRoPE, "max_wavelength"),
    (pz.nn.ApplyRoPEToSubset, "max_wavelength"),
    (pz.nn.ApplyRoPEToSubset, "rope_subset_size"),
    (ApplyScaledRoPE, "factor"),
    (pz.nn.RMSStandardize, "epsilon"),
    (pz.nn.Standardize, "epsilon"),
    (pz.nn.ConstantRescale, "by"),
    (pz.nn.TanhSoftCap, "soft_cap"),
    (pz.nn.ApplyCausalSlidingWindowAttentionMask, "sliding_window_size"),
)


def save_safetensors(
    path: Any,
    model: Any,
    *,
    config: Any = None,
    names: Mapping[str, str | None] | None = None,
    dtype: Any = None,
    max_file_bytes: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> str:
    """Saves the parameters of a model as safetensors files.

    With ``config`` the folder is one that Hugging Face's libraries read. Without it the tensors are
    the parameters, and the files say their logical axes: ``load_safetensors(into=)`` and
    ``restore_params`` need no other options for them.

    Args:
        path: The folder to make.
        model: As for ``param_dict``, with values. The devices are those of one process.
        config: The configuration whose model it is, as for ``load_safetensors``; it is copied.
        names: Without ``config``: for a path of the model, or a pattern, the name of the tensor,
            with the wildcards of the pattern in their order; None leaves the parameter out.
        dtype: What numbers with a fraction become.
        max_file_bytes: How large the tensors of one file are together, if there are several.
        overwrite: Whether to replace a folder that holds nothing but such weights.
        progress: Whether to show a bar; by default in a terminal.

    Returns:
        The absolute path.

    Raises:
        CheckpointMismatchError: The model is not that of the configuration; with a problem for each
            difference. Or ``names`` cannot be given so.
        CheckpointWriteError: The path is taken, or cannot be written.
        ShardingError: Some parameters have no values.
        RuleTypeError: Options cannot be read, all of which are in it; there are several processes;
            or safetensors files have no such dtype.

    >>> import tempfile
    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> from penzai_shard.pretrained.loading import load_safetensors
    >>> weights = {"up": pz.nx.ones({"embedding": 4, "neurons": 8})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_safetensors(f"{folder}/weights", weights)
    ...     loaded = load_safetensors(path, into=weights)
    """
    final, dtype, count = absolute_path(path), models.name_dtype(dtype), jax.process_count()
    is_size = type(max_file_bytes) is int and max_file_bytes > 0
    alone = "save_params(path, model); one process can restore that and save it so"
    checks = {
        "dtype": (dtype, dtype in (None, *FRACTIONS), models.DTYPE_FIX),
        "max_file_bytes": (max_file_bytes, max_file_bytes is None or is_size, f"{5 * 10**9}"),
        "config": (config, config is None or names is None, "it only without names="),
        "process_count": (count, count == 1, alone),
    }
    options = Options(_CALLED, names=names, more=checks)
    refuse_existing(final, overwrite, _has_weights_only)
    leaves = parameters_of(read_tree(_CALLED, model)[0])
    found, _ = run_inputs({leaf.path: leaf.value for leaf in leaves}, _CALLED)
    arrays = {leaf.path: leaf.value for leaf in found}
    records = {leaf.path: make_record(leaf) for leaf in leaves}

    replacement = Replacement(final)
    with plain_context(_CALLED):
        if config is None:
            paths = name_arrays(records, options)
            tensors: Records = {name: records[path] for name, path in paths.items()}
            parts: dict[str, list[Part]] = {}
            for name, record in tensors.items():
                order = tuple(range(len(record.shape)))
                parts[name] = [(paths[name], Source((name,), record.shape, order), 0)]
        else:
            config = read_config(config)
            parts, tensors = _find_tensors(config, model, records, arrays)
        tensors = _cast(tensors, dtype)
        total = sum(tensor.nbytes for tensor in tensors.values())
        make = functools.partial(_join_tensor, parts, tensors, arrays)
        with draw_progress(total, "bytes", progress) as bar, undo_on_failure(replacement):
            replacement.begin()
            replacement.new.mkdir()
            _write_files(replacement.new, tensors, make, max_file_bytes or total, bar)
            if config is not None:
                said = {"torch_dtype", "dtype"} & config.given.keys() if dtype else ()
                text = json.dumps({**config.given, **dict.fromkeys(said, dtype)}, indent=2)
                (replacement.new / CONFIG).write_text(text, "utf-8")
            replacement.commit()
    replacement.close()
    return str(final)


def _has_weights_only(folder: pathlib.Path) -> bool:
    names = {file.name for file in folder.glob("*")} - {INDEX, CONFIG}
    return is_tensors(folder) and all(name.endswith(SUFFIX) for name in names)


# Which tensors there are


def _find_tensors(
    config: ModelConfig, model: Any, records: Records, arrays: Mapping[str, Any]
) -> tuple[dict[str, list[Part]], Records]:
    """The tensors that Hugging Face has of a model."""
    own = {path: _read_sizes(record) for path, record in records.items()}
    is_stack = any(models.STACK_AXIS in sizes for sizes in own.values())
    built = models.model_of_config(config, dtype="float32", use_layer_stack=is_stack)
    leaves = parameters_of(read_tree(_CALLED, built)[0])
    wanted = {leaf.path: _read_sizes(make_record(leaf)) for leaf in leaves}
    problems = errors.Problems(f"the model is not that of {config.source}:")
    what = "the configuration makes it {}, and the model has {}"
    problems.compare(wanted, own, what, _OTHER_CONFIG)
    if not problems:
        _check_numbers(model, built, problems)
    problems.raise_if_any(errors.CheckpointMismatchError)

    sources, shapes = models.read_tables(config, records)
    parts: dict[str, list[Part]] = {}
    for path, source in sources.items():
        for number, tensor in enumerate(source.stored):
            parts.setdefault(tensor, []).append((path, source, number))
    tensors = {
        name: ArrayRecord(shapes[name], records[path].dtype, None)
        for name, [(path, *_), *_] in parts.items()
    }
    models.check_tied(
        config, tensors, lambda name: _sum(_join_tensor(parts, tensors, arrays, name)), problems
    )
    problems.raise_if_any(errors.CheckpointMismatchError)
    for name in models.find_tied(config):
        del tensors[name]
    return parts, tensors


def _check_numbers(model: Any, built: Any, problems: errors.Problems) -> None:
    """Whether layers compute with the numbers of a configuration; a dictionary has no layers."""
    for kind, field in _NUMBERS if isinstance(model, pz.nn.Layer) else ():
        layers = (pz.select(x).at_instances_of(kind).get_sequence() for x in (built, model))
        theirs, ours = (np.array([getattr(x, field) for x in side], float) for side in layers)
        # Some of them are rounded to bfloat16.
        if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=0.01, atol=0):
            sides = (np.unique(side).tolist() or "nothing" for side in (theirs, ours))
            what = "the configuration makes it {}, and the model has {}".format(*sides)
            problems.add(f"{kind.__name__}.{field}", what, _OTHER_CONFIG)


def _read_sizes(record: ArrayRecord) -> dict[Any, int]:
    return dict(zip(record.names or range(len(record.shape)), record.shape, strict=True))


def _sum(array: np.ndarray) -> str:
    return compute_checksums({"": array})[""]


def _cast(tensors: Records, dtype: str | None) -> Records:
    """What is written, which is of dtypes that such files have."""
    problems = errors.Problems(f"{_CALLED} cannot write these arrays:")
    found = {}
    for name, record in tensors.items():
        other = dtype if dtype and record.dtype in FRACTIONS else record.dtype
        found[name] = dataclasses.replace(record, dtype=other)
        if record.dtype not in _CODES:
            what = f"safetensors files hold no {record.dtype}"
            problems.add(name, what, "Leave it out with names=.", "dtype")
    problems.raise_if_any(errors.RuleTypeError)
    return found


def _join_tensor(
    parts: Mapping[str, Sequence[Part]], tensors: Records, arrays: Mapping[str, Any], name: str
) -> np.ndarray:
    """A tensor in host memory, made of the arrays that fill it."""
    whole = None
    for path, source, number in parts[name]:
        # The inverse of ``Source.read``: ones are subtracted.
        order = tuple(source.order.index(dim) for dim in sorted(source.order))
        array = np.asarray(_copy_part(arrays[path], number, source.stack, order))
        array = array - np.asarray(source.plus, array.dtype) if source.plus else array
        if source.pick is None:
            whole = array
        else:
            whole = np.empty(source.shape, array.dtype) if whole is None else whole
            dimension, position = source.pick
            np.moveaxis(whole, dimension, 0)[position] = array
    assert whole is not None
    whole = np.ascontiguousarray(whole).reshape(tensors[name].shape)
    return whole.astype(tensors[name].dtype)


@functools.partial(jax.jit, static_argnames=("stack", "order"))
def _copy_part(array: Any, number: Any, stack: int | None, order: tuple[int, ...]) -> Any:
    """An array in another order, of a stack one; made on devices, where it is faster."""
    if stack is not None:
        array = jax.lax.dynamic_index_in_dim(array, number, stack, keepdims=False)
    # An array of JAX keeps what the host has read of it: the host would have the whole model.
    return jnp.copy(array.transpose(order))


# Files


def _write_files(
    folder: pathlib.Path, tensors: Records, make: Callable[[str], np.ndarray], most: int, bar: Any
) -> None:
    """Writes tensors to files of so many bytes each, and where there are several their index."""
    files: list[list[str]] = [[]]
    size = 0
    for name, record in tensors.items():
        size += record.nbytes
        if size > most and files[-1]:
            files.append([])
            size = record.nbytes
        files[-1].append(name)
    homes = {f"model-{i:05}-of-{len(files):05}{SUFFIX}": x for i, x in enumerate(files, 1)}
    homes = homes if len(files) > 1 else {f"model{SUFFIX}": files[0]}

    # Each header has the checksums of all tensors, and is written again once they are known.
    records = {n: dataclasses.replace(x, values=_NO_CHECKSUM) for n, x in tensors.items()}
    texts = write_texts(records)
    for file, names in homes.items():
        with (folder / file).open("wb") as stream:
            stream.write(_make_header(names, tensors, texts))
            for name in names:
                array = make(name)
                bar.advance(array.nbytes)
                records[name] = dataclasses.replace(records[name], values=_sum(array))
                stream.write(array.reshape(-1).view(np.uint8).data)
    texts = write_texts(records)
    for file, names in homes.items():
        with (folder / file).open("r+b") as stream:
            stream.write(_make_header(names, tensors, texts))
    if len(files) > 1:
        total = sum(record.nbytes for record in tensors.values())
        weight_map = {name: file for file, names in homes.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), "utf-8")


def _make_header(
    names: Sequence[str], tensors: Mapping[str, ArrayRecord], texts: Mapping[str, str]
) -> bytes:
    """What stands before the numbers of a file: its length, and JSON."""
    header: dict[str, Any] = {"__metadata__": texts}
    start = 0
    for name in names:
        code, shape = _CODES[tensors[name].dtype], tensors[name].shape
        ends = [start, start := start + tensors[name].nbytes]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": ends}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # Numbers begin where any dtype may.
    return len(text).to_bytes(8, "little") + text
