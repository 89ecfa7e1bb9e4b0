"""Recipes as JSON text and back.

Plain data is written as it is. Whatever JSON has no form for is an object with one key that
starts with ``$``: a type or function by name, a mesh by its axis sizes, a layer by its fields.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from penzai.core.struct import Struct

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import MeshError, RuleTypeError, raise_all
from penzai_shard.meshes import make_mesh, mesh_text
from penzai_shard.rule_kinds import IdentityRule, LargestDimensionRule, NameRule
from penzai_shard.surgery.edits import Edit, make_edit
from penzai_shard.surgery.expressions import expression
from penzai_shard.surgery.places import ROOT, Where
from penzai_shard.surgery.references import is_reference, reference_to
from penzai_shard.surgery.tree_nodes import kind_of
from penzai_shard.surgery.trusted_references import (
    NotAllowedError,
    Role,
    TrustedReferences,
    is_private,
)

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
        except RecursionError:
            problems.append(f"edit {number}, {edit.kind}: a value in it contains itself.")
    raise_all(RuleTypeError, "this recipe cannot be written as JSON:", problems)
    return json.dumps({"format": _FORMAT, "version": _VERSION, "edits": written}, indent=2)


def edits_from_json(
    text: Any, mesh: Mesh | AbstractMesh | None, allow: Iterable[str]
) -> list[Edit]:
    """Reads edits; see ``Recipe.from_json``."""
    references = TrustedReferences.of(allow)
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise RuleTypeError(f"mesh= takes a jax.sharding.Mesh, not {reprlib.repr(mesh)}.")
    edits: list[Edit] = []
    problems: list[str] = []
    packages: dict[str, None] = {}
    for number, written in enumerate(_written_edits(text), 1):
        reader = _Reader(mesh, references)
        try:
            edits.append(reader.edit(written))
        except MeshError:
            raise
        except (RuleTypeError, KeyError, _Abandoned) as error:
            own = f"{error} is missing." if isinstance(error, KeyError) else str(error)
            shown = [*map(str, reader.refused)] or [own]
            problems += [f"edit {number}: {problem}" for problem in shown]
        except Exception as error:
            # Text that was changed by hand can be wrong in any way.
            problems.append(
                f"edit {number} is not as to_json() writes it: {error} "
                f"({reprlib.repr(written)}). Write the recipe again."
            )
        packages |= dict.fromkeys(refusal.package for refusal in reader.refused)
    headline = "this recipe cannot be read"
    if packages:
        names = ", ".join(map(repr, [*references.allow, *packages]))
        headline += f". If you trust all that it names: Recipe.from_json(text, allow=({names},))"
    raise_all(RuleTypeError, f"{headline}:", problems)
    return edits


def _written_edits(text: Any) -> list[Any]:
    """The list of edits in a text, which is what ``edits_to_json`` wrote as far as that goes."""
    if not isinstance(text, str):
        raise RuleTypeError(
            f"a recipe is read from text, and this is of type {type(text).__name__}. "
            "Give the text of to_json(); decode bytes first."
        )
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RuleTypeError(
            f"this is not a recipe: {error}. Give the text of to_json()."
        ) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise RuleTypeError(
            f'this JSON is not a recipe: it has no "format": "{_FORMAT}". '
            "Give the text of to_json()."
        )
    if data.get("version") != _VERSION:
        raise RuleTypeError(
            f"this recipe has version {data.get('version')!r}, and {_VERSION} is known. "
            "Read it with the penzai_shard that wrote it, or write it again."
        )
    if not isinstance(data.get("edits"), list):
        raise RuleTypeError('this recipe has no list of "edits". Give the text of to_json().')
    return data["edits"]


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
    kind = "class" if isinstance(value, type) else "function"
    if reference is None:
        is_in_script = getattr(value, "__module__", None) == "__main__"
        where = " outside of the script or notebook that defines it" if is_in_script else ""
        raise _CannotWrite(
            f"{expression(value)} cannot be imported by name{where}. "
            f"Define the {kind} at the top level of a module."
        )
    if is_private(reference.partition(":")[2]):
        raise _CannotWrite(f"{reference!r} is private. Give the {kind} a public name.")
    return reference


def _write(value: Any) -> Any:
    match value:
        case None | bool() | int() | str() if type(value) in (type(None), bool, int, str):
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
    if reference_to(value) is not None:
        return {"$ref": _reference(value)}
    if isinstance(value, Struct) and kind_of(value).is_struct:
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


class _Abandoned(Exception):
    """An edit refers to what may not be used; the reader has the refusals."""


class _Reader:
    """Reads one written edit.

    Args:
        mesh: The mesh to use in place of those written.
        references: How to resolve references.

    Attributes:
        refused: The references that lead to packages which were not allowed.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None, references: TrustedReferences) -> None:
        self._mesh = mesh
        self._references = references
        self.refused: list[NotAllowedError] = []
        self._forms: dict[str, Callable[[Any], Any]] = {
            "$float": float,
            "$spec": lambda parts: PartitionSpec(*map(self.value, parts)),
            "$sharding": self._sharding,
            "$mesh": self._read_mesh,
            "$rules": lambda rules: AxisRules.from_rules(map(self._rule, rules)),
            "$dtype": jax.numpy.dtype,
            "$tuple": lambda parts: tuple(map(self.value, parts)),
            "$dict": lambda items: {self.value(key): self.value(part) for key, part in items},
            "$ref": lambda reference: self._resolve(reference, "value"),
        }

    def edit(self, written: Any) -> Edit:
        kind, what = written["edit"], written["what"]
        if kind not in _EDIT_KINDS:
            raise RuleTypeError(f"{kind!r} is not an edit. Use one of {', '.join(_EDIT_KINDS)}.")
        where = self._where(written["where"])
        options = {name: self.value(part) for name, part in written.get("options", {}).items()}
        if not isinstance(what, dict):
            raise RuleTypeError(f'{what!r} is not a layer or a function. Write {{"$ref": ...}}.')
        what = self._resolve(what["$ref"], "function") if "$ref" in what else self.value(what)
        if self.refused:
            raise _Abandoned
        return make_edit(
            kind, where, what, options, written.get("expect"), written.get("nested", False)
        )

    def _resolve(self, reference: Any, role: Role) -> Any:
        """The object of a reference; None, and a note, if its package is not allowed."""
        try:
            return self._references.resolve(reference, role)
        except NotAllowedError as error:
            self.refused.append(error)
            return None

    def value(self, written: Any) -> Any:
        if isinstance(written, list):
            return [self.value(part) for part in written]
        if not isinstance(written, dict):
            return written
        if "$layer" in written:
            layer_type = self._resolve(written["$layer"], "layer type")
            fields = {name: self.value(part) for name, part in written["fields"].items()}
            return None if self.refused else layer_type.from_attributes(**fields)
        for form, read in self._forms.items():
            if form in written:
                return read(written[form])
        raise RuleTypeError(f"{json.dumps(written)} has no known form.")

    def _where(self, written: Any) -> Where:
        what: Any
        if "types" in written:
            what = tuple([self._resolve(name, "type") for name in written["types"]])
        elif "path" in written:
            what = written["path"]
            if not isinstance(what, str) or is_reference(what):
                raise RuleTypeError(f"{what!r} is not a path pattern.")
        elif "root" in written:
            what = ROOT
        else:
            what = self._resolve(written["predicate"], "function")
        narrowed = [
            self._where(written[around]) if around in written else None
            for around in ("within", "outside")
        ]
        # What may not be used is reported instead of the edit; any place will do for it.
        return Where.of(Where(ROOT) if self.refused else what, *narrowed)

    def _rule(self, written: Any) -> Any:
        fields = {name: self.value(part) for name, part in written.items() if name != "rule"}
        rule = _RULE_KINDS[written["rule"]](**fields)
        wanted = {"mesh_axes": tuple, "yields": bool, "min_size": int}
        fits = all(type(fields.get(name, kind())) is kind for name, kind in wanted.items())
        if not fits or not all(isinstance(axis, str) for axis in fields.get("mesh_axes", ())):
            raise RuleTypeError(f"{reprlib.repr(written)} is not a rule.")
        return rule

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
                has = mesh_text(self._mesh)
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
