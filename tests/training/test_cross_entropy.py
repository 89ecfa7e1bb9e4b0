"""`cross_entropy`: against optax, stable, masked; and the vocabulary never whole on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

from benchmarks.compiled_collectives import read_collectives
from penzai_shard import cross_entropy, make_mesh, place
from penzai_shard.errors import RuleTypeError

BATCH, SEQ, VOCABULARY = 4, 6, 24
LOGITS = pz.nx.wrap(
    jax.random.normal(jax.random.key(0), (BATCH, VOCABULARY, SEQ)) * 5, "batch", "vocabulary", "seq"
)
TARGETS = pz.nx.wrap(
    jax.random.randint(jax.random.key(1), (SEQ, BATCH), 0, VOCABULARY), "seq", "batch"
)
loss = jax.jit(cross_entropy, static_argnames=("vocabulary", "reduction"))
MASK = pz.nx.wrap(jnp.array([1, 1, 0, 1, 0, 0]), "seq")


def plain(array, *names):
    return array.order_as(*names).data_array


@jax.jit
def optax_losses(logits=LOGITS, targets=TARGETS):
    return optax.softmax_cross_entropy_with_integer_labels(
        plain(logits, "batch", "seq", "vocabulary"), plain(targets, "batch", "seq")
    )


def test_losses_and_gradients_are_those_of_optax():
    losses = loss(LOGITS, TARGETS, reduction="none")
    np.testing.assert_allclose(plain(losses, "batch", "seq"), optax_losses(), rtol=1e-5, atol=1e-6)
    value, gradient = jax.value_and_grad(loss)(LOGITS, TARGETS)
    expected, by_optax = jax.value_and_grad(lambda x: optax_losses(x).mean())(LOGITS)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient.data_array, by_optax.data_array, atol=1e-7)
    total = loss(LOGITS, TARGETS, reduction="sum")
    np.testing.assert_allclose(total, optax_losses().sum(), rtol=1e-6)


def test_masked_positions_count_nothing_whatever_they_hold():
    targets = pz.nx.nmap(jnp.where)(MASK == 1, TARGETS, -1)
    logits = pz.nx.nmap(jnp.where)(MASK == 1, LOGITS, jnp.inf)
    expected = optax_losses()[:, [0, 1, 3]].mean()
    np.testing.assert_allclose(loss(LOGITS, targets, mask=MASK == 1), expected, rtol=1e-6)
    np.testing.assert_allclose(loss(logits, targets, mask=MASK), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: loss(x, targets, mask=MASK))(LOGITS)
    assert not plain(gradient, "batch", "seq", "vocabulary")[:, [2, 4, 5]].any()
    assert np.isfinite(gradient.data_array).all()
    assert loss(LOGITS, targets, mask=MASK * 0) == 0
    losses = loss(LOGITS, targets, mask=MASK, reduction="none")
    assert not plain(losses, "batch", "seq")[:, [2, 4, 5]].any()


def test_a_mask_of_weights_weighs_the_mean():
    weights = pz.nx.wrap(jnp.array([0.5, 2.0, 0.0, 1.0]), "batch")
    expected = np.average(optax_losses().mean(1), weights=plain(weights, "batch"))
    np.testing.assert_allclose(loss(LOGITS, TARGETS, mask=weights), expected, rtol=1e-6)


@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_that_is_not_a_class_is_not_a_number(target):
    losses = loss(LOGITS, TARGETS * 0 + target, reduction="none")
    assert np.isnan(losses.data_array).all()


def test_it_is_stable_and_computes_in_float32_at_least():
    large = LOGITS * 1e4
    assert np.isfinite(loss(large, TARGETS))
    assert np.isfinite(jax.grad(loss)(large, TARGETS).data_array).all()
    low = LOGITS.astype(jnp.bfloat16)
    assert loss(low, TARGETS).dtype == jnp.float32
    expected = optax_losses(low.astype(jnp.float32)).mean()
    np.testing.assert_allclose(loss(low, TARGETS), expected, rtol=1e-6)
    assert jax.grad(loss)(low, TARGETS).dtype == jnp.bfloat16


def test_a_split_vocabulary_is_never_whole_and_three_numbers_are_reduced_per_position():
    mesh = make_mesh({"data": 2, "model": 4})
    rules = {"batch": "data", "vocabulary": "model"}
    logits, targets = place(LOGITS, mesh, rules), place(TARGETS, mesh, rules)
    program = jax.jit(jax.value_and_grad(cross_entropy)).lower(logits, targets).compile()
    value, gradient = program(logits, targets)
    expected, whole = jax.value_and_grad(loss)(LOGITS, TARGETS)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient.data_array, whole.data_array, atol=1e-7)
    assert gradient.data_array.sharding.spec == logits.data_array.sharding.spec
    over_model = [one for one in read_collectives(program, mesh) if "model" in one.mesh_axes]
    arrays = [array for one in over_model for array in one.arrays]
    assert {one.kind for one in over_model} == {"all-reduce"}
    assert len(arrays) == 3
    assert set(arrays) <= {"f32[2,6]", "f32[6,2]"}
    dims = {
        n
        for found in re.findall(r"\w\[(\d[\d,]*)\]\{", program.as_text())
        for n in found.split(",")
    }
    assert str(VOCABULARY // 4) in dims
    assert str(VOCABULARY) not in dims


@pytest.mark.parametrize(
    ("dtype", "classes"), [(jnp.uint8, 256), (jnp.uint8, 300), (jnp.int8, 200), (jnp.uint32, 8)]
)
def test_targets_of_a_dtype_that_cannot_say_how_many_classes_there_are(dtype, classes):
    logits = pz.nx.wrap(jnp.stack([jnp.arange(classes) / 100.0] * 2), "seq", "vocabulary")
    targets = pz.nx.wrap(jnp.array([0, min(classes - 1, jnp.iinfo(dtype).max)]), "seq")
    np.testing.assert_allclose(
        cross_entropy(logits, targets.astype(dtype)), cross_entropy(logits, targets), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LOGITS.data_array, TARGETS), r"logits: a named array is needed, not ArrayImpl. Name its"),
        ((LOGITS.untag("seq"), TARGETS), r"logits: it has positional dimensions \(6,\)"),
        ((LOGITS.untag("vocabulary").tag("vocab"), TARGETS), r"no logical axis 'vocabulary', but"),
        ((LOGITS, TARGETS[{"seq": 0}]), r"targets: their logical axes are 'batch', and those of"),
        ((LOGITS, TARGETS[{"seq": pz.slice[1:]}]), r"'seq' has length 5, and 6 in the logits"),
        ((LOGITS, TARGETS * 1.0), r"targets: they are integers, the numbers of classes, not float"),
        (
            (LOGITS, TARGETS, "mean", MASK.untag("seq").tag("time")),
            r"mask: it has the logical axes",
        ),
        ((LOGITS, TARGETS, "average"), r"reduction='average': it is one of 'mean', 'sum', 'none'"),
    ],
)
def test_what_does_not_fit_is_an_error(arguments, message):
    logits, targets, reduction, mask = (*arguments, *("mean", None)[len(arguments) - 2 :])
    with pytest.raises(RuleTypeError, match=message):
        cross_entropy(logits, targets, reduction=reduction, mask=mask)
