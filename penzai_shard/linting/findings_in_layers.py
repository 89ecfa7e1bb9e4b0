"""Findings about the layers of a model: one for all layers that have the same."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from penzai_shard.inspection.steps.layer_labels import layer_labels
from penzai_shard.linting.findings import Change, Finding, FindingKind, common_path
from penzai_shard.linting.subject_flows import LAYING_OUT
from penzai_shard.surgery.bare_paths import bare_paths
from penzai_shard.surgery.tree_nodes import keys_text, nodes_of

Changes = Callable[[tuple[str, ...]], Iterator[Change]]
"""Gives changes of the layers at some places."""


@dataclasses.dataclass
class FindingInLayers:
    """Layers with the same finding.

    Attributes:
        kind: What was found.
        problem: In sentences.
        about: What it is about.
        figures: Figures of one of them.
        changes: Gives changes for their places.
        labels: What people call the layers, by their places.
    """

    kind: FindingKind
    problem: str
    about: str
    figures: dict[str, Any]
    changes: Changes
    labels: dict[str, str] = dataclasses.field(default_factory=dict)

    def finding(self, table: str = "") -> Finding:
        """What was found of all of them, or of the table of rules that they were made by."""
        paths = () if table else tuple(self.labels.values())
        return Finding(
            self.kind,
            table or common_path(paths),
            self.problem,
            figures=self.figures,
            paths=paths,
            about=self.about,
            changes=tuple(self.changes(tuple(self.labels))),
        )


FoundInLayer: TypeAlias = tuple[str, str, FindingInLayers]
"""The place of a layer, its label, and what was found."""


def grouped(found: Iterable[FoundInLayer], table: str = "") -> Iterator[Finding]:
    """One finding for layers that have the same.

    Args:
        found: For each layer its place, its label, and what was found.
        table: The table of rules that the layers were made by, if they are not the user's.
    """
    groups: dict[tuple[str, str], FindingInLayers] = {}
    for place, label, group in found:
        groups.setdefault((group.kind, group.about), group).labels[place] = label
    for group in groups.values():
        yield group.finding(table)


def layers_laying_out(model: Any) -> Iterator[tuple[str, str, Any]]:
    """The place, the label and the layer of each layer that says how something is laid out."""
    found = [(keys_text(keys), layer) for keys, layer in nodes_of(model) if _lays_out(layer)]
    if not found:
        return  # Labels take longer than all else.
    labels, bare = layer_labels(model), bare_paths(model)
    for place, layer in found:
        yield place, labels.get(place) or bare.get(place, place), layer


def _lays_out(layer: Any) -> bool:
    return isinstance(layer, LAYING_OUT)
