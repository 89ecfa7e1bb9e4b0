"""Prices by names alone are those of the compiled step, as far as it goes."""

import dataclasses

import pytest

from penzai_shard import Layout
from penzai_shard.choosing.by_names import NamePrices
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.shallow_models import Shallow
from tests.choosing.compiled_truth import compiled_truth
from tests.choosing.small_problems import llama, problem_of

TALL, WIDE, LONG = (
    (("data", 4), ("model", 2)),
    (("data", 2), ("model", 4)),
    (("data", 8),),
)
SPLIT = {"neurons": "model", "head_groups": "model"}
VOCABULARY = SPLIT | {"vocabulary": "model"}
FSDP = Layout(parameters={"embedding": "data"}, compute={"batch": "data"})
SEQUENCE = Layout(
    parameters={"embedding": "data"} | VOCABULARY,
    compute={"batch": "data"} | VOCABULARY,
    between_blocks={"batch": "data", "seq": "model"},
)
CANDIDATES = {
    "zero1": Candidate(LONG, Layout.zero1(min_size=1)),
    "tensor": Candidate(WIDE, Layout.tensor_parallel(names={"neurons": "neurons"})),
    "two_dimensional": Candidate(TALL, Layout.two_dimensional(min_size=1)),
    "sequence": Candidate(TALL, dataclasses.replace(SEQUENCE, rematerialise="nothing")),
    "again": Candidate(LONG, dataclasses.replace(FSDP, reshard_after_forward=True)),
    "neurons": Candidate(
        TALL, Layout(parameters={"neurons": "model"}, compute={"batch": "data", "neurons": "model"})
    ),
    "microbatches": Candidate(LONG, FSDP, 2),
}


@pytest.fixture(scope="module")
def problem():
    return problem_of(llama(1, embedding_dim=64, mlp_hidden_dim=256, num_kv_heads=4))


@pytest.fixture(scope="module")
def prices(problem):
    return NamePrices.of(problem)


@pytest.fixture(scope="module")
def truths(problem):
    return {name: compiled_truth(problem, each) for name, each in CANDIDATES.items()}


@pytest.fixture(scope="module")
def costs(prices):
    return {name: prices.cost(each) for name, each in CANDIDATES.items()}


@pytest.fixture(scope="module")
def deep_prices():
    problem = problem_of(llama(3, num_kv_heads=4))
    return NamePrices.of(problem), NamePrices(Shallow((problem,), 1, "whole"))


@pytest.mark.parametrize("name", CANDIDATES)
def test_what_is_stored_is_exact(name, costs, truths):
    memory, truth = costs[name].memory, truths[name]
    assert (memory["parameters"], memory["optimizer"]) == (truth.parameters, truth.optimizer)


@pytest.mark.parametrize("name", CANDIDATES)
def test_products_are_those_of_the_compiled_step(name, costs, truths):
    assert costs[name].flops == pytest.approx(truths[name].flops, rel=0.02)


@pytest.mark.parametrize("name", CANDIDATES)
def test_what_is_sent_is_that_of_the_compiled_step(name, costs, truths):
    sent = sum(costs[name].traffic.values())
    assert sent == pytest.approx(truths[name].wire_bytes, rel=0.05)


def test_layouts_are_ranked_as_the_compiled_steps_are(costs, truths):
    by_price, by_truth = (
        sorted(CANDIDATES, key=lambda name: figures(name))
        for figures in (
            lambda name: sum(costs[name].traffic.values()),
            lambda name: truths[name].wire_bytes,
        )
    )
    places = [by_price.index(name) - by_truth.index(name) for name in CANDIDATES]
    count = len(places)
    spearman = 1 - 6 * sum(each**2 for each in places) / (count * (count**2 - 1))
    assert spearman > 0.95


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_deep_model_costs_what_its_first_two_blocks_say(name, deep_prices):
    shallow, whole = (prices.cost(CANDIDATES[name]) for prices in deep_prices)
    assert shallow.flops == pytest.approx(whole.flops)
    assert shallow.traffic == pytest.approx(whole.traffic)
    assert shallow.memory == pytest.approx(whole.memory)


def test_the_peak_of_a_deep_model_may_be_behind_its_backward_pass():
    problem = problem_of(llama(4, mlp_hidden_dim=256, vocab_size=32), batch=8, seq=2)
    prices = NamePrices.of(problem), NamePrices(Shallow((problem,), 1, "whole"))
    candidate = Candidate(LONG, Layout.data_parallel())
    shallow, whole = (each.cost(candidate).memory for each in prices)
    assert shallow == pytest.approx(whole)
    # Of few tokens, gradients are most of it.
    assert shallow["gradients"] > shallow["activations"]
