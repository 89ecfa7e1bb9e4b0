"""Arrays on a mesh filled from tensors in files, every device with its own part.

A part is read piece by piece into the memory that the device's array is made of, so that beside
what lands there is little more than one piece for each thread that reads. Devices that have the
same part share what was read.
"""

import concurrent.futures
import dataclasses
import functools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from penzai_shard.errors import CheckpointMismatchError
from penzai_shard.pretrained.byte_progress import ByteProgress
from penzai_shard.pretrained.stored_tensors import Index, TensorReader
from penzai_shard.pretrained.tensor_views import TensorView

# So much is read at once into one part.
PIECE_BYTES = 2 * 2**20
# Parts that are read at the same time have at most so many bytes together, or there is one alone.
# A device that is not the host's own memory gets a copy of each.
BYTES_IN_FLIGHT = 64 * 2**20
_MOST_THREADS = 8
# On a CPU, JAX takes memory that begins at a multiple of this for its own, without a copy.
_ALIGNMENT = 64
# From this size on, memory is taken from the system page by page.
_OWN_PAGES_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of an array that some devices of this process have.

    Attributes:
        name: The array's name.
        index: Where in the array it is.
        devices: The devices.
        is_first: Whether this process is the first of those that have the part.
    """

    name: str
    index: Index
    devices: tuple[jax.Device, ...]
    is_first: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(piece.stop - piece.start for piece in self.index)

    def without_padding(self, view: TensorView) -> Index:
        """Where it is in a view that may be shorter than the array."""
        return tuple(
            slice(*(min(end, length) for end in (piece.start, piece.stop)))
            for piece, length in zip(self.index, view.shape, strict=True)
        )


def filled_arrays(
    reader: TensorReader,
    views: Mapping[str, TensorView],
    structs: Mapping[str, jax.ShapeDtypeStruct],
    progress: ByteProgress,
    verifying: TensorReader | None = None,
    finished: Callable[[TensorView], None] = lambda view: None,
) -> dict[str, jax.Array]:
    """Reads arrays straight into their shardings; of each device's part nothing else is read.

    Args:
        reader: The tensors.
        views: By name, how each array is made of them.
        structs: By name, shape, dtype and sharding of each. Another dtype than the view's is cast
            to, as NumPy does it; behind what is longer than the view are zeros.
        progress: Is told of the bytes that this process reads.
        verifying: What reads in place of the reader, each element once over all processes.
        finished: Is told of every view that is not read any more.

    Returns:
        The arrays by name, exactly in the shardings asked for.

    Raises:
        CheckpointMismatchError: Integers do not fit into the dtype wanted.
    """
    parts = [part for name, struct in structs.items() for part in _parts(name, struct)]
    sizes = [math.prod(part.shape) * np.dtype(structs[part.name].dtype).itemsize for part in parts]
    progress.begin(sum(map(functools.partial(_bytes_to_read, views, structs), parts)))
    budget = _Budget(BYTES_IN_FLIGHT)

    def placed(part: _Part, size: int) -> list[jax.Array]:
        with budget.taken(size):
            using = verifying if verifying is not None and part.is_first else reader
            data = _read(using, views[part.name], structs[part.name], part, progress.advance)
            arrays = [jax.device_put(data, device) for device in part.devices]
            return jax.block_until_ready(arrays)

    shards: dict[str, list[jax.Array]] = {name: [] for name in structs}
    workers = min(_MOST_THREADS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers, "penzai_shard_weights") as pool:
        pending = [pool.submit(placed, *work) for work in zip(parts, sizes, strict=True)]
        try:
            for number, (part, future) in enumerate(zip(parts, pending, strict=True), 1):
                shards[part.name] += future.result()
                if number == len(parts) or parts[number].name != part.name:
                    finished(views[part.name])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {
        name: jax.make_array_from_single_device_arrays(
            struct.shape, struct.sharding, shards[name], dtype=struct.dtype
        )
        for name, struct in structs.items()
    }


def _parts(name: str, struct: jax.ShapeDtypeStruct) -> list[_Part]:
    """The parts of an array that devices of this process have, each once."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in struct.sharding.devices_indices_map(struct.shape).items():
        bounds = tuple(
            piece.indices(length)[:2] for piece, length in zip(index, struct.shape, strict=True)
        )
        devices.setdefault(bounds, []).append(device)
    process = jax.process_index()
    parts = []
    for bounds, those in devices.items():
        own = tuple(device for device in those if device.process_index == process)
        if own:
            is_first = min(device.process_index for device in those) == process
            parts.append(_Part(name, tuple(slice(*ends) for ends in bounds), own, is_first))
    return parts


