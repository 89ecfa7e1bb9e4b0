"""The collectives of a step as rows of a tree: by the layer that owns them, then what they are."""

from collections.abc import Iterable, Iterator

from penzai_shard.inspection.steps.layer_groups import OTHER_OWNERS, UNATTRIBUTED, owners_text
from penzai_shard.inspection.traffic.collective_records import (
    Collective,
    CollectivePart,
    CollectiveTotal,
)
from penzai_shard.inspection.traffic.collective_table import moves_text
from penzai_shard.report_trees import TreeFigure, TreeRow, bytes_text
from penzai_shard.tree_paths import common_parts

SENT = "sent"


def sent_rows(collectives: Iterable[Collective]) -> Iterator[TreeRow]:
    """The rows, in the order in which they run; what they send adds up to what the step does.

    What several layers own together is in the innermost layer around all of them.
    """
    groups: dict[tuple[str, str], list[tuple[Collective, CollectivePart]]] = {}
    for one in collectives:
        for part in one.parts:
            groups.setdefault(_place(one, part), []).append((one, part))
    for (path, item), members in groups.items():
        total = CollectiveTotal.of_parts(members)
        times = f"{total.executed:,} times" if total.executed != 1 else "once"
        if total.unknown_places:
            each = bytes_text(round(total.unknown_wire_bytes))
            times = f"an unknown number of times, each {each}"
        yield TreeRow(
            path,
            item,
            # What is not one of the known sorts goes without a word.
            line=f"{moves_text(members)}, {times}".removeprefix("others, "),
            figures=(TreeFigure(SENT, total.wire_bytes),),
            details=tuple(dict.fromkeys(part.moves for _, part in members if part.moves)),
        )


def _place(one: Collective, part: CollectivePart) -> tuple[str, str]:
    """Which layer's it is, and what it is called there."""
    what = f"{one.kind} over {one.axes_text}, {part.phase or 'phase unknown'}"
    if len(part.labels) < 2:
        return (part.labels or (UNATTRIBUTED,))[0], what
    layers = [label.split("/") for label in part.labels if label not in OTHER_OWNERS]
    around = "/".join(common_parts(layers)) if len(layers) == len(part.labels) else ""
    owners = owners_text(part.labels)
    return around, f"{owners.removeprefix(f'{around}/')}: {what}" if around else f"{owners}: {what}"
