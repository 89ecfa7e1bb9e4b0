"""Keeps what the logical axes of a program are called, each with its reason.

A class has a *role*, which is what it does in the program, and by default is called so. A name that
people gave it wins, and changes nothing of what other classes do.
"""

from collections.abc import Hashable, Iterable, Set

from penzai_shard.naming.ties import AxisClass


class AxisNames:
    """What each class is called, and why.

    Attributes:
        roles: What classes do in the program; the first role that one gets stays.
        names: What classes are called: their roles, unless ``call`` said otherwise.
        reasons: Why a class has its name.
        open: Why a class that had a name has none.

    >>> names, part = AxisNames(), AxisClass(0, 8)
    >>> names.give(part, "neurons", "a product makes it")
    >>> names.call(part, "mlp", "'up' has that name")
    >>> names.roles[part], names.names[part], names.reasons[part]
    ('neurons', 'mlp', "'up' has that name")
    """

    def __init__(self) -> None:
        self.roles: dict[AxisClass, str] = {}
        self.names: dict[AxisClass, Hashable] = {}
        self.reasons: dict[AxisClass, str] = {}
        self.open: dict[AxisClass, str] = {}
        self._called: set[AxisClass] = set()

    def give(self, part: AxisClass, role: str, reason: str) -> None:
        """Gives a class a role, unless it has one or is of length 1."""
        if part.size > 1 and part not in self.roles:
            self.roles[part] = role
            self.names.setdefault(part, role)
            self.reasons.setdefault(part, reason)

    def call(self, part: AxisClass, name: Hashable, reason: str) -> None:
        """Gives a class a name, whatever its role is; the first one stays."""
        if part.size > 1 and part not in self._called:
            self._called.add(part)
            self.names[part], self.reasons[part] = name, reason

    def take_back(self, part: AxisClass, reason: str) -> None:
        """Takes its role from a class, and its name if that was its role."""
        del self.roles[part]
        if part not in self._called:
            del self.names[part], self.reasons[part]
            self.open[part] = reason

    def with_role(self, *roles: str) -> Set[AxisClass]:
        """The classes that have one of some roles."""
        return {part for part, role in self.roles.items() if role in roles}

    def without_role(self, parts: Iterable[AxisClass]) -> list[AxisClass]:
        """Those of some classes that have no role yet, in order."""
        return sorted(part for part in parts if part not in self.roles)
