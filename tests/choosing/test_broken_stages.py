"""Stages that are wrong: the search gives what is right all the same, or says whose fault it is."""

import dataclasses
import itertools
import math

import pytest

from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.errors import CompilationError, NothingFitsError, PlanError
from penzai_shard.inspection.devices.hardware import Hardware
from tests.choosing.fake_stages import (
    GIB,
    FakeStage,
    asked_problem,
    candidates,
    choose,
    cost,
)

QUICKER = ("names", "propagation")
STAGES = (*QUICKER, "compiled")
# A half and a sixth of the candidates.
MOST = {"propagation": 18, "compiled": 6}
LIMITS = [2.6, 3.1, 4.1, 5.5, 16.0]


def chosen(*stages, **options):
    return choose(asked_problem(), *stages, most=MOST, **options)


def stages_with(**prices):
    return [FakeStage(name, prices.get(name, cost)) for name in STAGES]


def best_that_fits(limit):
    """By the true costs of all candidates."""
    hardware = Hardware.read("v5e:8")
    times = {
        one: StepTime.of(cost(one), one.mesh_shape, hardware)
        for one in candidates()
        if cost(one).memory_bytes <= limit
    }
    return min(time.bound for time in times.values())


def wrong(stage, **factors):
    return {stage: lambda one: cost(one, **factors)}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("factor", [1 / 3, 3.0])
@pytest.mark.parametrize("figure", ["memory_factor", "traffic_factor", "both"])
@pytest.mark.parametrize("stage", QUICKER)
def test_an_estimate_that_is_wrong_by_a_factor_of_three_loses_nothing(stage, figure, factor, limit):
    figures = ("memory_factor", "traffic_factor") if figure == "both" else (figure,)
    stages = stages_with(**wrong(stage, **dict.fromkeys(figures, factor)))
    choices = chosen(*stages, memory=int(limit * GIB))
    assert choices.best.memory_bytes <= limit * GIB
    assert choices.best.seconds == pytest.approx(best_that_fits(limit * GIB))


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
@pytest.mark.parametrize("stage", QUICKER)
def test_where_nothing_fits_it_is_said_whatever_was_estimated(stage, factor):
    stages = stages_with(**wrong(stage, memory_factor=factor))
    with pytest.raises(NothingFitsError, match=r"The nearest needs 2\.5 GiB, which is 1\.0 GiB"):
        chosen(*stages, memory="1.5GiB")
    # What is compiled though it seems hopeless is one of each way to store, not all that may be.
    assert len(stages[2].seen) <= MOST["propagation"] * 2 / 3


@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("part", ["flops", "sent", "memory"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_price_that_is_no_number_is_left_out_and_said(stage, part, figure):
    best = chosen().best.priced.candidate

    def price(one):
        return with_figure(cost(one), part, figure) if one == best else cost(one)

    choices = chosen(*stages_with(**{stage: price}))
    assert choices.best.priced.candidate != best
    assert math.isfinite(choices.best.seconds)
    text = " ".join(str(choices).split())
    assert f"the stage {stage!r} gave no price: {part} is {figure}" in text
    with pytest.raises(PlanError, match=f"the stage {stage!r} gave no price: {part} is {figure}"):
        chosen(*stages_with(**{stage: lambda one: with_figure(cost(one), part, figure)}))


def with_figure(price, part, figure):
    if part == "flops":
        return dataclasses.replace(price, flops=figure)
    if part == "memory":
        return dataclasses.replace(price, memory={"parameters": figure})
    gathered = cost(candidates()[3]).sent
    return dataclasses.replace(price, sent=(dataclasses.replace(gathered[0], bytes=figure),))


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_refuses_altogether_is_no_matter_of_memory(stage):
    stages = stages_with(**{stage: lambda one: CompilationError("it fell over.")})
    with pytest.raises(PlanError, match=r"can be laid out:\s+it fell over\.") as caught:
        chosen(*stages)
    assert not isinstance(caught.value, NothingFitsError)


@pytest.mark.parametrize("stage", STAGES)
def test_what_refuses_all_but_the_worst_leaves_it(stage):
    def price(one):
        is_worst = one.mesh_shape == {"data": 8} and one.microbatches == 4
        return cost(one) if is_worst else PlanError("not so.")

    choices = chosen(*stages_with(**{stage: price}))
    assert choices.best.mesh_shape == {"data": 8}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_that_is_no_answer_ends_the_search_and_all_stages(stage):
    def price(one):
        raise ZeroDivisionError("a mistake in the stage")

    stages = stages_with(**{stage: price})
    with pytest.raises(ZeroDivisionError, match="a mistake in the stage"):
        chosen(*stages)
    assert all(one.is_closed for one in stages)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_forgets_candidates_is_an_error(stage):
    class Forgetful(FakeStage):
        def costs(self, some):
            yield from itertools.islice(super().costs(some), 0)

    stages = [Forgetful(name) if name == stage else FakeStage(name) for name in STAGES]
    with pytest.raises(ValueError, match="is shorter than"):
        chosen(*stages)


@pytest.mark.parametrize("stage", QUICKER)
def test_of_equal_prices_the_more_exact_stage_decides(stage):
    def price(one):
        return StepCost(1e12, (), {"activations": float(GIB)})

    found = chosen(*stages_with(**{stage: price}))
    assert found.best.seconds == min(one.time.bound for one in found.found.priced["compiled"])
    equal = stages_with(**dict.fromkeys(STAGES, price))
    first, again = (chosen(*equal, among=some) for some in (candidates(), candidates()[::-1]))
    assert str(first) == str(again)


def test_one_candidate_is_the_answer_if_it_fits():
    (only,) = candidates()[:1]
    assert chosen(among=[only]).best.priced.candidate == only
    with pytest.raises(NothingFitsError, match="none of 1 layout fits"):
        chosen(among=[only], memory="5.9GiB")
