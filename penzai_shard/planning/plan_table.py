"""A plan as a table."""

import dataclasses
import re
from collections.abc import Iterable

from penzai_shard.text_tables import TextTable

Row = tuple[str, str, str, int, str]

_NUMBER = re.compile(r"\d+")


def bytes_text(count: int) -> str:
    """A number of bytes for people, in powers of 1024.

    >>> bytes_text(512), bytes_text(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


@dataclasses.dataclass(frozen=True, repr=False)
class PlanTable(TextTable):
    """Rows and totals of a plan; ``print`` and notebooks show them.

    Attributes:
        rows: One row of texts per array, or per group of arrays alike.
        verdict: What the plan costs, in one line.
        summary: Lines below the table.
    """

    headings = ("array", "count", "logical axes/mesh axes", "dtype", "per device", "reason")
    right_aligned = frozenset({"count", "per device"})
    unwrapped = frozenset({"dtype"})
    paths = frozenset({"array"})
    # From here on the reasons have room beside the rest.
    below = "reason"
    wide = 140

    rows: tuple[tuple[str, ...], ...]
    verdict: str
    summary: tuple[str, ...]

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        *,
        mesh: str,
        total_bytes: int,
        bytes_per_device: int,
        replicated_bytes: int,
        remarks: tuple[str, ...],
        collapse: bool,
    ) -> "PlanTable":
        """Makes the table; see ``ShardingPlan.table``."""
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            path, axes, dtype, _, reason = row
            place = path
            if collapse:
                place = "(scalars)" if axes == "scalar" else _NUMBER.sub("*", path)
            groups.setdefault((place, axes, dtype, reason), []).append(row)
        shown = []
        for (place, axes, dtype, reason), members in groups.items():
            path = members[0][0] if len(members) == 1 else place
            held = bytes_text(sum(member[3] for member in members))
            shown.append((path, str(len(members)), axes, dtype, held, reason))
        arrays = sum(len(members) for members in groups.values())
        verdict = (
            f"{arrays} arrays, {bytes_text(total_bytes)}; on mesh ({mesh}) each device holds "
            f"{bytes_text(bytes_per_device)}, of which replicated {bytes_text(replicated_bytes)}"
        )
        return cls(tuple(shown), verdict, remarks)

    def text_rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows."""
        return self.rows

    def text_verdict(self) -> str:
        """What the plan costs."""
        return self.verdict

    def text_summary(self) -> tuple[str, ...]:
        """The lines below the table."""
        return self.summary
