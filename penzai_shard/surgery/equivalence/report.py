"""The result of comparing an edited model with its original, as a short table."""

import dataclasses

from penzai_shard.errors import SHOWN_PROBLEMS, ShardingError, grouped_problems
from penzai_shard.path_folding import folding_key
from penzai_shard.surgery.equivalence.array_comparisons import ArrayComparison, Comparison
from penzai_shard.surgery.equivalence.divergence import Divergence
from penzai_shard.text_tables import PreparedTable, TextTable

_FIGURES = ("rounding", "off by", "allowed", "in float64", "allowed there")


class NotEquivalentError(ShardingError):
    """An edited model does not compute what its original computes."""


class ArrayTable(PreparedTable):
    """All arrays that were compared, those alike in one row; ``print`` shows them."""

    headings = ("compared", "array", "count", *_FIGURES, "")
    right_aligned = frozenset({"count", *_FIGURES})
    paths = frozenset({"array"})


@dataclasses.dataclass(frozen=True, repr=False)
class EquivalenceReport(TextTable):
    """Whether an edited model computes what its original computes; ``print`` shows it as a table.

    It is true where it is ok. It holds names and figures alone, no arrays.

    Attributes:
        comparisons: One per group of values.
        divergence: The first layer that differs, if the outputs do and it could be found.
        notes: What else there is to know.
        not_compared: What the caller or the models left out; the verdict names it.
        precision: The dtype that the edited model rounds to where the original keeps more digits,
            if that was needed to call them equivalent; the verdict names it.
    """

    headings = ("compared", "arrays", "worst at", *_FIGURES, "")
    right_aligned = frozenset({"arrays", *_FIGURES})
    paths = frozenset({"worst at"})

    comparisons: tuple[Comparison, ...]
    divergence: Divergence | None = None
    notes: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    precision: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing differs beyond what rounding explains."""
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

    def _problems(self) -> list[str]:
        return [problem for comparison in self.comparisons for problem in comparison.problems]

    def arrays(self) -> ArrayTable:
        """Every array that was compared; those whose names differ in numbers alone in one row."""
        groups: dict[tuple[str, str], list[ArrayComparison]] = {}
        for comparison in self.comparisons:
            for array in comparison.arrays:
                groups.setdefault((comparison.what, folding_key(array.name)), []).append(array)
        rows = (
            (
                what,
                name if len(members) > 1 else members[0].name,
                str(len(members)),
                *_figures(max(members, key=lambda array: array.excess)),
                "same" if all(array.ok for array in members) else "DIFFERENT",
            )
            for (what, name), members in groups.items()
        )
        return ArrayTable(tuple(rows), summary=(_LEGEND,))

    def raise_if_different(self) -> None:
        """Does nothing if the models agree.

        Raises:
            NotEquivalentError: They do not; the message says in what, by how much, and which
                layer is the first to differ.
        """
        if self.ok:
            return
        problems = self._problems()
        if self.divergence is not None:
            problems.insert(0, f"The first layer to differ is {self.divergence}.")
        raise NotEquivalentError(
            "the edited model does not compute what the original computes:", problems
        )

    def text_verdict(self) -> str:
        """Whether the models agree, how exactly, and what was not compared."""
        verdict = "equivalent" if self.ok else "NOT equivalent"
        if self.ok and self.precision:
            verdict += f" within what {self.precision} rounds away"
        if not self.not_compared:
            return verdict
        return f"{verdict}; not compared: {'; '.join(self.not_compared)}"

    def verdict_style(self) -> str:
        """Green or red."""
        return "bold green" if self.ok else "bold red"

    def text_rows(self) -> list[tuple[str, ...]]:
        """One row per comparison, with the array that is furthest off."""
        return [
            (
                comparison.what,
                str(comparison.count),
                comparison.worst or "-",
                *_figures(comparison.furthest),
                "same" if comparison.ok else "DIFFERENT",
            )
            for comparison in self.comparisons
        ]

    def text_summary(self) -> list[str]:
        """The first layer to differ, problems, notes, and what the columns mean."""
        lines = []
        if self.divergence is not None:
            lines.append(f"first to differ: {self.divergence}")
        grouped = [line for line, _ in grouped_problems(self._problems())]
        lines += grouped[:SHOWN_PROBLEMS]
        if len(grouped) > SHOWN_PROBLEMS:
            lines.append(f"and {len(grouped) - SHOWN_PROBLEMS:,} more; all are in comparisons")
        cancelling = [a.name for part in self.comparisons for a in part.arrays if a.cancels]
        if cancelling:
            names = sorted({folding_key(name) for name in cancelling})
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            lines.append(
                f"zero but for rounding, because larger values cancel ({len(cancelling)} arrays, "
                f"measured against the rounding errors of those): {shown}"
            )
        lines += self.notes
        return [*lines, _LEGEND] if len(self.comparisons) > 1 else lines

    def style_of(self, row: int, heading: str) -> str:
        """Green or red for the verdict."""
        if heading:  # The verdict's column has none.
            return ""
        return "green" if self.comparisons[row].ok else "red"


_LEGEND = (
    "rounding: the original's own error, found by running it in float64, exactly and with every "
    "operation rounded at random as its dtype rounds; off by: the edited model as it is, from the "
    "original in float64, or 0 if it equals the original as it is; in float64: both there"
)


def _figures(array: ArrayComparison | None) -> tuple[str, ...]:
    if array is None:
        return ("-",) * 5
    function = array.function
    return (
        f"{array.rounding:.1e}",
        f"{array.own.off_by:.1e}",
        f"{array.own.allowed:.1e}",
        f"{function.off_by:.1e}" if function else "-",
        f"{function.allowed:.1e}" if function else "-",
    )
