"""Finding the first layer whose output differs between two models that were listened to."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penzai_shard.surgery.equivalence.array_comparisons import difference
from penzai_shard.surgery.equivalence.tapping import Recording


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


def first_to_differ(
    originals: Mapping[str, Recording], edits: Mapping[str, Recording], tolerance: float
) -> Divergence | None:
    """The first layer, in the order in which they end, whose output is not the original's.

    Args:
        originals: What went through the original's layers, by path, in the order in which they
            end.
        edits: The same of the edited model's.
        tolerance: From which difference on, relative to the largest value of an array, it counts.
    """
    # Below a layer that was replaced by another, equal paths mean nothing.
    changed = tuple(
        f"{path}/"
        for path, found in originals.items()
        if path and path in edits and edits[path].layer != found.layer
    )
    common = [path for path in originals if path in edits and not path.startswith(changed)]
    differing = {
        path: call
        for path in common
        if (call := _first_call_off(originals[path], edits[path], tolerance)) is not None
    }
    if not differing:
        return None
    # In a loop, a layer late in an early turn comes before one early in a later turn.
    turns = len(originals[next(iter(differing))].outputs)
    path = min(
        (path for path in differing if len(originals[path].outputs) == turns),
        key=differing.__getitem__,
    )
    found, edited = originals[path], edits[path]
    first = slice(differing[path], differing[path] + 1)
    before = common[: common.index(path)]
    return Divergence(
        path,
        found.layer,
        _apart(found.outputs[first], edited.outputs[first]),
        input_differs=_apart(found.inputs[first], edited.inputs[first]) > tolerance,
        after=next((other for other in reversed(before) if other not in differing), None),
    )


def _first_call_off(original: Recording, edited: Recording, tolerance: float) -> int | None:
    """The first call of a layer whose outputs differ; None if there is none."""
    for call, (one, other) in enumerate(zip(original.outputs, edited.outputs, strict=False)):
        if _apart([one], [other]) > tolerance:
            return call
    return None


def _apart(original: Sequence[Mapping[str, Any]], edited: Sequence[Mapping[str, Any]]) -> float:
    """The largest relative difference over some calls of a layer."""
    largest = 0.0
    for one, other in zip(original, edited, strict=False):
        if one.keys() != other.keys():
            return float(np.inf)
        found = [difference(name, one[name], other[name]) for name in one]
        largest = max([largest, *(part.relative for part in found)])
    return largest
