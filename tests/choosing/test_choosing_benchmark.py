"""The judge of the choice, on a pair so small that every layout is compiled in a moment."""

import pytest

from benchmarks import choosing


def test_the_pick_of_a_small_pair_is_the_best_of_all_that_were_compiled():
    pair = choosing.Pair(lambda: choosing.mlp(64), "v5e:4", {"data": 2, "model": 2})
    found = choosing.judged(pair)
    assert found.count >= 3
    assert (found.slower, found.is_best, found.is_over) == (pytest.approx(0.0), True, False)
    assert all(-1 <= value <= 1 for value in found.spearman.values())


def test_rankings_are_compared_by_the_bound_and_then_by_the_sum():
    one = [(1.0, 2.0), (1.0, 3.0), (2.0, 2.0)]
    assert choosing._spearman(one, one) == pytest.approx(1.0)
    assert choosing._spearman(one, one[::-1]) == pytest.approx(-1.0)
    # Rankings without an order agree with each other alone.
    assert choosing._spearman([(1.0, 1.0)] * 3, [(2.0, 2.0)] * 3) == 1.0
    assert choosing._spearman(one, [(2.0, 2.0)] * 3) == 0.0
