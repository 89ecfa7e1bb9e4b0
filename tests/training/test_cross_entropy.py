"""``cross_entropy``: against optax, stable, masked, padded; the vocabulary whole on no device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from tests.models import hax
from tests.refusals import problems_of

STATIC = ("vocabulary", "reduction", "classes")
# Compiled: one program for each claim takes less time than operation by operation.
cross_entropy = jax.jit(pzs.cross_entropy, static_argnames=STATIC)
LOGITS = np.asarray(jax.random.normal(jax.random.key(0), (4, 6, 24)) * 5)
TARGETS = np.arange(24).reshape(4, 6) * 7 % 24
MASK = np.array([1, 1, 0, 1, 0, 0])
EXPECTED = optax.softmax_cross_entropy_with_integer_labels(LOGITS, TARGETS)
NAMED = (
    pz.nx.wrap(LOGITS.swapaxes(1, 2), "batch", "vocabulary", "seq"),
    pz.nx.wrap(TARGETS.T, "seq", "batch"),
)


def test_losses_and_gradients_are_those_of_optax():
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS, reduction="none"), EXPECTED, 1e-5)
    losses = cross_entropy(*NAMED, reduction="none")
    assert losses.named_shape == NAMED[1].named_shape
    np.testing.assert_allclose(losses.unwrap("batch", "seq"), EXPECTED, 1e-5)
    axes = hax.make_axes(batch=4, seq=6, words=24)
    arrays = map(jnp.asarray, (LOGITS, TARGETS))
    logits, targets = map(hax.NamedArray, arrays, (axes, axes[:2]))
    total = cross_entropy(logits, targets, vocabulary="words", reduction="sum")
    np.testing.assert_allclose(total, EXPECTED.sum(), 1e-5)

    value, gradient = jax.value_and_grad(cross_entropy)(*NAMED)
    find_losses = optax.softmax_cross_entropy_with_integer_labels
    expected, by_optax = jax.value_and_grad(lambda x: find_losses(x, TARGETS).mean())(LOGITS)
    np.testing.assert_allclose(value, expected, 1e-6)
    np.testing.assert_allclose(gradient.unwrap("batch", "seq", "vocabulary"), by_optax, atol=1e-7)


@pytest.mark.parametrize("is_named", [False, True])
def test_what_does_not_count(is_named):
    masked = np.where(MASK, TARGETS, -1), np.broadcast_to(MASK, (4, 6)).astype(bool)
    logits = np.where(MASK[:, None], LOGITS, np.inf)
    if is_named:
        logits = pz.nx.wrap(logits, "batch", "seq", "vocabulary")
        masked = pz.nx.wrap(masked[0], "batch", "seq"), pz.nx.wrap(MASK, "seq")
    targets, mask = masked
    kept = EXPECTED[:, [0, 1, 3]]
    np.testing.assert_allclose(cross_entropy(logits, targets, mask=mask), kept.mean(), 1e-5)
    total = cross_entropy(logits, targets, mask=mask, reduction="sum")
    np.testing.assert_allclose(total, kept.sum(), 1e-5)
    assert cross_entropy(logits, targets, mask=mask * 0) == 0
    # Weights weigh the mean, and a target that counts and is no class is seen.
    weights = np.linspace(0, 1, 24).reshape(4, 6)
    mean = cross_entropy(LOGITS, TARGETS, mask=weights)
    np.testing.assert_allclose(mean, np.average(EXPECTED, weights=weights), 1e-5)
    assert np.isnan(cross_entropy(LOGITS, masked[0]) if not is_named else np.nan)


def test_padded_vocabulary():
    targets = TARGETS % 20
    loss, gradient = jax.value_and_grad(cross_entropy)(LOGITS, targets, classes=20)
    np.testing.assert_allclose(loss, cross_entropy(LOGITS[..., :20], targets), 1e-6)
    assert not np.any(gradient[..., 20:])
    assert np.all(np.isfinite(gradient))
    assert np.isnan(cross_entropy(LOGITS, TARGETS, classes=20))


def test_stable_in_float32_at_least_with_targets_of_any_dtype():
    assert np.isfinite(cross_entropy(LOGITS * 1e4, TARGETS))
    assert np.all(np.isfinite(jax.grad(cross_entropy)(LOGITS * 1e4, TARGETS)))
    low = jnp.asarray(LOGITS, jnp.bfloat16)
    assert cross_entropy(low, TARGETS).dtype == jnp.float32
    assert jax.grad(cross_entropy)(low, TARGETS).dtype == jnp.bfloat16
    many = np.arange(300, dtype=np.float32)[None] / 100
    for dtype in (np.uint8, np.int16, np.uint32):
        found = cross_entropy(many, np.array([200], dtype))
        np.testing.assert_allclose(found, cross_entropy(many, np.array([200])))


@pytest.mark.parametrize("is_named", [False, True])
def test_a_split_vocabulary_is_whole_nowhere(is_named):
    mesh = pzs.make_mesh({"data": 2, "model": 4})
    named = (pz.nx.wrap(LOGITS, "batch", "seq", "vocabulary"), pz.nx.wrap(TARGETS, "batch", "seq"))
    placed = pzs.place(named, mesh, {"batch": "data", "vocabulary": "model"})
    logits, targets = placed if is_named else (each.data_array for each in placed)
    program = jax.jit(jax.value_and_grad(cross_entropy)).lower(logits, targets).compile()
    value, gradient = program(logits, targets)
    np.testing.assert_allclose(value, EXPECTED.mean(), 1e-5)
    layouts = [jax.tree.leaves(each)[0].sharding.spec for each in (gradient, logits)]
    assert layouts[0] == layouts[1]
    text = program.as_text()
    lengths = {n for found in re.findall(r"\w\[(\d[\d,]*)\]", text) for n in found.split(",")}
    assert "6" in lengths
    assert "24" not in lengths
    # Over the devices go numbers for each position: maximum, sum and target, and the mean.
    reduced = re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    arrays = [array for each in reduced for array in re.findall(r"f32\[([\d,]*)\]", each)]
    assert len(arrays) <= 5
    assert {*arrays} <= {"2,6", "2,6,1", "2,1,6", ""}
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)", text)


# fmt: off
REFUSED = [
    ("logits", lambda: pzs.cross_entropy(*NAMED, vocabulary="words")),
    ("logits", lambda: pzs.cross_entropy("abc", TARGETS)),
    ("targets", lambda: pzs.cross_entropy(LOGITS, TARGETS[:, :5])),
    ("targets", lambda: pzs.cross_entropy(LOGITS, TARGETS * 1.0)),
    ("targets", lambda: pzs.cross_entropy(LOGITS, None)),
    ("targets", lambda: pzs.cross_entropy(NAMED[0], NAMED[1].untag("seq").tag("time"))),
    ("mask", lambda: pzs.cross_entropy(*NAMED, mask=pz.nx.wrap(MASK, "time"))),
    ("reduction", lambda: pzs.cross_entropy(*NAMED, reduction="average")),
    ("classes", lambda: pzs.cross_entropy(*NAMED, classes=25)),
]
# fmt: on


@pytest.mark.parametrize(("path", "call"), REFUSED)
def test_refused(path, call):
    problems = problems_of(pzs.RuleTypeError, call)
    assert path in [problem.path for problem in problems]
    assert all(problem.fix for problem in problems)
