"""Whether two optimizers are the same computation, so that they may share a compiled program.

Every call of ``optax.adam(1e-3)`` makes new functions, so identity would compile the same step
again for each. Two optimizers count as equal only where that follows from what they are made of:
the same code of optax, with equal numbers in its closures. Whatever else they hold (a user's
schedule, an array) must be the very same object.
"""

import dataclasses
import functools
import types
from typing import Any

# Of these the functions are known to read nothing but their arguments, closures and the package
# itself. A user's function may read a global that has changed between two optimizers.
_PURE_PACKAGES = frozenset({"optax"})


class SameObject:
    """Stands for an object of which nothing is known: equal to itself alone, and kept alive.

    >>> thing = []
    >>> SameObject(thing) == SameObject(thing), SameObject(thing) == SameObject([])
    (True, False)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclasses.dataclass(frozen=True, repr=False)
class OptimizerIdentity:
    """An optimizer as a static part of a train state, comparable by what it computes.

    Attributes:
        definition: The optimizer.
        fingerprint: What it is made of, as one hashable value, read when this was made.
    """

    definition: Any = dataclasses.field(compare=False)
    fingerprint: Any

    @classmethod
    def of(cls, definition: Any) -> "OptimizerIdentity":
        """The identity of an optimizer.

        >>> import optax
        >>> identity = OptimizerIdentity.of
        >>> identity(optax.adam(1e-3)) == identity(optax.adam(1e-3))
        True
        >>> identity(optax.adam(1e-3)) == identity(optax.adam(2e-3))
        False
        >>> identity(optax.sgd(0.1, momentum=0.9))
        OptimizerIdentity(chain)
        """
        return cls(definition, _fingerprint(definition, {}))

    def is_current(self) -> bool:
        """Whether nothing that the optimizer holds was changed since this was made."""
        return bool(_fingerprint(self.definition, {}) == self.fingerprint)

    def __repr__(self) -> str:
        # The function that made it, as far as that can be seen.
        made = getattr(getattr(self.definition, "update", None), "__qualname__", None)
        name = str(made or type(self.definition).__name__).split(".", maxsplit=1)[0]
        return f"{type(self).__name__}({name})"


def _fingerprint(value: Any, visiting: dict[int, int]) -> Any:
    """What a value is made of: equal fingerprints mean equal behaviour.

    Args:
        value: Anything that an optimizer holds.
        visiting: The functions and containers around it, to end at cycles.
    """
    kind = type(value)
    if value is None or kind in (int, bool, str, bytes):
        return (kind, value)
    if kind is float:
        # Tells -0.0 from 0.0, and one NaN is as good as another.
        return (kind, value.hex())
    if kind is complex:
        return (kind, value.real.hex(), value.imag.hex())
    if kind not in (types.FunctionType, functools.partial, list, dict) and not isinstance(
        value, tuple
    ):
        return SameObject(value)
    if id(value) in visiting:
        return ("around", visiting[id(value)])
    inside = visiting | {id(value): len(visiting)}
    if kind is types.FunctionType:
        return _function_fingerprint(value, inside)
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        return (kind, *(_fingerprint(part, inside) for part in parts))
    if kind is dict:
        return (
            kind,
            *((_fingerprint(k, inside), _fingerprint(v, inside)) for k, v in value.items()),
        )
    return (kind, *(_fingerprint(part, inside) for part in value))


def _function_fingerprint(function: types.FunctionType, inside: dict[int, int]) -> Any:
    if str(function.__globals__.get("__name__")).split(".", maxsplit=1)[0] not in _PURE_PACKAGES:
        return SameObject(function)
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_fingerprint(cell.cell_contents, inside))
        except ValueError:
            cells.append("empty")
    rest = (function.__defaults__, function.__kwdefaults__, function.__dict__)
    return (
        function.__code__,
        function.__globals__["__name__"],
        *cells,
        *(_fingerprint(part, inside) for part in rest),
    )
