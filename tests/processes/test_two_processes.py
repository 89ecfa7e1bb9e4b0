"""Two processes agree, share arrays, train and save: this file is the test, and their program.

Each process has four simulated devices, makes all claims, and writes which of them failed.
"""

import inspect
import json
import pathlib
import signal
import sys
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.manager import CheckpointManager
from penzai_shard.errors import MissingExtraError, PlanError, Problem, ShardingError
from penzai_shard.fitting.fit import fit
from penzai_shard.jax_internals import messages
from penzai_shard.processes import agreement
from penzai_shard.processes.arrays import put
from penzai_shard.processes.job import several_processes
from tests.checkpoints.trees import structs_of
from tests.processes.launching import run_processes
from tests.refusals import problem_paths, refused

AXES = ("data", "model")
RULES, ROWS = {"in": "data", "out": "model"}, {"batch": "data", "in": None}
BATCHES = np.random.default_rng(0).normal(size=(20, 16, 8)).astype("float32")
STEPS = 8


def make_mesh(shape):
    devices = jax.devices()[: shape[0] * shape[1]]
    return Mesh(np.array(devices).reshape(shape), AXES)


# Claims about agreements


def claim_together_raises_what_another_process_raised(me):
    problem = Problem("w", "does not divide", "Pad it.", "indivisible")
    for error, elsewhere in [
        (PlanError("no valid layout:", [problem]), PlanError),
        (MissingExtraError("no torch"), MissingExtraError),
        (FileNotFoundError(2, "no such file", "config.json"), ShardingError),
        (KeyError("w"), ShardingError),
    ]:
        with pytest.raises(Exception, match="process 1" if me == 0 else "") as caught:
            fail_within_blocks(1, me, error)
        assert caught.type is (elsewhere if me == 0 else type(error))
        assert getattr(caught.value, "problems", ()) == getattr(error, "problems", ())


def fail_within_blocks(process, me, error):
    with agreement.together("outermost"), agreement.together("outer"):
        if me == process:
            raise error
        with agreement.together("inner"):
            agreement.gather("counting", 1)


def claim_together_ends_agreements_within_the_block(me):
    for process in (0, 1):
        refused(PlanError, fail_within_blocks, process, me, PlanError("no valid layout:"))
        # Both have left all blocks, and are in step.
        assert agreement.gather("counting", me) == [0, 1]


def claim_different_calls_are_refused(me):
    problems = refused(ShardingError, agreement.gather, f"counting {me}", 1)
    assert [*problems] == ["process 0", "process 1"]


def claim_a_process_that_does_not_come_is_named(me):
    agreement.PATIENCE_SECONDS, patience = 1.0, agreement.PATIENCE_SECONDS
    for late in (0, 1):
        if me == late:
            assert messages.receive(f"without/{late}", 20) == "gave up"
        if me == late == 0:
            assert agreement.any_process(True) is True
            continue
        assert problem_paths(ShardingError, agreement.any_process, False) == [f"process {late}"]
        if me != late:
            messages.send(f"without/{late}", "gave up")
    agreement.PATIENCE_SECONDS = patience


