"""What one layout pays more for than another, and where, in words."""

import collections
import dataclasses

from penzai_shard.choosing.choices.priced_candidates import Priced
from penzai_shard.choosing.step_costs import SentReason
from penzai_shard.inspection.devices.mesh_networks import MeshNetwork
from penzai_shard.report_trees import bytes_text

# A difference that is smaller than this part of the step is not worth a word.
_SMALL = 0.002
_MORE_SHOWN = 3
_LESS_SHOWN = 1

_DONE = {
    "parameter": "gathering parameters",
    "gradient": "reducing gradients",
    "activation": "moving activations",
    "optimizer": "moving the optimizer's state",
}


@dataclasses.dataclass(frozen=True)
class CostDifference:
    """What a step pays more for than another, or less.

    Attributes:
        seconds: How much more; less than 0 for less.
        text: For what and where.
    """

    seconds: float
    text: str

    def __str__(self) -> str:
        return f"{'+' if self.seconds > 0 else '-'}{seconds_text(abs(self.seconds))} {self.text}"


def seconds_text(seconds: float) -> str:
    """A time for people.

    >>> seconds_text(1.234), seconds_text(0.0512), seconds_text(3.1e-5)
    ('1.23 s', '51.2 ms', '31.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def times_of(priced: Priced, network: MeshNetwork) -> dict[str, float]:
    """The seconds that a step computes, and sends for each reason, in words."""
    found: dict[str, float] = collections.defaultdict(float)
    found["computing"] = priced.time.compute
    # As StepTime has it: nothing is sent over a mesh axis of one device, and unknown ones are all.
    real = [axis for axis, links in network.rates.items() if links]
    for sent in priced.cost.sent:
        over = [axis for axis in sent.mesh_axes or real if axis in real]
        if sent.bytes and over:
            found[_reason_words(sent.reason)] += sent.bytes / network.carried(over)
    return dict(found)


def differences(
    other: dict[str, float], pick: dict[str, float], bound: float
) -> tuple[CostDifference, ...]:
    """What one pays more for than the other, and then what less, the largest first.

    Args:
        other: The times of the one, as ``times_of`` gives them.
        pick: Those of the other.
        bound: The time of a step; what is small beside it is left out.

    >>> [str(one) for one in differences({"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.5}, 4.0)]
    ['+2.00 s a', '-500.0 ms b']
    """
    all_of_it = [
        CostDifference(other.get(text, 0.0) - pick.get(text, 0.0), text)
        for text in dict.fromkeys((*other, *pick))
    ]
    counted = [one for one in all_of_it if abs(one.seconds) > _SMALL * bound]
    counted.sort(key=lambda one: (-abs(one.seconds), one.text))
    return (
        *[one for one in counted if one.seconds > 0][:_MORE_SHOWN],
        *[one for one in counted if one.seconds < 0][:_LESS_SHOWN],
    )


def memory_difference(other: Priced, pick: Priced) -> str:
    """Of what one holds more memory or less than the other; empty where there is little in it."""
    parts = dict.fromkeys((*other.cost.memory, *pick.cost.memory))
    more = {
        part: other.cost.memory.get(part, 0.0) - pick.cost.memory.get(part, 0.0) for part in parts
    }
    part = max(more, key=lambda name: (abs(more[name]), name))
    if abs(more[part]) < 0.05 * pick.memory:
        return ""
    return f"{'+' if more[part] > 0 else '-'}{bytes_text(abs(more[part]))} of {part}"


def _reason_words(reason: SentReason) -> str:
    what, where, names, mesh_axes = reason
    words = _DONE.get(what, f"moving {what}")
    if known := [str(name) for name in names if name is not None]:
        words += f" [{', '.join(known)}]"
    if where:
        words += f" of {where}"
    return f"{words} over {' and '.join(map(repr, mesh_axes))}" if mesh_axes else words
