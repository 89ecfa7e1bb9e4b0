"""What one layout pays more for than another, and where, in words."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from penzai_shard.choosing.choices.priced_candidates import Priced
from penzai_shard.choosing.step_costs import Sent, SentReason
from penzai_shard.inspection.devices.mesh_networks import MeshNetwork
from penzai_shard.inspection.steps.layer_groups import OTHER_OWNERS
from penzai_shard.inspection.traffic.transfer_time import worst_set
from penzai_shard.report_trees import bytes_text

# A difference that is smaller than this part of the step is not worth a word.
_SMALL = 0.005
_MORE_SHOWN = 3
_LESS_SHOWN = 1
# More memory than this part, of the pick's, is worth a word.
_MUCH_MEMORY = 0.05
# One reason of several is named where it is more than this part of all.
_MOST = 0.25
_AS_FAST = "As fast as the pick"

# What a step takes time for, as ``StepTime`` has it, and what of it is not sending.
_PARTS = ("compute", "traffic", "update")
_OWN_PARTS = {"compute": "computing", "update": "updating the optimizer's state"}

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
        return f"{_signed(self.seconds, seconds_text)} {self.text}"


def seconds_text(seconds: float) -> str:
    """A time for people.

    >>> seconds_text(1.234), seconds_text(0.0512), seconds_text(3.1e-5), seconds_text(3.1e-8)
    ('1.23 s', '51.2 ms', '31.0 us', '31.0 ns')
    """
    if 0 < seconds < 1e-7:
        return f"{seconds * 1e9:.1f} ns"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


@dataclasses.dataclass(frozen=True)
class PaidTimes:
    """What a priced step takes time for.

    Attributes:
        priced: The step.
        network: What its mesh's axes carry.
    """

    priced: Priced
    network: MeshNetwork

    @functools.cached_property
    def loads(self) -> dict[frozenset[str], list[Sent]]:
        """What is sent over each set of mesh axes, as ``StepTime`` has it."""
        found: dict[frozenset[str], list[Sent]] = collections.defaultdict(list)
        for sent in self.priced.cost.sent:
            over = self.network.used(sent.mesh_axes)
            if sent.bytes and over:
                found[over].append(sent)
        return found

    @functools.cached_property
    def busiest(self) -> tuple[str, ...]:
        """The mesh axes whose links are busy for the longest, in the mesh's order."""
        loads = {over: sum(one.bytes for one in sent) for over, sent in self.loads.items()}
        worst = worst_set(loads, self.network.carried)
        return tuple(axis for axis in self.network.rates if axis in worst)

    @property
    def bound_by(self) -> str:
        """What takes longest: ``"compute"``, ``"traffic"`` or ``"update"``."""
        return max(_PARTS, key=self.of_part)

    def of_part(self, part: str) -> float:
        """The seconds of one of these."""
        return float(getattr(self.priced.time, part))

    def sending(self, mesh_axes: Sequence[str]) -> dict[SentReason, float]:
        """The seconds for what stays within some mesh axes, by reason."""
        inside = frozenset(mesh_axes) & frozenset(self.network.rates)
        found: dict[SentReason, float] = collections.defaultdict(float)
        for over, sent in self.loads.items():
            for one in sent if over <= inside else ():
                found[one.reason] += one.bytes / self.network.carried(inside)
        return found

    def sending_in_all(self) -> dict[SentReason, float]:
        """The seconds for all that is sent, by reason."""
        sent: dict[SentReason, float] = collections.defaultdict(float)
        for over, of_them in self.loads.items():
            for one in of_them:
                sent[one.reason] += one.bytes / self.network.carried(over)
        return sent

    def most_paid(self, most: int) -> tuple[CostDifference, ...]:
        """What most time is for, whatever bounds the step."""
        own = [CostDifference(self.of_part(part), text) for part, text in _OWN_PARTS.items()]
        everything = [*own, *_by_kind(self.sending_in_all())]
        counted = [one for one in everything if one.seconds > _SMALL * self.priced.time.bound]
        return tuple(sorted(counted, key=lambda one: (-one.seconds, one.text))[:most])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A step beside another one, the pick's; of the pick itself what it pays most for.

    Attributes:
        words: How much longer it takes, and what bounds it.
        pays: What it sends longer for than the other, and then what less, over the mesh axes that
            the words are about; of devices that do one thing after the other, what it does longer.
        memory_words: How much more it holds, or less; empty where there is little in it.
    """

    words: str = ""
    pays: tuple[CostDifference, ...] = ()
    memory_words: str = ""


def compared(other: PaidTimes, pick: PaidTimes) -> Comparison:
    """Says of a step what it pays more for than the pick's, where that makes it longer.

    The time of a step is that of what takes longest in it, so that only this counts; of two that
    take as long it is what may not be hidden behind it.
    """
    words, pays = _times_compared(other, pick)
    return Comparison(words, pays, _memory_difference(other.priced, pick.priced))


def _times_compared(other: PaidTimes, pick: PaidTimes) -> tuple[str, tuple[CostDifference, ...]]:
    time, best = other.priced.time, pick.priced.time
    bound = max(time.bound, best.bound)
    if time.bound - best.bound > _SMALL * best.bound:
        slower = f"{_slower_text(time.bound / best.bound)} the pick"
        if not time.overlaps:
            return slower, _all_compared(other, pick, bound)
        words, pays = _part_compared(other.bound_by, other, pick, bound)
        repeated = _repeated(other, pick) if other.bound_by == "compute" else ""
        return f"{slower}, bound by {words}{repeated}", pays
    if abs(time.without_overlap - best.without_overlap) <= _SMALL * bound:
        return _otherwise_equal(other.priced, pick.priced), ()
    hidden = [part for part in _PARTS if part != other.bound_by]
    most = max(hidden, key=lambda part: other.of_part(part) - pick.of_part(part))
    words, pays = _part_compared(most, other, pick, bound)
    return f"{_AS_FAST}, unless {words} is not hidden", pays


def _memory_difference(other: Priced, pick: Priced) -> str:
    """How much more memory one holds than the other, or less; empty where there is little in it."""
    more = other.memory - pick.memory
    if abs(more) < _MUCH_MEMORY * pick.memory:
        return ""
    # The two are at their peaks at different moments: parts need not add up to the difference.
    parts = dict.fromkeys((*other.cost.memory, *pick.cost.memory))
    by_part = {
        part: other.cost.memory.get(part, 0.0) - pick.cost.memory.get(part, 0.0) for part in parts
    }
    near = [part for part, each in by_part.items() if abs(each - more) < 0.1 * abs(more)]
    return f"{_signed(more, bytes_text)} of {near[0] if len(near) == 1 else 'memory'}"


def _signed(number: float, text: Callable[[float], str]) -> str:
    return f"{'+' if number > 0 else '-'}{text(abs(number))}"


def _slower_text(ratio: float) -> str:
    """How much longer something takes, before what it is compared to.

    >>> _slower_text(1.37), _slower_text(12.69)
    ('37% slower than', '12.7 times as long as')
    """
    return f"{ratio - 1:.0%} slower than" if ratio < 2 else f"{ratio:.1f} times as long as"


def _repeated(other: PaidTimes, pick: PaidTimes) -> str:
    """Why a step computes more than another that keeps as much for the backward pass."""
    kept = other.priced.candidate.layout.rematerialise, pick.priced.candidate.layout.rematerialise
    more = other.priced.cost.flops > (1 + _MUCH_MEMORY) * pick.priced.cost.flops
    return ", a part of it alike on several devices" if more and kept[0] == kept[1] else ""


def _otherwise_equal(other: Priced, pick: Priced) -> str:
    """Why a step that takes as long comes after another."""
    if other.candidate.microbatches > pick.candidate.microbatches:
        return f"{_AS_FAST}, but for what more microbatches cost"
    kept = other.candidate.layout.rematerialise
    if kept != pick.candidate.layout.rematerialise:
        return f"{_AS_FAST}, and blocks keep {kept or 'all'}"
    return _AS_FAST


def _part_compared(
    part: str, other: PaidTimes, pick: PaidTimes, bound: float
) -> tuple[str, tuple[CostDifference, ...]]:
    """A part of the step in words, and for what it takes longer in it than another.

    Sending is compared over the mesh axes over which the step sends for the longest.
    """
    if part != "traffic":
        return _OWN_PARTS[part], (_of_part(part, other, pick),)
    more = _less(other.sending(other.busiest), pick.sending(other.busiest))
    words = f"sending over {_axes_words(other.busiest)}"
    return words, _most_different(_by_kind(more), bound)


def _of_part(part: str, other: PaidTimes, pick: PaidTimes) -> CostDifference:
    return CostDifference(other.of_part(part) - pick.of_part(part), _OWN_PARTS[part])


def _all_compared(other: PaidTimes, pick: PaidTimes, bound: float) -> tuple[CostDifference, ...]:
    """For what a step takes longer than another, and then for what less, of all that it does."""
    own = [_of_part(part, other, pick) for part in _OWN_PARTS]
    sent = _less(other.sending_in_all(), pick.sending_in_all())
    return _most_different([*own, *_by_kind(sent)], bound)


def _less(
    sent: Mapping[SentReason, float], of_pick: Mapping[SentReason, float]
) -> dict[SentReason, float]:
    return {
        reason: sent.get(reason, 0.0) - of_pick.get(reason, 0.0)
        for reason in dict.fromkeys((*sent, *of_pick))
    }


def _most_different(found: Iterable[CostDifference], bound: float) -> tuple[CostDifference, ...]:
    counted = [one for one in found if abs(one.seconds) > _SMALL * bound]
    counted.sort(key=lambda one: (-abs(one.seconds), one.text))
    return (
        *[one for one in counted if one.seconds > 0][:_MORE_SHOWN],
        *[one for one in counted if one.seconds < 0][:_LESS_SHOWN],
    )


def _by_kind(seconds: Mapping[SentReason, float]) -> list[CostDifference]:
    """The times of reasons, summed up by what is sent over which mesh axes.

    >>> [one] = _by_kind({("gradient", at, (), ("data",)): 0.1 for at in ("up", "down")})
    >>> str(one)
    "+200.0 ms reducing gradients over 'data', above all of down and of up"
    >>> [one] = _by_kind({("gradient", "loss", (), ("data",)): 0.1})
    >>> one.text
    "reducing gradients over 'data'"
    """
    groups: dict[tuple[str, tuple[str, ...]], dict[SentReason, float]] = {}
    has_layers = any(where and where not in OTHER_OWNERS for _, where, _, _ in seconds)
    for reason, each in seconds.items():
        groups.setdefault((reason[0], reason[3]), {})[reason] = each
    found = []
    for (what, mesh_axes), of_it in groups.items():
        total = sum(of_it.values())
        words = _DONE.get(what, f"moving {what}")
        over = f" over {_axes_words(mesh_axes)}" if mesh_axes else ""
        places: dict[str, float] = collections.defaultdict(float)
        for reason, each in of_it.items():
            if each:
                # Where no layer is known, all is of the loss.
                places[_place_words(reason, with_layer=has_layers)] += each
        if len(places) == 1:
            text = f"{words}{next(iter(places))}{over}"
        else:
            led = [p for p, each in places.items() if total and each / total > _MOST]
            led.sort(key=lambda place: (-abs(places[place]), place))
            named = " and".join(filter(None, led[:2]))
            text = f"{words}{over}{f', above all{named}' if named else ''}"
        found.append(CostDifference(total, text))
    return found


def _place_words(reason: SentReason, with_layer: bool = True) -> str:
    """What is sent and for which place, such as `` [embedding, neurons] of blocks/*/up``."""
    _, where, names, _ = reason
    known = [str(name) for name in names if name is not None]
    of_layer = f" of {where}" if where and with_layer else ""
    return (f" [{', '.join(known)}]" if known else "") + of_layer


def _axes_words(mesh_axes: Sequence[str]) -> str:
    return " and ".join(map(repr, mesh_axes))
