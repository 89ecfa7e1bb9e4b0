"""Keeps what the logical axes of a program are called, each with its reason.

A class has a *role*, which is what it does in the program, and by default is called so. A name that
people gave it wins, and changes nothing of what other classes do.
"""

from collections.abc import Hashable, Iterable, Mapping, Set

from penzai_shard.naming.ties import AxisClass


class ClassNames:
    """What each class is called, and why.

    Attributes:
        roles: What classes do in the program; the first role that one gets stays.
        reasons: Why a class has its role, or has lost it.
        given: Names that are not roles, each with its reason.

    >>> names, part = ClassNames(), AxisClass(0, 8)
    >>> names.give_role(part, "neurons", "a product makes it")
    >>> names.give_name(part, "mlp", "'up' has that name")
    >>> names.roles[part], names.names[part]
    ('neurons', ('mlp', "'up' has that name"))
    """

    def __init__(self) -> None:
        self.roles: dict[AxisClass, str] = {}
        self.reasons: dict[AxisClass, str] = {}
        self.given: dict[AxisClass, tuple[Hashable, str]] = {}

    @property
    def names(self) -> Mapping[AxisClass, tuple[Hashable, str]]:
        """What each class is called, with the reason."""
        return {part: (role, self.reasons[part]) for part, role in self.roles.items()} | self.given

    def give_role(self, part: AxisClass, role: str, reason: str) -> None:
        """Gives a class a role, unless it has one or is of length 1."""
        if part.size > 1 and part not in self.roles:
            self.roles[part], self.reasons[part] = role, reason

    def give_name(self, part: AxisClass, name: Hashable, reason: str) -> None:
        """Gives a class a name, whatever its role is; the first one stays."""
        if part.size > 1:
            self.given.setdefault(part, (name, reason))

    def take_role(self, part: AxisClass, reason: str) -> None:
        """Takes its role from a class, and with it the name that it has by that."""
        del self.roles[part]
        self.reasons[part] = reason

    def with_role(self, *roles: str) -> Set[AxisClass]:
        """The classes that have one of some roles."""
        return {part for part, role in self.roles.items() if role in roles}

    def without_role(self, parts: Iterable[AxisClass]) -> list[AxisClass]:
        """Those of some classes that have no role yet, in order."""
        return sorted(part for part in parts if part not in self.roles)
