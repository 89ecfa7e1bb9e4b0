"""``search``: what is compiled, in which order, and that the limit holds."""

import random

import pytest

from penzai_shard.choosing.search import Price, search

ALL = ((),)


def make_price(seconds, memory):
    return Price(seconds, seconds, memory)


def run(estimates, exact, limit, most, kinds=None, least=0.0):
    """What was compiled, and in which lots."""
    lots = []

    def compile_lot(numbers):
        lots.append(list(numbers))
        return [exact[number] for number in numbers]

    known = dict(enumerate(kinds or [ALL] * len(estimates)))
    found = search(dict(enumerate(estimates)), known, compile_lot, limit, most, least)
    return found, lots


def best_of(found, limit):
    return min((p for p in found.values() if p.memory <= limit), default=None)


def test_search_compiles_the_quickest_that_fit():
    prices = [make_price(float(n), 100.0 - n) for n in range(1, 41)]
    found, lots = run(prices, prices, limit=90.0, most=6)
    # Number 9 is the first that fits. Number 8 needs 91, which is near enough to the limit to look.
    assert lots[:3] == [[8, 9], [10, 11], [12, 13]]
    assert best_of(found, 90.0) == make_price(10.0, 90.0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_search_learns_an_error_of_all_estimates_of_memory(factor):
    exact = [make_price(float(n), 40.0 - n) for n in range(1, 31)]
    estimates = [p._replace(memory=p.memory * factor) for p in exact]
    found, _ = run(estimates, exact, limit=25.0, most=6)
    assert best_of(found, 25.0) == make_price(15.0, 25.0)
    assert len(found) <= 12


def test_search_corrects_by_what_was_compiled_most_alike():
    """Every second candidate takes twice as long as its estimate says."""
    exact = [make_price(float(n), 1.0) for n in range(10, 40)]
    estimates = [p._replace(seconds=p.seconds / (1 + i % 2)) for i, p in enumerate(exact)]
    kinds = [((i % 2,), ()) for i in range(len(exact))]
    found, _ = run(estimates, exact, 9.0, 6, kinds)
    assert best_of(found, 9.0) == exact[0]


def test_search_compiles_more_while_something_is_likely_quicker():
    # The first three are slower than estimated, and the others are not like them.
    estimates = [make_price(1.0 if n < 3 else 1.5, 1.0) for n in range(20)]
    exact = [make_price(2.0 if n < 3 else 1.5, 1.0) for n in range(20)]
    kinds = [((min(n, 3),),) for n in range(20)]
    found, _ = run(estimates, exact, limit=9.0, most=3, kinds=kinds)
    assert best_of(found, 9.0).seconds == 1.5
    assert 3 < len(found) <= 6


def test_search_goes_on_after_a_first_that_fits_is_found_late():
    # The leanest, the first of which fits, are slow; two that are quicker fit by a little.
    prices = [make_price(float(n), 10.0) for n in range(1, 13)]
    prices += [make_price(50.0 - 2 * n, 7.0 + n) for n in range(3)]
    estimates = [p._replace(memory=p.memory + 3 * (p.memory < 10)) for p in prices]
    found, _ = run(estimates, prices, limit=9.6, most=5)
    assert best_of(found, 9.6) == make_price(46.0, 9.0)


@pytest.mark.parametrize(("least", "count"), [(9.99, 2), (9.9, 12)])
def test_search_ends_where_nothing_can_be_quicker(least, count):
    prices = [make_price(float(n), 1.0) for n in range(10, 40)]
    found, _ = run(prices, prices, limit=9.0, most=6, least=least)
    assert best_of(found, 9.0) == prices[0]
    assert len(found) <= count


def test_search_looks_longest_where_nothing_fits():
    prices = [make_price(float(n), 10.0) for n in range(1, 100)]
    found, _ = run(prices, prices, limit=9.0, most=3)
    assert best_of(found, 9.0) is None
    assert len(found) == 12


@pytest.mark.parametrize("seed", range(20))
def test_search_finds_nearly_the_best_however_estimates_err(seed):
    """Estimates err by one factor for all of a kind, and by 5 % besides.

    The judge is an exhaustive search.
    """
    drawn = random.Random(seed)
    factors = {kind: (drawn.uniform(0.8, 1.2), drawn.uniform(0.5, 1.1)) for kind in range(4)}
    exact, estimates, kinds = [], [], []
    for _ in range(60):
        kind = drawn.randrange(4)
        price = make_price(drawn.uniform(1, 10), drawn.uniform(1, 10))
        time, memory = (factor * drawn.uniform(0.95, 1.05) for factor in factors[kind])
        exact.append(price)
        estimates.append(make_price(price.seconds * time, price.memory * memory))
        kinds.append(((kind,), ()))
    for part in (0, 6, 30, 59):
        limit = sorted(price.memory for price in exact)[part]
        found, _ = run(estimates, exact, limit, 10, kinds)
        best = min(price.seconds for price in exact if price.memory <= limit)
        assert best_of(found, limit).seconds <= 1.1 * best
        assert len(found) <= 40
