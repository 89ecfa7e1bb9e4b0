"""Fills arrays on a mesh from stored ones: each process reads what its devices need, once.

Parts that lie in the same rows of what is stored are read together, about a MiB at a time, and each
piece is cut up, transposed and cast on its way into the memory of the parts. Pieces are made of
whole chunks, as Orbax packs them. So no chunk is unpacked twice, whatever the layout, and little
memory is needed besides that of the result.
"""

import ctypes
import dataclasses
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from penzai_shard.checkpoints.value_checksums import sum_piece, write_checksum
from penzai_shard.errors import CheckpointMismatchError, Problem
from penzai_shard.processes.agreement import gather

Shape = tuple[int, ...]
Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]
Read = Callable[..., np.ndarray]  # As Store.read.

PIECE_BYTES = 2**20
_BATCH_BYTES, _MOST_THREADS = 64 * 2**20, 8
_WIDEST = 8  # Bytes of an element.
# JAX uses the memory of NumPy arrays on a CPU if it begins at a multiple of 64 bytes, and such an
# array cannot be donated. This is the offset from one.
_ALIGNMENT, _MISALIGNMENT = 64, 16


class Store(Protocol):
    """What parts of stored arrays are read from, by any thread, once they are open."""

    def read(self, name: str, index: Index, shape: Shape | None = None) -> np.ndarray:
        """A part of a stored array.

        Args:
            name: The array.
            index: The part.
            shape: The shape in which the array is looked at, if it is not the stored one.

        Raises:
            CheckpointDamagedError: It cannot be read.
        """

    def chunk(self, name: str) -> Shape:
        """The shape of each part that must be unpacked to read one of its numbers."""

    def open(self, names: Iterable[str]) -> dict[str, tuple[Shape, str]]:
        """Opens arrays; the shape and dtype of each.

        Raises:
            CheckpointDamagedError: Some cannot be opened; all of them are in it.
        """


@dataclasses.dataclass(frozen=True)
class Source:
    """What an array is read from: one stored array, or several stacked along a dimension.

    Attributes:
        stored: The stored arrays: one, or one for each position along ``stack``.
        shape: The shape in which each is looked at, as stored or with dimensions split or joined;
            random keys without their dimension of numbers.
        order: For each dimension of the array but ``stack``, which one of ``shape`` it is.
        stack: The dimension along which several are stacked.
        pick: Of a dimension of ``shape`` that the array lacks: which it is, and the position in it.
        plus: What is added to each number, after it was cast to the wanted dtype.
    """

    stored: tuple[str, ...]
    shape: Shape
    order: Shape
    stack: int | None = None
    pick: tuple[int, int] | None = None
    plus: float = 0.0

    @property
    def rows(self) -> int:
        """The dimension of the array that is outermost in what is stored."""
        if self.stack is not None or not self.order:
            return self.stack or 0
        return self.order.index(min(self.order))

    def chunk(self, stored: Shape) -> Shape:
        """The shape of each part that is unpacked at once, by that of each stored array."""
        # Those that are split come from stores that unpack nothing; arrays may have no numbers.
        chunk = [stored[i] if len(stored) == len(self.shape) else 1 for i in self.order]
        if self.stack is not None:
            chunk.insert(self.stack, 1)
        return tuple(chunk)

    def read(self, read: Read, index: Index, dtype: Any = None) -> np.ndarray:
        """A part of the array.

        Args:
            read: What reads a part of a stored array, as ``Store.read`` does.
            index: The part.
            dtype: The dtype to which numbers are cast before ``plus`` is added; without it, and
                where nothing is added, they keep the stored one.
        """
        if self.stack is None:
            piece = self._read_one(read, self.stored[0], index)
        else:
            names = self.stored[index[self.stack]]
            index = (*index[: self.stack], *index[self.stack + 1 :])
            piece = np.stack([self._read_one(read, name, index) for name in names], self.stack)
        if self.plus:
            piece = piece.astype(dtype or piece.dtype)
            piece += piece.dtype.type(self.plus)
        return piece

    def _read_one(self, read: Read, name: str, index: Index) -> np.ndarray:
        wanted = dict(zip(self.order, index, strict=True))
        if self.pick is not None:
            dimension, position = self.pick
            wanted[dimension] = slice(position, position + 1)
        part = tuple(wanted[i] for i in range(len(self.shape)))
        piece = read(name, part, self.shape)
        # The dimension of which one position is picked is the last of those wanted.
        piece = piece.transpose([*wanted])
        return piece if self.pick is None else piece[..., 0]