def claim_on_first_gives_the_value_of_the_first(me):
    assert agreement.on_first("asking", lambda: {"process": me}) == {"process": 0}
    with pytest.raises(ZeroDivisionError if me == 0 else ShardingError):
        agreement.on_first("dividing", lambda: 1 // me)


def claim_any_process_answers_each_thread(me):
    assert agreement.any_process(me == 1) is True
    heard = []
    feed = threading.Thread(
        target=lambda: heard.append(agreement.any_process(me == 1)), name="feed"
    )
    # In each process another thread comes first.
    if me == 0:
        feed.start()
    assert agreement.any_process(False) is False
    if me == 1:
        feed.start()
    feed.join()
    assert heard == [True]
    # Of each thread only the last round is kept.
    assert messages.receive("penzai_shard/MainThread/0/decision", 0.1) is None


def claim_refuse_differences_names_what_differs(me):
    texts = {"same": "int32[2]", "w": f"float32[{me}]", **({"extra": "x" * 300} if me else {})}
    with pytest.raises(ShardingError) as caught:
        agreement.refuse_differences("place", texts)
    assert [problem.path for problem in caught.value.problems] == ["w", "extra"]
    assert len(str(caught.value)) < 600


# Claims about arrays


def layout(*axes):
    """Over the devices of both processes."""
    return NamedSharding(make_mesh((2, 4)), jax.P(*axes))


def check_parts(array, whole, sharding):
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert array.shape == whole.shape
    assert len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def claim_put_fills_the_parts_of_each_process(me):
    reversed_mesh = Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("a", "b"))
    rows = layout("data")
    columns = NamedSharding(reversed_mesh, jax.P("b", "a"))
    here = NamedSharding(Mesh(np.array(jax.local_devices()), "x"), jax.P("x"))
    whole = np.arange(32.0).reshape(8, 4)
    arrays = [whole, whole, jnp.asarray(whole, jnp.bfloat16), put([whole], [columns])[0]]
    shardings = [rows, here, columns, rows]
    placed = put(arrays, shardings)
    for array, sharding in zip(placed, shardings, strict=True):
        check_parts(array, whole, sharding)
    assert [array.dtype for array in placed[:3]] == [jnp.float32, jnp.float32, jnp.bfloat16]
    (number,) = put([1.5], [layout()])
    assert number.weak_type
    assert number.addressable_data(0) == 1.5
    # Nothing goes to the other process, which need not call.
    if me == 0:
        check_parts(put([whole], [here])[0], whole, here)


def claim_put_takes_typed_keys(me):
    split, whole = layout("model"), layout()
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 8)
    (placed,) = put([keys], [split])
    (moved,) = put([placed], [whole])
    for array, sharding in [(placed, split), (moved, whole)]:
        assert array.dtype == keys.dtype
        check_parts(jax.random.key_data(array), np.asarray(jax.random.key_data(keys)), sharding)


def claim_put_refuses_other_shapes(me):
    call = put, [np.ones(2), np.ones(2 + me)], [layout()] * 2
    assert problem_paths(ShardingError, *call, paths=["b", "w"]) == ["w"]


def claim_sharded_init_takes_typed_keys(me):
    def build(key):
        w = jax.random.normal(key, (64, 8))
        return {"w": w, "key": key, "q": jnp.linalg.qr(jnp.eye(8) + 1)[0]}

    options = {"mesh": make_mesh((4, 2)), "rules": {}, "on_unnamed": "replicate"}
    made = pzs.sharded_init(build, jax.random.key(3), **options)
    assert made.pop("key").is_fully_replicated
    for name, array in made.items():
        check_parts(array, np.asarray(build(jax.random.key(3))[name]), array.sharding)


# Claims about checkpoints

NUMBERS = np.random.default_rng(0).normal(size=(16, 24)).astype("float32")


