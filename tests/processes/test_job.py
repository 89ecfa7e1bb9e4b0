"""Jobs of two processes: this file holds the tests, and is the program that they start."""

import json
import pathlib
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.manager import CheckpointManager
from penzai_shard.fitting.fit import fit
from penzai_shard.jax_internals import messages
from penzai_shard.processes import agreement
from penzai_shard.processes.job import ENDED_BY_ANOTHER, several_processes
from tests.processes.launching import run_processes

AXES = ("data", "model")
RULES, ROWS = {"in": "data", "out": "model"}, {"batch": "data", "in": None}
BATCHES = np.random.default_rng(0).normal(size=(20, 16, 8)).astype("float32")
STEPS = 8
ENDING = pathlib.Path(__file__).with_name("ending_program.py")


def make_mesh(shape):
    devices = jax.devices()[: shape[0] * shape[1]]
    return Mesh(np.array(devices).reshape(shape), AXES)


def make_state(mesh):
    model = {"w": pz.nx.wrap(jnp.linspace(-1, 1, 64).reshape(8, 8), "in", "out")}
    state = pzs.TrainState.initial_state(model, optax.adam(0.1), jax.random.key(0))
    return pzs.place(state, mesh, RULES)


def loss_fn(model, rng, state, x):
    out = pz.nx.nmap(jnp.dot)(x.untag("in"), model["w"].untag("in")).unwrap("batch", "out")
    return jnp.mean((out + jax.random.normal(rng, out.shape) - 1) ** 2), state, {}


def train(mesh, rows, folder, **options):
    """Losses and the last state, of batches of which this process has some rows."""
    records = []
    place = {"mesh": mesh, "rules": ROWS, "local": True}
    state = fit(
        make_state(mesh),
        pzs.build_train_step_fn(loss_fn, step_metrics=["loss"], donate_params_and_state=True),
        [{"x": pz.nx.wrap(batch[rows], "batch", "in")} for batch in BATCHES],
        shard_batch=lambda batch: pzs.shard_batch(batch, **place),
        steps=STEPS,
        log_every=1,
        progress=False,
        checkpoint=folder,
        save_every=4,
        on_log=options.pop("on_log", records.append),
        **options,
    )
    return [record.loss for record in records], state


def gather(mesh, state):
    """The trained matrix, to the bit."""
    copy = jax.jit(lambda w: w, out_shardings=NamedSharding(mesh, jax.P()))
    return np.asarray(copy(state.params["w"].unwrap("in", "out"))).tolist()


# The program


def claim_training_stops_after_the_same_step(me, folder):
    mesh, rows = make_mesh((4, 2)), slice(8 * me, 8 * me + 8)
    records, stop = [], threading.Event()

    def log(record):
        records.append(record.loss)
        if me == 1 and record.step == 3:
            stop.set()

    _, state = train(mesh, rows, folder / "run", on_log=log, stop_event=stop)
    stopped = int(state.step)
    assert agreement.gather("asking for the step", stopped) == [stopped] * 2
    assert 3 <= stopped < STEPS
    losses, state = train(mesh, rows, folder / "run")
    (folder / f"result_{me}").write_text(json.dumps([records + losses, gather(mesh, state)]))


def claim_other_data_is_refused(me, folder):
    # Both processes have all rows.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4).T, AXES)
    batch = {"x": BATCHES[me], "y": BATCHES[0]}
    with pytest.raises(pzs.ShardingError) as caught:
        pzs.shard_batch(batch, mesh, ROWS, first_axis="batch", local=True)
    assert [problem.path for problem in caught.value.problems] == ["x"]


def claim_each_process_has_an_extra(me, folder):
    state = make_state(make_mesh((2, 4)))
    with CheckpointManager(folder / "extra", keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state, {"loss": step + me}, extra={"me": me})
        with pytest.raises(pzs.ShardingError):
            manager.save(3 + me, state)
        manager.wait()
        assert (manager.extra(2), manager.metrics(2)) == ({"me": me}, {"loss": 2.0})
        assert agreement.gather("asking for steps", manager.steps()) == [[2], [2]]
        with pytest.raises(pzs.CheckpointWriteError) as caught:
            manager.save(1, state)
    assert caught.value.problems[0].path == str(folder / "extra")
    # Nobody waits for it but the end of the job.
    CheckpointManager(folder / "late").save(1, state)


def main(me, address, folder):
    # The second block finds out that the job has begun.
    with several_processes(address, 2, me), several_processes():
        for name, claim in list(globals().items()):
            if name.startswith("claim_"):
                claim(me, folder)


# The tests


def test_two_processes_train_and_save_as_one(tmp_path):
    assert [status for status, *_ in run_processes(__file__, tmp_path)] == [0, 0]
    results = [json.loads((tmp_path / f"result_{me}").read_text()) for me in (0, 1)]
    assert results[0] == results[1]
    losses, trained = results[0]
    expected, _ = train(make_mesh((4, 2)), slice(None), tmp_path / "alone")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

    manager = CheckpointManager(tmp_path / "run")
    for shape in [(1, 8), (4, 2), (2, 2)]:
        restored = manager.restore(make_state(make_mesh(shape)))
        assert int(restored.step) == STEPS
        assert restored.params["w"].data_array.sharding.mesh.devices.shape == shape
        assert gather(make_mesh(shape), restored) == trained
    assert CheckpointManager(tmp_path / "late").latest == 1
    with pytest.raises(pzs.CheckpointMismatchError):
        CheckpointManager(tmp_path / "extra").extra(2)


def go_on(folder):
    """The next run finds whole checkpoints, and saves."""
    with CheckpointManager(folder) as manager:
        assert manager.steps() in ([], [1])
        manager.save(2, {"w": BATCHES[0]})
    np.testing.assert_array_equal(manager.restore({"w": BATCHES[0]})["w"], BATCHES[0])
    assert {path.name for path in folder.iterdir()} <= {"step_00000001", "step_00000002"}


def test_an_error_in_one_process_ends_both(tmp_path):
    (status, _, errors), (own, _, own_errors) = run_processes(ENDING, tmp_path, "error")
    assert (status, own) == (ENDED_BY_ANOTHER, 1)
    assert "process 1 of 2 failed: KeyError: 'mine'" in errors
    assert own_errors.endswith("KeyError: 'mine'\n")
    go_on(tmp_path)


def test_a_killed_process_ends_both(tmp_path):
    (status, _, errors), (own, *_) = run_processes(ENDING, tmp_path, "kill")
    assert own == -signal.SIGKILL
    # JAX ends the other one, and says why.
    assert status == -signal.SIGABRT
    assert errors
    go_on(tmp_path)


def test_one_process_goes_on_as_it_is(capsys):
    for arguments in ((), (None, 1)):
        with several_processes(*arguments):
            assert not jax.distributed.is_initialized()
    assert capsys.readouterr().err.count("the only process") == 1


def test_a_cluster_is_what_jax_knows_as_one(monkeypatch):
    assert not messages.is_cluster()
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    assert messages.is_cluster()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
