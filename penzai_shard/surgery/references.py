"""Types and functions by name: ``module:qualname``, as recipes are written and read."""

import dataclasses
import importlib
import inspect
import re
import sys
import types
from typing import Any

import jax
from penzai import pz

from penzai_shard.errors import RuleTypeError, extra_for
from penzai_shard.rule_kinds import nearest_name

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_LIBRARY = __name__.partition(".")[0]
# Short forms of modules whose names are known from elsewhere than where they are defined.
_SHORT_MODULES = {"pz": "penzai.pz"}


def is_reference(text: str) -> bool:
    """Whether a text has the form of a reference, and not of a path pattern.

    >>> is_reference("pz.nn:Linear"), is_reference("**/attention/**")
    (True, False)
    """
    return _REFERENCE.fullmatch(text) is not None


@dataclasses.dataclass(frozen=True)
class Ref:
    """A type or function by name, as the value of an option of an edit.

    An option that is text stays text. Where an option takes a type or function that shall be
    named and not imported by the writer, give a ``Ref``; the edit holds what it names.

    Attributes:
        name: ``module:qualified_name``; ``pz.nn`` stands for ``penzai.pz.nn``.

    Raises:
        RuleTypeError: The name is not of that form.

    >>> from penzai_shard.layers import InPrecision
    >>> from penzai_shard.surgery import ROOT, wrap
    >>> wrap(ROOT, InPrecision, compute_dtype="bfloat16", keep=Ref("pz.nn:Softmax"))
    wrap(ROOT, InPrecision, compute_dtype='bfloat16', keep=Ref('pz.nn:Softmax'))
    """

    name: str

    def __post_init__(self) -> None:
        """Refuses what is not a reference where it is written."""
        _check_reference(self.name)

    def resolve(self) -> Any:
        """The object. Imports its module."""
        return resolve(self.name)


def named(value: Any) -> Any:
    """The object that a text of the form of a reference, or a ``Ref``, names; all else as it is.

    For arguments that are places, types or functions. Options are read otherwise: text is text.

    >>> named("pz.nn:Linear") is named(Ref("pz.nn:Linear")) is named(pz.nn.Linear)
    True
    """
    if isinstance(value, Ref):
        return value.resolve()
    return resolve(value) if isinstance(value, str) and is_reference(value) else value


def _check_reference(reference: Any) -> None:
    if not (isinstance(reference, str) and is_reference(reference)):
        raise RuleTypeError(
            f"{reference!r} is not a reference. Write module:name, for instance 'pz.nn:Linear'."
        )


def resolve(reference: str) -> Any:
    """The object of a reference. Imports the module that it names.

    Args:
        reference: Module and qualified name; ``pz.nn`` stands for ``penzai.pz.nn``.

    Returns:
        The object.

    Raises:
        RuleTypeError: There is no such module, or it has no such name.

    >>> resolve("pz.nn:Linear") is pz.nn.Linear
    True
    """
    return resolve_chain(reference)[-1]


def resolve_chain(reference: str) -> list[Any]:
    """The module of a reference, and each object on the way from it to what is named."""
    _check_reference(reference)
    module_name, _, qualname = reference.partition(":")
    try:
        chain: list[Any] = [importlib.import_module(full_module_name(module_name))]
    except Exception as error:  # A module runs when it is imported, and may raise anything.
        raise RuleTypeError(
            f"{reference!r}: cannot import {module_name!r}: {error}. "
            f"{extra_for(error) or 'Install or import it first, or correct the name.'}"
        ) from error
    for name in qualname.split("."):
        if not hasattr(chain[-1], name):
            near = nearest_name(name, dir(chain[-1]))
            raise RuleTypeError(
                f"{reference!r}: {module_name!r} has no {qualname!r}. "
                + (f"Did you mean {near!r}?" if near else "Correct the name.")
            )
        chain.append(getattr(chain[-1], name))
    return chain


def full_module_name(module_name: str) -> str:
    """A module's name in full.

    >>> full_module_name("pz.nn")
    'penzai.pz.nn'
    """
    first, dot, rest = module_name.partition(".")
    return _SHORT_MODULES.get(first, first) + dot + rest


def reference_to(value: Any) -> str | None:
    """How a type or function is written as a reference; None if it has no importable name.

    Args:
        value: A type, a function, a class method, or a policy of ``jax.checkpoint_policies``.

    Returns:
        The shortest form that ``resolve`` gives the same object back for.

    >>> reference_to(pz.nn.Linear), reference_to(lambda layer: layer)
    ('pz.nn:Linear', None)
    """
    if inspect.ismodule(value) or not (callable(value) or isinstance(value, type)):
        return None
    qualname = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    if isinstance(value, types.MethodType):
        if not isinstance(value.__self__, type):
            return None
        module = value.__self__.__module__
    for name, policy in vars(jax.checkpoint_policies).items():
        if policy is value:
            return f"jax:checkpoint_policies.{name}"
    if isinstance(qualname, str) and isinstance(module, str):
        for candidate in _candidates(module, qualname):
            if is_reference(candidate) and _resolves_to(candidate, value):
                return candidate
    return None


def _candidates(module: str, qualname: str) -> list[str]:
    """References that an object may have, those of public modules first."""
    root = module.partition(".")[0]
    candidates = []
    if root == _LIBRARY:
        candidates += [f"{_LIBRARY}:{qualname}", f"{_LIBRARY}.layers:{qualname}"]
    if root == "penzai" and qualname in dir(pz.nn):
        candidates.append(f"pz.nn:{qualname}")
    if root == "jax":
        candidates += [f"{public}:{qualname}" for public in ("jax.numpy", "jax.nn", "jax.lax")]
        candidates += [
            f"{name}:{qualname}"
            for name, loaded in sorted(sys.modules.items())
            if name.startswith("jax") and "._" not in name and qualname in vars(loaded)
        ]
    # What a script or notebook defines has a name that no other process can import.
    if module != "__main__":
        candidates.append(f"{module}:{qualname}")
    return candidates


def _resolves_to(reference: str, value: Any) -> bool:
    try:
        found = resolve(reference)
    except RuleTypeError:
        return False
    return found is value or (isinstance(value, types.MethodType) and found == value)


def display_name(value: Any) -> str:
    """A type or function in messages.

    >>> display_name(pz.nn.Linear)
    'Linear'
    """
    return (getattr(value, "__qualname__", None) or repr(value)).rpartition("<locals>.")[2]
