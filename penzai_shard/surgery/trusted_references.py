"""Reading references from text that somebody else may have written.

Nothing is imported but what is known or allowed by name, and no object is given out that does not
itself belong there: a name can reach other modules through the modules that a module imports.
"""

import dataclasses
import types
from collections.abc import Iterable
from typing import Any, Literal

import jax

from penzai_shard.errors import RuleTypeError
from penzai_shard.surgery.references import Ref, full_module_name, resolve_chain
from penzai_shard.surgery.tree_nodes import kind_of_type

KNOWN_PACKAGES = ("penzai_shard", "penzai", "jax")
"""What a recipe's text may import unasked."""

# Whose types and functions may be called with a layer, and whose may be values beside that.
_LAYER_PACKAGES = ("penzai", "penzai_shard.layers", "penzai_shard.surgery")
_VALUE_PACKAGES = (*_LAYER_PACKAGES, "jax")

Role = Literal["type", "layer type", "function", "value"]


class NotAllowedError(RuleTypeError):
    """A reference leads to a package that was not allowed.

    Attributes:
        package: What to allow.
    """

    def __init__(self, reference: str, module: str, package: str) -> None:
        self.package = package
        super().__init__(
            f"{reference!r} needs the module {module!r}, which is not one of those that a recipe "
            f"may use unasked. If you trust it, give allow=({package!r},)."
        )


@dataclasses.dataclass(frozen=True)
class TrustedReferences:
    """Resolves references within the known packages and those that were allowed.

    Attributes:
        allow: Further packages or modules, by name.
    """

    allow: tuple[str, ...]

    @classmethod
    def of(cls, allow: Iterable[str]) -> "TrustedReferences":
        """Reads ``allow=`` of ``Recipe.from_json``.

        >>> TrustedReferences.of("my_layers").allow
        ('my_layers',)
        """
        names = (
            (allow,) if isinstance(allow, str) or not isinstance(allow, Iterable) else tuple(allow)
        )
        for name in names:
            if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
                raise RuleTypeError(
                    f"allow takes names of packages, such as allow=('my_layers',), not {name!r}."
                )
        return cls(names)

    def resolve(self, reference: Any, role: Role) -> Any:
        """The object of a reference, if it may be used.

        Args:
            reference: ``module:name``.
            role: What it is wanted for: the type of a place, the type of a layer to be made, a
                function (or class) that will be called with layers, or a value beside them.

        Returns:
            The object.

        Raises:
            NotAllowedError: It is not in a package that is known or allowed.
            RuleTypeError: It cannot be found, or cannot stand in that role.
        """
        Ref(reference)  # Refuses what is not of the form.
        module_name, _, qualname = reference.partition(":")
        module = full_module_name(module_name)
        allowed = any(map(module_is_in, [module] * len(self.allow), self.allow))
        if not allowed:
            if not any(module_is_in(module, package) for package in KNOWN_PACKAGES):
                raise NotAllowedError(reference, module, module.partition(".")[0])
            if is_private(module):
                raise NotAllowedError(reference, module, module)
        if is_private(qualname):
            raise RuleTypeError(f"{reference!r} names something private. Recipes use public names.")
        *way, found = resolve_chain(reference)
        self._check_way(reference, way[1:])
        self._check_object(reference, found, role)
        return found

    def _check_way(self, reference: str, way: list[Any]) -> None:
        for step in way:
            if step is not jax.checkpoint_policies and not isinstance(step, type):
                raise RuleTypeError(
                    f"{reference!r} goes through a {type(step).__name__}. Write the module that "
                    "defines the name, a colon, and the name."
                )

    def _check_object(self, reference: str, found: Any, role: Role) -> None:
        is_type = isinstance(found, type)
        if isinstance(found, types.ModuleType) or not callable(found):
            raise RuleTypeError(f"{reference!r} is neither a type nor a function.")
        if role in ("type", "layer type") and not is_type:
            raise RuleTypeError(f"{reference!r} is not a type.")
        kind = kind_of_type(found) if is_type else None
        if role == "layer type" and (kind is None or not kind.is_struct):
            raise RuleTypeError(f"{reference!r} is not a class of Penzai's kind (pz.Struct).")
        is_method = isinstance(found, types.MethodType)
        known = _LAYER_PACKAGES if role in ("function", "layer type") else _VALUE_PACKAGES
        for owner in (found.__self__, found.__func__) if is_method else (found,):
            module = getattr(owner, "__module__", None)
            if not isinstance(module, str):
                raise RuleTypeError(f"{reference!r} does not say which module it belongs to.")
            if not any(module_is_in(module, package) for package in (*known, *self.allow)):
                raise NotAllowedError(reference, module, _package_to_allow(module))


def module_is_in(module: str, package: str) -> bool:
    """Whether a module is a package or is in it; names that only begin alike do not count.

    >>> module_is_in("jax.numpy", "jax"), module_is_in("jaxtyping", "jax")
    (True, False)
    """
    return module == package or module.startswith(f"{package}.")


def is_private(name: str) -> bool:
    """Whether some part of a name begins with an underscore.

    >>> is_private("jax._src"), is_private("jax.numpy")
    (True, False)
    """
    return any(part.startswith("_") for part in name.split("."))


def _package_to_allow(module: str) -> str:
    root = module.partition(".")[0]
    return module if root in KNOWN_PACKAGES else root
