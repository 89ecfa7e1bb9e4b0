"""A checksum of an array's numbers that is the same however the array is laid out or read.

The bits of each element are mixed with the element's place in the whole array, and the results are
added, so that parts can be added up in any order, on any device. Two sums of 32 bits are kept; they
mix by MurmurHash3's fmix32 (https://github.com/aappleby/smhasher) and by Wellons' lowbias32
(https://github.com/skeeto/hash-prospector). Places wrap at 2^32.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from penzai_shard.arrays.kinds import is_traced
from penzai_shard.errors import Problem, ShardingError

# The context of a mesh would refuse arrays on other devices, and those of its Auto twin.
_NO_MESH = Mesh(np.empty((), object), ())
# A smaller array is added up by NumPy before a program for it could be compiled.
_HOST_BYTES = 64 * 2**10
# A factor of places, odd so that they stay different, and the numbers of fmix32 and lowbias32.
_MIXES = (0x9E3779B9, 0x85EBCA6B, 13, 0xC2B2AE35), (0x7F4A7C15, 0x7FEB352D, 15, 0x846CA68B)


def plain_context(called: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX computes with arrays wherever they are, whatever ``set_mesh`` says.

    Args:
        called: The function that was called, for messages.

    Raises:
        ShardingError: ``jax.jit`` is tracing the call, so that nothing can be read or written.
    """
    if is_traced(jnp.zeros(())):
        what = "it is called inside jax.jit, where arrays have no values"
        raise ShardingError(f"{called}:", [Problem("", what, "Call it outside of jax.jit.")])
    return jax.set_mesh(_NO_MESH)


def write_checksum(sums: Sequence[int]) -> str:
    """Both sums as the text that a checkpoint keeps.

    >>> write_checksum(sum_piece(np.arange(6), (0,), (6,)))
    '71b603ca49c33a4e'
    """
    return "".join(f"{number % 2**32:08x}" for number in sums)


def compute_checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The checksums of whole arrays, computed where they are; with several processes in all.

    Args:
        arrays: Arrays of JAX or NumPy by name; of random keys the numbers.
    """
    # All programs are started before the first result is waited for. Not with several processes:
    # on CPU devices many sums under way at once wait for each other for ever (jax 0.10.2, Gloo).
    sums = {}
    for name, array in arrays.items():
        sums[name] = _start_sums(array)
        if jax.process_count() > 1:
            jax.block_until_ready(sums[name])
    return {name: write_checksum([int(lane) for lane in lanes]) for name, lanes in sums.items()}


def _start_sums(array: Any) -> Any:
    """Both sums of an array, computed by NumPy or still being computed on its devices."""
    whole = (0,) * np.ndim(array), np.shape(array)
    if isinstance(array, jax.Array):
        is_here = array.is_fully_replicated or array.is_fully_addressable
        # Devices do not compute with what is in the memory of the host.
        is_large = array.nbytes > _HOST_BYTES and array.sharding.memory_kind != "pinned_host"
        if is_large or not is_here:
            return _sum_on_devices(array, *_place(*whole))
    return sum_piece(np.asarray(array), *whole)


def sum_piece(piece: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """Both sums of a piece in host memory.

    Args:
        piece: The piece.
        start: Where it begins in the whole array.
        shape: The shape of the whole array.
    """
    words, place = _read_words(piece), _place(start, shape)
    if piece.nbytes > _HOST_BYTES:
        first, second = _sum_on_devices(words, *place)
    else:
        with np.errstate(over="ignore"):  # NumPy warns where numbers wrap that have no dimension.
            first, second = (np.sum(lane, dtype=np.uint32) for lane in _mix(np, words, *place))
    return int(first), int(second)


def _place(start: Sequence[int], shape: Sequence[int]) -> tuple[np.uint32, list[np.uint32]]:
    """The place of a piece's first element, and how far it is from one index to the next."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(index * stride for index, stride in zip(start, strides, strict=True))
    return np.uint32(first % 2**32), [np.uint32(stride % 2**32) for stride in strides]


@jax.jit
def _sum_on_devices(content: Any, place: Any, strides: Any) -> tuple[jax.Array, jax.Array]:
    """Both sums of an array, or of the words of one."""
    words = content if isinstance(content, list) else _bitcast_words(content)
    lanes = _mix(jnp, words, place, strides)
    # One reduction of both: XLA then keeps nothing but the sums in memory.
    first, second = jax.lax.reduce(
        lanes,
        (np.uint32(0), np.uint32(0)),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(lanes[0].ndim)),
    )
    return first, second


def _mix(xp: Any, words: Sequence[Any], first: Any, strides: Sequence[Any]) -> tuple[Any, Any]:
    """Each element's bits mixed with its place, in two ways."""
    shape = words[0].shape
    place = first
    for dimension, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        along = xp.arange(size, dtype=np.uint32) * stride
        place = place + along.reshape([-1 if i == dimension else 1 for i in range(len(shape))])
    lanes = []
    for factor, *numbers in _MIXES:
        mixed = place * np.uint32(factor)
        for word in words:
            mixed = _scramble(mixed + word.astype(np.uint32), *numbers)
        lanes.append(mixed)
    return lanes[0], lanes[1]


def _scramble(word: Any, first: int, shift: int, second: int) -> Any:
    word = (word ^ (word >> 16)) * np.uint32(first)
    word = (word ^ (word >> shift)) * np.uint32(second)
    return word ^ (word >> 16)


def _read_words(array: np.ndarray) -> list[np.ndarray]:
    """The bits of each element as words of at most 32 bits, in the order of memory."""
    size = array.dtype.itemsize
    if size > 4:
        bits = np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint32)
        return [bits[..., i] for i in range(size // 4)]
    bits = np.ascontiguousarray(array).reshape(array.shape).view(f"u{size}")
    # Of narrow integers the upper bits of the byte say nothing.
    return [bits & np.uint8(2 ** _count_bits(array.dtype) - 1)] if size == 1 else [bits]


def _bitcast_words(array: jax.Array) -> list[jax.Array]:
    """The same on a device."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*_bitcast_words(array.real), *_bitcast_words(array.imag)]
    if array.dtype == jnp.bool_:
        return [array]
    words = jax.lax.bitcast_convert_type(array, f"uint{min(32, _count_bits(array.dtype))}")
    return [words[..., i] for i in range(2)] if words.ndim > array.ndim else [words]


def _count_bits(dtype: Any) -> int:
    return 8 if dtype == jnp.bool_ else int(jax.dtypes.itemsize_bits(dtype))