def _bytes_to_read(
    views: Mapping[str, TensorView], structs: Mapping[str, jax.ShapeDtypeStruct], part: _Part
) -> int:
    lengths = (piece.stop - piece.start for piece in part.without_padding(views[part.name]))
    return math.prod(lengths) * int(np.dtype(structs[part.name].dtype).itemsize)


def _read(
    reader: TensorReader,
    view: TensorView,
    struct: jax.ShapeDtypeStruct,
    part: _Part,
    advance: Callable[[int], None],
) -> np.ndarray[Any, Any]:
    """One part in the dtype wanted, read piece by piece."""
    data = _aligned(part.shape, np.dtype(struct.dtype))
    true = part.without_padding(view)
    if true != part.index:
        data[...] = 0
    if any(piece.start == piece.stop for piece in true):
        return data
    for index in _pieces(true, np.dtype(view.dtype).itemsize):
        read = view.read(reader, index)
        place = tuple(
            slice(piece.start - whole.start, piece.stop - whole.start)
            for piece, whole in zip(index, part.index, strict=True)
        )
        data[place] = _cast(read, data.dtype, part.name)
        advance(math.prod(read.shape) * data.dtype.itemsize)
    return data


def _pieces(index: Index, itemsize: int) -> Iterator[Index]:
    """An index cut along its outermost dimensions into pieces of few bytes."""
    lengths = [piece.stop - piece.start for piece in index]
    if math.prod(lengths) * itemsize <= PIECE_BYTES:
        yield index
        return
    dimension = next(i for i, length in enumerate(lengths) if length > 1)
    rows = max(1, PIECE_BYTES // (math.prod(lengths[dimension + 1 :]) * itemsize))
    whole = index[dimension]
    for start in range(whole.start, whole.stop, rows):
        piece = slice(start, min(start + rows, whole.stop))
        cut = (*index[:dimension], piece, *index[dimension + 1 :])
        # A single row may still be too long.
        yield from _pieces(cut, itemsize) if rows == 1 else [cut]


def _cast(data: np.ndarray[Any, Any], dtype: Any, name: str) -> np.ndarray[Any, Any]:
    if data.dtype == dtype:
        return data
    if dtype.kind in "iu" and data.size:
        limits = np.iinfo(dtype)
        if data.min() < limits.min or data.max() > limits.max:
            raise CheckpointMismatchError(
                f"{name}: has {data.dtype} values beyond those of {dtype}. Set "
                "jax.config.update('jax_enable_x64', True), or give the model a wider dtype."
            )
    with np.errstate(over="ignore"):
        return data.astype(dtype)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Memory for an array, where JAX can use it without a copy."""
    size = math.prod(shape) * dtype.itemsize
    if size >= _OWN_PAGES_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        # NumPy asks for huge pages, which the system may have to make first. Measured on 2.2 GiB in
        # a virtual machine: 4.0 s of the system's time, and 1.5 s for ordinary ones.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, dtype).reshape(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class _Budget:
    """Lets threads take bytes as long as there are some; one that wants more than all goes alone.

    >>> with _Budget(10).taken(20):
    ...     pass
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._changed = threading.Condition()

    def taken(self, size: int) -> "_Taken":
        return _Taken(functools.partial(self._add, size), functools.partial(self._add, -size))

    def _add(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: size < 0 or not self._taken or self._taken + size <= self._size
            )
            self._taken += size
            self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Bytes that are taken in a ``with`` block."""

    take: Callable[[], None]
    give_back: Callable[[], None]

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.give_back()
