"""Names of classes, each with its reason."""

from collections.abc import Iterable

from penzai_shard.choosing.dimensions import DimensionClass


class ClassNames:
    """What classes are called, and why; the first name that is given stays.

    Attributes:
        names: The name of each class.
        reasons: Why it is called so, as a sentence.
        doubts: Why a class has no name, where something is known of it.
    """

    def __init__(self) -> None:
        self.names: dict[DimensionClass, str] = {}
        self.reasons: dict[DimensionClass, str] = {}
        self.doubts: dict[DimensionClass, str] = {}

    def give(self, part: DimensionClass, name: str, reason: str) -> None:
        """Gives a class a name, unless it has one or there is nothing to name."""
        if part.size > 1 and part not in self.names:
            self.names[part] = name
            self.reasons[part] = reason

    def without_name(self, parts: Iterable[DimensionClass]) -> list[DimensionClass]:
        """Those that have no name yet, in order."""
        return sorted((p for p in parts if p not in self.names), key=lambda part: part.number)
