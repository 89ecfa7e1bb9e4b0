"""The values of edits as text: Python expressions that evaluate back, and JSON and back.

Expressions use this library's public names; layers of Penzai need ``pz`` too, shardings ``jax``.
Types and functions of other libraries are written as references, such as ``'pz.nn:Linear'``: as
text where edits take a type or function, as ``Ref('pz.nn:Softmax')`` in options.

In JSON plain data is written as it is. Whatever JSON has no form for is an object with one key
that starts with ``$``: a type or function by name, a mesh by its axis sizes, a layer by its fields.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from penzai.core.struct import Struct

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.layers import LayerStackPolicy
from penzai_shard.meshes import make_mesh, mesh_text
from penzai_shard.rule_kinds import IdentityRule, LargestDimensionRule, NameRule
from penzai_shard.surgery.references import reference_to
from penzai_shard.surgery.tree_nodes import kind_of
from penzai_shard.surgery.trusted_references import (
    NotAllowedError,
    Role,
    TrustedReferences,
    is_private,
)

_LIBRARY = __name__.partition(".")[0]
_RULE_KINDS: dict[str, type] = {
    "name": NameRule,
    "identity": IdentityRule,
    "largest": LargestDimensionRule,
}

Write = Callable[[str], str]
"""How an expression has the reference to a type or function of another library."""


class CannotWriteError(Exception):
    """A value has no form in JSON; carries what it is and what to do."""


@dataclasses.dataclass(frozen=True)
class _Form:
    """How the values of a kind are written.

    Attributes:
        kind: Their type; of lists and the like that very type, of all else subtypes too.
        expression: The value as an expression.
        data: What stands for it in JSON, below the form's name.
        value: The value that such data stands for.
    """

    kind: Any
    expression: Callable[[Any, Write], str]
    data: Callable[[Any], Any]
    value: Callable[[Any, "ValueReader"], Any]


def last_name(reference: str) -> str:
    """The last name in a reference, for titles.

    >>> last_name("pz.nn:Linear")
    'Linear'
    """
    return reference.rpartition(":")[2].rpartition(".")[2]


def expression(value: Any, write: Write = repr) -> str:
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
    _, form = _form_of(value)
    if form is not None:
        return form.expression(value, write)
    if type(value) is list:
        return f"[{', '.join(expression(part, write) for part in value)}]"
    if isinstance(value, jax.Array | np.ndarray):
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
        return f"{_constructor(type(value))}({', '.join(fields)})"
    return repr(value)


def _dotted(reference: str) -> str:
    return reference.replace(":", ".")


def _constructor(layer_type: type) -> str:
    module, _, name = (reference_to(layer_type) or f":{layer_type.__qualname__}").partition(":")
    return f"{module}.{name}" if module == "pz.nn" else name


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default
    return default is not dataclasses.MISSING and (
        value is default or (isinstance(value, bool | int | str) and value == default)
    )


def data_of(value: Any) -> Any:
    """What stands for a value in JSON.

    Raises:
        CannotWriteError: It has no form in JSON.

    >>> data_of({"a": (1, None)})
    {'$dict': [['a', {'$tuple': [1, None]}]]}
    """
    if type(value) in (type(None), bool, int, str) or (
        isinstance(value, float) and np.isfinite(value)
    ):
        return value
    name, form = _form_of(value)
    if form is not None:
        return {name: form.data(value)}
    if type(value) is list:
        return list(map(data_of, value))
    if isinstance(value, jax.Array | np.ndarray):
        raise CannotWriteError(
            f"it holds {expression(value)}. Put arrays into the layer with a function of the "
            "layer at the place, defined at the top level of a module."
        )
    is_layer = isinstance(value, Struct) and kind_of(value).is_struct
    if is_layer and reference_to(value) is None:
        return {
            "$layer": written_reference(type(value)),
            "fields": {name: data_of(part) for name, part in value.attributes_dict().items()},
        }
    has_name = hasattr(value, "__qualname__") or hasattr(value, "__code__")
    if reference_to(value) is not None or (callable(value) and has_name):
        return {"$ref": written_reference(value)}
    raise CannotWriteError(
        f"{expression(value)} of type {type(value).__name__} has no form in JSON. "
        "Make it in a function of the layer, defined at the top level of a module."
    )


def written_reference(value: Any) -> str:
    """The reference to a type or function, for somebody else to read."""
    reference = reference_to(value)
    kind = "class" if isinstance(value, type) else "function"
    if reference is None:
        is_in_script = getattr(value, "__module__", None) == "__main__"
        where = " outside of the script or notebook that defines it" if is_in_script else ""
        raise CannotWriteError(
            f"{expression(value)} cannot be imported by name{where}. "
            f"Define the {kind} at the top level of a module."
        )
    if is_private(reference.partition(":")[2]):
        raise CannotWriteError(f"{reference!r} is private. Give the {kind} a public name.")
    return reference


class ValueReader:
    """Reads the values of one edit from JSON.

    Args:
        mesh: The mesh to use in place of those written.
        references: How to resolve references.

    Attributes:
        refused: The references that lead to packages which were not allowed.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None, references: TrustedReferences) -> None:
        self.mesh = mesh
        self._references = references
        self.refused: list[NotAllowedError] = []

    def resolve(self, reference: Any, role: Role) -> Any:
        """The object of a reference; None, and a note, if its package is not allowed."""
        try:
            return self._references.resolve(reference, role)
        except NotAllowedError as error:
            self.refused.append(error)
            return None

    def value(self, written: Any) -> Any:
        """The value that ``data_of`` wrote."""
        if isinstance(written, list):
            return list(map(self.value, written))
        if not isinstance(written, dict):
            return written
        if "$layer" in written:
            layer_type = self.resolve(written["$layer"], "layer type")
            fields = {name: self.value(part) for name, part in written["fields"].items()}
            return None if self.refused else layer_type.from_attributes(**fields)
        for name, form in _FORMS.items():
            if name in written:
                return form.value(written[name], self)
        if "$ref" in written:
            return self.resolve(written["$ref"], "value")
        raise RuleTypeError(f"{json.dumps(written)} has no known form.")


