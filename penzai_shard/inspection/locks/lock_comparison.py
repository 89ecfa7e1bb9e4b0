"""In what a step differs from its lock, in words."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from penzai_shard.errors import LockError, RuleTypeError, raise_all
from penzai_shard.inspection.locks.lock_content import (
    CollectiveCount,
    CollectiveGroup,
    LockContent,
    LockedArray,
)
from penzai_shard.inspection.steps.layer_groups import OTHER_OWNERS, owners_text
from penzai_shard.meshes import mesh_text
from penzai_shard.path_folding import folded_rows
from penzai_shard.report_trees import ReportTree, TreeFigure, TreeRow, bytes_text, tree_of
from penzai_shard.text_tables import FindingsTable, Report

Effect = Literal["worse", "better", "changed"]
Improvements = Literal["fail", "pass"]

_NOTHING = CollectiveCount(0, 0)


@dataclasses.dataclass(frozen=True)
class LockDifference:
    """One thing in which a step differs from its lock.

    Attributes:
        where: The path of an array or of layers, or an item of memory.
        what: What differs, in words.
        effect: Whether the step became ``"worse"``, ``"better"``, or just other than it was.
    """

    where: str
    what: str
    effect: Effect

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class LockTable(FindingsTable):
    """In what a step differs from its lock."""

    headings = ("where", "count", "what differs from the lock", "effect")
    right_aligned = frozenset({"count"})
    unwrapped = frozenset({"effect"})
    paths = frozenset({"where"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LockReport(Report):
    """Whether a step is as its lock says, as ``ShardingLock.check`` found it.

    It is true if the step is ``ok``.

    Attributes:
        differences: What differs, layouts first.
        tolerance: How far bytes may be from those of the lock, as a share of them.
        improvements: Whether what got better must be locked too.
        notes: What all collectives come to, and what may explain the differences.
    """

    differences: tuple[LockDifference, ...]
    tolerance: float
    improvements: Improvements
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs, but for what may."""
        return not self.failures

    @property
    def failures(self) -> tuple[LockDifference, ...]:
        """The differences that are not accepted."""
        if self.improvements == "pass":
            return tuple(d for d in self.differences if d.effect != "better")
        return self.differences

    def __bool__(self) -> bool:
        return self.ok

    def table(self, *, collapse: bool = True) -> LockTable:
        """The differences as a table.

        Args:
            collapse: Show those that differ only in the numbers of their paths as one row.
        """
        rows = folded_rows(((d.where, d.what, d.effect) for d in self.differences), collapse)
        return LockTable(tuple(rows), self._verdict(), self.notes, self.ok)

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The differences as a tree, by the layer or the item that differs.

        Args:
            collapse: Show equal blocks as one.
        """
        failures = set(self.failures)
        rows = [
            TreeRow(
                difference.where,
                line=difference.effect,
                figures=(TreeFigure("differences", 1, "count"),),
                details=(difference.what,),
                ok=difference not in failures,
            )
            for difference in self.differences
        ]
        return tree_of(
            "LockReport", self._verdict(), rows, ok=self.ok, notes=self.notes, collapse=collapse
        )

    def _verdict(self) -> str:
        if not self.differences:
            return (
                "as locked: layouts and collectives are the same, and so is memory within "
                f"{_percent(self.tolerance)}"
            )
        found = [
            f"{count} {effect}"
            for effect in get_args(Effect)
            if (count := sum(d.effect == effect for d in self.differences))
        ]
        text = f"{'accepted' if self.ok else 'not as locked'}: {', '.join(found)}"
        if all(d.effect == "better" for d in self.failures) and not self.ok:
            text += "; lock it anew, so that it stays better"
        return text

    def to_json(self) -> str:
        """All of it as JSON text: one object per difference."""
        return json.dumps({"ok": self.ok, **dataclasses.asdict(self)}, indent=2)


def compared(
    lock: LockContent, step: LockContent, tolerance: float, improvements: Improvements
) -> LockReport:
    """In what a step differs from its lock; see ``ShardingLock.check``."""
    if improvements not in get_args(Improvements):
        raise RuleTypeError(f"improvements={improvements!r} is not 'fail' or 'pass'.")
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not is_number or not 0 <= tolerance < math.inf:
        raise RuleTypeError(
            f"tolerance={tolerance!r} is not a share such as 0.05, which is five percent."
        )
    _refuse_others(lock, step)
    differences = (
        *_arrays(lock.arrays, step.arrays),
        *_collectives(lock.collectives, step.collectives, tolerance),
        *_not_counted(lock.not_counted, step.not_counted),
        *_memory(lock.memory, step.memory, tolerance),
    )
    notes = (*_totals(lock, step), *_notes(lock.made_with, step.made_with)) if differences else ()
    return LockReport(differences, tolerance, improvements, notes)


def _totals(lock: LockContent, step: LockContent) -> Iterator[str]:
    was, now = (sum(each.collectives.values(), _NOTHING) for each in (lock, step))
    if was != now:
        texts = (f"{each.count:,} ({bytes_text(each.payload_bytes)})" for each in (was, now))
        yield f"all collectives together: {' → '.join(texts)}"


def _refuse_others(lock: LockContent, step: LockContent) -> None:
    """Refuses a step that no lock of another mesh or other devices says anything of."""
    problems = []
    if lock.mesh != step.mesh:
        problems.append(f"mesh: the lock is of {_mesh_text(lock)}, the step of {_mesh_text(step)}.")
    if lock.device_kind != step.device_kind:
        problems.append(
            f"device kind: the lock is of {lock.device_kind!r}, the step of {step.device_kind!r}."
        )
    raise_all(
        LockError,
        "a step is compared with a lock of the same mesh and the same kind of devices. "
        "Lock each of them under a name of its own:",
        problems,
    )


def _mesh_text(content: LockContent) -> str:
    return f"({mesh_text(dict(content.mesh))})" if content.mesh else "no mesh"


def _arrays(
    lock: Mapping[str, LockedArray], step: Mapping[str, LockedArray]
) -> Iterator[LockDifference]:
    for path in dict.fromkeys([*lock, *step]):
        was, now = lock.get(path), step.get(path)
        if now is None:
            yield LockDifference(path, "is gone", "changed")
        elif was is None:
            what = f"is new among the {now.part}, {now.type_text}, spec {now.spec_text}"
            yield LockDifference(path, what, "changed")
        else:
            yield from _array(path, was, now)


def _array(path: str, was: LockedArray, now: LockedArray) -> Iterator[LockDifference]:
    if was.spec_text != now.spec_text:
        yield LockDifference(path, f"spec was {was.spec_text}, is now {now.spec_text}", "changed")
    if was.type_text != now.type_text:
        yield LockDifference(path, f"was {was.type_text}, is now {now.type_text}", "changed")
    if was.part != now.part:
        yield LockDifference(
            path, f"was one of the {was.part}, is now of the {now.part}", "changed"
        )
    if was.on_host != now.on_host:
        places = "the host's memory", "the device's memory"
        then, here = places if was.on_host else places[::-1]
        yield LockDifference(path, f"was in {then}, is now in {here}", "changed")
    if was.donated and not now.donated:
        yield LockDifference(path, "was donated, is not any more", "worse")
    if now.donated and not was.donated:
        yield LockDifference(path, "was not donated, is now", "better")


def _collectives(
    lock: Mapping[CollectiveGroup, CollectiveCount],
    step: Mapping[CollectiveGroup, CollectiveCount],
    tolerance: float,
) -> Iterator[LockDifference]:
    partners = dict(_merged_otherwise(lock, step))
    found: list[tuple[LockDifference, int]] = []
    for group in dict.fromkeys([*lock, *step]):
        if group in partners.values():
            continue
        was, now = lock.get(group, _NOTHING), step.get(partners.get(group, group), _NOTHING)
        layers = group.layers
        if group in partners:
            layers = partners[group].layers
            change: tuple[str, Effect] | None = _merging(group, was, now, tolerance)
        else:
            change = _collective(group, was, now, tolerance)
        if change:
            difference = LockDifference(owners_text(layers), *change)
            found.append((difference, max(was.payload_bytes, now.payload_bytes)))
    effects = get_args(Effect)
    found.sort(key=lambda one: (effects.index(one[0].effect), -one[1]))
    return (difference for difference, _ in found)


def _merged_otherwise(
    lock: Mapping[CollectiveGroup, CollectiveCount], step: Mapping[CollectiveGroup, CollectiveCount]
) -> Iterator[tuple[CollectiveGroup, CollectiveGroup]]:
    """Groups that are gone, each with the new one of the most of its layers, if there is one.

    One collective more or less, and the compiler merges others of its kind in another way.
    """
    new = [group for group in step if group not in lock]
    for group in lock:
        if group in step:
            continue
        alike = [
            other
            for other in new
            if (other.phase, other.kind, other.mesh_axes)
            == (group.phase, group.kind, group.mesh_axes)
            and _shared_layers(group, other)
        ]
        if alike:
            other = max(alike, key=functools.partial(_shared_layers, group))
            new.remove(other)
            yield group, other


def _shared_layers(group: CollectiveGroup, other: CollectiveGroup) -> int:
    return len(set(group.layers).intersection(other.layers).difference(OTHER_OWNERS))


def _merging(
    group: CollectiveGroup, was: CollectiveCount, now: CollectiveCount, tolerance: float
) -> tuple[str, Effect]:
    what = f"{_many(group, was)}{_in_phase(group)} for {owners_text(group.layers)} became "
    what += f"{now.count:,} ({bytes_text(now.payload_bytes)}), merged otherwise"
    return what, "worse" if _is_worse(was, now, tolerance) else "changed"


def _collective(
    group: CollectiveGroup, was: CollectiveCount, now: CollectiveCount, tolerance: float
) -> tuple[str, Effect] | None:
    """What differs in the collectives of a group, and whether that is worse."""
    place = _in_phase(group)
    if not was.count:
        return f"{_many(group, now)} {_are(now)} new{place}", "worse"
    if not now.count:
        return f"{_many(group, was)} {_are(was)} gone{place.replace(' in ', ' from ')}", "better"
    if was.unknown_times != now.unknown_times:
        what = f"{now.unknown_times} of {_many(group, now)}{place} run an unknown number of times"
        effect: Effect = "worse" if now.unknown_times > was.unknown_times else "better"
        return f"{what}, {was.unknown_times} of {was.count:,} did", effect
    if was.count != now.count:
        what = f"{_many(group, was)}{place} became {now.count:,}"
        what += f" ({bytes_text(now.payload_bytes)})"
        return what, "worse" if _is_worse(was, now, tolerance) else "better"
    if change := _change(was.payload_bytes, now.payload_bytes, tolerance):
        effect = "worse" if now.payload_bytes > was.payload_bytes else "better"
        return f"{_many(group, now, with_bytes=False)}{place}: {change}", effect
    return None


def _is_worse(was: CollectiveCount, now: CollectiveCount, tolerance: float) -> bool:
    """Whether there are more, or fewer that move more."""
    return (
        now.count > was.count
        or now.unknown_times > was.unknown_times
        or _is_more(was.payload_bytes, now.payload_bytes, tolerance)
    )


def _in_phase(group: CollectiveGroup) -> str:
    phase = f"{group.phase} pass" if group.phase in ("forward", "backward") else group.phase
    return f" in the {phase}" if phase else ""


def _many(group: CollectiveGroup, count: CollectiveCount, with_bytes: bool = True) -> str:
    """Such as ``2 all-gathers over 'data' (64.0 KiB)``."""
    kind = group.kind + ("s" if count.count != 1 else "")
    text = f"{count.count:,} {kind} over {group.mesh_axes!r}"
    return text + (f" ({bytes_text(count.payload_bytes)})" if with_bytes else "")


def _are(count: CollectiveCount) -> str:
    return "is" if count.count == 1 else "are"


def _not_counted(lock: Mapping[str, int], step: Mapping[str, int]) -> Iterator[LockDifference]:
    for reason in dict.fromkeys([*lock, *step]):
        was, now = lock.get(reason, 0), step.get(reason, 0)
        if was != now:
            what = f"{was} became {now}: {reason}"
            yield LockDifference("not counted", what, "worse" if now > was else "better")


def _memory(
    lock: Mapping[str, int], step: Mapping[str, int], tolerance: float
) -> Iterator[LockDifference]:
    for item in dict.fromkeys([*lock, *step]):
        was, now = lock.get(item, 0), step.get(item, 0)
        if change := _change(was, now, tolerance):
            effect: Effect = "worse" if now > was else "better"
            if item == "donated":
                effect = _effect_of_donation(lock, step)
            yield LockDifference(item, change, effect)


def _effect_of_donation(lock: Mapping[str, int], step: Mapping[str, int]) -> Effect:
    """Worse if more comes out beside what was donated; the same of less of everything."""
    was, now = (each.get("outputs", 0) - each.get("donated", 0) for each in (lock, step))
    return "worse" if now > was else "better" if now < was else "changed"


def _change(was: int, now: int, tolerance: float) -> str | None:
    """A change of bytes in words, if it is more than the tolerance."""
    if abs(now - was) <= tolerance * was:
        return None
    then, here = bytes_text(was), bytes_text(now)
    if then == here:
        then, here = f"{was:,} B", f"{now:,} B"
    share = f"{100 * (now / was - 1):+.3g}%, " if was else ""
    return f"{then} → {here} ({share}tolerance {_percent(tolerance)})"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _is_more(was: int, now: int, tolerance: float) -> bool:
    return now - was > tolerance * was


def _notes(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """What of the software differs, which may be why the program does."""
    changed = [name for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
    if changed:
        then = ", ".join(f"{name} {was.get(name, '-')}" for name in changed)
        here = ", ".join(f"{name} {now.get(name, '-')}" for name in changed)
        yield f"the lock was made with {then}, and this is {here}: that alone may be the reason"
