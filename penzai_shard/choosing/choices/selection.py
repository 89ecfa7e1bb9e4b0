"""Which priced candidates are priced once more, more exactly."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from penzai_shard.choosing.choices.priced_candidates import Priced

Price: TypeAlias = tuple[tuple[float, float], int]
"""What candidates have alike that mostly differ in nothing that counts: time and memory."""

# An estimate of memory is wrong by up to so much; what is further over the limit does not fit.
MEMORY_MARGIN = {"names": 2.0, "propagation": 2.0, "compiled": 1.0}
# Of those that are kept, this part is for what holds less, the slower it may be: an estimate that
# is too low for all of them would else leave nothing that fits.
_LEANER = 4


def as_priced(one: Priced) -> float:
    """The memory of a candidate as its stage has it."""
    return one.memory


def as_bound(one: Priced) -> float:
    """The time of a candidate as its stage has it."""
    return one.price[0]


def price_of(one: Priced) -> Price:
    """The time and the memory of a candidate."""
    return one.price, one.memory


def best_by_price(
    priced: Iterable[Priced], most: int, time_of: Callable[[Priced], float] = as_bound
) -> list[Priced]:
    """The best candidates, one of each price before the second ones of others."""
    ranked = sorted(priced, key=lambda one: (time_of(one), one.rank))
    return list(itertools.islice(itertools.chain(*_one_of_each_price(ranked)), most))


def leanest(
    priced: Iterable[Priced], most: int, memory_of: Callable[[Priced], float] = as_priced
) -> list[Priced]:
    """The candidates that hold least."""
    return sorted(priced, key=lambda one: (memory_of(one), one.rank))[:most]


def without(priced: Iterable[Priced], others: Iterable[Priced]) -> list[Priced]:
    """What is not among others."""
    taken = {id(one) for one in others}
    return [one for one in priced if id(one) not in taken]


def selected(
    priced: Iterable[Priced],
    limit: int,
    most: int,
    memory_of: Callable[[Priced], float] = as_priced,
    time_of: Callable[[Priced], float] = as_bound,
    prices: Iterable[Price] = (),
) -> list[Priced]:
    """The candidates that are worth a closer look, the best first.

    Of candidates with equal prices, which mostly differ in nothing that counts, one comes before
    the second ones of others.

    Args:
        priced: Candidates that were priced in one way.
        limit: The memory of a device, in bytes.
        most: How many to select; a part of the places is for what holds less memory than all that
            is quicker.
        memory_of: What a candidate is thought to hold.
        time_of: What a step of a candidate is thought to take.
        prices: Those of which a candidate was selected before.
    """
    may_fit = (one for one in priced if memory_of(one) <= limit * MEMORY_MARGIN[one.stage])
    ranked = sorted(may_fit, key=lambda one: (time_of(one), one.rank))
    fitting = [one for one in ranked if memory_of(one) <= limit]
    doubtful = [one for one in ranked if memory_of(one) > limit]
    # The one place that there is belongs to the best.
    lean = _leanest_so_far(ranked)[-max(most // _LEANER, 1) :] if most > 1 else []
    order = itertools.chain(
        lean, *_one_of_each_price(fitting, prices), *_one_of_each_price(doubtful, prices)
    )
    kept = {id(one): one for one in itertools.islice(_distinct(order), most)}
    return [one for one in ranked if id(one) in kept]


def _leanest_so_far(ranked: Sequence[Priced]) -> list[Priced]:
    """Those that hold less than all before them."""
    found: list[Priced] = []
    for one in ranked:
        if not found or one.memory < found[-1].memory:
            found.append(one)
    return found


def _one_of_each_price(
    ranked: Sequence[Priced], prices: Iterable[Price] = ()
) -> tuple[list[Priced], list[Priced]]:
    """The first of each price, but for some prices, and the others."""
    known, first = frozenset(prices), dict[Price, Priced]()
    others = []
    for one in ranked:
        if price_of(one) in known or first.setdefault(price_of(one), one) is not one:
            others.append(one)
    return list(first.values()), others


def _distinct(order: Iterable[Priced]) -> Iterable[Priced]:
    seen: set[int] = set()
    for one in order:
        if id(one) not in seen:
            seen.add(id(one))
            yield one
