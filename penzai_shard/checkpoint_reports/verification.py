"""Checking the numbers of a checkpoint or of safetensors files, with progress by bytes."""

from collections.abc import Callable
from typing import Any

from penzai_shard.checkpoint_reports.stored_arrays import (
    are_weights,
    contents_of,
    record_of_tensor,
)
from penzai_shard.checkpointing import CheckpointVerification, VerifiedArray
from penzai_shard.checkpointing.locations import PathLike
from penzai_shard.checkpointing.value_checksums import checksums_of, sums_of
from penzai_shard.checkpointing.verifying import verify_arrays
from penzai_shard.pretrained.byte_progress import byte_progress
from penzai_shard.pretrained.tensor_files import open_tensors

_Callback = Callable[[VerifiedArray], None]


def verify_checkpoint(
    path: PathLike, *, on_array: _Callback | None = None, progress: Any = None
) -> CheckpointVerification:
    """Reads all of a checkpoint, and compares its numbers with the checksums kept at the save.

    No model and no mesh is needed: the arrays are read into host memory, a few at a time.

    Args:
        path: The checkpoint's directory; or a safetensors file, its index, or a directory with
            either, which have checksums if ``save_safetensors`` wrote them.
        on_array: Called for each array once it was checked.
        progress: Whether to show how many bytes are checked. By default in a terminal and a
            notebook; True shows lines elsewhere too. Or the ``rich.console.Console`` to show it on.

    Returns:
        What was found of each array. It prints as a table of what is damaged.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: What it says of its arrays is not as it was saved.
        CheckpointMismatchError: It is in a format that this version does not read.
        MissingExtraError: Orbax is not installed, or safetensors.

    >>> import tempfile
    >>> from penzai import pz
    >>> from penzai_shard import save_params
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_params(f"{directory}/params", {"w": pz.nx.ones({"a": 2})})
    ...     found = verify_checkpoint(path)
    >>> found.ok, found.damaged, [(array.name, array.finding) for array in found.arrays]
    (True, (), [('w', 'ok')])
    """
    with byte_progress(progress, "verifying") as shown:
        shown.begin(sum(array.record.nbytes for array in contents_of(path).arrays))

        def done(array: VerifiedArray) -> None:
            shown.advance(array.record.nbytes)
            if on_array is not None:
                on_array(array)

        if are_weights(path):
            return _verified_files(path, done)
        return verify_arrays(path, on_array=done)


def _verified_files(path: PathLike, on_array: _Callback) -> CheckpointVerification:
    reader = open_tensors(path)
    arrays = []
    for name, tensor in reader.tensors.items():
        record = record_of_tensor(reader, name)
        found = VerifiedArray(name, record, "unchecked")
        if record.values is not None:
            numbers = reader.read(name, tuple(slice(0, size) for size in tensor.shape))
            is_as_saved = checksums_of({name: sums_of(numbers)})[name] == (record.values,)
            found = VerifiedArray(name, record, "ok" if is_as_saved else "damaged")
        arrays.append(found)
        on_array(found)
    return CheckpointVerification(reader.where, "safetensors", tuple(arrays), "")
