"""Values as Python expressions that evaluate back, with this library's public names.

Layers of Penzai need ``pz`` too, shardings ``jax``. Types and functions of other libraries are
written as references, such as ``'pz.nn:Linear'``: as text where edits take a type or function, as
``Ref('pz.nn:Softmax')`` in options.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from penzai_shard.axis_rules import AxisRules
from penzai_shard.surgery.references import reference_to
from penzai_shard.surgery.tree_nodes import kind_of

_LIBRARY = __name__.partition(".")[0]


def last_name(reference: str) -> str:
    """The last name in a reference, for titles.

    >>> last_name("pz.nn:Linear")
    'Linear'
    """
    return reference.rpartition(":")[2].rpartition(".")[2]


def expression(value: Any, write: Callable[[str], str] = repr) -> str:
    """A value as an expression.

    Args:
        value: What is given to an edit: a type, a function, a layer, a mesh, rules, plain data.
        write: How to write the reference to a type or function of another library.

    Returns:
        The expression. Lambdas, arrays and the like are named without being evaluable.

    >>> from penzai_shard.layers import Jitted
    >>> expression(Jitted), expression({"a": (1, None)})
    ('Jitted', "{'a': (1, None)}")
    """
    match value:
        case AxisRules():
            return repr(value)
        case Mesh() | AbstractMesh():
            return _mesh_expression(value)
        case NamedSharding():
            spec = ", ".join(expression(entry) for entry in value.spec)
            return (
                f"jax.sharding.NamedSharding({expression(value.mesh)}, "
                f"jax.sharding.PartitionSpec({spec}))"
            )
        case PartitionSpec():
            return f"jax.sharding.PartitionSpec({', '.join(map(expression, value))})"
        case float() if not np.isfinite(value):
            return f"float({str(value)!r})"
        case dict() if type(value) is dict:
            items = (f"{expression(k, write)}: {expression(v, write)}" for k, v in value.items())
            return "{" + ", ".join(items) + "}"
        case list() | tuple() if type(value) in (list, tuple):
            parts = ", ".join(expression(part, write) for part in value)
            if type(value) is list:
                return f"[{parts}]"
            return f"({parts},)" if len(value) == 1 else f"({parts})"
        case np.dtype():
            return repr(str(value))
        case jax.Array() | np.ndarray():
            return f"<array {value.dtype}{list(value.shape)}>"
    reference = reference_to(value)
    if reference is not None:
        module, _, name = reference.partition(":")
        is_public = module == _LIBRARY or module.startswith(f"{_LIBRARY}.layers")
        return name if is_public else write(reference)
    if isinstance(value, type):
        return value.__qualname__
    qualname = getattr(value, "__qualname__", "<")
    if getattr(value, "__module__", None) == "__main__" and "<" not in qualname:
        return str(qualname)
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"<{value.__name__} of {value.__module__}, line {code.co_firstlineno}>".replace(
            "<<lambda>", "<lambda"
        )
    if dataclasses.is_dataclass(value) and kind_of(value).is_struct:
        fields = [
            # A layer's fields take a type or function itself, and no reference to one.
            f"{field.name}={expression(getattr(value, field.name), _dotted)}"
            for field in dataclasses.fields(value)
            if not _is_default(field, getattr(value, field.name))
        ]
        name = _constructor(type(value))
        return f"{name}({', '.join(fields)})"
    return repr(value)


def _dotted(reference: str) -> str:
    return reference.replace(":", ".")


def _mesh_expression(mesh: Mesh | AbstractMesh) -> str:
    """Auto axes as ``make_mesh`` makes them, others as JAX does."""
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return f"make_mesh({dict(mesh.shape)!r})"
    types = ", ".join(f"jax.sharding.{kind}" for kind in mesh.axis_types)
    sizes = tuple(mesh.shape.values())
    return f"jax.make_mesh({sizes!r}, {tuple(mesh.shape)!r}, axis_types=({types},))"


def _constructor(layer_type: type) -> str:
    module, _, name = (reference_to(layer_type) or f":{layer_type.__qualname__}").partition(":")
    return f"{module}.{name}" if module == "pz.nn" else name


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default
    return default is not dataclasses.MISSING and (
        value is default or (isinstance(value, bool | int | str) and value == default)
    )
