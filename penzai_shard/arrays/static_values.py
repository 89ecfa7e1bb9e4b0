"""Tells whether two static values of trees do the same: functions, settings, containers.

Programs are found again by them: two values that count as equal and are not would run a program
that was compiled with other values; two that are equal and count as unequal compile once more.
"""

import dataclasses
import functools
import re
import types
from typing import Any

import jax

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def same_static(a: Any, b: Any) -> bool:
    """Whether two static values do the same wherever they are used.

    Functions are the same if their code and all that they hold is: two optimizers that are made
    in the same way are one. ``2`` and ``2.0`` differ, ``0.0`` and ``-0.0``, and arrays of two
    dtypes.

    >>> def scale(factor):
    ...     return lambda x: factor * x
    >>> same_static(scale(2), scale(2)), same_static(scale(2), scale(2.0))
    (True, False)
    """
    try:
        return _same_value(a, b)
    except (RecursionError, TypeError, ValueError):
        # Recursive values and arrays of several elements cannot be compared, and count as unequal.
        return False


def _compared_attributes(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that count, and what else a subclass has put beside them."""
    fields = {field.name: field.compare for field in dataclasses.fields(value)}
    is_plain = "__dataclass_fields__" not in vars(type(value))
    others = {k: v for k, v in vars(value).items() if k not in fields} if is_plain else {}
    return {name: getattr(value, name) for name, counts in fields.items() if counts} | others


def _same_value(a: Any, b: Any) -> bool:
    kind: Any = type(a)
    if a is b or kind is not type(b):
        return a is b
    if isinstance(a, types.FunctionType):
        return _same_function(a, b)
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _same_value(a.__self__, b.__self__)
    if isinstance(a, functools.partial):
        return _same_value((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, dict):
        return _same_value((*a.items(),), (*b.items(),))
    if isinstance(a, jax.tree_util.PyTreeDef):
        return _same_value((a.node_data(), a.children()), (b.node_data(), b.children()))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if kind.__eq__ is object.__eq__ and hasattr(a, "__dict__"):  # type: ignore[comparison-overlap]
        # Without an equality of its own, as optax.MultiSteps: what it holds tells.
        is_own = isinstance(a, type | types.ModuleType)
        has_slots = any(base.__dict__.get("__slots__") for base in kind.__mro__)
        return not (is_own or has_slots) and _same_value(vars(a), vars(b))
    if dataclasses.is_dataclass(kind):
        # By fields: == takes 2 and 2.0 for equal, and two functions made alike for unlike.
        return _same_value(_compared_attributes(a), _compared_attributes(b))
    return bool(a == b) and _ADDRESS.sub("", repr(a)) == _ADDRESS.sub("", repr(b))


def _same_function(a: types.FunctionType, b: types.FunctionType) -> bool:
    # One code in two modules reads globals of two modules.
    has_one_world = a.__globals__ is b.__globals__ and _has_constant_globals(a)
    if a.__code__ != b.__code__ or not has_one_world:
        return False
    own, other = (
        (f.__defaults__, f.__kwdefaults__, [cell.cell_contents for cell in f.__closure__ or ()])
        for f in (a, b)
    )
    return _same_value(own, other)


def _has_constant_globals(function: types.FunctionType) -> bool:
    """Whether the globals that a function reads are the same whenever it is made again.

    In a notebook they change from cell to cell, and the function of an earlier cell was compiled
    with what they were then.
    """
    if function.__module__ != "__main__":
        return True
    names = _names(function.__code__)
    read = [value for name, value in function.__globals__.items() if name in names]
    made_once = type | types.FunctionType | types.BuiltinFunctionType
    return all(
        isinstance(value, types.ModuleType)
        or (isinstance(value, made_once) and value.__module__ != "__main__")
        for value in read
    )


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
