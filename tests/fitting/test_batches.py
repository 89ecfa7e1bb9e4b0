"""Batches made ahead: their order, their number, their errors, and the end of their thread."""

import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penzai_shard as pzs
from penzai_shard.checkpoints.manager import CheckpointManager
from tests.fitting import runs
from tests.fitting.runs import draw, initial, make_batch, train


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("penzai_shard batches")]


@pytest.mark.parametrize("prefetch", [1, 3])
def test_fit_draws_no_more_batches_ahead_than_it_may_and_no_more_than_steps(prefetch):
    drawn = []

    def batches():
        for batch in draw():
            drawn.append(batch)
            yield batch

    def on_log(record):
        # In the callback of a step the next one has its batch already; the last is logged late.
        assert len(drawn) <= min(record.step + 1 + prefetch, 9)

    train(batches, prefetch=prefetch, on_log=on_log)
    assert len(drawn) == 9


def test_fit_draws_a_batch_while_a_step_is_used():
    # The third batch comes only once a callback waits for it, and the other way round.
    is_drawn, is_wanted = threading.Event(), threading.Event()

    def batches():
        yield from draw(2)
        assert is_wanted.wait(60)
        is_drawn.set()
        yield from draw(1, 2)

    def on_log(record):
        is_wanted.set()
        assert is_drawn.wait(60)

    train(batches, steps=3, prefetch=1, on_log=on_log)


def test_fit_draws_in_the_contexts_of_its_caller():
    def batches():
        assert jnp.ones(1, "float64").dtype == "float64"
        assert jax.config.jax_default_device == jax.devices()[3]
        assert jax.device_put(np.ones(8), jax.P("data")).sharding.mesh == runs.mesh()
        yield from draw()

    state = initial()
    with jax.enable_x64(True), jax.default_device(jax.devices()[3]), jax.set_mesh(runs.mesh()):
        train(batches, state=state, step=runs.KEEPING_STEP, steps=1)


def test_fit_raises_what_the_iterator_raises(tmp_path):
    def batches():
        yield from draw(3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        train(batches, checkpoint=tmp_path)
    assert [frame.name for frame in traceback.extract_tb(caught.tb)][-1] == "batches"
    assert caught.value.__notes__ == ["fit was drawing the batch of step 4"]
    assert int(caught.value.state.step) == CheckpointManager(tmp_path).latest == 3


@pytest.mark.parametrize(
    "batches", [make_batch(0), np.ones(3), [(1, 2)], [{1: np.ones(8)}], 3, lambda: None]
)
def test_fit_refuses_what_is_no_batch(batches):
    with pytest.raises(pzs.RuleTypeError) as caught:
        train(batches, shard_batch=lambda batch: batch)
    assert {problem.path for problem in caught.value.problems} == {"batches"}
    assert int(caught.value.state.step) == 0
