"""Recipes as JSON text and back; ``edit_values`` has the form of the values in it."""

import json
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import MeshError, RuleTypeError, raise_all
from penzai_shard.surgery.changes import EditKind
from penzai_shard.surgery.edit_values import (
    CannotWriteError,
    ValueReader,
    data_of,
    written_reference,
)
from penzai_shard.surgery.edits import Edit
from penzai_shard.surgery.making_edits import make_edit
from penzai_shard.surgery.places import ROOT, Where
from penzai_shard.surgery.references import is_reference
from penzai_shard.surgery.trusted_references import TrustedReferences

_FORMAT = "penzai_shard recipe"
_VERSION = 1
_EDIT_KINDS = get_args(EditKind)


def edits_to_json(edits: Sequence[Edit]) -> str:
    """Writes edits; see ``Recipe.to_json``."""
    written: list[Any] = []
    problems: list[str] = []
    for number, edit in enumerate(edits, 1):
        try:
            written.append(_write_edit(edit))
        except CannotWriteError as error:
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
        reader = ValueReader(mesh, references)
        try:
            edits.append(_read_edit(written, reader))
        except MeshError:
            raise
        except (RuleTypeError, KeyError) as error:
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
    written["what"] = data_of(edit.what)
    if edit.options:
        written["options"] = {name: data_of(value) for name, value in edit.options}
    if edit.expect is not None:
        written["expect"] = edit.expect
    if edit.nested:
        written["nested"] = True
    return written


def _write_where(where: Where) -> dict[str, Any]:
    written: dict[str, Any]
    if isinstance(where.what, tuple):
        written = {"types": [written_reference(kind) for kind in where.what]}
    elif isinstance(where.what, str):
        written = {"path": where.what}
    elif where.what is ROOT:
        written = {"root": True}
    else:
        written = {"predicate": written_reference(where.what)}
    around = {"within": where.within, "outside": where.outside}
    return written | {name: _write_where(place) for name, place in around.items() if place}


def _read_edit(written: Any, reader: ValueReader) -> Edit:
    kind, what = written["edit"], written["what"]
    if kind not in _EDIT_KINDS:
        raise RuleTypeError(f"{kind!r} is not an edit. Use one of {', '.join(_EDIT_KINDS)}.")
    where = _read_where(written["where"], reader)
    options = {name: reader.value(part) for name, part in written.get("options", {}).items()}
    if not isinstance(what, dict):
        raise RuleTypeError(f'{what!r} is not a layer or a function. Write {{"$ref": ...}}.')
    what = reader.resolve(what["$ref"], "function") if "$ref" in what else reader.value(what)
    if reader.refused:
        raise reader.refused[0]
    return make_edit(
        kind, where, what, options, written.get("expect"), written.get("nested", False)
    )


def _read_where(written: Any, reader: ValueReader) -> Where:
    what: Any
    if "types" in written:
        what = tuple([reader.resolve(name, "type") for name in written["types"]])
    elif "path" in written:
        what = written["path"]
        if not isinstance(what, str) or is_reference(what):
            raise RuleTypeError(f"{what!r} is not a path pattern.")
    elif "root" in written:
        what = ROOT
    else:
        what = reader.resolve(written["predicate"], "function")
    narrowed = [
        _read_where(written[around], reader) if around in written else None
        for around in ("within", "outside")
    ]
    # What may not be used is reported instead of the edit; any place will do for it.
    return Where.of(Where(ROOT) if reader.refused else what, *narrowed)
