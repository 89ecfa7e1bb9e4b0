"""Arrays into safetensors files, as Hugging Face has them: the one public way out."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard.checkpointing.array_records import ArrayRecord, record_of
from penzai_shard.checkpointing.arrays_by_name import ArraysByName
from penzai_shard.checkpointing.locations import PathLike, absolute_path, is_remote
from penzai_shard.checkpointing.name_matching import NameRules
from penzai_shard.checkpointing.orbax_store import unsavable
from penzai_shard.checkpointing.padded_layouts import leaf_to_save
from penzai_shard.checkpointing.parameter_dict import stored_params
from penzai_shard.checkpointing.replacement import Replacement, where_content_is
from penzai_shard.checkpointing.taking_part import all_save, refuse_other_arrays_elsewhere
from penzai_shard.checkpointing.value_checksums import checksums_of, sums_of
from penzai_shard.checkpointing.write_failures import raise_write_failure
from penzai_shard.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointWriteError,
    RuleTypeError,
    ShardingError,
    raise_all,
    require_extra,
)
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.pretrained.axis_metadata import SavedRecords, metadata_of
from penzai_shard.pretrained.byte_progress import ByteProgress, byte_progress
from penzai_shard.pretrained.floating_dtypes import floating_dtype
from penzai_shard.pretrained.new_names import new_names
from penzai_shard.pretrained.safetensors_header import DTYPES, METADATA, SUFFIX
from penzai_shard.pretrained.weight_locations import INDEX, ONE_FILE
from penzai_shard.pretrained.whole_arrays import whole_array
from penzai_shard.processes import failing_together, on_first_process

MAX_FILE_BYTES = 384 * 2**20
"""How large a file becomes by default: so much is in host memory at once."""

_OWN_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def save_safetensors(
    path: PathLike,
    model: Any,
    *,
    names: NameRules | None = None,
    dtype: Any = None,
    max_file_bytes: int | None = None,
    overwrite: bool = False,
    progress: Any = None,
) -> str:
    """Saves the parameters of a model as safetensors files, which any library reads.

    The files also say what the format has no place for: the logical axes of each array, and a
    checksum of its numbers. ``load_safetensors`` puts an order of axes right by them, and refuses
    what is damaged.

    Args:
        path: The directory to make; or a path that ends in ``.safetensors``, to make one file. In
            a job of several processes all must save, to the same path, and the first one writes.
        model: What ``param_dict`` takes: a model, or a dictionary of arrays by name; sharded or
            not.
        names: Names in the files, by patterns of the model's, as ``{"block_*/w": "layers.*.w"}``;
            None in place of a name leaves an array out. Others keep their names.
        dtype: What all floating numbers become, such as ``"bfloat16"``; by default they stay as
            they are.
        max_file_bytes: How large a file of a directory may become. So many bytes are in host
            memory at once, beside the model; an array that is larger has a file of its own. 384
            MiB by default. One file, where the path is one, takes whatever it needs.
        overwrite: Whether to replace what ``save_safetensors`` wrote to the path before. The new
            files are written beside it, and put in its place in one step.
        progress: Whether to show how many bytes are written, as for ``load_safetensors``.

    Returns:
        The absolute path. A directory has ``model.safetensors``, or several files and their index
        in Hugging Face's form, ``model.safetensors.index.json``.

    Raises:
        CheckpointExistsError: The path exists and may not be replaced.
        CheckpointMismatchError: With one line per array that cannot be saved: it has no values, or
            a dtype that the format does not have; or two would have one name.
        CheckpointWriteError: It cannot be written: no permission, a full disk.
        MissingExtraError: safetensors is not installed.

    >>> import tempfile
    >>> from penzai import pz
    >>> from penzai_shard.pretrained.loading import load_safetensors
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_safetensors(f"{directory}/weights", {"w": pz.nx.ones({"a": 2, "b": 8})})
    ...     wanted = {"w": pz.nx.zeros({"b": 8, "a": 2})}
    ...     loaded = load_safetensors(path, mesh, {"b": "data"}, into=wanted)
    >>> loaded["w"].named_shape, loaded["w"].data_array.sharding.spec
    ({'b': 8, 'a': 2}, P('data',))
    """
    require_extra("safetensors", "safetensors")
    where = absolute_path(path)
    is_file = where.endswith(SUFFIX)
    size = _file_size(max_file_bytes, is_file)
    dtype = floating_dtype(dtype)
    all_save(where, {"overwrite": str(overwrite), "max_file_bytes": str(max_file_bytes)})
    with failing_together("saving weights"):
        _refuse_existing(where, is_file, overwrite)
        arrays = _arrays_to_save(where, model, names, dtype)
    refuse_other_arrays_elsewhere(
        where,
        {name: array.leaf for name, array in arrays.items()},
        {name: array.record for name, array in arrays.items()},
    )
    files = _divided(arrays, size)
    with byte_progress(progress, "saving") as shown:
        shown.begin(sum(array.size for array in arrays.values()))
        with _written_beside(where, is_file, overwrite, shown.total) as beside:
            _write(files, beside, is_file, shown)
    return where


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array to be saved.

    Attributes:
        leaf: The array in the model.
        record: What is said of it in the file, but for its checksum.
    """

    leaf: NamedLeaf
    record: ArrayRecord

    @property
    def is_cast(self) -> bool:
        """Whether it has another dtype in the file."""
        return self.record.dtype != str(self.leaf.dtype)

    @property
    def size(self) -> int:
        """Its size in the file in bytes."""
        return math.prod(self.record.shape) * np.dtype(self.record.dtype).itemsize


