"""Writes edits as JSON, and reads them from a text that a stranger may have written.

Plain data is written as it is. Whatever JSON has no form for is an object with one key that begins
with ``$``: ``{"$ref": "pz.nn:Linear"}`` is a type by name, ``{"$tuple": [1, 2]}`` a tuple. Reading
imports what is trusted and nothing else, and calls no function that a text names.
"""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import MeshError, Problem, Problems, RuleTypeError, ShardingError
from penzai_shard.meshes import AnyMesh, make_mesh
from penzai_shard.rules import AxisRules
from penzai_shard.surgery.edits import Edit, Verb
from penzai_shard.surgery.references import Ref, find_name, find_trusted
from penzai_shard.surgery.where import ROOT, Where, value_text

_FORMAT = "penzai_shard recipe 1"
# Whose types and functions may be called with a layer, and whose may be values besides.
_CALLED = (
    "penzai",
    "penzai_shard.layers",
    "penzai_shard.layouts.edits",
    "penzai_shard.surgery.standard_recipes",
)
_VALUES = (*_CALLED, "jax")
_OTHER_MESH = "Give another mesh: Recipe.from_json(text, mesh=mesh)."


def _make_layer(kind: Any, fields: dict[str, Any]) -> Any:
    """Makes a layer without its constructor, so that none of its code runs."""
    if not (isinstance(kind, type) and issubclass(kind, pz.Struct)):
        raise TypeError(f"{kind!r} is no type of layers")
    return kind.from_attributes(**fields)  # type: ignore[attr-defined]


# How values are taken apart that are more than plain data, and made again: their exact types, the
# parts of one, and what makes it of these.
_FORMS: dict[str, tuple[Sequence[type], Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    "$tuple": ([tuple], list, lambda *parts: parts),
    "$dict": ([dict], dict.items, lambda *pairs: dict(pairs)),
    "$root": ([type(ROOT)], lambda root: (), lambda: ROOT),
    "$where": ([Where], lambda where: (where.what, where.within, where.outside), Where.of),
    "$layer": ([], lambda layer: (type(layer), layer.attributes_dict()), _make_layer),
    # Of a mesh its axes are written; its devices are another matter on another machine.
    "$mesh": (
        [Mesh, AbstractMesh],
        lambda mesh: (dict(mesh.shape), isinstance(mesh, AbstractMesh)),
        lambda shape, abstract: make_mesh(shape, abstract=abstract),
    ),
    "$spec": ([PartitionSpec], list, PartitionSpec),
    "$sharding": ([NamedSharding], lambda own: (own.mesh, own.spec), NamedSharding),
    "$rules": ([AxisRules], AxisRules.to_data, lambda *rows: AxisRules.from_data(rows)),
}


# Writing


def _write(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return list(map(_write, value))
    if kind is dict and all(isinstance(key, str) and key[:1] != "$" for key in value):
        return {key: _write(part) for key, part in value.items()}
    if kind is Ref:
        return {"$ref": value.name}
    exact = (form for form, (kinds, *_) in _FORMS.items() if kind in kinds)
    form = "$layer" if isinstance(value, pz.Struct) else next(exact, None)
    if form is not None:
        return {form: [*map(_write, _FORMS[form][1](value))]}
    name = find_name(value)
    if name is None:
        what = f"{value_text(value)} of type {kind.__name__} has no form in JSON"
        fix = "Make it in a function with a public name at the top level of a module."
        raise RuleTypeError("a value:", [Problem("", what, fix)])
    return {"$ref": name}


def write_edits(edits: Sequence[Edit]) -> str:
    """Writes edits; see ``Recipe.to_json``."""
    problems = Problems("this recipe cannot be written as JSON:")
    written = []
    for number, edit in enumerate(edits):
        try:
            defaults = {field.name: field.default for field in dataclasses.fields(edit)}
            fields = {name: value for name, value in vars(edit).items() if value != defaults[name]}
            if edit.options:
                fields["options"] = dict(edit.options)
            written.append(_write(fields))
        except RuleTypeError as error:
            problems.extend(dataclasses.replace(p, path=f"edits/{number}") for p in error.problems)
    problems.raise_if_any(RuleTypeError)
    return json.dumps({"format": _FORMAT, "edits": written}, indent=2)


# Reading


def read_edits(text: Any, mesh: AnyMesh | None, allow: Iterable[str]) -> list[Edit]:
    """Reads edits; see ``Recipe.from_json``."""
    problems = Problems("this recipe cannot be read:")
    allowed, edits = [allow] if isinstance(allow, str) else [*allow], []
    for number, row in enumerate(_read_rows(text)):
        path = f"edits/{number}"
        try:
            edits.append(_read_edit(row, mesh, allowed))
        except ShardingError as error:
            other = {"fix": _OTHER_MESH} if isinstance(error, MeshError) else {}
            problems.extend(dataclasses.replace(p, path=path, **other) for p in error.problems)
        except Exception as error:
            # Text that was changed by hand can be wrong in any way.
            what = f"{reprlib.repr(row)} is not as to_json() writes it: {error!r}"
            problems.add(path, what, "Write the recipe again.")
    problems.raise_if_any(RuleTypeError)
    return edits


def _read_rows(text: Any) -> list[Any]:
    try:
        data = json.loads(text) if isinstance(text, str) else {}
        rows = data["edits"] if data["format"] == _FORMAT else None
    except (LookupError, RecursionError, TypeError, ValueError):
        rows = None
    if not isinstance(rows, list):
        what = f"{reprlib.repr(text)} is no text of to_json(), or one of another version"
        problem = Problem("", what, "Write the recipe again with to_json().")
        raise RuleTypeError("this recipe cannot be read:", [problem])
    return rows


def _read_edit(row: dict[str, Any], mesh: AnyMesh | None, allow: Sequence[str]) -> Edit:
    def read(data: Any, givers: Sequence[str]) -> Any:
        """The value that was written, with types and functions of some packages."""
        if isinstance(data, list):
            return [read(part, givers) for part in data]
        if not isinstance(data, dict):
            return data
        if not any(key.startswith("$") for key in data):
            return {key: read(part, givers) for key, part in data.items()}
        ((form, content),) = data.items()
        if form == "$ref":
            return find_trusted(Ref(content), givers, allow)
        parts = read(content, _VALUES if form == "$layer" else givers)
        return mesh if form == "$mesh" and mesh is not None else _FORMS[form][2](*parts)

    called = "where", "what"
    fields = {name: read(x, _CALLED if name in called else _VALUES) for name, x in row.items()}
    if fields["verb"] not in get_args(Verb):
        raise ValueError(f"{fields['verb']!r} is no edit")
    options = fields.get("options", {})
    fields |= {"where": Where.of(fields["where"]), "options": (*options.items(),)}
    return Edit(**fields)
