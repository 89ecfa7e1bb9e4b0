"""The result of holding an edited model against its original, as a short table."""

import dataclasses

from penzai_shard.errors import ShardingError
from penzai_shard.text_tables import TextTable


class NotEquivalentError(ShardingError):
    """An edited model does not compute what its original computes."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One group of values of both models.

    Attributes:
        what: ``"outputs"``, ``"gradients"``, ``"state variables"`` or ``"parameters"``.
        count: How many arrays, or names in the case of the parameters, were compared.
        worst: Name of the array that is furthest from its counterpart; empty if all are equal.
        ulps: The largest difference in units in the last place, over all arrays.
        relative: The largest difference relative to the size of its array.
        tolerance: The largest relative difference allowed; None where names alone count.
        problems: What differs in more than rounding.
    """

    what: str
    count: int
    worst: str = ""
    ulps: float = 0.0
    relative: float = 0.0
    tolerance: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs beyond the tolerance."""
        return not self.problems and (self.tolerance is None or self.relative <= self.tolerance)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first layer whose output differs between the two models.

    Attributes:
        path: Its path in the model without inserted layers; empty for the root.
        layer: Name of its type.
        relative: How far its output is off, relative to the size of the output.
        input_differs: Whether its input was off already: the cause then lies between it and the
            layer that ran before it.
        after: The path of the last layer before it whose output was the same; None if there is
            none.
    """

    path: str
    layer: str
    relative: float
    input_differs: bool
    after: str | None

    def __str__(self) -> str:
        place = f"{self.layer} at {self.path}" if self.path else f"{self.layer}, the root"
        off = f"output off by {self.relative:.2g}"
        if not self.input_differs:
            return f"{place} ({off}; its input is the same)"
        before = f" after {self.after}" if self.after else ""
        return f"{place} ({off}; its input is off already, so look for the cause{before} before it)"


@dataclasses.dataclass(frozen=True, repr=False)
class EquivalenceReport(TextTable):
    """Whether an edited model computes what its original computes; ``print`` shows it as a table.

    It is true where it is ok.

    Attributes:
        comparisons: One per group of values.
        divergence: The first layer that differs, if the outputs do and it could be found.
        notes: What else there is to know.
    """

    headings = ("compared", "arrays", "worst at", "ulps", "relative", "allowed", "")
    right_aligned = frozenset({"arrays", "ulps", "relative", "allowed"})
    paths = frozenset({"worst at"})

    comparisons: tuple[Comparison, ...]
    divergence: Divergence | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs beyond the tolerances."""
        return all(comparison.ok for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def max_ulps(self) -> float:
        """The largest difference of any array, in units in the last place."""
        return max((comparison.ulps for comparison in self.comparisons), default=0.0)

    @property
    def max_relative(self) -> float:
        """The largest difference of any array, relative to the size of that array."""
        return max((comparison.relative for comparison in self.comparisons), default=0.0)

    def raise_if_different(self) -> None:
        """Does nothing if the models agree.

        Raises:
            NotEquivalentError: They do not; the message says in what, by how much, and which
                layer is the first to differ.
        """
        if self.ok:
            return
        problems = []
        for comparison in self.comparisons:
            if comparison.ok:
                continue
            problems += [f"{comparison.what}: {problem}" for problem in comparison.problems]
            if comparison.tolerance is not None and comparison.relative > comparison.tolerance:
                problems.append(
                    f"{comparison.what}: {comparison.worst} is off by {comparison.relative:.2g} "
                    f"({comparison.ulps:.3g} ulps), and {comparison.tolerance:.2g} is allowed."
                )
        if self.divergence is not None:
            problems.append(f"The first layer to differ is {self.divergence}.")
        raise NotEquivalentError(
            "the edited model does not compute what the original computes:", problems
        )

    def text_rows(self) -> list[tuple[str, ...]]:
        """One row per comparison."""
        return [
            (
                comparison.what,
                str(comparison.count),
                comparison.worst or "-",
                f"{comparison.ulps:.3g}",
                f"{comparison.relative:.2g}",
                "-" if comparison.tolerance is None else f"{comparison.tolerance:.2g}",
                "same" if comparison.ok else "DIFFERENT",
            )
            for comparison in self.comparisons
        ]

    def text_verdict(self) -> str:
        """Whether the models agree."""
        return "equivalent" if self.ok else "NOT equivalent"

    def verdict_style(self) -> str:
        """Green or red."""
        return "bold green" if self.ok else "bold red"

    def text_summary(self) -> list[str]:
        """Problems, the first layer to differ, and notes."""
        lines = [
            f"{comparison.what}: {problem}"
            for comparison in self.comparisons
            for problem in comparison.problems
        ]
        if self.divergence is not None:
            lines.append(f"first to differ: {self.divergence}")
        return [*lines, *self.notes]

    def style_of(self, row: int, heading: str) -> str:
        """Green or red for the verdict."""
        if heading:  # The verdict's column has none.
            return ""
        return "green" if self.comparisons[row].ok else "red"