def _form_of(value: Any) -> tuple[str, _Form] | tuple[None, None]:
    """The name and form of a value's kind, if it has one."""
    for name, form in _FORMS.items():
        is_exact = form.kind in (tuple, dict)
        if type(value) is form.kind if is_exact else isinstance(value, form.kind):
            return name, form
    return None, None


def _sequence_text(parts: Any, write: Write = repr) -> str:
    return ", ".join(expression(part, write) for part in parts)


def _dict_text(items: dict[Any, Any], write: Write) -> str:
    parts = (f"{expression(k, write)}: {expression(v, write)}" for k, v in items.items())
    return "{" + ", ".join(parts) + "}"


def _sharding_text(sharding: NamedSharding, write: Write) -> str:
    return f"jax.sharding.NamedSharding({expression(sharding.mesh)}, {expression(sharding.spec)})"


def _sharding_data(sharding: NamedSharding) -> dict[str, Any]:
    has_usual_memory = sharding == NamedSharding(sharding.mesh, sharding.spec)
    return {
        "mesh": data_of(sharding.mesh),
        "spec": data_of(sharding.spec),
        "memory_kind": None if has_usual_memory else sharding.memory_kind,
    }


def _sharding(written: Any, reader: ValueReader) -> NamedSharding:
    mesh, spec = reader.value(written["mesh"]), reader.value(written["spec"])
    return NamedSharding(mesh, spec, memory_kind=written["memory_kind"])


def _mesh_text(mesh: Mesh | AbstractMesh, write: Write) -> str:
    """Auto axes as ``make_mesh`` makes them, others as JAX does."""
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return f"make_mesh({dict(mesh.shape)!r})"
    types = ", ".join(f"jax.sharding.{kind}" for kind in mesh.axis_types)
    sizes = tuple(mesh.shape.values())
    return f"jax.make_mesh({sizes!r}, {tuple(mesh.shape)!r}, axis_types=({types},))"


def _mesh_data(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    return {
        "axes": list(map(list, mesh.shape.items())),
        "types": [kind.name for kind in mesh.axis_types],
        "abstract": isinstance(mesh, AbstractMesh),
        "devices": _own_devices(mesh),
    }


def _own_devices(mesh: Mesh | AbstractMesh) -> list[int] | None:
    """The ids of a mesh's devices, if they are not those, and in that order, of ``make_mesh``."""
    if isinstance(mesh, AbstractMesh):
        return None
    try:
        usual: Any = make_mesh(dict(mesh.shape)).devices.flat
    except MeshError:
        usual = ()
    own = [device.id for device in mesh.devices.flat]
    return None if own == [device.id for device in usual] else own


def _mesh(written: Any, reader: ValueReader) -> Mesh | AbstractMesh:
    axes = dict(written["axes"])
    if reader.mesh is not None:
        missing = [name for name in axes if name not in reader.mesh.shape]
        if missing:
            raise MeshError(
                f"the recipe's mesh has the mesh axis {missing[0]!r}, and the mesh given "
                f"({mesh_text(reader.mesh)}) does not. Give a mesh with {list(axes)}."
            )
        return reader.mesh
    types = tuple(AxisType[name] for name in written["types"])
    if written["abstract"]:
        return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)
    ids = written.get("devices")
    if ids is None:
        try:
            devices = make_mesh(axes).devices
        except MeshError as error:
            raise MeshError(
                f"{error.args[0]}\n  Or give the recipe another mesh: "
                "Recipe.from_json(text, mesh=mesh)."
            ) from None
    else:
        devices = _devices(ids).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=types)


