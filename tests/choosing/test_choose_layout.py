"""``choose_layout`` from end to end: the pick trains as one device does, and is always the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from penzai_shard.errors import RuleTypeError
from tests.choosing.traced_once import trace_once

pytestmark = pytest.mark.long  # What they share takes long.
CONFIG = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=2,
    query_head_multiplier=2,
    embedding_dim=64,
    projection_dim=16,
    mlp_hidden_dim=128,
    num_decoder_blocks=3,
    vocab_size=128,
    mlp_variant="swiglu",
    tie_embedder_and_logits=False,
)
TOKENS = pz.nx.wrap(jnp.arange(32 * 33).reshape(32, 33) * 7 % 128, "batch", "seq")
OPTIMIZER = optax.adam(1e-2)


def build_lm():
    return llamalike_common.build_llamalike_transformer(CONFIG, jax.random.key(0), name="lm")


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    loss = pzs.cross_entropy(logits, tokens[{"seq": pz.slice[1:]}])
    return loss, state, loss


choose = functools.partial(
    pzs.choose_layout,
    loss_fn=loss_fn,
    optimizer=OPTIMIZER,
    devices="v5e:8",
    batch={"tokens": TOKENS},
    memory="4MiB",
    rematerialise=(None, "nothing"),
    microbatches=(1, 2),
    propagated=4,
    compiled=2,
    progress=False,
)


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    known = {}
    with pytest.MonkeyPatch.context() as patched:
        trace_once(patched, known)
        yield known


@pytest.fixture(scope="module")
def abstract():
    return pzs.abstract_model(build_lm)


@pytest.fixture(scope="module")
def choices(abstract):
    return choose(abstract)


def losses(state, step, tokens):
    found = []
    for _ in range(3):
        state, loss = step(state, tokens=tokens)
        found.append(float(loss))
    return found


def test_the_pick_trains_as_one_device_does(choices):
    pick = choices.best
    assert len([size for size in pick.mesh_shape.values() if size > 1]) >= 1
    given = {"loss_fn": loss_fn, "optimizer": OPTIMIZER, "rng": jax.random.key(1)}
    mesh = pick.mesh()
    state, step = pick.build(build_lm, **given)
    assert state.step.sharding.mesh == mesh
    on_eight = losses(state, step, pick.layout.shard_batch(TOKENS, mesh))
    whole = pzs.Layout(parameters={}, compute={"batch": "data"})
    one = pzs.make_mesh({"data": 1}, jax.devices()[:1])
    state, step = whole.build(build_lm, mesh=one, **given)
    np.testing.assert_allclose(on_eight, losses(state, step, TOKENS), rtol=2e-5)


def test_no_choice_is_over_the_memory_and_some_layouts_are(choices):
    assert all(choice.memory_bytes <= 4 * 2**20 for choice in choices)
    assert any(one.memory > 4 * 2**20 for one in choices.priced)


def test_memory_compiled_for_simulated_devices_is_said_to_be_an_estimate(choices):
    assert "is an estimate of what the hardware needs" in " ".join(str(choices).split())


def test_the_same_question_has_the_same_answer(abstract, traced_once):
    by_names = functools.partial(choose, propagated=0, compiled=0, memory=None)
    kept = {"batch": "data", "embedding": None, "vocabulary": "model"}
    first = by_names(abstract, keep=kept)
    traced_once.clear()
    again = by_names(abstract, keep=dict(reversed(kept.items())))
    assert str(again) == str(first)
    assert again.best.to_toml() == first.best.to_toml()


def test_what_is_kept_is_kept_and_unknown_names_are_refused_with_the_right_ones(abstract):
    mesh = pzs.make_mesh(data=4, model=2, abstract=True)
    on_mesh = functools.partial(
        *(choose, abstract),
        **{"devices": mesh, "hardware": "v5e", "propagated": 0, "compiled": 0, "memory": None},
    )
    for choice in on_mesh(keep={"neurons": "model"}, microbatches=(1,), rematerialise=(None,)):
        assert "neurons" in choice.layout.compute.logical_axes
        assert choice.mesh_shape == {"data": 4, "model": 2}
    with pytest.raises(RuleTypeError, match=r"no such logical axis\. Did you mean 'neurons'"):
        on_mesh(keep={"nuerons": "model"})
    with pytest.raises(RuleTypeError, match=r"mesh axis 'modle'\. Did you mean 'model'"):
        on_mesh(keep={"neurons": "modle"})


def test_a_batch_that_does_not_divide_is_reported(abstract):
    tokens = {"tokens": pz.nx.ones({"batch": 9, "seq": 5}, dtype=jnp.int32)}
    options = {"propagated": 0, "compiled": 0, "memory": None, "rematerialise": (None,)}
    choices = choose(abstract, batch=tokens, **options)
    left_out = "Left out: the batch (9) does not divide over 8 devices; one of 8 or 16 does"
    assert left_out in " ".join(str(choices).split())
    assert "an estimate of what the hardware needs" not in str(choices)
    assert all(choice.mesh_shape == {"model": 8} for choice in choices)
