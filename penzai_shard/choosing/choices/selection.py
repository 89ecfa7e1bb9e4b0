"""Which priced candidates are priced once more, more exactly."""

import itertools
from collections.abc import Iterable, Sequence

from penzai_shard.choosing.choices.priced_candidates import Priced

# An estimate of memory is wrong by up to so much; what is further over the limit does not fit.
MEMORY_MARGIN = {"names": 2.0, "propagation": 2.0, "compiled": 1.0}
# Of those that are kept, this part is for what holds less, the slower it may be: an estimate that
# is too low for all of them would else leave nothing that fits.
_LEANER = 4


def may_fit(priced: Priced, limit: int) -> bool:
    """Whether a candidate's memory may be within the limit, as exactly as it is priced."""
    return priced.memory <= limit * MEMORY_MARGIN[priced.stage]


def best_by_price(priced: Iterable[Priced], most: int) -> list[Priced]:
    """The best candidates, one of each price before the second ones of others."""
    ranked = sorted(priced, key=lambda one: one.rank)
    return list(itertools.islice(itertools.chain(*_one_of_each_price(ranked)), most))


def selected(priced: Iterable[Priced], limit: int, most: int) -> list[Priced]:
    """The candidates that are worth a closer look, the best first.

    Of candidates with equal prices, which mostly differ in nothing that counts, one comes before
    the second ones of others.

    Args:
        priced: Candidates that were priced in one way.
        limit: The memory of a device, in bytes.
        most: How many to select; a part of the places is for what holds less memory than all that
            is quicker.
    """
    ranked = sorted((one for one in priced if may_fit(one, limit)), key=lambda one: one.rank)
    fitting = [one for one in ranked if one.memory <= limit]
    doubtful = [one for one in ranked if one.memory > limit]
    lean = _leanest_so_far(ranked)[-max(most // _LEANER, 1) :]
    order = itertools.chain(lean, *_one_of_each_price(fitting), *_one_of_each_price(doubtful))
    kept = {id(one): one for one in itertools.islice(_distinct(order), most)}
    return [one for one in ranked if id(one) in kept]


def _leanest_so_far(ranked: Sequence[Priced]) -> list[Priced]:
    """Those that hold less than all before them."""
    found: list[Priced] = []
    for one in ranked:
        if not found or one.memory < found[-1].memory:
            found.append(one)
    return found


def _one_of_each_price(ranked: Sequence[Priced]) -> tuple[list[Priced], list[Priced]]:
    """The first of each price, and the others."""
    first: dict[tuple[float, ...], Priced] = {}
    others = []
    for one in ranked:
        if first.setdefault(one.price, one) is not one:
            others.append(one)
    return list(first.values()), others


def _distinct(order: Iterable[Priced]) -> Iterable[Priced]:
    seen: set[int] = set()
    for one in order:
        if id(one) not in seen:
            seen.add(id(one))
            yield one
