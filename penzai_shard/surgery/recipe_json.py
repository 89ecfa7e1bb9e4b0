"""Recipes as JSON text and back.

Plain data is written as it is. Whatever JSON has no form for is an object with one key that
starts with ``$``: a type or function by name, a mesh by its axis sizes, a layer by its fields.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from penzai.core.struct import Struct

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, RuleTypeError, raise_all
from penzai_shard.meshes import make_mesh
from penzai_shard.rule_kinds import IdentityRule, LargestDimensionRule, NameRule
from penzai_shard.surgery.edits import Edit
from penzai_shard.surgery.expressions import expression
from penzai_shard.surgery.places import ROOT, Where
from penzai_shard.surgery.references import reference_to, resolve
from penzai_shard.surgery.tree_nodes import STRUCT, kind_of

_FORMAT = "penzai_shard recipe"
_VERSION = 1
_RULE_KINDS: dict[str, type] = {
    "name": NameRule,
    "identity": IdentityRule,
    "largest": LargestDimensionRule,
}
_EDIT_KINDS = ("wrap", "insert_before", "insert_after", "replace")


class _CannotWrite(Exception):
    """A value has no form in JSON; carries what it is and what to do."""


def edits_to_json(edits: Sequence[Edit]) -> str:
    """Writes edits; see ``Recipe.to_json``."""
    written: list[Any] = []
    problems: list[str] = []
    for number, edit in enumerate(edits, 1):
        try:
            written.append(_write_edit(edit))
        except _CannotWrite as error:
            problems.append(f"edit {number}, {edit!r}: {error}")
    raise_all(RuleTypeError, "this recipe cannot be written as JSON:", problems)
    return json.dumps({"format": _FORMAT, "version": _VERSION, "edits": written}, indent=2)


def edits_from_json(text: str, mesh: Mesh | AbstractMesh | None) -> list[Edit]:
    """Reads edits; see ``Recipe.from_json``."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RuleTypeError(f"this is no recipe: {error}. Give the text of to_json().") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise RuleTypeError(
            f'this JSON is no recipe: it has no "format": "{_FORMAT}". Give the text of to_json().'
        )
    if data.get("version") != _VERSION:
        raise RuleTypeError(
            f"this recipe has version {data.get('version')!r}, and {_VERSION} is known. "
            "Read it with the penzai_shard that wrote it, or write it again."
        )
    reader = _Reader(mesh)
    edits: list[Edit] = []
    problems: list[str] = []
    if not isinstance(data.get("edits"), list):
        raise RuleTypeError('this recipe has no list of "edits". Give the text of to_json().')
    for number, written in enumerate(data["edits"], 1):
        try:
            edits.append(reader.edit(written))
        except RuleTypeError as error:
            problems.append(f"edit {number}: {error}")
        except MeshError:
            raise
        except KeyError as error:
            problems.append(f"edit {number}: {error} is missing.")
        except Exception as error:
            # Text that was changed by hand can be wrong in any way.
            problems.append(
                f"edit {number} is not as to_json() writes it: {error} "
                f"({reprlib.repr(written)}). Write the recipe again."
            )
    raise_all(RuleTypeError, "this recipe cannot be read:", problems)
    return edits


def _write_edit(edit: Edit) -> dict[str, Any]:
    written: dict[str, Any] = {"edit": edit.kind, "where": _write_where(edit.where)}
    written["what"] = _write(edit.what)
    if edit.options:
        written["options"] = {name: _write(value) for name, value in edit.options}
    if edit.expect is not None:
        written["expect"] = edit.expect
    if edit.nested:
        written["nested"] = True
    return written


def _write_where(where: Where) -> dict[str, Any]:
    written: dict[str, Any]
    if isinstance(where.what, tuple):
        written = {"types": [_reference(kind) for kind in where.what]}
    elif isinstance(where.what, str):
        written = {"path": where.what}
    elif where.what is ROOT:
        written = {"root": True}
    else:
        written = {"predicate": _reference(where.what)}
    if where.within is not None:
        written["within"] = _write_where(where.within)
    if where.outside is not None:
        written["outside"] = _write_where(where.outside)
    return written


def _reference(value: Any) -> str:
    reference = reference_to(value)
    if reference is not None:
        return reference
    kind = "class" if isinstance(value, type) else "function"
    raise _CannotWrite(
        f"{expression(value)} cannot be imported by name. "
        f"Define the {kind} at the top level of a module."
    )


