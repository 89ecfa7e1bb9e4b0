"""Layouts in which lengths do not divide: stored padded, priced so by all stages, and applied."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import penzai_shard as pzs
from penzai_shard.choosing.by_compiling import CompiledPrices
from penzai_shard.choosing.by_names import NamePrices
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.candidates import Candidate, PaddedAxis, candidates
from penzai_shard.errors import NothingFitsError, PlanError, RuleTypeError
from penzai_shard.fused_axes import FusedAxes
from penzai_shard.layouts import Layout
from penzai_shard.named_arrays import named_array
from tests.choosing.compiled_truth import compiled_truth
from tests.choosing.small_problems import llama, problem_of

WIDE, LONG = (("data", 2), ("model", 4)), (("data", 8),)
SPLIT = {"neurons": "model", "heads": "model", "vocabulary": "model"}
CANDIDATES = {
    "in layers": Candidate(
        WIDE,
        Layout(
            parameters={"embedding": "data"} | SPLIT,
            compute={"batch": "data"} | SPLIT,
            between_blocks={"batch": "data", "seq": "model"},
        ),
        padded=(
            PaddedAxis("head_groups", 5, 8),
            PaddedAxis("neurons", 251, 252),
            PaddedAxis("vocabulary", 125, 128),
        ),
    ),
    "stored alone": Candidate(
        LONG,
        Layout(parameters={"embedding": "data"}, compute={"batch": "data"}),
        padded=(PaddedAxis("embedding", 62, 64),),
    ),
    "words stored alone": Candidate(
        LONG,
        Layout(
            parameters={"vocabulary": "data", "neurons": "data"},
            compute={"batch": "data"},
        ),
        padded=(PaddedAxis("neurons", 251, 256), PaddedAxis("vocabulary", 125, 128)),
    ),
}


@pytest.fixture(scope="module")
def problem():
    return problem_of(
        llama(1, embedding_dim=62, num_kv_heads=5, mlp_hidden_dim=251, vocab_size=125)
    )


@pytest.fixture(scope="module")
def truths(problem):
    return {name: compiled_truth(problem, each) for name, each in CANDIDATES.items()}


@pytest.fixture(scope="module")
def stages(problem):
    return {"names": NamePrices.of(problem), "propagation": PropagatedPrices.of(problem)}


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("stage", ["names", "propagation"])
def test_what_is_padded_costs_what_it_costs_compiled(stage, name, stages, truths):
    cost, truth = stages[stage].cost(CANDIDATES[name]), truths[name]
    held = cost.memory["parameters"], cost.memory["optimizer"]
    assert held == (truth.parameters, truth.optimizer)
    assert cost.flops == pytest.approx(truth.flops, rel=0.01)
    assert sum(cost.traffic.values()) == pytest.approx(truth.wire_bytes, rel=0.05)


def test_padded_gradients_send_what_divisible_ones_do(truths):
    divisible = problem_of(
        llama(1, embedding_dim=64, num_kv_heads=5, mlp_hidden_dim=251, vocab_size=125)
    )
    layout = CANDIDATES["stored alone"].layout
    neighbour = compiled_truth(divisible, Candidate(LONG, layout))
    assert truths["stored alone"].wire_bytes < 1.01 * neighbour.wire_bytes


def test_the_compiled_price_is_that_of_padded_arrays(problem, truths):
    one, truth = CANDIDATES["stored alone"], truths["stored alone"]
    with CompiledPrices(problem, workers=1) as prices:
        (cost,) = prices.costs([one])
    assert cost.flops == truth.flops
    assert cost.memory["optimizer"] == truth.optimizer
    assert cost.traffic == pytest.approx(truth.traffic)


def on_meshes(problem, *meshes, **options):
    return candidates(problem, meshes, microbatches=(1,), rematerialise=(None,), **options)


def test_tables_are_padded_where_they_are_allowed_to_be_and_nowhere_else(problem):
    mesh = {"data": 2, "model": 4}
    kept = on_meshes(problem, mesh)
    found = on_meshes(problem, mesh, on_indivisible="pad")
    assert all(one.on_indivisible == "error" for one in kept)
    assert [one for one in found if not one.padded] == list(kept)
    names = {axis.name for one in found for axis in one.padded}
    assert names == {"vocabulary", "neurons", "head_groups"}
    for one in found[:: len(found) // 12]:
        mesh_of_it = pzs.make_mesh(one.mesh_shape, abstract=True)
        plan = one.layout.plan(problem.model, mesh_of_it, on_indivisible=one.on_indivisible)
        assert bool(plan.padding_bytes) == bool(one.padded)


def test_what_would_be_half_padding_is_left_out(problem):
    # 2 query heads and 5 groups: 5 over 8 leaves 3 devices without any, 5 over 16 is half padding.
    (eight, sixteen) = (
        {axis.name for one in found for axis in one.padded}
        for found in (on_meshes(problem, {"model": n}, on_indivisible="pad") for n in (8, 16))
    )
    assert eight - sixteen == {"head_groups"}


def test_parts_that_cut_through_the_major_of_fused_axes_are_not_tried():
    fused = FusedAxes.of({"heads": 10, "projection": 8})
    model = {"out": named_array(jax.ShapeDtypeStruct((80, 64), jnp.float32), (fused, "embedding"))}
    found = on_meshes(
        problem_of(model), {"data": 2, "model": 4}, keep={"heads": "model"}, on_indivisible="pad"
    )
    assert found.left_out == (
        "logical axis 'heads' (10) of 'heads*projection' (80) does not divide over mesh axis "
        "'model' (4) (5 tables)",
    )


def test_what_is_not_allowed_is_said_with_the_length_that_would_be_stored(problem):
    found = on_meshes(problem, {"data": 2, "model": 4})
    assert any(
        line.startswith(
            "logical axis 'vocabulary' (125) does not divide over mesh axis 'model' (4); "
            'on_indivisible="pad" would store it as 128 ('
        )
        for line in found.left_out
    )
    padded = on_meshes(problem, {"data": 2, "model": 4}, on_indivisible="pad")
    assert not padded.left_out


# A model like GPT-2, of which nothing divides over four devices: a dictionary of weights.

VOCABULARY, EMBEDDING, HEADS, PROJECTION, NEURONS, SEQ = 101, 18, 6, 3, 50, 8
NAMES = {
    "tokens": ("vocabulary", "embedding"),
    "positions": (None, "embedding"),
    "qkv": (None, "embedding", "heads", "projection"),
    "out": ("heads", "projection", "embedding"),
    "up": ("embedding", "neurons"),
    "down": ("neurons", "embedding"),
}
SHAPES = {
    "tokens": (VOCABULARY, EMBEDDING),
    "positions": (SEQ, EMBEDDING),
    "qkv": (3, EMBEDDING, HEADS, PROJECTION),
    "out": (HEADS, PROJECTION, EMBEDDING),
    "up": (EMBEDDING, NEURONS),
    "down": (NEURONS, EMBEDDING),
}


def weights():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    drawn = {
        name: 0.1 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    return pzs.name_axes(drawn, NAMES)


def gpt_loss(model, rng, state, tokens):
    x = model["tokens"][tokens[:, :-1]] + model["positions"]
    q, k, v = jnp.einsum("bse,qehp->qbshp", x, model["qkv"])
    scores = jnp.where(jnp.tri(SEQ, dtype=bool), jnp.einsum("bshp,bthp->bhst", q, k), -1e9)
    x = x + jnp.einsum("bhst,bthp,hpe->bse", jax.nn.softmax(scores), v, model["out"])
    x = x + jax.nn.gelu(x @ model["up"]) @ model["down"]
    chances = jax.nn.log_softmax(x @ model["tokens"].T)
    loss = -jnp.take_along_axis(chances, tokens[:, 1:, None], -1).mean()
    return loss, state, {"loss": loss}


def chosen(data=2, model=4, **options):
    return pzs.choose_layout(
        weights(),
        gpt_loss,
        optax.adam(1e-2),
        devices=pzs.make_mesh({"data": data, "model": model}, abstract=True),
        hardware="v5e",
        batch={"tokens": jax.ShapeDtypeStruct((16, SEQ + 1), jnp.int32)},
        plain_arrays=True,
        microbatches=(1,),
        propagated=4,
        compiled=0,
        **options,
    )


@pytest.fixture(scope="module")
def padded():
    keep = {"vocabulary": "model", "heads": "model", "embedding": "data"}
    return chosen(keep=keep, on_indivisible="pad")


def losses(state, step, batch):
    found = []
    for _ in range(3):
        state, aux = step(state, tokens=batch)
        found.append(float(aux["loss"]))
    return state, found


def test_the_pick_trains_as_one_device_does_and_its_checkpoint_has_true_lengths(padded, tmp_path):
    best = padded.best
    assert best.on_indivisible == "pad"
    assert not padded.found.refused
    options = {"loss_fn": gpt_loss, "optimizer": optax.adam(1e-2), "rng": jax.random.key(1)}
    tokens = jax.random.randint(jax.random.key(2), (16, SEQ + 1), 0, VOCABULARY, jnp.int32)
    state, step = best.build(weights, **options)
    stored = state.params["tokens"].stored
    assert stored.sharding.shard_shape(stored.shape)[0] == 26
    batch = best.layout.shard_batch(tokens, best.mesh(), first_axis="batch")
    state, found = losses(state, step, batch)
    alone = pzs.TrainState.initial_state(
        weights(), optax.adam(1e-2), jax.random.key(1), plain_arrays=True
    )
    _, expected = losses(alone, pzs.build_train_step_fn(gpt_loss), tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    pzs.save_params(tmp_path / "saved", state.model)
    restored = pzs.restore_params(tmp_path / "saved", weights(), pzs.make_mesh(data=8), {})
    assert {name: array.data_array.shape for name, array in restored.items()} == SHAPES


def test_a_file_of_the_pick_says_that_it_is_padded(padded, tmp_path):
    best = padded.best
    assert "padded: heads 6 to 8, vocabulary 101 to 104" in str(padded)
    said = Layout.read_toml(best.save(tmp_path / "rules.toml"))
    assert (said.layout, said.mesh_shape, said.on_indivisible) == (
        best.layout,
        best.mesh_shape,
        "pad",
    )
    mesh = pzs.make_mesh(said.mesh_shape, abstract=True)
    plan = said.layout.plan(weights(), mesh, on_indivisible=said.on_indivisible)
    held = plan.bytes_per_device
    assert held == best.memory["parameters"]
    with pytest.raises(PlanError, match=r"\(101\) does not divide .* on_indivisible=\"pad\""):
        said.layout.plan(weights(), mesh)


def test_where_nothing_fits_padding_is_among_what_would_help():
    with pytest.raises(NothingFitsError, match=r'on_indivisible="pad" tries \d+ more tables'):
        chosen(data=4, model=2, memory=10_000)


def test_what_was_decided_and_does_not_divide_is_answered_with_padding():
    with pytest.raises(PlanError, match=r'on_indivisible="pad" would store it as 104'):
        chosen(keep={"vocabulary": "model"})


@pytest.mark.parametrize(
    ("given", "fix"),
    [("replicate", 'are tried anyway: on_indivisible="error"'), (True, 'on_indivisible="pad"')],
)
def test_other_ways_to_treat_lengths_are_refused(given, fix):
    with pytest.raises(RuleTypeError, match=f"on_indivisible: is {given!r}.*{fix}"):
        chosen(on_indivisible=given)