def _devices(ids: list[int]) -> np.ndarray:
    devices = {device.id: device for device in jax.devices()}
    missing = [number for number in ids if number not in devices]
    if missing:
        raise MeshError(
            f"the recipe's mesh has the devices {ids}, and this process has none with the ids "
            f"{missing}. Give the recipe another mesh: Recipe.from_json(text, mesh=mesh)."
        )
    return np.array([devices[number] for number in ids])


def _rule_data(rule: Any) -> dict[str, Any]:
    names = {kind: name for name, kind in _RULE_KINDS.items()}
    fields = {field.name: data_of(getattr(rule, field.name)) for field in dataclasses.fields(rule)}
    return {"rule": names[type(rule)], **fields}


def _rule(written: Any, reader: ValueReader) -> Any:
    fields = {name: reader.value(part) for name, part in written.items() if name != "rule"}
    rule = _RULE_KINDS[written["rule"]](**fields)
    wanted = {"mesh_axes": tuple, "yields": bool, "min_size": int, "splits_unnamed": bool}
    fits = all(type(fields.get(name, kind())) is kind for name, kind in wanted.items())
    if not fits or not all(isinstance(axis, str) for axis in fields.get("mesh_axes", ())):
        raise RuleTypeError(f"{reprlib.repr(written)} is not a rule.")
    return rule


def _stack_policy_data(policy: LayerStackPolicy) -> dict[str, Any]:
    return {
        field.name: data_of(getattr(policy, field.name)) for field in dataclasses.fields(policy)
    }


def _stack_policy(written: Any, reader: ValueReader) -> LayerStackPolicy | None:
    fields = {name: reader.value(part) for name, part in written.items()}
    if not fields.keys() <= {field.name for field in dataclasses.fields(LayerStackPolicy)}:
        raise RuleTypeError(f"{reprlib.repr(written)} is not a policy of layer stacks.")
    return None if reader.refused else LayerStackPolicy(**fields)


_FORMS: dict[str, _Form] = {
    "$float": _Form(
        float,
        lambda number, write: repr(number) if np.isfinite(number) else f"float({str(number)!r})",
        repr,
        lambda text, reader: float(text),
    ),
    "$spec": _Form(
        PartitionSpec,
        lambda spec, write: f"jax.sharding.PartitionSpec({_sequence_text(spec)})",
        lambda spec: list(map(data_of, spec)),
        lambda parts, reader: PartitionSpec(*map(reader.value, parts)),
    ),
    "$sharding": _Form(NamedSharding, _sharding_text, _sharding_data, _sharding),
    "$mesh": _Form(Mesh | AbstractMesh, _mesh_text, _mesh_data, _mesh),
    "$rules": _Form(
        AxisRules,
        lambda rules, write: repr(rules),
        lambda rules: list(map(_rule_data, rules.rules)),
        lambda rules, reader: AxisRules.from_rules(_rule(rule, reader) for rule in rules),
    ),
    "$stack_policy": _Form(
        LayerStackPolicy,
        lambda policy, write: policy.text(lambda value: expression(value, _dotted)),
        _stack_policy_data,
        _stack_policy,
    ),
    "$dtype": _Form(
        np.dtype,
        lambda dtype, write: repr(str(dtype)),
        str,
        lambda name, reader: jax.numpy.dtype(name),
    ),
    "$tuple": _Form(
        tuple,
        lambda parts, write: f"({_sequence_text(parts, write)}{',' * (len(parts) == 1)})",
        lambda parts: list(map(data_of, parts)),
        lambda parts, reader: tuple(map(reader.value, parts)),
    ),
    "$dict": _Form(
        dict,
        _dict_text,
        lambda items: [[data_of(key), data_of(part)] for key, part in items.items()],
        lambda items, reader: {reader.value(key): reader.value(part) for key, part in items},
    ),
}
"""Each kind of value that is more than plain data, by its name in JSON."""
