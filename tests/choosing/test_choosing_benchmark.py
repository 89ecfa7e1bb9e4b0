"""The judge of the choice, on steps so small that everything is compiled in a moment."""

import itertools

import jax
import numpy as np
import pytest

from benchmarks.choosing import every_table, judge, judged, models
from benchmarks.choosing.pairs import Pair
from penzai_shard import make_mesh
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices import choose_layout
from penzai_shard.choosing.choices.layout_words import candidate_words
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.inspection.traffic.transfer_time import time_of_loads
from penzai_shard.layouts import Layout

V5E = Hardware.read("v5e:4")


@pytest.fixture(scope="module")
def small():
    """A pair, and what became of it."""
    pair = Pair(lambda: models.mlp(64), "v5e:4", {"data": 2, "model": 2}, microbatches=(1, 2))
    return pair, judged.judged(pair)


def test_the_picks_of_a_small_pair_are_the_best_under_every_limit(small):
    _, found = small
    assert found.count == 6
    for pick in found.picks.values():
        assert (pick.slower, pick.over, pick.is_best) == (pytest.approx(0.0, abs=1e-6), 0.0, True)
        assert pick.compiled > 0
    fitting = [pick.fitting for pick in found.picks.values()]
    assert fitting == sorted(fitting, reverse=True)
    assert found.is_refused
    assert found.apart[0] < 1e-6
    assert all(-1 <= value <= 1 for value in found.spearman.values())


def test_the_judge_searches_as_choose_layout_does(small, monkeypatch):
    pair, _ = small
    asked = pair.asked()
    problem = asked.problem
    choices = choose_layout(
        problem.model,
        problem.loss_fn,
        problem.optimizer,
        devices=jax.sharding.AbstractMesh((2, 2), ("data", "model")),
        hardware="v5e",
        batch=dict(problem.inputs),
        rematerialise=(None,),
        microbatches=(1, 2),
        compiled=0,
        progress=False,
    )
    stages = judged.stages_of(problem, with_compiling=False)
    found = pair.candidates(asked)
    again = judged._search(pair, asked, found, stages, pair.hardware.memory)
    assert candidate_words(again.best.priced.candidate) == candidate_words(
        choices.best.priced.candidate
    )


def test_rankings_are_compared_by_the_bound_and_then_by_the_sum():
    one = [(1.0, 2.0), (1.0, 3.0), (2.0, 2.0)]
    assert judged.spearman_of(one, one) == pytest.approx(1.0)
    assert judged.spearman_of(one, one[::-1]) == pytest.approx(-1.0)
    # Rankings without an order agree with each other alone.
    assert judged.spearman_of([(1.0, 1.0)] * 3, [(2.0, 2.0)] * 3) == 1.0
    assert judged.spearman_of(one, [(2.0, 2.0)] * 3) == 0.0


def test_the_judge_counts_what_a_step_by_hand_costs():
    """Batch and neurons are split over two devices each, and everything is known."""
    batch, embedding, neurons = 64, 32, 128
    problem = models.mlp(batch, embedding, neurons, layers=1).problem
    layout = Layout(
        parameters={"neurons": "model"}, compute={"batch": "data", "neurons": "model"}, blocks=()
    )
    one = Candidate((("data", 2), ("model", 2)), layout)
    found = judge.verdict(problem, one, V5E)
    weights = 2 * embedding * neurons // 2
    # Twice forward, and three products backward: nobody asks for the gradient of the input.
    assert found.flops == 5 * 2 * (batch // 2) * embedding * neurons // 2
    ring = 2 * (2 - 1) / 2
    gradients, outputs = ring * 4 * weights, ring * 4 * (batch // 2) * embedding
    assert found.sent["data",] == pytest.approx(gradients, rel=0.01)
    assert found.sent["model",] == outputs
    assert found.memory >= 3 * 4 * weights
    moments = 2 * 4 * weights
    assert found.update == pytest.approx(2 * moments / V5E.memory_bandwidth, rel=1e-3)
    assert found.time == max(found.compute, found.traffic, found.update)


def test_products_are_those_that_the_compiler_counts():
    def step(x, w):
        return jax.lax.fori_loop(0, 3, lambda i, y: y @ w, x) @ w

    structs = (
        jax.ShapeDtypeStruct((64, 256), "float32"),
        jax.ShapeDtypeStruct((256, 256), "float32"),
    )
    compiled = jax.jit(step).lower(*structs).compile()
    assert judge.flops_of(compiled.as_text()) == 4 * 2 * 64 * 256 * 256
    once = jax.jit(lambda x, w: x @ w).lower(*structs).compile()
    assert judge.flops_of(once.as_text()) == pytest.approx(once.cost_analysis()["flops"], rel=0.01)


def test_the_time_to_send_is_that_of_the_worst_set_of_links():
    """By the theorem on flows and cuts, which the library counts by and the judge does not."""
    draw = np.random.default_rng(0)
    axes = ("x", "y", "z")
    sets = [one for size in (1, 2, 3) for one in itertools.combinations(axes, size)]
    for _ in range(20):
        rates = {axis: float(draw.uniform(1, 10)) for axis in axes}
        sent = {one: float(draw.uniform(0, 5)) for one in sets if draw.random() < 0.6}
        loads = {frozenset(one): bytes_ for one, bytes_ in sent.items()}
        links = {axis: {f"link of {axis}": rate} for axis, rate in rates.items()}
        by_cuts = time_of_loads(loads, lambda chosen: sum(rates[axis] for axis in chosen))  # noqa: B023
        assert judge.sending_time(sent, links) == pytest.approx(by_cuts, rel=1e-6)


def test_each_use_of_a_mesh_axis_splits_one_axis_of_an_array_at_most():
    step = every_table.plain_mlp(64)
    uses = every_table.uses_of(step)
    assert len(uses) == len(set(uses)) == 75
    for use in uses:
        assert all(len(use.stored & set(names)) <= 1 for names in step.weights.values())
        assert not use.stored or use.optimizer == use.stored


def test_a_table_costs_what_the_same_layout_of_the_list_costs():
    step = every_table.plain_mlp(64)
    mesh = make_mesh({"data": 4}, jax.devices()[:4])
    nothing, batch = frozenset(), frozenset({"batch"})
    use = every_table.Use(nothing, nothing, batch, batch)
    plain = every_table.judged_table(step, mesh, V5E, [use], gathered=False)
    listed = Candidate((("data", 4),), Layout(parameters={}, compute={"batch": "data"}, blocks=()))
    same = judge.verdict(step.same().problem, listed, V5E)
    assert (plain.flops, plain.update) == (same.flops, pytest.approx(same.update, rel=1e-3))
    assert plain.traffic == pytest.approx(same.traffic, rel=0.01)


def test_a_list_that_lacks_the_best_is_found_out():
    def cost(time, memory):
        return judge.Verdict(0.0, {}, memory, time, 0.0, 0.0)

    tables = {"quick": cost(1.0, 100), "slow": cost(2.0, 100), "lean": cost(1.5, 10)}
    full = every_table.Compared(tables, [cost(1.0, 100), cost(1.5, 10)])
    assert (full.faster, full.lacking(0.02)) == (0.0, {})
    without_quick = every_table.Compared(tables, [cost(1.5, 10)])
    assert without_quick.faster == pytest.approx(1 / 3)
    assert without_quick.lacking(0.02) == {"quick": pytest.approx(1 / 3)}
    without_lean = every_table.Compared(tables, [cost(1.0, 100)])
    assert without_lean.lacking(0.02) == {"lean": 1.0}
