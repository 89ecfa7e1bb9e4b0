"""Means over what differs in number between microbatches, such as tokens that are no padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.training import (
    TrainState,
    build_eval_step_fn,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

EXAMPLES, LENGTH = 16, 6


def initial(**options):
    weights = jnp.sin(jnp.arange(64, dtype=jnp.float32)).reshape(8, 8)
    model = {"w": pz.nx.wrap(weights, "vocabulary", "features")}
    return TrainState.initial_state(model, optax.sgd(0.5), jax.random.key(0), **options)


def batch():
    """Tokens of which more are padding the further on in the batch."""
    tokens = (jnp.arange(EXAMPLES * LENGTH).reshape(EXAMPLES, LENGTH) * 5) % 8
    lengths = 1 + (jnp.arange(EXAMPLES) * 7) % LENGTH
    mask = jnp.arange(LENGTH) < lengths[:, None]
    return {
        "tokens": pz.nx.wrap(tokens, "batch", "seq"),
        "mask": pz.nx.wrap(mask, "batch", "seq"),
    }


def parts_of(model, tokens, mask):
    ids = tokens.unwrap("batch", "seq")
    logits = model["w"].unwrap("vocabulary", "features")[ids]
    weights = mask.unwrap("batch", "seq").astype(jnp.float32)
    losses = -jax.nn.log_softmax(logits)[..., 0] * weights
    right = (jnp.argmax(logits, -1) == ids) * weights
    return losses, right, weights


def pair_loss(model, rng, state, tokens, mask):
    losses, right, weights = parts_of(model, tokens, mask)
    aux = {
        "accuracy": (right.sum(), weights.sum()),
        "by_example": pz.nx.wrap(losses.sum(-1), "batch"),
        "tokens": mask.unwrap("batch", "seq").sum(),
    }
    return (losses.sum(), weights.sum()), state, aux


def mean_loss(model, rng, state, tokens, mask):
    losses, right, weights = parts_of(model, tokens, mask)
    aux = {
        "accuracy": right.sum() / weights.sum(),
        "by_example": pz.nx.wrap(losses.sum(-1), "batch"),
        "tokens": mask.unwrap("batch", "seq").sum(),
    }
    return losses.sum() / weights.sum(), state, aux


REDUCTION = {"accuracy": "ratio", "tokens": "sum"}


@pytest.fixture(scope="module")
def plain():
    """State, outputs and loss of one step of the whole batch on one device."""
    step = build_train_step_fn(mean_loss)
    state, aux = step(initial(), **batch())
    return state, aux, build_eval_step_fn(mean_loss)(initial(), **batch())[0]


def assert_equal(found, expected):
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "placed", "options"),
    [
        (1, False, {}),
        (4, False, {"jit": False}),
        (4, True, {}),
        (1, True, {"manual_axes": ("data",)}),
        (2, True, {"manual_axes": ("data",), "loss_scaling": 8.0}),
    ],
)
def test_pairs_give_the_step_of_the_whole_batch(steps, placed, options, plain, mesh):
    state, inputs = initial(), batch()
    if placed:
        state = jax.device_put(state, train_state_sharding(state, mesh, {"features": "data"}))
        inputs = shard_batch(inputs, mesh, {"batch": "data"})
    step = build_train_step_fn(
        pair_loss,
        accumulate_steps=steps,
        aux_reduction=REDUCTION,
        step_metrics="loss",
        **options,
    )
    state, aux = step(state, **inputs)
    expected, expected_aux, loss = plain
    assert_equal(state.params, expected.params)
    assert_equal(aux.pop("loss"), loss)
    assert_equal(aux, expected_aux)
    # Example by example, in the order of the batch.
    assert dict(aux["by_example"].named_shape) == {"batch": EXAMPLES}
    assert aux["tokens"].dtype == jnp.int32


def test_a_mean_of_means_is_another_loss(plain):
    """The reason for pairs: without them a microbatch of few tokens weighs as much as any."""
    step = build_train_step_fn(mean_loss, accumulate_steps=4, aux_reduction={"tokens": "sum"})
    state, _ = step(initial(), **batch())
    difference = state.params["w"].data_array - plain[0].params["w"].data_array
    assert float(jnp.abs(difference).max()) > 1e-3


@pytest.mark.parametrize("steps", [1, 4])
def test_evaluations_put_outputs_together_as_steps_do(steps, plain, mesh):
    _, expected_aux, loss = plain
    step = build_eval_step_fn(pair_loss, accumulate_steps=steps, aux_reduction=REDUCTION)
    state = jax.device_put(initial(), train_state_sharding(initial(), mesh, {"features": "data"}))
    found, aux = step(state, **shard_batch(batch(), mesh, {"batch": "data"}))
    assert_equal((found, aux), (loss, expected_aux))


def test_line_searches_see_the_weighted_loss(plain):
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    optimizer = optax.chain(optax.sgd(20.0), search)
    state = TrainState.initial_state(initial().model, optimizer, jax.random.key(0))
    states = [
        build_train_step_fn(loss, accumulate_steps=steps, aux_reduction=words)(state, **batch())[0]
        for loss, steps, words in ((mean_loss, 1, None), (pair_loss, 4, REDUCTION))
    ]
    assert_equal(states[1].params, states[0].params)


def run(aux, **options):
    def loss(model, rng, state, tokens, mask):
        return pair_loss(model, rng, state, tokens, mask)[0], state, aux(tokens)

    step = build_train_step_fn(loss, accumulate_steps=2, **options)
    return step(initial(), **batch())


@pytest.mark.parametrize(
    ("aux", "words", "message"),
    [
        (lambda t: {"a": jnp.ones(())}, {"a": "ratio"}, r"a: 'ratio' is for a pair \(sum, count\)"),
        (lambda t: {"a": (1.0, 2.0, 3.0)}, {"a": "ratio"}, "3 times.*: 'ratio' is for a pair"),
        (
            lambda t: {"a": (pz.nx.ones({"k": 2}), 2.0)},
            {"a": "ratio"},
            "that are alike: two arrays, or two named arrays of the same logical axes",
        ),
        (
            lambda t: {"a": jnp.ones(8)},
            {"a": "concatenate"},
            "needs a named array with the ax",
        ),
    ],
)
def test_words_that_do_not_fit_are_refused(aux, words, message):
    with pytest.raises(ShardingError, match=message):
        run(aux, aux_reduction=words)


def test_one_word_serves_all_pairs_and_named_arrays_stay_named():
    def aux(tokens):
        ones = pz.nx.ones({"k": 2})
        return {"m": {"a": (ones, ones * 4), "b": [jnp.int32(1), jnp.int32(2)]}}

    _, found = run(aux, aux_reduction={"m": "ratio"})
    np.testing.assert_allclose(found["m"]["a"].unwrap("k"), [0.25, 0.25])
    assert float(found["m"]["b"]) == 0.5


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda s: (s, jnp.ones(2)), r"the count of the loss is of shape \(2,\) and dtype float32"),
        (lambda s: (s, True), "the count of the loss is of shape .* and dtype bool"),
        (lambda s: (jnp.int32(1), 2), "the sum of the loss is of shape .* and dtype int32"),
        (lambda s: (s, pz.nx.ones({"seq": 3})), r"has logical axes \(seq=3\).*Return its sum"),
        (lambda s: (s, 1, 2), "the loss is a tuple, not an array"),
    ],
)
def test_losses_that_are_no_pair_of_numbers_are_refused(loss, message):
    def loss_fn(model, rng, state, tokens, mask):
        return loss(model["w"].unwrap("vocabulary", "features").sum()), state, {}

    with pytest.raises(ShardingError, match=message):
        build_train_step_fn(loss_fn)(initial(), **batch())


def test_unknown_words_name_all_that_there_are():
    with pytest.raises(RuleTypeError, match="'last', 'ratio', 'concatenate', not 'join'"):
        build_eval_step_fn(pair_loss, aux_reduction={"a": "join"})


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_of_padding_alone_changes_nothing(parts):
    given = batch()
    step = build_train_step_fn(
        lambda model, rng, state, **inputs: (*pair_loss(model, rng, state, **inputs)[:2], {}),
        accumulate_steps=parts,
        step_metrics="loss",
    )
    state, aux = step(initial(), **given | {"mask": given["mask"] & False})
    assert float(aux["loss"]) == 0.0
    np.testing.assert_array_equal(state.params["w"].data_array, initial().params["w"].data_array)
    # A sum over nothing that is not 0 is a mistake.
    mistaken = build_train_step_fn(
        lambda model, rng, state, **inputs: ((model["w"].data_array.sum(), 0), state, {}),
        accumulate_steps=parts,
        step_metrics="loss",
    )
    assert not np.isfinite(mistaken(initial(), **given)[1]["loss"])
