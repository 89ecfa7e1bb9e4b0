"""What is known of an array besides its numbers: shape, dtype and logical axis names.

Orbax stores arrays without the names of their dimensions: an axis renamed at the same shape would
be restored without a word, and so would a square array stored the other way round. So the names
travel in the checkpoint's metadata, in the form that this module reads and writes.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.named_leaves import NamedLeaf

AxisTexts = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """Everything about an array that can be compared without reading it.

    Attributes:
        shape: Its shape; of typed PRNG keys, the shape of the key array.
        dtype: Name of its dtype, such as ``bfloat16``, or ``key<fry>`` for typed PRNG keys.
        axes: The logical axis of each dimension, None for a positional one; None altogether where
            the names are not known.
        key_impl: Name of the PRNG implementation, for typed PRNG keys.
        values: The checksum of its numbers, if it was saved with one. It is not compared with
            that of another array.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: AxisTexts | None = None
    key_impl: str | None = None
    values: str | None = None

    @property
    def nbytes(self) -> int:
        """The size of its numbers, in bytes; of typed PRNG keys, that of what makes them up."""
        if self.key_impl is not None:
            return 4 * math.prod((*self.shape, *key_data_shape(self.key_impl)))
        return math.prod(self.shape) * int(jnp.dtype(self.dtype).itemsize)

    def __str__(self) -> str:
        """Names and sizes, as they stand in error messages.

        >>> str(ArrayRecord((3, 8), "float32", (None, "embedding")))
        '(3, embedding=8)'
        """
        axes = self.axes if self.axes is not None else (None,) * len(self.shape)
        texts = [
            str(size) if axis is None else f"{axis}={size}"
            for axis, size in zip(axes, self.shape, strict=True)
        ]
        return f"({', '.join(texts)})"


def axis_text(axis: Any) -> str | None:
    """A logical axis name as the text that is stored; None for a positional dimension.

    Names are nearly always strings. Any other hashable is stored as what it prints, marked so
    that it equals no string.

    >>> axis_text("embedding"), axis_text(("head", 0))
    ('embedding', "<('head', 0)>")
    """
    return axis if axis is None or isinstance(axis, str) else f"<{axis!r}>"


def record_of(leaf: NamedLeaf) -> ArrayRecord:
    """The record of one leaf of a tree, which must be an array or describe one.

    >>> from penzai import pz
    >>> from penzai_shard.named_leaves import leaves_of
    >>> record_of(leaves_of({"w": pz.nx.ones({"a": 2})})[0])
    ArrayRecord(shape=(2,), dtype='float32', axes=('a',), key_impl=None, values=None)
    """
    axes: AxisTexts | None
    if leaf.problem:
        axes = None
    elif leaf.names is None:
        axes = (None,) * len(leaf.shape)
    else:
        axes = tuple(axis_text(name) for name in leaf.names)
    return ArrayRecord(leaf.shape, str(leaf.dtype), axes, key_impl_of(leaf.array))


def key_impl_of(array: Any) -> str | None:
    """The PRNG implementation of a typed key array or of its struct; None for anything else.

    >>> key_impl_of(jax.random.key(0, impl="rbg"))
    'rbg'
    """
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    found: list[str] = []

    def look(key: jax.Array) -> jax.Array:
        found.append(str(jax.random.key_impl(key)))
        return key

    # JAX names the implementation of an array only, so that a struct must be traced.
    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return found[0]


@functools.cache
def key_data_shape(impl: str) -> tuple[int, ...]:
    """The shape of the numbers that make up one key.

    >>> key_data_shape("rbg")
    (4,)
    """
    return tuple(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape)


def checksum_of(content: Any) -> str:
    """A checksum of anything that JSON can hold.

    >>> checksum_of({"b": 1, "a": 2}) == checksum_of({"a": 2, "b": 1})
    True
    """
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_to_json(name: str, record: ArrayRecord, save: str) -> dict[str, Any]:
    """The stored form of a record, with a checksum of all it says.

    Args:
        name: The array's name, which is in the checksum.
        record: The record.
        save: The id of the save that it belongs to, which is in the checksum too.

    >>> record_to_json("w", ArrayRecord((2, 3), "float32", ("a", None)), "5e1f")["axes"]
    ('a', None)
    """
    entry = dataclasses.asdict(record)
    return {**entry, "checksum": checksum_of([name, entry, save])}


def record_from_json(name: str, stored: Any, save: str | None) -> ArrayRecord | None:
    """Reads what ``record_to_json`` gave; None if it is not as it was written.

    Args:
        name: The array's name.
        stored: The stored form.
        save: The id of the save; None for a record of the format before, which has neither that
            nor a checksum of the numbers.

    >>> record = ArrayRecord((2,), "float32", ("a",), None, "0123456789abcdef")
    >>> stored = record_to_json("w", record, "5e1f")
    >>> record_from_json("w", stored, "5e1f") == record
    True
    >>> record_from_json("v", stored, "5e1f"), record_from_json("w", stored, "another")
    (None, None)
    """
    entry = dict(stored) if isinstance(stored, Mapping) else {}
    signed = [name, entry] if save is None else [name, entry, save]
    is_signed = entry.pop("checksum", None) == checksum_of(signed)
    if not is_signed or ("values" in entry) == (save is None) or not _is_record(entry):
        return None
    axes = None if entry["axes"] is None else tuple(entry["axes"])
    return ArrayRecord(**{**entry, "shape": tuple(entry["shape"]), "axes": axes})


def _is_record(entry: Mapping[str, Any]) -> bool:
    """Whether an entry has the fields of a record, each with what it can hold."""
    shape, axes, impl = (entry.get(field) for field in ("shape", "axes", "key_impl"))
    fields = {field.name for field in dataclasses.fields(ArrayRecord)}
    return (
        # The second format has no checksum of the numbers.
        entry.keys() in (fields, fields - {"values"})
        and isinstance(entry.get("values", ""), str)
        and isinstance(shape, list | tuple)
        and all(type(length) is int and 0 <= length < 2**63 for length in shape)
        and isinstance(entry["dtype"], str)
        and (
            axes is None
            or (
                isinstance(axes, list | tuple)
                and len(axes) == len(shape)
                and all(axis is None or isinstance(axis, str) for axis in axes)
            )
        )
        and (impl is None or _is_key_impl(impl))
    )


def _is_key_impl(name: Any) -> bool:
    try:
        return isinstance(name, str) and bool(key_data_shape(name))
    except ValueError:
        return False
