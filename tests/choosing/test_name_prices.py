"""Prices by names alone are those of the compiled step, as far as it goes."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from penzai_shard import Layout, fully_sharded
from penzai_shard.choosing.by_names import NamePrices
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.shallow_models import Shallow
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import PlanError
from penzai_shard.fused_axes import FusedAxes
from penzai_shard.named_arrays import named_array
from tests.choosing.compiled_truth import compiled_truth
from tests.choosing.small_problems import llama, problem_of
from tests.model_families import GLOBAL, LOCAL

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
    return NamePrices.of(problem), NamePrices(Shallow((problem,), 1))


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


def test_over_the_sequence_all_of_the_gradient_of_a_whole_vocabulary_is_summed(problem, prices):
    """Lookups and logits are split by the sequence then, and what is summed over it comes first."""
    layout = Layout(
        parameters=SPLIT,
        compute={"batch": "data"} | SPLIT,
        between_blocks={"batch": "data", "seq": "model"},
        optimizer=fully_sharded("data", 1),
    )
    candidate = Candidate(TALL, layout)
    cost, truth = prices.cost(candidate), compiled_truth(problem, candidate)
    assert cost.traffic["model",] == pytest.approx(truth.traffic["model",], rel=0.05)


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


def test_local_and_global_attention_in_turn_costs_what_an_unfinished_turn_and_one_more_say():
    kinds = [LOCAL, GLOBAL] * 3 + [LOCAL]
    problem = problem_of(llama(7, num_kv_heads=4, attention_type=kinds))
    cut, whole = NamePrices.of(problem), NamePrices(Shallow((problem,), 1))
    assert len(cut._depth.problems) == 2
    for candidate in (CANDIDATES["two_dimensional"], CANDIDATES["neurons"]):
        found, expected = (prices.cost(candidate) for prices in (cut, whole))
        assert found.flops == pytest.approx(expected.flops)
        assert found.traffic == pytest.approx(expected.traffic)
        assert found.memory == pytest.approx(expected.memory)


@pytest.fixture(scope="module")
def prices_of_stack():
    return NamePrices.of(problem_of(llama(3, num_kv_heads=4, stack=True)))


def test_layers_in_a_stack_are_priced_as_those_in_a_list(prices_of_stack, deep_prices):
    candidate = CANDIDATES["neurons"]
    (flops, held), expected = (
        (cost.flops, cost.memory["parameters"])
        for cost in (each.cost(candidate) for each in (prices_of_stack, deep_prices[0]))
    )
    assert (flops, held) == expected


def test_what_a_stack_keeps_for_the_backward_pass_stays_where_it_was_made(deep_prices):
    sequence = {"batch": "data", "seq": "model"}
    split = Layout(parameters=SPLIT, compute={"batch": "data"} | SPLIT, between_blocks=sequence)
    # Of all three layers: a loop of one, of which all would be worked out, keeps other things.
    problem = problem_of(llama(3, num_kv_heads=4, stack=True))
    stacked, listed = (
        sum(prices.cost(Candidate(WIDE, split)).traffic.values())
        for prices in (NamePrices(Shallow((problem,), 1)), deep_prices[1])
    )
    # What loops compute once for all of their layers, such as masks, is brought to each.
    assert listed <= stacked < 1.2 * listed


def test_the_peak_of_a_deep_model_may_be_behind_its_backward_pass():
    problem = problem_of(llama(3, mlp_hidden_dim=256, vocab_size=32), batch=8, seq=2)
    prices = NamePrices.of(problem), NamePrices(Shallow((problem,), 1))
    candidate = Candidate(LONG, Layout.data_parallel())
    shallow, whole = (each.cost(candidate).memory for each in prices)
    assert shallow == pytest.approx(whole)
    # Of few tokens, gradients are most of it.
    assert shallow["gradients"] > shallow["activations"]


SIZES = {"batch": 32, "layers": 4, "embedding": 64, "neurons": 256}


def struct(*names):
    shape = tuple(SIZES[name] for name in names)
    return named_array(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def residual(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def scanned_loss(*, model, rng, state, x):
    del rng
    layers = (
        model["up"].unwrap("layers", "embedding", "neurons"),
        model["down"].unwrap("layers", "neurons", "embedding"),
    )
    x = x.unwrap("batch", "embedding") * model["scale"].unwrap("embedding")
    return (
        jnp.square(jax.lax.scan(lambda x, w: (residual(x, *w), None), x, layers)[0]).sum(),
        state,
        {},
    )


def unrolled_loss(*, model, rng, state, x):
    del rng
    x = x.unwrap("batch", "embedding") * model["scale"].unwrap("embedding")
    for i in range(SIZES["layers"]):
        up = model[f"up_{i}"].unwrap("embedding", "neurons")
        x = residual(x, up, model[f"down_{i}"].unwrap("neurons", "embedding"))
    return jnp.square(x).sum(), state, {}


@pytest.mark.parametrize(
    ("parameters", "compute"),
    [
        ({}, {"batch": "data"}),
        ({"neurons": "model"}, {"batch": "data", "neurons": "model"}),
        ({"embedding": "data"}, {"batch": "data"}),
    ],
)
def test_a_loop_over_layers_costs_what_the_layers_do(parameters, compute):
    up, down = ("embedding", "neurons"), ("neurons", "embedding")
    inputs = {"x": struct("batch", "embedding")}
    stacked = {"up": struct("layers", *up), "down": struct("layers", *down)}
    apart = {f"up_{i}": struct(*up) for i in range(SIZES["layers"])}
    apart |= {f"down_{i}": struct(*down) for i in range(SIZES["layers"])}
    scale = {"scale": struct("embedding")}
    candidate = Candidate(TALL, Layout(parameters=parameters, compute=compute, blocks=()))
    loop, layers = (
        NamePrices.of(TrainingProblem(model | scale, loss_fn, optax.adam(1e-3), inputs))
        for model, loss_fn in ((stacked, scanned_loss), (apart, unrolled_loss))
    )
    assert loop.notes == layers.notes == ()
    assert loop.cost(candidate).flops == layers.cost(candidate).flops
    assert loop.cost(candidate).traffic == pytest.approx(layers.cost(candidate).traffic, rel=0.02)


def test_what_has_no_name_counts_as_whole_and_is_said():
    def loss_fn(*, model, rng, state, x):
        del rng
        inner = x.unwrap("batch", "embedding") @ jnp.ones((64, 32))
        return jnp.square(inner @ model["w"].data_array).sum(), state, {}

    model = {"w": named_array(jax.ShapeDtypeStruct((32, 64), jnp.float32), (None, "embedding"))}
    problem = TrainingProblem(model, loss_fn, optax.sgd(1.0), {"x": struct("batch", "embedding")})
    prices = NamePrices.of(problem)
    split = {"embedding": "model"}
    layout = Layout(parameters=split, compute=split | {"batch": "data"}, blocks=())
    # Two products forward and one backward, each split along what has a name.
    assert prices.cost(Candidate(TALL, layout)).flops == 3 * 2 * 32 * 64 * 32 / 8
    assert (
        "stablehlo.dot_general in loss: no parameter and no input names its dimension of length "
        "32, which counts as whole"
    ) in prices.notes


def convolutions(*strides):
    """A step of convolutions one after the other, each of windows of 3 by 3."""

    def loss_fn(*, model, rng, state, x):
        del rng
        y = x.unwrap("batch", "features", "rows", "columns")
        for stride, kernel in zip(strides, model, strict=True):
            y = jax.lax.conv(y, kernel.data_array, (stride, stride), "VALID")
        return jnp.square(y).sum(), state, {}

    kernel_axes = ("features", None, None, None)
    kernel = named_array(jax.ShapeDtypeStruct((16, 16, 3, 3), jnp.float32), kernel_axes)
    image = jax.ShapeDtypeStruct((16, 16, 8, 8), jnp.float32)
    inputs = {"x": named_array(image, ("batch", "features", "rows", "columns"))}
    return TrainingProblem([kernel for _ in strides], loss_fn, optax.sgd(1.0), inputs)


def test_convolutions_count_all_of_their_windows_and_no_gaps_between_places():
    split = {"features": "model"}
    layout = Layout(parameters=split, compute=split | {"batch": "data"}, blocks=())
    first, second = (2 * 16 * 16 * places * 16 * 3 * 3 for places in (6 * 6, 2 * 2))
    for of_one in (NamePrices.of(convolutions(1)), PropagatedPrices.of(convolutions(1))):
        # One product forward, and one for the kernel's gradient.
        assert of_one.cost(Candidate(TALL, layout)).flops == 2 * first / 8
    # The gradient of what goes into the second one has gaps between its places.
    by_data = Layout(parameters={}, compute={"batch": "data"}, blocks=())
    of_two = NamePrices.of(convolutions(1, 2)).cost(Candidate(LONG, by_data))
    assert of_two.flops == (2 * first + 3 * second) / 8


def test_a_layout_that_does_not_fit_is_refused_as_it_is_when_it_is_built(prices):
    layout = Layout(parameters={"embedding": ("data", "model")}, compute={"batch": "data"})
    with pytest.raises(PlanError, match="does not divide over mesh axes"):
        prices.cost(Candidate((("data", 3), ("model", 2)), layout))


def attention_loss(*, model, rng, state, x):
    del rng
    x = x.unwrap("batch", "embedding")
    queries, keys = (
        (x @ model[name].data_array).reshape(SIZES["batch"], 4, 16) for name in ("q", "k")
    )
    return jnp.square(jnp.einsum("bhd,chd->bhc", queries, keys)).sum(), state, {}


def test_of_fused_logical_axes_the_major_one_is_split():
    fused = FusedAxes.of({"heads": 4, "projection": 16})
    weights = named_array(jax.ShapeDtypeStruct((64, 64), jnp.float32), ("embedding", fused))
    model = {"q": weights, "k": weights}
    inputs = {"x": struct("batch", "embedding")}
    prices = NamePrices.of(TrainingProblem(model, attention_loss, optax.sgd(1.0), inputs))

    def cost(name, mesh_axes):
        rules = {name: mesh_axes}
        layout = Layout(parameters=rules, compute=rules, blocks=())
        return prices.cost(Candidate(TALL, layout))

    whole = cost("heads", None)
    assert prices.notes == ()
    assert cost("heads", "data").flops == whole.flops / 4
    assert cost("heads", "data").memory["parameters"] == whole.memory["parameters"] / 4
    assert cost("projection", "data").memory["parameters"] == whole.memory["parameters"]