def _file_size(given: Any, is_file: bool) -> float:
    if given is None:
        return math.inf if is_file else MAX_FILE_BYTES
    if is_file:
        raise RuleTypeError(
            "max_file_bytes is an option of a directory, and the path is that of one file. Give "
            f"the path of a directory, without {SUFFIX}."
        )
    if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
        raise RuleTypeError(f"max_file_bytes={given!r}: give a number of bytes, such as 5 * 2**30.")
    return given


def _refuse_existing(where: str, is_file: bool, overwrite: bool) -> None:
    """Refuses a path at which something is that may not be replaced.

    Raises:
        CheckpointExistsError: There is.
        CheckpointWriteError: It is not on a file system.
    """
    if is_remote(where):
        raise CheckpointWriteError(
            f"cannot save to {where}: weights are written to a file system. Save to a local disk, "
            "and copy them."
        )
    place = where_content_is(pathlib.Path(os.path.realpath(where)))
    if not os.path.lexists(place):
        return
    others = (
        []
        if is_file or not place.is_dir()
        else sorted(entry.name for entry in place.iterdir() if not _OWN_FILES.fullmatch(entry.name))
    )
    if not overwrite:
        reason = "it exists. Pass overwrite=True to replace it, or choose another path."
    elif is_file and not place.is_file():
        reason = "it is a directory, and its name is that of a file. Choose another path."
    elif not is_file and not place.is_dir():
        reason = "it is a file, and weights are saved as a directory. Choose another path."
    elif others:
        # Replacing removes the whole directory.
        reason = (
            f"it has {others[0]} too, so overwrite=True does not remove it. Choose a new "
            f"directory: {where.rstrip('/')}_weights"
        )
    else:
        return
    raise CheckpointExistsError(f"cannot save to {where}: {reason}")


def _arrays_to_save(where: str, model: Any, names: Any, dtype: Any) -> dict[str, _Array]:
    """The arrays by their names in the files.

    Raises:
        CheckpointMismatchError: Some cannot be saved.
    """
    leaves = ArraysByName(stored_params(model), "saving").leaves
    if not leaves:
        raise RuleTypeError(
            f"cannot save to {where}: this {type(model).__name__} has no parameters. Give a model, "
            "or a dictionary of arrays by name."
        )
    chosen = new_names(list(leaves), names)
    arrays, problems = {}, []
    for name, new in chosen.items():
        record = record_of(leaves[name])
        if dtype is not None and jax.numpy.issubdtype(leaves[name].dtype, jax.numpy.floating):
            record = dataclasses.replace(record, dtype=str(dtype))
        arrays[new] = _Array(leaves[name], record)
        problem = _not_of_the_format(name, record) or unsavable(name, leaves[name])
        problems += [problem] if problem else []
        if new == METADATA:
            problems.append(f"{name}: no tensor may be called {new}. Give it another name.")
    raise_all(CheckpointMismatchError, f"cannot save to {where}:", problems)
    return {
        new: dataclasses.replace(array, leaf=leaf_to_save(array.leaf))
        for new, array in arrays.items()
    }


def _not_of_the_format(name: str, record: ArrayRecord) -> str:
    """Why safetensors cannot hold an array; empty if it can."""
    if record.key_impl is not None:
        return (
            f"{name}: is a random key, and safetensors holds numbers alone. Save its numbers, "
            "jax.random.key_data(key), or all of it with save_params."
        )
    if record.dtype in DTYPES.values():
        return ""
    fix = next(
        (fix for start, fix in _FITTING.items() if record.dtype.startswith(start)), "float32"
    )
    return (
        f"{name}: is of {record.dtype}, which safetensors does not have. Give it as {fix}, "
        "or save it with save_params."
    )


