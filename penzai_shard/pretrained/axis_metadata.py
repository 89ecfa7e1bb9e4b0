"""What ``save_safetensors`` writes of each array into a file, beside what the format has for it.

The format has names, shapes and dtypes of tensors, and free texts. One of these texts says the
logical axes of each array, and which save the file belongs to, so that files of two saves are not
taken for one.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

from penzai_shard.checkpointing.array_records import (
    ArrayRecord,
    record_from_json,
    record_to_json,
)
from penzai_shard.pretrained.safetensors_header import FileHeader

KEY = "penzai_shard"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class SavedRecords:
    """What the files of one save say of their arrays.

    Attributes:
        records: The record of each array by its name.
        save: A text that all files of one save have in common.
    """

    records: Mapping[str, ArrayRecord]
    save: str


def metadata_of(saved: SavedRecords) -> dict[str, str]:
    """The texts for a file with these arrays; the framework is what transformers looks for."""
    content = {
        "version": _VERSION,
        "save": saved.save,
        "arrays": {
            name: record_to_json(name, record, saved.save) for name, record in saved.records.items()
        },
    }
    return {"format": "pt", KEY: json.dumps(content)}


def read_records(headers: Sequence[FileHeader], problems: list[str]) -> SavedRecords:
    """Reads what the files say of their arrays.

    Args:
        headers: The headers of all files.
        problems: Gets one line per file or array of which this is not as it was written.

    Returns:
        The records of all arrays; none for files that were written by others.
    """
    records: dict[str, ArrayRecord] = {}
    saves: dict[str, str] = {}
    for header in headers:
        if KEY not in header.metadata:
            continue
        file = os.path.basename(header.path)
        try:
            content = json.loads(header.metadata[KEY])
            version, saves[file], arrays = (content[k] for k in ("version", "save", "arrays"))
            save = saves[file]
            if not isinstance(save, str):
                raise TypeError(save)
            found = {n: record_from_json(n, arrays.get(n), save) for n in header.tensors}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            problems.append(f"{file}: what save_safetensors wrote in it of its arrays is damaged.")
            continue
        if version != _VERSION:
            problems.append(
                f"{file}: was written by another version of this library (form {version!r}), "
                "which this one does not read. Install a newer one."
            )
            continue
        for name, record in found.items():
            tensor = header.tensors[name]
            if record is None or (record.shape, record.dtype) != (tensor.shape, tensor.dtype):
                problems.append(
                    f"{name}: what save_safetensors wrote of it in {file} does not fit the tensor, "
                    "so the file is damaged. Load another copy of it."
                )
            else:
                records[name] = record
    missing = [os.path.basename(h.path) for h in headers if os.path.basename(h.path) not in saves]
    if len(set(saves.values())) > 1 or (saves and missing and not problems):
        others = [file for file in saves if saves[file] != next(iter(saves.values()))] or missing
        problems.append(
            f"{', '.join(others[:3])}: of another save than {next(iter(saves))}. Copy all files of "
            "one save."
        )
    return SavedRecords(records, next(iter(saves.values()), ""))