class ChecksumStore:
    """Adds up what is read from a store, to tell whether it is what was saved.

    Args:
        store: The store.
        shapes: The shape of each array that is to be added up.
        advance: Is called with the number of bytes of each part, by one thread at a time.
    """

    def __init__(self, store: Store, shapes: Mapping[str, Shape], advance: Any) -> None:
        self._store, self._shapes, self._advance = store, shapes, advance
        self._lock, self.chunk = threading.Lock(), store.chunk
        # Both sums, and the number of elements that are in them.
        self._rows = {name: [0, 0, 0] for name in shapes}

    def read(self, name: str, index: Index, shape: Shape | None = None) -> np.ndarray:
        """As ``Store.read``; what another process adds up is not added up."""
        piece = self._store.read(name, index, shape)
        with self._lock:
            self._advance(piece.nbytes)
        return piece

    def add(self, name: str, index: Index, shape: Shape | None = None) -> np.ndarray:
        """Reads and adds up. A number has one place in row-major order, in whatever shape."""
        piece = self.read(name, index, shape)
        if name in self._shapes:
            whole = self._shapes[name] if shape is None else shape
            sums = sum_piece(piece, [part.start for part in index], whole)
            with self._lock:
                found = zip(self._rows[name], (*sums, piece.size), strict=True)
                self._rows[name] = [before + more for before, more in found]
        return piece

    def add_whole(self, name: str) -> str:
        """The checksum of an array, of which this process reads everything."""
        self._rows[name] = [0, 0, 0]
        box = tuple((0, size) for size in self._shapes[name])
        for index in _cut(box, _WIDEST, 0, self.chunk(name)):
            self.add(name, index)
        return write_checksum(self._rows[name][:2])

    def compute_checksums(self) -> dict[str, str]:
        """The checksum of each array, of which each process has added up parts.

        Raises:
            CheckpointDamagedError: An array cannot be read.
        """
        numbers = [int(number) for row in self._rows.values() for number in row]
        totals = map(sum, zip(*gather("adding up checksums", numbers), strict=True))
        checksums = {}
        for name, shape in self._shapes.items():
            first, second, count = (next(totals) for _ in range(3))
            # If only parts of it were wanted, or parts overlapped, it is read for this only.
            is_whole = count == math.prod(shape)
            checksums[name] = write_checksum((first, second)) if is_whole else self.add_whole(name)
        return checksums


def read_checksum(store: Store, name: str, shape: Shape) -> str:
    """The checksum of a stored array, of which this process reads everything.

    Raises:
        CheckpointDamagedError: It cannot be read.
    """
    return ChecksumStore(store, {name: shape}, lambda size: None).add_whole(name)


# Filling


@dataclasses.dataclass(frozen=True)
class _Group:
    """Parts of an array that are read together, as they lie in the same rows of what is stored.

    Attributes:
        name: The array.
        source: What it is read from.
        struct: Its shape, dtype and sharding.
        devices: Where each part goes.
        pieces: What is read at once, one after the other, of the smallest box that has all parts.
        is_first: Whether no process before this one reads the same elements.
    """

    name: str
    source: Source
    struct: jax.ShapeDtypeStruct
    devices: Mapping[Bounds, Sequence[jax.Device]]
    pieces: Iterator[Index]
    is_first: bool


def fill_arrays(
    wanted: Mapping[str, tuple[Source, jax.ShapeDtypeStruct]], store: ChecksumStore
) -> dict[str, jax.Array]:
    """Reads arrays straight into their shardings. Any of them can be donated.

    Args:
        wanted: What each array is read from, and its shape, dtype and sharding.
        store: What is read from. All processes together add up each element of an array once.

    Raises:
        CheckpointDamagedError: An array cannot be read.
        CheckpointMismatchError: A number does not fit into the dtype that is wanted.
    """
    groups = [
        group
        for name, (source, struct) in wanted.items()
        for group in _group_parts(name, source, struct, store.chunk(source.stored[0]))
    ]
    shards: dict[str, list[jax.Array]] = {name: [] for name in wanted}
    readers = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
    try:
        while groups:
            # Many small arrays are read at once, and so are the pieces of a large one.
            batch, size = [], 0
            while groups and size < _BATCH_BYTES:
                group = groups.pop()
                parts, pending = _begin_reading(group, store, readers)
                batch.append((group, parts, pending))
                size += sum(memory.nbytes for memory in parts.values())
            for group, parts, pending in batch:
                for future in pending:
                    future.result()
                shards[group.name] += _put_parts(group, parts)
            # glibc keeps what was freed, for each thread (measured: 50 MiB).
            if sys.platform == "linux":
                getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    finally:
        # Whoever stops a restore does not wait for the rest of a large array.
        readers.shutdown(cancel_futures=True)
    return {
        name: jax.make_array_from_single_device_arrays(
            struct.shape, struct.sharding, shards[name], dtype=struct.dtype
        )
        for name, (_, struct) in wanted.items()
    }


