"""Names of classes, each with its reason."""

from collections.abc import Iterable, Set

from penzai_shard.choosing.dimensions import DimensionClass


class ClassNames:
    """What classes do in a program, what they are called for it, and what people call them.

    The first role that a class gets stays. A name that people give goes before it, and changes
    nothing of what the roles of others are.

    Attributes:
        roles: The role of each class, which is its name unless people give it another.
        doubts: Why a class has no name, where something is known of it.
        groups: The classes that are groups of another one, which stands behind them: both are one
            logical axis. By themselves they have no name.
    """

    def __init__(self) -> None:
        self.roles: dict[DimensionClass, str] = {}
        self.doubts: dict[DimensionClass, str] = {}
        self.groups: dict[DimensionClass, DimensionClass] = {}
        self._reasons: dict[DimensionClass, str] = {}
        self._called: dict[DimensionClass, tuple[str, str]] = {}

    def give(self, part: DimensionClass, role: str, reason: str) -> None:
        """Gives a class a role, unless it has one or there is nothing to name."""
        if part.size > 1 and part not in self.roles:
            self.roles[part] = role
            self._reasons[part] = reason

    def take_back(self, part: DimensionClass, doubt: str) -> None:
        """Takes its role from a class, for a reason."""
        del self.roles[part], self._reasons[part]
        self.doubts[part] = doubt

    def group(self, part: DimensionClass, whole: DimensionClass) -> None:
        """Makes a class groups of another one, whatever its role was."""
        self.roles.pop(part, None)
        self._reasons.pop(part, None)
        self.groups[part] = whole
        self.doubts[part] = f"it is groups of what is called {self.roles[whole]!r}"

    def call(self, part: DimensionClass, name: str, reason: str) -> None:
        """Gives a class a name, whatever its role is."""
        if part.size > 1:
            self._called.setdefault(part, (name, reason))

    def name(self, part: DimensionClass) -> tuple[str, str] | None:
        """What a class is called, and why; None if that is not known."""
        if part in self._called:
            return self._called[part]
        return (self.roles[part], self._reasons[part]) if part in self.roles else None

    def reason(self, part: DimensionClass) -> str:
        """Why a class has its role."""
        return self._reasons[part]

    def with_role(self, *roles: str) -> Set[DimensionClass]:
        """The classes that have one of some roles."""
        return {part for part, own in self.roles.items() if own in roles}

    def without_role(self, parts: Iterable[DimensionClass]) -> list[DimensionClass]:
        """Those that have no role yet, in order."""
        return sorted(part for part in parts if part not in self.roles)
