"""Saves models as safetensors files: with Hugging Face's tensors, or with one's own paths and axes.

Tensors are made one by one in host memory and written at once. The path has its old content or the
whole new one at every moment.
"""

import dataclasses
import json
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.matching import name_arrays, read_options
from penzai_shard.checkpoints.parameters import parameters_of, read_tree
from penzai_shard.checkpoints.records import (
    ArrayRecord,
    absolute_path,
    make_record,
    write_texts,
)
from penzai_shard.checkpoints.replacement import Replacement
from penzai_shard.checkpoints.saving import refuse_existing, undo_on_failure
from penzai_shard.checkpoints.tensor_files import DTYPES, INDEX, INDEX_SUFFIX, SUFFIX, is_tensors
from penzai_shard.checkpoints.value_checksums import compute_checksums, plain_context
from penzai_shard.errors import (
    CheckpointMismatchError,
    Problem,
    Problems,
    RuleTypeError,
    ShardingError,
)
from penzai_shard.pretrained.families import build_model
from penzai_shard.pretrained.loading import CONFIG
from penzai_shard.pretrained.model_configs import ModelConfig, read_config
from penzai_shard.pretrained.tensor_tables import (
    STACK_AXIS,
    Part,
    find_parts,
    find_tied,
    join_tensor,
    read_tables,
)
from penzai_shard.progress import Bar
from penzai_shard.progress import progress as draw_progress

