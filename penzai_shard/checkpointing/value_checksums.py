"""A checksum of an array's numbers that is the same however the array is laid out.

The bits of every element are mixed with the element's place in the whole array, and the results
are added. A sum may be taken in any order and in any parts, so each device adds up what it holds,
and any mesh and any number of processes come to the same. A changed bit changes it, and so does an
exchange of elements, rows or parts.

Two sums modulo 2^32 are kept beside each other, as JAX has no 64-bit integers by default. They mix
with two functions: the finaliser of MurmurHash3 (Austin Appleby, ``fmix32``), and ``lowbias32`` of
Chris Wellons' hash-prospector. Damage that is not made for it goes unnoticed once in 2^64 times.
Along one dimension of more than 2^32 elements places repeat, so an exchange over just that
distance is not seen.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penzai_shard.processes import is_on_this_process, totals_of_processes

# Pieces up to this size are added up by NumPy, which compiles nothing.
_HOST_BYTES = 64 * 2**10
# Larger arrays of NumPy go through a device in blocks of this size.
_BLOCK_BYTES = 16 * 2**20
_WORD = 2**32
_LANES = (0, 1)
# A zero at the first place would be mixed to zero, and so be as good as no element.
_FIRST_PLACES = (0x9E3779B9, 0x7F4A7C15)


@dataclasses.dataclass(frozen=True)
class ValueSums:
    """What this process has of the sums over an array's elements.

    Attributes:
        copies: For each copy of the array that the devices have among them, the two sums of
            each piece that is on this process; devices may still be adding them up.
        is_whole: Whether this process has all pieces.
    """

    copies: tuple[tuple[Any, ...], ...]
    is_whole: bool

    def finished(self) -> "ValueSums":
        """The same once the devices are done, so that the array is not needed any more."""
        copies = tuple((_added(pieces),) for pieces in self.copies)
        return dataclasses.replace(self, copies=copies)


def sums_of(array: Any, *, all_copies: bool = True) -> ValueSums:
    """Begins to add up an array's elements.

    Args:
        array: An array of NumPy or JAX; random keys as the numbers that they are made of.
        all_copies: Whether to add up each copy of the array, or one of them.

    >>> checksums_of({"w": sums_of(jnp.arange(3)), "empty": sums_of(np.ones((2, 0)))})
    {'w': ('06ee268d8a3e9275',), 'empty': ('0000000000000000',)}
    """
    is_whole = is_on_this_process(array)
    if not isinstance(array, jax.Array):
        host = np.asarray(array)
        blocks = _blocks(host, (0,) * host.ndim)
        return ValueSums(
            (tuple(sums_of_piece(block, at, host.shape) for block, at in blocks),), is_whole
        )
    copies: list[list[Any]] = [[] for _ in range(_copies_of(array) if all_copies else 1)]
    shards = [shard for shard in array.addressable_shards if shard.replica_id < len(copies)]
    for shard, sums in zip(shards, _sums_of_shards(shards, array.shape), strict=True):
        copies[shard.replica_id].append(sums)
    return ValueSums(tuple(map(tuple, copies)), is_whole)


def no_sums(array: Any) -> ValueSums:
    """The sums of an array or struct of which this process has nothing, as it cannot be read."""
    is_whole = array.sharding is None or array.sharding.is_fully_addressable
    return ValueSums(((),) * _copies_of(array), is_whole)


def checksums_of(sums: Mapping[str, ValueSums]) -> dict[str, tuple[str, ...]]:
    """The checksums of whole arrays; those that have parts of any all take part.

    Args:
        sums: By name, what this process has. All processes give the same names.

    Returns:
        By name, the checksum of each copy of the array.

    Raises:
        ShardingError: Some process does not take part.
    """
    here = {name: [_added(pieces) for pieces in found.copies] for name, found in sums.items()}
    spread = [name for name, found in sums.items() if not found.is_whole]
    own = [number for name in spread for copy in here[name] for number in copy]
    totals = iter(totals_of_processes("adding up checksums", own) if spread else ())
    for name in spread:
        here[name] = [tuple(next(totals) for _ in _LANES) for _ in here[name]]
    return {name: tuple(map(_text, copies)) for name, copies in here.items()}


def _added(pieces: Sequence[Any]) -> tuple[int, ...]:
    hosted = [np.asarray(piece).reshape(len(_LANES)) for piece in pieces]
    return tuple(sum(int(piece[lane]) for piece in hosted) % _WORD for lane in _LANES)


def _text(sums: Sequence[int]) -> str:
    return "".join(f"{number % _WORD:08x}" for number in sums)


def _copies_of(array: Any) -> int:
    """How many devices have each piece."""
    if array.sharding is None:
        return 1
    part = array.sharding.shard_shape(array.shape)
    pieces = math.prod(-(-n // max(own, 1)) for n, own in zip(array.shape, part, strict=True))
    return len(array.sharding.device_set) // max(pieces, 1)


def _blocks(array: np.ndarray, start: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """An array in parts of bounded size, and where each begins in it."""
    if array.nbytes <= _BLOCK_BYTES:
        yield array, start
        return
    along = next(i for i, size in enumerate(array.shape) if size > 1)
    rows = max(1, array.shape[along] * _BLOCK_BYTES // array.nbytes)
    for first in range(0, array.shape[along], rows):
        at = (*start[:along], start[along] + first, *start[along + 1 :])
        part = array[(slice(None),) * along + (slice(first, first + rows),)]
        yield from _blocks(part, at)


def sums_of_piece(piece: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> Any:
    """The two sums of a piece in host memory that begins at a place of an array of some shape.

    >>> whole = np.arange(4)
    >>> parts = (sums_of_piece(whole[:3], (0,), (4,)), sums_of_piece(whole[3:], (3,), (4,)))
    >>> checksums_of({"whole": sums_of(whole), "parts": ValueSums((parts,), True)})
    {'whole': ('c0e363d3a4597b14',), 'parts': ('c0e363d3a4597b14',)}
    """
    strides = _strides(shape)
    first = _place(start, strides)
    if piece.nbytes > _HOST_BYTES and piece.ndim:
        # As words, since JAX may have no 64-bit numbers.
        words = jax.device_put(_words_on_host(piece), device := _device_of_host())
        return _sums_on_devices([words], [first], strides, [device])[0]
    host = np.atleast_1d(piece)
    places = _places(np, host.shape, first, strides or ((0, 1),))
    return [np.sum(lane, dtype=np.uint32) for lane in _mixed(_words_on_host(host), *places)]


def _sums_of_shards(shards: Sequence[Any], shape: Sequence[int]) -> Sequence[Any]:
    """The two sums of each shard of an array."""
    starts = [[part.start or 0 for part in shard.index] for shard in shards]
    if not shards or shards[0].data.nbytes <= _HOST_BYTES or not shape:
        return [
            sums_of_piece(np.asarray(shard.data), start, shape)
            for shard, start in zip(shards, starts, strict=True)
        ]
    strides = _strides(shape)
    firsts = [_place(start, strides) for start in starts]
    pieces = [[shard.data] for shard in shards]
    return _sums_on_devices(pieces, firsts, strides, [shard.device for shard in shards])


def _place(start: Sequence[int], strides: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    """The place of the element at an index, as two words."""
    outer, inner = (
        np.uint32(sum(at * stride[word] for at, stride in zip(start, strides, strict=True)) % _WORD)
        for word in range(2)
    )
    return outer, inner


def _sums_on_devices(
    pieces: Sequence[Sequence[jax.Array]],
    firsts: Sequence[tuple[Any, Any]],
    strides: tuple[tuple[int, int], ...],
    devices: Sequence[jax.Device],
) -> Sequence[Any]:
    """The sums of equally large pieces on devices of this process, by one program for all.

    Compiled for each device, it would take as many times as long. The pieces are taken for those
    of one array, so that nothing is moved; and nothing is sent from one device to another.

    Args:
        pieces: What is on each device: a piece, or the words of one.
        firsts: The place of each piece's first element.
        strides: By how much places move.
        devices: The devices.
    """
    mesh = Mesh(np.array(devices), ("piece",))
    sharding = NamedSharding(mesh, PartitionSpec("piece"))

    def joined(parts: Sequence[jax.Array]) -> jax.Array:
        shape = (len(parts) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    with jax.set_mesh(mesh):  # And not with the caller's, which has other devices.
        places = jax.device_put(np.array(firsts, np.uint32), sharding)
        wholes = [joined(parts) for parts in zip(*pieces, strict=True)]
        sums = _program(mesh, strides)(wholes, places)
    by_device = {shard.device: shard.data for shard in sums.addressable_shards}
    return [by_device[device] for device in devices]


@functools.lru_cache(maxsize=1024)
def _program(mesh: Mesh, strides: tuple[tuple[int, int], ...]) -> Any:
    split = PartitionSpec("piece")

    def sums(pieces: list[jax.Array], first: jax.Array) -> jax.Array:
        # What is in host memory comes as words.
        words = pieces if len(pieces) > 1 else _words_on_device(pieces[0])
        lanes = _mixed(words, *_places(jnp, words[0].shape, first[0], strides))
        # One reduction of both, as XLA then keeps nothing but the sums in memory.
        zeros = (np.uint32(0), np.uint32(0))
        dimensions = tuple(range(words[0].ndim))
        return jnp.stack(jax.lax.reduce(lanes, zeros, _sum_of_lanes, dimensions))[None]

    return jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=(split, split), out_specs=split))


def _sum_of_lanes(first: Any, second: Any) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _device_of_host() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # Where JAX_PLATFORMS leaves the CPU out.
        return jax.local_devices()[0]


def _strides(shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """By how much a place moves with each dimension's index.

    A place is two words: where the element is among the first dimensions, and where among the
    last ones, as many as have up to 2^32 elements together; each in row-major order.
    """
    strides: list[tuple[int, int]] = []
    elements, word = 1, 1
    for size in reversed(shape):
        if word and elements * size > _WORD:
            elements, word = 1, 0
        strides.insert(0, (0, elements) if word else (elements, 0))
        elements *= size
    return tuple(strides)


def _places(
    xp: Any, shape: Sequence[int], first: Any, strides: Sequence[tuple[int, int]]
) -> tuple[Any, Any]:
    """The two words of each element's place; None for the first if it is zero for all."""
    words = []
    for word in range(2):
        place = first[word]
        for i, (size, stride) in enumerate(zip(shape, strides, strict=True)):
            if stride[word]:
                along = xp.arange(size, dtype=np.uint32) * np.uint32(stride[word] % _WORD)
                place = place + along.reshape((1,) * i + (size,) + (1,) * (len(shape) - 1 - i))
        words.append(place)
    is_short = not any(stride[0] for stride in strides)
    return (None if is_short else words[0]), words[1]


