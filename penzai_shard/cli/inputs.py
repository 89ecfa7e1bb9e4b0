"""Reads what is given on the command line: a model, a mesh, rules."""

import importlib
import importlib.util
import pathlib
import re
import sys
from typing import Any

from penzai_shard.errors import MeshError, Problem, RuleTypeError, SelectionError
from penzai_shard.meshes import AnyMesh, make_mesh
from penzai_shard.paths import nearest
from penzai_shard.rules import AxisRules


def read_object(reference: str) -> Any:
    """What ``file.py:name`` or ``module:name`` stands for.

    Raises:
        SelectionError: There is no such file, module or name.
    """
    place, _, name = reference.rpartition(":")
    what = fix = ""
    if not place:
        what, fix = f"{reference!r} names no object", f"Write {name}:build."
    elif place.endswith(".py"):
        path = pathlib.Path(place)
        if not path.is_file():
            what, fix = f"there is no file {place!r}", "Write the path of a file."
    elif importlib.util.find_spec(place.partition(".")[0]) is None:
        what, fix = f"there is no module {place!r}", "Write file.py:name for a file."
    if what:
        raise SelectionError("cannot read the command:", [Problem("", what, fix)])
    module = _import_file(path) if place.endswith(".py") else importlib.import_module(place)
    if not hasattr(module, name):
        known = [known for known in vars(module) if not known.startswith("_")]
        near = nearest(name, known) or next(iter(known), "name")
        problem = Problem("", f"{place} has no {name!r}", f"Write {place}:{near}.")
        raise SelectionError("cannot read the command:", [problem])
    return getattr(module, name)


def _import_file(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where the file imports its neighbours, and where dataclasses look their module up.
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def read_mesh(text: str) -> AnyMesh:
    """The mesh of ``data=4,model=2``, without devices.

    Raises:
        MeshError: It cannot be read.
    """
    if not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text):
        problem = Problem("", f"{text!r} is no mesh", "Write --mesh data=4,model=2.")
        raise MeshError("cannot read the command:", [problem])
    sizes = (part.split("=") for part in text.split(","))
    return make_mesh({name: int(size) for name, size in sizes}, abstract=True)


def read_rules(text: str | None) -> AxisRules:
    """The rules of ``embedding=data,heads=data+model,layers=``, or of a reference to some.

    Raises:
        RuleTypeError: They cannot be read.
    """
    if text is None:
        return AxisRules(None)
    if ":" in text:
        return AxisRules(read_object(text))
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not all(equals for _, equals, _ in pairs):
        fix = "Write --rules embedding=data,neurons=model."
        raise RuleTypeError(
            "cannot read the command:", [Problem("", f"{text!r} are no rules", fix)]
        )
    return AxisRules([(name, tuple(filter(None, axes.split("+")))) for name, _, axes in pairs])