_CALLED = "save_safetensors"
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NO_CHECKSUM = "0" * 16  # As long as one.
_ALIGNMENT = 8


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
            Tokens that ``vocabulary=`` has added are cut off.
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
        ShardingError: Some parameters have no values, or there are several processes.
        RuleTypeError: An option cannot be read, or safetensors files have no such dtype.
        MissingExtraError: rich is not installed, and a bar is to be shown.

    >>> import tempfile
    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> from penzai_shard.pretrained.loading import load_safetensors
    >>> weights = {"up": pz.nx.ones({"embedding": 4, "neurons": 8})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_safetensors(f"{folder}/weights", weights)
    ...     loaded = load_safetensors(path, into=weights)
    """
    final = absolute_path(path)
    _check_options(final, config, names, dtype, max_file_bytes)
    refuse_existing(final, overwrite, _has_weights_only)
    leaves = parameters_of(read_tree(_CALLED, model)[0])
    records = {leaf.path: make_record(leaf) for leaf in leaves}
    found, _ = run_inputs({leaf.path: leaf.value for leaf in leaves}, _CALLED)
    arrays = {leaf.path: leaf.value for leaf in found}
    checked = None if config is None else read_config(config)

    replacement, threads = Replacement(final), frozenset(threading.enumerate())
    with plain_context(_CALLED):
        if checked is None:
            tensors = _name_tensors(records, names)
        else:
            tensors = _find_tensors(checked, records, arrays)
        tensors = _choose_dtypes(tensors, dtype)
        total = sum(tensor.record.nbytes for tensor in tensors.values())
        with (
            draw_progress(total, "bytes", progress is not False) as bar,
            undo_on_failure(replacement, threads),
        ):
            replacement.begin()
            replacement.new.mkdir()
            _write_files(replacement.new, tensors, arrays, max_file_bytes or total, bar)
            if checked is not None:
                text = json.dumps(dict(checked.given), indent=2)
                (replacement.new / CONFIG).write_text(f"{text}\n", "utf-8")
            replacement.commit()
    replacement.close()
    return str(final)


def _check_options(final: pathlib.Path, config: Any, names: Any, dtype: Any, most: Any) -> None:
    problems = Problems(f"{_CALLED} cannot read its options:")
    if final.suffix == SUFFIX:
        fix = f"Write a folder, for instance {os.fspath(final.with_suffix(''))!r}."
        problems.add("path", "it is that of a file", fix)
    if config is not None and names is not None:
        problems.add("names", "config= has names for the tensors", "Leave out one of them.")
    if most is not None and (not isinstance(most, int) or most < 1):
        problems.add("max_file_bytes", f"it is {most!r}", "Write max_file_bytes=5 * 10**9.")
    if dtype is not None and not _is_float(dtype):
        what = f"{dtype!r} is no dtype of numbers with a fraction that such files hold"
        problems.add("dtype", what, "Write dtype='bfloat16'.")
    problems.raise_if_any(RuleTypeError)
    if jax.process_count() > 1:
        fix = "Write save_params(path, model); one process can restore that and save it so."
        problem = Problem("", "no process has whole arrays where there are several", fix)
        raise ShardingError(f"{_CALLED}:", [problem])


def _is_float(dtype: Any) -> bool:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        return False
    return name in _CODES and jnp.issubdtype(name, jnp.floating)


def _has_weights_only(folder: pathlib.Path) -> bool:
    """Whether nothing but such weights would be lost if a folder is replaced."""
    names = [file.name for file in folder.glob("*")]
    ends = SUFFIX, INDEX_SUFFIX
    return is_tensors(folder) and all(x.endswith(ends) or x == CONFIG for x in names)


# Which tensors there are


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor that is to be written.

    Attributes:
        record: What is to be written, without a checksum.
        parts: The arrays of the model from which it is made.
    """

    record: ArrayRecord
    parts: Sequence[Part]

    def make(self, arrays: Mapping[str, Any]) -> np.ndarray:
        """The tensor in host memory."""

        def read(part: Part) -> np.ndarray:
            array, stack = arrays[part.path], part.source.stack
            if stack is not None:
                # Cut on the devices: the host never has a whole stack.
                cut = jax.lax.dynamic_index_in_dim(array, part.number, stack, keepdims=False)
                return np.asarray(cut)
            return np.asarray(array)

        joined = join_tensor(self.parts, self.record.shape, read)
        return np.ascontiguousarray(joined.astype(self.record.dtype, copy=False))


def _name_tensors(
    records: Mapping[str, ArrayRecord], names: Mapping[str, str | None] | None
) -> dict[str, _Tensor]:
    """Each parameter as a tensor of its own."""
    headline = "the parameters cannot be named so:"
    options = read_options(_CALLED, names=names)
    named = name_arrays(records, options, headline=headline, holder="the model")
    tensors = {}
    for path, name in named.items():
        shape = records[path].shape
        part = Part(path, Source((name,), shape, tuple(range(len(shape)))))
        tensors[name] = _Tensor(records[path], [part])
    return tensors


def _find_tensors(
    config: ModelConfig, records: Mapping[str, ArrayRecord], arrays: Mapping[str, Any]
) -> dict[str, _Tensor]:
    """The tensors that Hugging Face has of a model."""
    headline = f"the model is not that of {config.source}:"
    sizes = {path: _read_sizes(record) for path, record in records.items()}
    tokens = [each["vocabulary"] for each in sizes.values() if "vocabulary" in each]
    wanted = build_model(
        config,
        dtype="float32",
        use_layer_stack=any(STACK_AXIS in each for each in sizes.values()),
        vocabulary=max(config["vocab_size"], *tokens),
    )
    expected = {
        leaf.path: _read_sizes(make_record(leaf))
        for leaf in parameters_of(read_tree(_CALLED, wanted)[0])
    }
    problems = Problems(headline)
    for path in dict.fromkeys([*expected, *sizes]):
        theirs, own = (side.get(path, "nothing") for side in (expected, sizes))
        if theirs != own:
            what = f"the configuration makes it {theirs}, and the model has {own}"
            problems.add(path, what, "Give config= the configuration of this model.")
    problems.raise_if_any(CheckpointMismatchError)

    sources, shapes = read_tables(config, records)
    tensors = {}
    for name, parts in find_parts(sources).items():
        record = ArrayRecord(shapes[name], records[parts[0].path].dtype, None)
        tensors[name] = _Tensor(record, parts)
    for name, other in find_tied(config).items():
        first, second = (_sum(tensors[each].make(arrays)) for each in (name, other))
        if first != second:
            what = f"{config.source} ties it to {other}, and their numbers differ"
            fix = "Write config= with tie_word_embeddings=False."
            problems.add(name, what, fix, "tied")
        del tensors[name]
    problems.raise_if_any(CheckpointMismatchError)
    return tensors


def _read_sizes(record: ArrayRecord) -> dict[Any, int]:
    return dict(zip(record.names or (), record.shape, strict=False))


def _sum(array: np.ndarray) -> str:
    return compute_checksums({"": array})[""]


def _choose_dtypes(tensors: Mapping[str, _Tensor], dtype: Any) -> dict[str, _Tensor]:
    """The tensors with the dtypes in which they are written."""
    problems = Problems(f"{_CALLED} cannot write these arrays:")
    found = {}
    for name, tensor in tensors.items():
        record = tensor.record
        if record.dtype not in _CODES:
            fix = f"Write names={ {tensor.parts[0].path: None} }."
            problems.add(name, f"such files hold no {record.dtype}", fix, "dtype")
        elif dtype is not None and _is_float(record.dtype):
            record = dataclasses.replace(record, dtype=jnp.dtype(dtype).name)
        found[name] = dataclasses.replace(tensor, record=record)
    problems.raise_if_any(RuleTypeError)
    return found


# Files


def _write_files(
    folder: pathlib.Path,
    tensors: Mapping[str, _Tensor],
    arrays: Mapping[str, Any],
    most: int,
    bar: Bar,
) -> None:
    """Writes tensors to files of so many bytes each, and where there are several their index."""
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.record.nbytes
        if size > most and files[-1]:
            files.append([])
            size = tensor.record.nbytes
        files[-1].append(name)
    count = len(files)
    homes = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{count:05}{SUFFIX}" if count > 1 else f"model{SUFFIX}"
        # Wide numbers first, so that each begins at a multiple of its size.
        homes[file] = sorted(
            names, key=lambda name: -jnp.dtype(tensors[name].record.dtype).itemsize
        )

    # Each header has the checksums of all tensors, and is written again once they are known.
    records = {
        name: dataclasses.replace(tensor.record, values=_NO_CHECKSUM)
        for name, tensor in tensors.items()
    }
    texts = write_texts(records)
    for file, names in homes.items():
        with (folder / file).open("wb") as stream:
            stream.write(_make_header({name: records[name] for name in names}, texts))
            for name in names:
                array = tensors[name].make(arrays)
                records[name] = dataclasses.replace(records[name], values=_sum(array))
                stream.write(array.reshape(-1).view(np.uint8).data)
                bar.advance(array.nbytes)
    texts = write_texts(records)
    for file, names in homes.items():
        with (folder / file).open("r+b") as stream:
            stream.write(_make_header({name: records[name] for name in names}, texts))
    if count > 1:
        weight_map = {name: file for file, names in homes.items() for name in names}
        total = sum(record.nbytes for record in records.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), "utf-8")


def _make_header(records: Mapping[str, ArrayRecord], texts: Mapping[str, str]) -> bytes:
    """What stands before the numbers of a file: its length, and JSON."""
    header: dict[str, Any] = {"__metadata__": texts}
    start = 0
    for name, record in records.items():
        ends = [start, start := start + record.nbytes]
        header[name] = {
            "dtype": _CODES[record.dtype],
            "shape": record.shape,
            "data_offsets": ends,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
