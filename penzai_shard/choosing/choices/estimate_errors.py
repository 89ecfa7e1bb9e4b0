"""How wrong the estimates of a stage are, learned from those that a more exact one has checked."""

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.priced_candidates import Priced
from penzai_shard.choosing.choices.selection import MEMORY_MARGIN
from penzai_shard.layouts import Layout

_Kinds: TypeAlias = Callable[[Candidate], tuple[Hashable, ...]]
_Ratios: TypeAlias = Mapping[Hashable, Sequence[float]]

# Of candidates whose like was checked, no estimate of memory is more wrong than by this.
MARGIN_IF_CHECKED = 1.25
_TINY = 1e-12


@dataclasses.dataclass(frozen=True)
class EstimateErrors:
    """How wrong estimates are, by those that were checked.

    Candidates that compute alike have estimates of memory and time that are wrong by nearly the
    same factor, and so have, on other meshes, those whose parameters are stored alike, because
    compilers follow how parameters lie where nothing else is said.

    Attributes:
        memory: The ratios of exact to estimated memory of each kind of candidates, from kinds that
            are told from others by all that says what is computed, to that of all candidates.
        time: The same of times, by what is computed, and by how parameters are stored where that
            is not how they are used.
    """

    memory: _Ratios
    time: _Ratios

    @classmethod
    def of(cls, exact: Sequence[Priced], estimated: Sequence[Priced]) -> "EstimateErrors":
        """The errors of those estimates of which the truth is known."""
        known = {one.candidate: one for one in estimated}
        pairs = [(one, known[one.candidate]) for one in exact if one.candidate in known]
        return cls(
            _ratios(_of_computing, [(one, one.memory, other.memory) for one, other in pairs]),
            _ratios(
                lambda one: (*_of_time(one), ()),
                [(one, one.time.bound, other.time.bound) for one, other in pairs],
            ),
        )

    def likely_memory(self, estimated: Priced) -> float:
        """The memory of a candidate, if its estimate is as wrong as those that are most like it."""
        return estimated.memory * _likely(self.memory, _of_memory(estimated.candidate))

    def likely_time(self, estimated: Priced) -> float:
        """The time of a candidate, if its estimate is wrong by how it computes and is stored.

        Both errors count, but what those of all candidates have in common only once, and no more
        than any were wrong. Where candidates were checked that are alike in both, theirs alone.
        """
        alike, way, *stored = _of_time(estimated.candidate)
        if alike in self.time:
            return estimated.time.bound * _likely(self.time, (alike,))
        of_both = _likely(self.time, (way,)) * _likely(self.time, stored)
        if way in self.time and not self.time.keys().isdisjoint(stored):
            of_all = self.time[()]
            of_both = min(max(of_both / statistics.median(of_all), min(of_all)), max(of_all))
        return estimated.time.bound * of_both

    def least_memory(self, estimated: Priced) -> float:
        """What a candidate holds at least, as estimates of its kind were seen to be wrong.

        Of a kind of which none was checked, as any were, or not at all.
        """
        kinds = _of_computing(estimated.candidate)
        known = (self.memory.get(kind) for kind in (kinds[0], kinds[_STORED]))
        of_any = (1.0, *self.memory.get((), ()))
        return estimated.memory * min(next(filter(None, known), of_any))

    def is_checked(self, estimated: Priced) -> bool:
        """Whether one was checked that computes as this candidate does."""
        return computing_kind(estimated.candidate) in self.memory

    def may_fit(self, estimated: Priced, limit: int) -> bool:
        """Whether a candidate may be within the limit, as much as estimates still err."""
        is_checked = self.is_checked(estimated)
        margin = MARGIN_IF_CHECKED if is_checked else MEMORY_MARGIN[estimated.stage]
        return self.likely_memory(estimated) <= limit * margin


def computing_kind(candidate: Candidate) -> Hashable:
    """What candidates have in common that compute alike, with parameters stored alike."""
    return _of_computing(candidate)[0]


def way_of_computing(candidate: Candidate) -> Hashable:
    """What candidates have in common that compute alike, however they are stored."""
    return _of_computing(candidate)[_COMPUTED]


def _of_computing(candidate: Candidate) -> tuple[Hashable, ...]:
    layout = candidate.layout
    kept = (layout.rematerialise, layout.reshard_after_forward, candidate.microbatches > 1)
    on_mesh = (*kept, candidate.mesh_axes)
    computed = (*on_mesh, layout.compute, layout.between_blocks)
    stored = _stored(layout)
    return (*computed, stored), ("stored", *kept, stored), computed, on_mesh, kept, ()


# Which of these kinds are that of how parameters are stored, and that of what is computed.
_STORED, _COMPUTED = 1, 2


def _of_memory(candidate: Candidate) -> tuple[Hashable, ...]:
    """The same, from what says most of memory: blocks that are known are told how to compute."""
    alike, stored, computed, *others = _of_computing(candidate)
    nearest = (stored, computed) if candidate.layout.blocks == () else (computed, stored)
    return (alike, *nearest, *others)


def _of_time(candidate: Candidate) -> tuple[Hashable, ...]:
    stored, way = _stored(candidate.layout), way_of_computing(candidate)
    return computing_kind(candidate), way, (candidate.mesh_axes, stored), (stored,)


def _stored(layout: Layout) -> tuple[Hashable, ...]:
    """How parameters are stored where that is not how they are used."""
    used = layout.compute.rules
    return tuple(rule for rule in layout.parameters.rules if rule not in used)


def _ratios(kinds: _Kinds, figures: Sequence[tuple[Priced, float, float]]) -> _Ratios:
    found: dict[Hashable, list[float]] = {}
    for one, exact, guessed in figures:
        for kind in kinds(one.candidate):
            found.setdefault(kind, []).append(exact / max(guessed, _TINY))
    return found


def _likely(ratios: _Ratios, kinds: Sequence[Hashable]) -> float:
    known = (ratios.get(kind) for kind in kinds)
    nearest: Sequence[float] = next(filter(None, known), (1.0,))
    return statistics.median(nearest)
