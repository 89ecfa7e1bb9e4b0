"""Names types and functions by text, ``module:name``, and finds what such a text names.

A text that somebody else has written may name what is trusted and nothing more. Modules hold what
they import, ``os`` for instance, so the object that is found is looked at too.
"""

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from penzai_shard.errors import Problem, RuleTypeError
from penzai_shard.paths import nearest

_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# Their public modules may be imported unasked.
_PACKAGES = ("penzai_shard", "penzai", "jax")


@dataclasses.dataclass(frozen=True)
class Ref:
    """A type or function by name, wherever an edit takes one: as place, wrapper, layer or option.

    It is looked up when the edit is carried out, so that a recipe can be made where what it names
    is not installed.

    Attributes:
        name: ``module:name``; ``pz.nn`` stands for ``penzai.pz.nn``.

    Raises:
        RuleTypeError: The name is not of that form.

    >>> import penzai_shard as pzs
    >>> pzs.wrap(Ref("pz.nn:Linear"), Ref("my_layers:Traced"))
    wrap(Ref(name='pz.nn:Linear'), Ref(name='my_layers:Traced'))
    """

    name: str

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and _FORM.fullmatch(self.name)):
            what = f"{self.name!r} is not of the form module:name"
            raise RuleTypeError("Ref:", [Problem("", what, "Write for instance 'pz.nn:Linear'.")])


def resolve(value: Any) -> Any:
    """What a ``Ref`` names, also inside of tuples, lists and dicts; all else as it is.

    Raises:
        RuleTypeError: There is nothing of that name.
    """
    if isinstance(value, Ref):
        return _follow(value)[-1]
    if type(value) in (tuple, list):
        return type(value)(map(resolve, value))
    return {k: resolve(v) for k, v in value.items()} if type(value) is dict else value


def _split(ref: Ref) -> tuple[str, str]:
    """The module's full name, and the name in it."""
    module, _, name = ref.name.partition(":")
    return re.sub(r"^pz\b", "penzai.pz", module), name


def _follow(ref: Ref) -> list[Any]:
    """The module, what is on the way from it to what is named, and that. Imports the module."""
    module, name = _split(ref)
    found: list[Any] = []
    try:
        found.append(importlib.import_module(module))
        for part in name.split("."):
            found.append(getattr(found[-1], part))
    except Exception as error:  # A module may raise anything when it is imported.
        near = nearest(name, dir(found[0])) if found else None
        fix = f"Write {near!r}." if near else "Correct the name, or install its package."
        problem = Problem("", f"{ref.name!r} cannot be found: {error}", fix)
        raise RuleTypeError("a name:", [problem]) from error
    return found


def _is_private(name: str) -> bool:
    return "._" in f".{name}"


def _is_in(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of some packages or lies in one; ``jaxtyping`` is not in ``jax``."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def find_name(value: Any) -> str | None:
    """How others name a type or function, by the public module with the shortest name.

    >>> import jax
    >>> find_name(Ref), find_name(jax.nn.silu), find_name(lambda layer: layer)
    ('penzai_shard.surgery:Ref', 'jax.nn:silu', None)
    """
    own, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or not _FORM.fullmatch(f"{own}:{name}") or _is_private(f"{name}"):
        return None
    root, first = f"{own}".partition(".")[0], f"{name}".partition(".")[0]
    # __main__, where scripts and notebooks define things, is another module elsewhere.
    public = [m for m in sys.modules if _is_in(m, [root]) and not _is_private(m)]
    for module in sorted(public, key=len):
        held: Any = sys.modules[module]
        # The library loads its names when asked for them. Others may warn when asked.
        if root == _PACKAGES[0] or first in vars(held):
            for part in f"{name}".split("."):
                held = getattr(held, part, None)
            if type(held) is type(value) and held == value:
                return f"{module}:{name}"
    return None


def find_trusted(ref: Ref, givers: Iterable[str], allow: Sequence[str]) -> Any:
    """What a name in a stranger's text stands for.

    Args:
        ref: The name.
        givers: Parts of the library, Penzai and JAX whose types and functions will do.
        allow: Packages that are trusted in all.

    Raises:
        RuleTypeError: It is in no package that is trusted, or there is nothing of that name, or
            nothing public that can be called.
    """
    module, name = _split(ref)
    if (_is_in(module, _PACKAGES) and not _is_private(module)) or _is_in(module, allow):
        *way, found = [None] if _is_private(name) else _follow(ref)[1:]
        if not callable(found) or not all(isinstance(step, type) for step in way):
            what = f"{ref.name!r} is no public type or function of a module, nor a method of a type"
            fix = "Name the module that defines it, a colon, and its name there."
            raise RuleTypeError("a name:", [Problem("", what, fix)])
        owners = (f"{getattr(step, '__module__', None)}" for step in (*way, found))
        strange = [owner for owner in owners if not _is_in(owner, [*givers, *allow])]
        if not strange:
            return found
        module = strange[0]
    # Whoever trusts a package allows all of it; of those above one module is enough.
    root = module.partition(".")[0]
    allowed = (*allow, module if root in _PACKAGES else root)
    what = f"{ref.name!r} is in no package that a recipe may name unasked"
    fix = f"If you trust it, write Recipe.from_json(text, allow={allowed})."
    raise RuleTypeError("a name:", [Problem("", what, fix)])
