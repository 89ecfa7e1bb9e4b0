"""A preset's step does no more than one that is written by hand on raw arrays."""

import pytest

from benchmarks.parallel_training import by_hand, with_penzai
from benchmarks.parallel_training.compiled_figures import CompiledFigures
from benchmarks.parallel_training.work import LAYOUTS, Shape

SMALL = Shape(
    blocks=1, embedding=64, heads=4, projection=16, neurons=128, vocabulary=64, batch=8, seq=16
)


@pytest.mark.parametrize("name", ["fully sharded", "4x2"])
def test_a_preset_computes_and_moves_no_more_than_by_hand(name):
    layout = LAYOUTS[name]
    hand, ours = (module.build(SMALL, layout) for module in (by_hand, with_penzai))
    assert hand.parameters == ours.parameters
    losses = [float(contender.step(contender.start())[1]) for contender in (hand, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    least, found = (CompiledFigures.of(one.compiled, layout.mesh) for one in (hand, ours))
    assert found.flops <= 1.02 * least.flops
    assert found.bytes_accessed <= 1.02 * least.bytes_accessed
    assert found.temporaries <= 1.05 * least.temporaries
    assert found.bytes_sent <= least.bytes_sent