def _write(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if np.isfinite(value) else {"$float": repr(value)}
        case PartitionSpec():
            return {"$spec": [_write(entry) for entry in value]}
        case NamedSharding():
            return {
                "$sharding": {
                    "mesh": _write(value.mesh),
                    "spec": _write(value.spec),
                    "memory_kind": value.memory_kind if _has_own_memory(value) else None,
                }
            }
        case Mesh() | AbstractMesh():
            return {
                "$mesh": {
                    "axes": list(map(list, value.shape.items())),
                    "types": [kind.name for kind in value.axis_types],
                    "abstract": isinstance(value, AbstractMesh),
                    "devices": _own_devices(value),
                }
            }
        case AxisRules():
            return {"$rules": [_write_rule(rule) for rule in value.rules]}
        case np.dtype():
            return {"$dtype": str(value)}
        case list() if type(value) is list:
            return [_write(part) for part in value]
        case tuple() if type(value) is tuple:
            return {"$tuple": [_write(part) for part in value]}
        case dict() if type(value) is dict:
            return {"$dict": [[_write(key), _write(part)] for key, part in value.items()]}
        case jax.Array() | np.ndarray():
            raise _CannotWrite(
                f"it holds {expression(value)}. Put arrays into the layer with a function of the "
                "layer at the place, defined at the top level of a module."
            )
    reference = reference_to(value)
    if reference is not None:
        return {"$ref": reference}
    if isinstance(value, Struct) and kind_of(value).shape == STRUCT:
        return {
            "$layer": _reference(type(value)),
            "fields": {name: _write(part) for name, part in value.attributes_dict().items()},
        }
    if callable(value) and (hasattr(value, "__qualname__") or hasattr(value, "__code__")):
        return {"$ref": _reference(value)}
    raise _CannotWrite(
        f"{expression(value)} of type {type(value).__name__} has no form in JSON. "
        "Make it in a function of the layer, defined at the top level of a module."
    )


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


def _has_own_memory(sharding: NamedSharding) -> bool:
    return sharding != NamedSharding(sharding.mesh, sharding.spec)


def _write_rule(rule: Any) -> dict[str, Any]:
    names = {kind: name for name, kind in _RULE_KINDS.items()}
    fields = {field.name: _write(getattr(rule, field.name)) for field in dataclasses.fields(rule)}
    return {"rule": names[type(rule)], **fields}


class _Reader:
    """Reads written values; knows the mesh to use in place of those written."""

    def __init__(self, mesh: Mesh | AbstractMesh | None) -> None:
        self._mesh = mesh
        self._forms: dict[str, Callable[[Any], Any]] = {
            "$float": float,
            "$spec": lambda parts: PartitionSpec(*map(self.value, parts)),
            "$sharding": self._sharding,
            "$mesh": self._read_mesh,
            "$rules": lambda rules: AxisRules.from_rules(map(self._rule, rules)),
            "$dtype": jax.numpy.dtype,
            "$tuple": lambda parts: tuple(map(self.value, parts)),
            "$dict": lambda items: {self.value(key): self.value(part) for key, part in items},
            "$ref": resolve,
        }

    def edit(self, written: Any) -> Edit:
        if written["edit"] not in _EDIT_KINDS:
            raise RuleTypeError(
                f"{written['edit']!r} is no edit. Use one of {', '.join(_EDIT_KINDS)}."
            )
        options = written.get("options", {})
        return Edit(
            written["edit"],
            self._where(written["where"]),
            self.value(written["what"]),
            tuple((name, self.value(value)) for name, value in options.items()),
            written.get("expect"),
            written.get("nested", False),
        )

    def value(self, written: Any) -> Any:
        if isinstance(written, list):
            return [self.value(part) for part in written]
        if not isinstance(written, dict):
            return written
        if "$layer" in written:
            fields = {name: self.value(part) for name, part in written["fields"].items()}
            return resolve(written["$layer"]).from_attributes(**fields)
        for form, read in self._forms.items():
            if form in written:
                return read(written[form])
        raise RuleTypeError(f"{json.dumps(written)} has no known form.")

    def _where(self, written: Any) -> Where:
        what: Any
        if "types" in written:
            what = tuple(map(resolve, written["types"]))
        elif "path" in written:
            what = written["path"]
        elif "root" in written:
            what = ROOT
        else:
            what = resolve(written["predicate"])
        return Where(
            what,
            self._where(written["within"]) if "within" in written else None,
            self._where(written["outside"]) if "outside" in written else None,
        )

    def _rule(self, written: Any) -> Any:
        fields = {name: self.value(part) for name, part in written.items() if name != "rule"}
        return _RULE_KINDS[written["rule"]](**fields)

    def _sharding(self, written: Any) -> NamedSharding:
        return NamedSharding(
            self.value(written["mesh"]),
            self.value(written["spec"]),
            memory_kind=written["memory_kind"],
        )

    def _read_mesh(self, written: Any) -> Mesh | AbstractMesh:
        axes = dict(written["axes"])
        if self._mesh is not None:
            missing = [name for name in axes if name not in self._mesh.shape]
            if missing:
                has = ", ".join(f"{name}={size}" for name, size in self._mesh.shape.items())
                raise MeshError(
                    f"the recipe's mesh has the mesh axis {missing[0]!r}, and the mesh given "
                    f"({has}) does not. Give a mesh with {list(axes)}."
                )
            return self._mesh
        types = tuple(AxisType[name] for name in written["types"])
        if written["abstract"]:
            return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)
        if written.get("devices") is not None:
            return self._mesh_of_devices(written["devices"], axes, types)
        try:
            made = make_mesh(axes)
        except MeshError as error:
            raise MeshError(
                f"{error.args[0]}\n  Or give the recipe another mesh: "
                "Recipe.from_json(text, mesh=mesh)."
            ) from None
        return made if made.axis_types == types else Mesh(made.devices, made.axis_names, types)

    def _mesh_of_devices(
        self, ids: list[int], axes: dict[str, int], types: tuple[AxisType, ...]
    ) -> Mesh:
        devices = {device.id: device for device in jax.devices()}
        missing = [number for number in ids if number not in devices]
        if missing:
            raise MeshError(
                f"the recipe's mesh has the devices {ids}, and there are none here with the ids "
                f"{missing}. Give the recipe another mesh: Recipe.from_json(text, mesh=mesh)."
            )
        ordered = np.array([devices[number] for number in ids]).reshape(tuple(axes.values()))
        return Mesh(ordered, tuple(axes), axis_types=types)