def _group_parts(
    name: str, source: Source, struct: jax.ShapeDtypeStruct, stored_chunk: Shape
) -> Iterator[_Group]:
    """The parts of an array that this process reads, those of the same rows of chunks together.

    Those of all processes are found, so that each knows what it is the first to read. Boxes of odd
    layouts overlap, and then some elements are added up twice.
    """
    chunk = source.chunk(stored_chunk)
    found: dict[tuple[int, Bounds], dict[Bounds, list[jax.Device]]] = {}
    for device, index in struct.sharding.devices_indices_map(struct.shape).items():
        part = find_bounds(index, struct.shape)
        rows = slice(source.rows, source.rows + 1)  # An array without dimensions has none.
        ends = [(a // n, -(-b // n)) for (a, b), n in zip(part[rows], chunk[rows], strict=True)]
        key = device.process_index, tuple(ends)
        found.setdefault(key, {}).setdefault(part, []).append(device)

    first: dict[Bounds, int] = {}
    for (process, _), devices in sorted(found.items()):
        bounds = zip(*devices, strict=True)
        box = tuple((min(a for a, _ in ends), max(b for _, b in ends)) for ends in bounds)
        is_first = first.setdefault(box, process) == process
        if process == jax.process_index():
            # Of as many bytes as stored: at most twice as many if cast to a narrower dtype.
            pieces = _cut(box, max(4, struct.dtype.itemsize), source.rows, chunk)
            yield _Group(name, source, struct, devices, pieces, is_first)


def find_bounds(index: Index, shape: Shape) -> Bounds:
    """Where a part of an array begins and ends in each dimension."""
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def _begin_reading(
    group: _Group, store: ChecksumStore, readers: Executor
) -> tuple[dict[Bounds, np.ndarray], list[Future[None]]]:
    """The parts of a group in host memory, and the pieces of which they are being made."""
    source, dtype = group.source, group.struct.dtype
    parts = {part: _allocate(part, dtype) for part in group.devices}

    def read(index: Index) -> None:
        piece = source.read(store.add if group.is_first else store.read, index, dtype)
        for part, memory in parts.items():
            ends = [
                (max(wanted.start, start), min(wanted.stop, stop))
                for wanted, (start, stop) in zip(index, part, strict=True)
            ]
            if any(start >= stop for start, stop in ends):
                continue  # The piece has nothing of this part.
            here = [slice(a - i.start, b - i.start) for (a, b), i in zip(ends, index, strict=True)]
            there = [slice(a - p, b - p) for (a, b), (p, _) in zip(ends, part, strict=True)]
            memory[tuple(there)] = cut = piece[tuple(here)]
            # NumPy would wrap integers, and cut off what is behind the point.
            if piece.dtype != dtype and dtype.kind in "iu" and (memory[tuple(there)] != cut).any():
                refuse_numbers(group.name, piece.dtype, dtype)

    return parts, [readers.submit(read, piece) for piece in group.pieces]


def refuse_numbers(path: str, dtype: Any, wanted: Any) -> NoReturn:
    """Refuses to cast an array.

    Raises:
        CheckpointMismatchError: In any case.
    """
    what = f"it has numbers of {dtype} that {wanted} cannot hold"
    problem = Problem(path, what, f"Give the model {dtype} there.")
    raise CheckpointMismatchError("numbers do not fit:", [problem])


def _put_parts(group: _Group, parts: dict[Bounds, np.ndarray]) -> list[jax.Array]:
    """Puts parts on their devices; they are gone from host memory."""
    arrays, kind = [], group.struct.sharding.memory_kind
    # The memory of a part is free before the next one takes its place on a device.
    while parts:
        part, memory = parts.popitem()
        places = [SingleDeviceSharding(d, memory_kind=kind) for d in group.devices[part]]
        arrays += jax.block_until_ready([jax.device_put(memory, place) for place in places])
    return arrays


def _cut(box: Bounds, itemsize: int, rows: int, chunk: Sequence[int]) -> Iterator[Index]:
    """The index of each piece of a box that is cut along its rows; none of an empty box.

    Chunks are not cut, but where they are cut by the box.
    """
    lengths = [stop - start for start, stop in box]
    size = math.prod(lengths) * itemsize
    # What is large in spite of having one row is cut along another dimension.
    dims = [i for i in (rows, *range(len(box))) if box and lengths[i] > chunk[i]]
    if 0 < size <= PIECE_BYTES or (size and not dims):
        yield tuple(slice(*ends) for ends in box)
    elif size:
        dim, (start, stop) = dims[0], box[dims[0]]
        step = max(1, PIECE_BYTES * lengths[dim] // size // chunk[dim]) * chunk[dim]
        for place in range(start - start % chunk[dim], stop, step):
            ends = max(place, start), min(place + step, stop)
            yield from _cut((*box[:dim], ends, *box[dim + 1 :]), itemsize, rows, chunk)


def _allocate(part: Bounds, dtype: np.dtype) -> np.ndarray:
    """Memory that JAX copies from, so that the array on the device owns what it has."""
    shape = [stop - start for start, stop in part]
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 2 * _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT + _MISALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
