"""Where an iterator stands, as text.

Iterators of grain say where they stand with ``get_state()`` and go there with ``set_state(state)``.
A state is a dictionary of numbers and texts, or bytes; grain's own checkpoints hold it as JSON, and
so does this module, with marks for what JSON does not have.
"""

import base64
import json
from typing import Any

import numpy as np

from penzai_shard.errors import RuleTypeError

_BYTES, _TUPLE, _ARRAY, _PAIRS = "__bytes__", "__tuple__", "__array__", "__pairs__"
_MARKS = {_BYTES, _TUPLE, _ARRAY, _PAIRS}


def keeps_state(iterator: Any) -> bool:
    """Whether an iterator can say where it stands, and go there.

    >>> keeps_state(iter([1, 2]))
    False
    """
    return callable(getattr(iterator, "get_state", None)) and callable(
        getattr(iterator, "set_state", None)
    )


def state_text(iterator: Any) -> str:
    """Where an iterator stands, as JSON.

    Raises:
        RuleTypeError: The state holds something that is not data.
    """
    state = iterator.get_state()
    try:
        return json.dumps(_as_json(state))
    except TypeError as error:
        raise RuleTypeError(
            f"the state of {type(iterator).__name__} cannot be saved: {error}. Let get_state() "
            "return dictionaries, lists, numbers, texts, bytes or NumPy arrays. Or pass the "
            "batches without it, (batch for batch in batches): a resumed run then skips those "
            "that were used."
        ) from None


def state_of_text(text: str) -> Any:
    """The state that ``state_text`` gave as text.

    >>> state_of_text('{"next_index": 3}')
    {'next_index': 3}
    """
    return _as_data(json.loads(text))


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
            return {key: _as_json(child) for key, child in value.items()}
        return {_PAIRS: [[_as_json(key), _as_json(child)] for key, child in value.items()]}
    if isinstance(value, list):
        return [_as_json(child) for child in value]
    if type(value) is tuple:
        return {_TUPLE: [_as_json(child) for child in value]}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.asarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        return {_ARRAY: [array.dtype.str, list(array.shape), data]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"it holds a {type(value).__name__}")


def _as_data(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_data(child) for child in value]
    if not isinstance(value, dict):
        return value
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    if _TUPLE in value:
        return tuple(_as_data(child) for child in value[_TUPLE])
    if _PAIRS in value:
        return {_as_data(key): _as_data(child) for key, child in value[_PAIRS]}
    if _ARRAY in value:
        dtype, shape, data = value[_ARRAY]
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        return array if shape else array[()]
    return {key: _as_data(child) for key, child in value.items()}
