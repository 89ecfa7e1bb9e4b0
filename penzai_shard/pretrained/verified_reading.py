"""Reading tensors while the checksums of their numbers are added up.

The numbers are added up as they are read, before they are cast or transposed, so that any layout
and any number of processes come to the sums that were kept at the save.
"""

import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.value_checksums import ValueSums, checksums_of, sums_of_piece
from penzai_shard.errors import CheckpointDamagedError, raise_all
from penzai_shard.pretrained.stored_tensors import Index, StoredTensor, TensorReader


class VerifyingReader:
    """Adds up the numbers of all that is read of some tensors.

    Args:
        reader: What reads them.
        records: What was kept of them at the save; those without a checksum are read as they are.
    """

    def __init__(self, reader: TensorReader, records: Mapping[str, ArrayRecord]) -> None:
        self.tensors: Mapping[str, StoredTensor] = reader.tensors
        self._reader = reader
        self._expected = {
            name: record.values for name, record in records.items() if record.values is not None
        }
        self._pieces: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    def read(self, name: str, index: Index) -> np.ndarray[Any, Any]:
        """As the reader does."""
        data = self._reader.read(name, index)
        if name in self._expected:
            start = [piece.start for piece in index]
            sums = np.asarray(sums_of_piece(data, start, self.tensors[name].shape))
            with self._lock:
                self._pieces.setdefault(name, []).append(sums)
        return data

    def refuse_damaged(self, names: Mapping[str, str], where: str) -> None:
        """Refuses tensors whose numbers are not those that were saved; all processes take part.

        Args:
            names: The tensors that were read by all processes together, each element once; by
                what they are called in the model.
            where: Where they are, for the message.

        Raises:
            CheckpointDamagedError: With one line per tensor.
        """
        read = {name: tensor for name, tensor in names.items() if tensor in self._expected}
        is_whole = jax.process_count() == 1
        found = checksums_of(
            {
                name: ValueSums((tuple(self._pieces.get(tensor, ())),), is_whole)
                for name, tensor in read.items()
            }
        )
        raise_all(
            CheckpointDamagedError,
            f"the numbers in the weights at {where} are not those that were saved:",
            [
                f"{name}: the tensor {tensor!r} in {self.tensors[tensor].file} does not have its "
                "checksum. Load another copy of it."
                for name, tensor in read.items()
                if found[name] != (self._expected[tensor],)
            ],
        )
