"""Reads what is given on the command line: a model, a mesh, rules."""

import functools
import importlib
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import MeshError, Problem, RuleTypeError, SelectionError, ShardingError
from penzai_shard.meshes import AnyMesh, make_mesh
from penzai_shard.paths import nearest
from penzai_shard.placement.sharded_init import abstract_model
from penzai_shard.rules import AxisRules, data_parallel, fully_sharded, tensor_parallel

_PRESETS = {preset.__name__: preset for preset in (data_parallel, fully_sharded, tensor_parallel)}


def make_error(what: str, fix: str, error: type[ShardingError] = SelectionError) -> ShardingError:
    """An error about what is given on the command line."""
    return error("cannot read the command:", [Problem("", what, fix)])


def read_object(reference: str) -> Any:
    """What ``file.py:name`` or ``module:name`` stands for.

    Raises:
        SelectionError: There is no such file, module or name, or the module fails.
    """
    place, _, name = reference.rpartition(":")
    if not place:
        raise make_error(f"{reference!r} names no object", f"Write {name}:build.")
    is_file = place.endswith(".py")
    if is_file and not pathlib.Path(place).is_file():
        raise make_error(f"there is no file {place!r}", "Write the path of a file.")
    module = run_user_code(place, lambda: _import_file(place) if is_file else _import_module(place))
    if not hasattr(module, name):
        near = nearest(name, vars(module)) or "name"
        raise make_error(f"{place} has no {name!r}", f"Write {place}:{near}.")
    return getattr(module, name)


def read_model(text: str) -> Any:
    """The model of a reference, of a published name, or of the path of a ``config.json``.

    What functions build has structs in place of arrays; so have the parameters of configurations.

    Raises:
        SelectionError: There is no such object, it fails, or it has no arrays.
        CheckpointNotFoundError: There is no such name or path.
    """
    if ":" not in text and not text.endswith(".py"):
        from penzai_shard.checkpoints.parameters import param_dict
        from penzai_shard.pretrained.models import model_of_config

        return param_dict(model_of_config(text))  # Without constants, which fill a plan.
    tree = read_shapes(text)
    if not leaves_of(tree):
        fix = "Write the name of a model, or of a function that returns one."
        raise make_error(f"{text} has no arrays", fix)
    return tree


def read_shapes(reference: str) -> Any:
    """What a reference stands for; of a function the shapes of what it builds."""
    found = read_object(reference)
    # A model can mostly be called too, and has arrays.
    if leaves_of(found) or not callable(found):
        return found
    return run_user_code(reference, lambda: abstract_model(found))


def run_user_code(name: str, code: Callable[[], Any]) -> Any:
    """What code of a user gives, which may fail in any way.

    Args:
        name: What it is called on the command line.
        code: A function without arguments.

    Raises:
        SelectionError: It raises what is no error of this library.
    """
    try:
        return code()
    except ShardingError:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        what = f"{name} fails with {type(error).__name__}: {first_line}"
        raise make_error(what, "Add --debug to see where.") from error


def _import_module(name: str) -> types.ModuleType:
    # A script that pip installs has its own folder there, and not the one it is called in.
    sys.path.insert(0, "")
    return importlib.import_module(name)


@functools.cache
def _import_file(path: str) -> types.ModuleType:
    # It may import its neighbours. Its own name may be that of a library.
    sys.path.insert(0, str(pathlib.Path(path).parent))
    spec: Any = importlib.util.spec_from_file_location(
        f"penzai_shard_model_{pathlib.Path(path).stem}", path
    )
    module = importlib.util.module_from_spec(spec)
    # There dataclasses and pickle look for it, also when its functions are called later.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read_mesh(text: str) -> AnyMesh:
    """The mesh of ``data=4,model=2``, without devices.

    Raises:
        MeshError: It cannot be read.
    """
    text = re.sub(r"\s", "", text)
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", text)}
    # What was not read, and an axis that is named twice.
    if text != ",".join(f"{name}={size}" for name, size in sizes.items()):
        what = f"{text!r} is no mesh with axes of different names"
        raise make_error(what, "Write --mesh data=4,model=2.", MeshError)
    return make_mesh(sizes, abstract=True)


def read_rules(text: str | None) -> Any:
    """The rules of ``fully_sharded,heads=data+model,layers=``, or what a reference stands for.

    A preset splits over the mesh axis that it names itself: ``data``, or ``model``.

    Raises:
        RuleTypeError: They cannot be read.
    """
    if text is None:
        return AxisRules(None)
    if ":" in text:
        return read_object(text)
    rules: list[Any] = []
    for part in filter(None, re.sub(r"\s", "", text).split(",")):
        name, equals, axes = part.partition("=")
        if not equals and name not in _PRESETS:
            fix = f"Write --rules embedding=data,neurons=model, or {', '.join(_PRESETS)}."
            raise make_error(f"{part!r} is no rule", fix, RuleTypeError)
        own = [(name, tuple(filter(None, axes.split("+"))))]
        rules += own if equals else _PRESETS[name]().rules
    return AxisRules(rules)