def _mixed(words: Sequence[Any], outer: Any, inner: Any) -> tuple[Any, ...]:
    """Both mixtures of each element's bits, as 32-bit words, with its place."""
    lanes = []
    for mix, first_place in zip((_fmix32, _lowbias32), _FIRST_PLACES, strict=True):
        place = inner + np.uint32(first_place)
        mixed = mix(place if outer is None else place ^ mix(outer))
        for word in words:
            mixed = mix(mixed ^ word)
        lanes.append(mixed)
    return tuple(lanes)


def _fmix32(word: Any) -> Any:
    """The finaliser of MurmurHash3, https://github.com/aappleby/smhasher, in the public domain."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _lowbias32(word: Any) -> Any:
    """The permutation of https://github.com/skeeto/hash-prospector, in the public domain."""
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


def _words_on_host(array: np.ndarray) -> list[Any]:
    """The bits of each element as 32-bit words, the low one of each 64 first."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*_words_on_host(array.real), *_words_on_host(array.imag)]
    size = array.dtype.itemsize
    bits = np.ascontiguousarray(array).view(f"u{size}")
    if size == 1:
        # Numbers of fewer than eight bits have a byte each, of which some bits mean nothing.
        bits = bits & np.uint8(2 ** _bits(array.dtype) - 1)
    return [(bits >> 32 * i).astype(np.uint32) for i in range(max(1, size // 4))]


def _words_on_device(array: jax.Array) -> list[Any]:
    """The same, traced."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*_words_on_device(array.real), *_words_on_device(array.imag)]
    if array.dtype == jnp.bool_:
        return [array.astype(np.uint32)]
    size = _bits(array.dtype)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{size}"))
    return [(bits >> 32 * i).astype(np.uint32) for i in range(max(1, size // 32))]


def _bits(dtype: Any) -> int:
    return 8 if dtype == jnp.bool_ else int(jax.dtypes.itemsize_bits(dtype))