def column_layout():
    """Each process has every second column."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("model", "data"))
    return NamedSharding(mesh, jax.P(None, ("model", "data")))


def claim_both_restore_what_both_saved_in_any_layout(me, folder):
    # What processes read overlaps.
    layouts = [layout(), layout("model", "data"), column_layout()]
    whole = {"w": NUMBERS, "keys": jax.random.split(jax.random.key(3), 8)}
    local = {"key": jax.random.key(1), "numpy": np.arange(3)}
    for number, one in enumerate(layouts):
        rows = NamedSharding(one.mesh, jax.P("data"))
        spread = dict(zip(whole, put([*whole.values()], [one, rows]), strict=True))
        path = pzs.save_params(folder / "layouts" / str(number), spread | local)
        # Each layout is once the second, once the third.
        for other in (layouts * 2)[number + 1 : number + 3]:
            structs = structs_of(local) | structs_of({"w": NUMBERS}, other)
            structs |= {"keys": structs_of(whole, rows)["keys"]}
            for restored in (pzs.restore_params(path, structs), pzs.move(spread | local, structs)):
                keys = jax.random.key_data(restored["keys"]), jax.random.key_data(whole["keys"])
                check_parts(restored["w"], NUMBERS, other)
                check_parts(keys[0], np.asarray(keys[1]), rows)
                assert restored["key"] == local["key"]
                assert restored["numpy"].tolist() == [0, 1, 2]


def claim_many_arrays_are_saved(me, folder):
    # Sums over all devices, more than may be under way at once.
    pzs.save_params(folder / "many", put([NUMBERS] * 100, [layout("data", "model")] * 100))


def claim_saves_and_restores_that_differ_are_refused(me, folder):
    path, deleted = folder / "layouts" / "4", {"w": jnp.ones(2), "v": jnp.ones(2)}
    if me == 1:
        deleted["v"].delete()
    different = {"w": NUMBERS + me, "v": NUMBERS}
    assert problem_paths(ShardingError, pzs.save_params, path, different) == ["w"]
    assert problem_paths(ShardingError, pzs.save_params, path, deleted) == ["v"]
    assert sorted(x.name for x in path.parent.iterdir()) == ["0", "1", "2"]
    path = str(path.with_name("0"))
    call = pzs.save_params, path, {"w": NUMBERS}
    assert problem_paths(pzs.CheckpointWriteError, *call) == [path]
    call = pzs.restore_params, path, structs_of({"w": NUMBERS}, (layout(), column_layout())[me])
    assert problem_paths(ShardingError, *call, allow="extra") == ["w"]


# Claims about training and its checkpoints


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


def read_matrix(mesh, state):
    """The trained matrix, to the bit."""
    copy = jax.jit(lambda w: w, out_shardings=NamedSharding(mesh, jax.P()))
    return np.asarray(copy(state.params["w"].unwrap("in", "out"))).tolist()


def claim_training_stops_after_the_same_step(me, folder):
    mesh, rows = make_mesh((4, 2)), slice(8 * me, 8 * me + 8)
    records = []

    def log(record):
        records.append(record.loss)
        if me == 1 and record.step == 3:
            # Twice, as launchers may send it.
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    _, state = train(mesh, rows, folder / "run", on_log=log, on_stop="return")
    stopped, manager = int(state.step), CheckpointManager(folder / "run")
    assert agreement.gather("asking for steps", [stopped, manager.latest]) == [[stopped] * 2] * 2
    assert 3 <= stopped < STEPS
    assert int(manager.restore(state).step) == stopped
    losses, state = train(mesh, rows, folder / "run")
    (folder / f"result_{me}").write_text(json.dumps([records + losses, read_matrix(mesh, state)]))


def claim_other_data_is_refused(me, folder):
    # Both processes have all rows.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4).T, AXES)
    batch = {"x": BATCHES[me], "y": BATCHES[0]}
    options = {"first_axis": "batch", "local": True}
    assert problem_paths(ShardingError, pzs.shard_batch, batch, mesh, ROWS, **options) == ["x"]


def claim_each_process_has_an_extra(me, folder):
    states = [make_state(make_mesh((2, 4))).replace(step=jnp.int32(step)) for step in range(5)]
    with CheckpointManager(folder / "extra", keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, states[step], {"loss": step + me}, extra={"me": me})
        refused(pzs.ShardingError, manager.save, 3 + me, states[3 + me])
        manager.wait()
        assert (manager.extra(2), manager.metrics(2)) == ({"me": me}, {"loss": 2.0})
        assert agreement.gather("asking for steps", manager.steps()) == [[2], [2]]
        paths = problem_paths(pzs.CheckpointWriteError, manager.save, 1, states[1])
    assert paths == [str(folder / "extra")]
    # Nobody waits for it but the end of the job.
    CheckpointManager(folder / "late").save(1, states[1])


# The program and the test


def main(me, address, folder):
    agreement.PATIENCE_SECONDS, failed = 30.0, []
    # The second block finds out that the job has begun.
    with several_processes(address, 2, me), several_processes():
        for name, claim in list(globals().items()):
            try:
                if name.startswith("claim_"):
                    claim(*[me, folder][: len(inspect.signature(claim).parameters)])
            except Exception:
                traceback.print_exc()
                failed.append(name)
    print(json.dumps(failed))


def test_claims_of_two_processes(tmp_path):
    ended = run_processes(__file__, tmp_path)
    assert [json.loads(output.splitlines()[-1]) for _, output, _ in ended] == [[], []]
    assert [status for status, *_ in ended] == [0, 0]
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
        assert read_matrix(make_mesh(shape), restored) == trained
    assert CheckpointManager(tmp_path / "late").latest == 1
    refused(pzs.CheckpointMismatchError, CheckpointManager(tmp_path / "extra").extra, 2)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