# A dtype of the format that holds all numbers of dtypes which begin so.
_FITTING = {
    "int": "int8",
    "uint": "uint8",
    "complex": "two arrays, its real and its imaginary part",
    "float8_e3m4": "float16",
    "float": "bfloat16",
}


def _divided(arrays: Mapping[str, _Array], size: float) -> list[dict[str, _Array]]:
    """The arrays file by file, in their order."""
    files: list[dict[str, _Array]] = [{}]
    total = 0
    for name, array in arrays.items():
        if files[-1] and total + array.size > size:
            files.append({})
            total = 0
        files[-1][name] = array
        total += array.size
    return files


@contextlib.contextmanager
def _written_beside(
    where: str, is_file: bool, overwrite: bool, size: int
) -> Iterator[pathlib.Path]:
    """Where to write what is then put at a path in one step, or not at all."""
    replacement = Replacement(where)
    try:
        on_first_process("beginning to save weights", replacement.begin)
        # Once more, now that nobody else can save to the path.
        on_first_process(
            "beginning to save weights", lambda: _refuse_existing(where, is_file, overwrite)
        )
        yield replacement.new
        on_first_process("replacing weights", replacement.commit)
    except (OSError, _safetensors_error()) as error:
        if isinstance(error, ShardingError):
            raise
        raise_write_failure(error, where, size)
    finally:
        replacement.discard()


def _safetensors_error() -> type[Exception]:
    error: type[Exception] = require_extra("safetensors", "safetensors").SafetensorError
    return error


def _write(
    files: Sequence[Mapping[str, _Array]], beside: pathlib.Path, is_file: bool, shown: ByteProgress
) -> None:
    """Writes all files, one after the other, each from arrays that are in host memory at once."""
    save = secrets.token_hex(8)
    weight_map: dict[str, str] = {}
    if not is_file:
        on_first_process("writing weights", beside.mkdir)
    for number, arrays in enumerate(files, 1):
        name = ONE_FILE
        if len(files) > 1:
            name = f"model-{number:05}-of-{len(files):05}{SUFFIX}"
        weight_map |= dict.fromkeys(arrays, name)
        path = beside if is_file else beside / name
        # What devices need to add up is given back before host memory is taken.
        values = _values_on_devices(arrays)
        host = _in_host_memory(arrays)
        records = _records(arrays, host, values)
        on_first_process(
            "writing weights",
            functools.partial(_write_file, path, host, SavedRecords(records, save)),
        )
        del host  # Before the next file's arrays are there.
        shown.advance(sum(array.size for array in arrays.values()))
    if len(files) > 1:
        total = sum(array.size for arrays in files for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        on_first_process("writing weights", functools.partial(_write_index, beside / INDEX, index))


def _in_host_memory(arrays: Mapping[str, _Array]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays as they are in the file, on the first process; the others give their parts."""
    host = {}
    for name, array in arrays.items():
        values = whole_array(array.leaf.array, wanted=jax.process_index() == 0)
        if values is not None:
            # The format has the order of rows alone.
            host[name] = np.asarray(values, np.dtype(array.record.dtype), order="C")
    return host


def _values_on_devices(arrays: Mapping[str, _Array]) -> dict[str, tuple[str, ...]]:
    """The checksums of arrays that are on devices as they are saved, added up there."""
    values: dict[str, tuple[str, ...]] = {}
    for name, array in arrays.items():
        if isinstance(array.leaf.array, jax.Array) and not array.is_cast:
            values |= checksums_of({name: sums_of(array.leaf.array, all_copies=False)})
    return values


def _records(
    arrays: Mapping[str, _Array],
    host: Mapping[str, np.ndarray[Any, Any]],
    values: Mapping[str, tuple[str, ...]],
) -> dict[str, ArrayRecord]:
    """The records of arrays with their checksums; those not known yet are added up here."""
    others = {name: array for name, array in host.items() if name not in values}
    values = dict.fromkeys(arrays, ("",)) | dict(values)
    for name, array in others.items():
        values |= checksums_of({name: sums_of(array)})
    return {
        name: dataclasses.replace(array.record, values=values[name][0])
        for name, array in arrays.items()
    }


def _write_file(
    path: pathlib.Path, host: Mapping[str, np.ndarray[Any, Any]], saved: SavedRecords
) -> None:
    writing = require_extra("safetensors.numpy", "safetensors")
    # The library makes files that their owner alone may read, whatever others in the directory are.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    writing.save_file(dict(host), str(path), metadata=metadata_of(saved))
    path.chmod(mode)


def _write_index(path: pathlib.Path, index: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
