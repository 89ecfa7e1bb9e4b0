"""The header of one safetensors file: which tensors it has, and where in it they are.

The format: eight bytes with the header's length, the header as JSON, the tensors' bytes one after
the other. The safetensors library decides whether a file is as it must be; what is said here of one
that is not is looked for afterwards.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from penzai_shard.checkpointing.file_kinds import problem_of_file
from penzai_shard.errors import require_extra
from penzai_shard.pretrained.stored_tensors import StoredTensor

SUFFIX = ".safetensors"

METADATA = "__metadata__"
"""What has texts in place of a tensor in the header."""

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""NumPy's name of each dtype of the format that NumPy and JAX have, by the format's own."""

_LENGTH_BYTES = 8
_LONGEST_EXPLAINED = 2**27
_AGAIN = "Download or copy it again."

# Of these NumPy has no dtype: several elements are in one byte.
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")

# How other files begin that are found under the name of one with weights, and what to do.
_OTHER_FILES = (
    (
        b"version https://git-lfs",
        "is a pointer of Git LFS and not the weights. Fetch them: git lfs pull",
    ),
    (b"<!doctype", "is a web page and not weights, as a download that failed leaves. " + _AGAIN),
    (b"<html", "is a web page and not weights, as a download that failed leaves. " + _AGAIN),
    (
        b"pk\x03\x04",
        "is a file of torch.save under another name. Save it as safetensors, with "
        "model.save_pretrained(path) or safetensors.torch.save_file",
    ),
    (
        b"\x80\x02",
        "is a pickle of Python under another name. Save it as safetensors, with "
        "model.save_pretrained(path) or safetensors.torch.save_file",
    ),
)


class UnreadableFileError(Exception):
    """Why a file cannot be read, as the rest of a sentence that begins with its name."""


@dataclasses.dataclass(frozen=True)
class FileHeader:
    """What a file says of itself.

    Attributes:
        path: The file.
        tensors: Its tensors by name, in the order of their bytes.
        starts: The first byte of each in the file.
        metadata: Texts that whoever wrote it put in.
    """

    path: str
    tensors: Mapping[str, StoredTensor]
    starts: Mapping[str, int]
    metadata: Mapping[str, str]


def read_header(path: str) -> FileHeader:
    """Reads and checks the header of a file; of its tensors nothing is read.

    Raises:
        UnreadableFileError: It is not a whole file of this format, or has what NumPy cannot hold.
        MissingExtraError: safetensors is not installed.
    """
    safetensors = require_extra("safetensors", "safetensors")
    # A pipe in its place would never end.
    if problem := problem_of_file(pathlib.Path(path)):
        raise UnreadableFileError(f"{problem}. {_AGAIN}")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            beginning = file.read(64)
            if not size:
                raise UnreadableFileError(f"is empty. {_AGAIN}")
            try:
                with safetensors.safe_open(path, framework="numpy"):
                    pass
            except safetensors.SafetensorError as error:
                why = _other_file(beginning) or _why_invalid(file, size, str(error))
                raise UnreadableFileError(why) from error
            length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
            file.seek(_LENGTH_BYTES)
            header = json.loads(file.read(length), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise UnreadableFileError(f"cannot be opened: {error.strerror or error}.") from error
    metadata = header.pop(METADATA, {})
    unheld = [name for name, entry in header.items() if entry["dtype"] not in DTYPES]
    if unheld:
        code = header[unheld[0]]["dtype"]
        raise UnreadableFileError(
            f"has tensors of dtype {code}, such as {unheld[0]!r} ({len(unheld):,} in all), whose "
            "elements are smaller than a byte, which NumPy does not hold. Convert them to "
            "float8_e4m3fn or bfloat16 with the library that wrote them."
        )
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    data = _LENGTH_BYTES + length
    return FileHeader(
        path,
        {
            name: StoredTensor(name, tuple(entry["shape"]), DTYPES[entry["dtype"]], path)
            for name, entry in ordered
        },
        {name: data + entry["data_offsets"][0] for name, entry in ordered},
        metadata,
    )


def _other_file(beginning: bytes) -> str:
    """What a file is that is not of this format, if its beginning tells."""
    found = [what for start, what in _OTHER_FILES if beginning.lower().startswith(start)]
    return found[0] if found else ""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnreadableFileError(f"has {twice!r} twice in its header. {_AGAIN}")
    return found


def _why_invalid(file: Any, size: int, reason: str) -> str:
    """Why the library refuses a file, as far as its parts show it; else in the library's words."""
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > size - _LENGTH_BYTES:
        return (
            f"is truncated, or not of this format: its header should have {length:,} bytes, and "
            f"the whole file has {size:,}. {_AGAIN}"
        )
    unknown = f"is damaged: {reason.removeprefix('Error while deserializing header: ')}. {_AGAIN}"
    if length > _LONGEST_EXPLAINED:
        return unknown
    try:
        header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != METADATA}
        found = _why_wrong(entries, size - _LENGTH_BYTES - length)
    except (ValueError, RecursionError):
        return f"has a header that is not JSON, so it is damaged. {_AGAIN}"
    except (AttributeError, TypeError, KeyError):
        return unknown
    return f"{found}. {_AGAIN}" if found else unknown


def _why_wrong(entries: Mapping[str, Any], size: int) -> str:
    """What of the tensors in a header cannot be; empty if nothing is found.

    Args:
        entries: The tensors' entries.
        size: How many bytes of tensors the file has.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        code, (first, last) = entry["dtype"], entry["data_offsets"]
        if first != end or last < first:
            which = "overlap those of another" if first < end else "leave a hole before them"
            return f"is damaged: the bytes of tensor {name!r}, {first:,} to {last:,}, {which}"
        if code not in (*DTYPES, *_PACKED):
            return (
                f"has tensor {name!r} of dtype {code!r}, which this version of safetensors does "
                "not know. Where a newer one does: pip install -U safetensors"
            )
        if code in DTYPES:
            wanted = math.prod(entry["shape"]) * np.dtype(DTYPES[code]).itemsize
            if wanted != last - first:
                return (
                    f"is damaged: tensor {name!r} has {last - first:,} bytes, and "
                    f"{code}{entry['shape']} takes {wanted:,}"
                )
        end = last
    if end > size:
        return f"is truncated: its tensors take {end:,} bytes, and {size:,} are there"
    return f"has {size - end:,} bytes more than its tensors take" if end < size else ""
