"""What ``fit`` promises of its steps, its records, and a run that goes on."""

import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from penzai import pz

from penzai_shard import (
    CheckpointExistsError,
    CheckpointManager,
    CheckpointMismatchError,
    CheckpointWriteError,
    ShardingWarning,
    StatefulTrainer,
    TrainState,
    build_eval_step_fn,
    build_train_step_fn,
    fit,
    restore_train_state,
)
from penzai_shard.errors import (
    NonFiniteLossError,
    PlanError,
    RuleTypeError,
    TrainingStoppedError,
)
from penzai_shard.fitting import fit_call
from tests.checkpointing.disk import Disk
from tests.fitting import killed_run
from tests.fitting.conftest import RULES, CountingIterator, numbers
from tests.processes.jobs import run_script


@pytest.fixture
def run(setting):
    """Calls ``fit`` silently, every step logged; gives the state and the records."""

    def call(batches=numbers, steps=6, state=None, **options):
        records = []
        options = {"shard_batch": setting.place, "progress": False, "log_every": 1} | options
        options.setdefault("on_log", records.append)
        state = setting.make_state() if state is None else state
        return fit(state, setting.step, batches, steps=steps, **options), records

    return call


@pytest.fixture(scope="module")
def by_hand(setting):
    """Losses and final weights of the loop that one writes by hand."""
    state, losses = setting.make_state(), []
    for batch in numbers(12):
        state, aux = setting.step(state, **setting.place(batch))
        losses.append(float(aux["loss"]))
    return losses, np.asarray(state.params["w"].data_array)


def losses_of(records):
    return [record.loss for record in records]


def stop_at(step, event):
    """A callback that sets an event at a step, and the records it was given."""
    records = []

    def on_log(record):
        records.append(record)
        if record.step == step:
            event.set()

    return on_log, records


def test_losses_and_weights_are_those_of_a_loop_by_hand_and_nothing_is_compiled_again(
    setting, run, by_hand
):
    traced = setting.loss_fn.traces
    for prefetch in (0, 1, 3):
        state, records = run(steps=12, prefetch=prefetch)
        assert losses_of(records) == by_hand[0]
        assert (np.asarray(state.params["w"].data_array) == by_hand[1]).all()
        assert int(state.step) == 12
    assert setting.loss_fn.traces == traced


def test_a_record_says_what_a_step_returned_on_the_host(run, by_hand):
    _, records = run(steps=3, tokens_axes=("batch", "seq"))
    assert [record.step for record in records] == [1, 2, 3]
    last = records[-1]
    assert last.loss == last.aux["loss"] == by_hand[0][2]
    assert type(last.aux["largest"]) is np.ndarray
    assert last.learning_rate == 0.125
    assert last.seconds_waiting >= 0.0
    assert last.tokens_per_second == pytest.approx(24 / last.seconds_per_step)
    assert last.memory.of == "process"
    assert 2**20 < last.memory.bytes < 2**40
    assert str(last).startswith(f"loss {last.loss:.4f}, ")


def test_tokens_are_not_counted_where_no_array_has_these_logical_axes(run):
    _, (record, *_) = run(steps=1, tokens_axes=("batch", "position"))
    assert record.tokens_per_second is None


def test_records_come_at_intervals_and_of_the_last_step(run, by_hand):
    _, records = run(steps=11, log_every=4)
    assert [record.step for record in records] == [4, 8, 11]
    assert losses_of(records) == [by_hand[0][i] for i in (3, 7, 10)]


def test_results_of_a_step_are_read_after_the_next_one_was_given_to_the_devices(setting):
    """Without timing: the events of a step that notes when it is called and when it is read."""
    events = []

    class Loss:
        shape = ()
        size = 1
        dtype = np.dtype("float32")

        def __init__(self, number):
            self.number = number

        def __array__(self, dtype=None, copy=None):
            events.append(f"read {self.number}")
            return np.zeros((), np.float32)

    def step(state, x):
        number = len([event for event in events if event.startswith("step")]) + 1
        events.append(f"step {number}")
        return state, Loss(number)

    fit(
        setting.make_state(),
        step,
        numbers,
        steps=4,
        loss=lambda aux: aux,
        log_every=100,
        progress=False,
        shard_batch=setting.place,
    )
    assert events[:7] == ["step 1", "step 2", "read 1", "step 3", "read 2", "step 4", "read 3"]
    assert events[7] == "read 4"


def test_a_run_that_was_stopped_goes_on_with_the_same_losses(run, by_hand, tmp_path):
    stop = threading.Event()
    on_log, records = stop_at(4, stop)
    # The step after the one that set the event was with the devices already.
    state, _ = run(checkpoint=tmp_path / "run", on_log=on_log, stop_event=stop, steps=12)
    assert int(state.step) == 5
    resumed, later = run(checkpoint=tmp_path / "run", steps=12)
    assert losses_of(records + later) == by_hand[0]
    assert (np.asarray(resumed.params["w"].data_array) == by_hand[1]).all()
    assert resumed.params["w"].data_array.sharding == state.params["w"].data_array.sharding


def test_a_state_that_jax_was_free_to_place_stays_so_when_it_is_restored(setting, tmp_path):
    optimizer = optax.adam(0.1)
    loss_fn = setting.loss_fn
    step = build_train_step_fn(loss_fn, donate_params_and_state=True)

    def call(**options):
        model = {"w": pz.nx.wrap(jnp.zeros(4), "features")}
        state = TrainState.initial_state(model, optimizer, jax.random.key(0))
        records = []
        fit(
            state,
            step,
            numbers,
            shard_batch=setting.place,
            progress=False,
            log_every=1,
            on_log=records.append,
            **options,
        )
        return losses_of(records)

    whole = call(steps=5)
    first = call(steps=2, checkpoint=tmp_path)
    assert first + call(steps=5, checkpoint=tmp_path) == whole


def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, capsys):
    killed = run_script(killed_run.__file__, tmp_path / "run", 8, "SIGKILL")
    assert killed.returncode == -9, killed.stderr
    killed_run.train(tmp_path / "run")
    resumed = capsys.readouterr().out.splitlines()
    killed_run.train(tmp_path / "whole")
    losses = capsys.readouterr().out.splitlines()
    assert len(losses) == 10
    assert killed.stdout.splitlines() == losses[:8]
    # Saved after every third step, and killed after the eighth, when the save that began after the
    # sixth may not have been complete.
    assert resumed in (losses[3:], losses[6:])


def test_memory_of_a_state_is_freed_before_the_checkpoint_is_read_into_its_layout(
    setting, run, by_hand, tmp_path
):
    run(checkpoint=tmp_path, steps=3)
    state = setting.make_state()
    arrays = jax.tree.leaves((state.params, state.opt_state))
    other = TrainState.initial_state({"v": jnp.zeros(4)}, optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(CheckpointMismatchError):
        run(checkpoint=tmp_path, state=other)
    assert not other.params["v"].is_deleted()
    _, records = run(checkpoint=tmp_path, steps=4, state=state)
    assert all(array.is_deleted() for array in arrays)
    assert losses_of(records) == by_hand[0][3:4]


def test_an_abstract_state_is_filled_from_the_checkpoint(setting, run, by_hand, tmp_path):
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        setting.make_state(),
    )
    with pytest.raises(RuleTypeError, match="is abstract, and there is no checkpoint to fill it"):
        run(state=abstract)
    run(checkpoint=tmp_path, steps=3)
    _, records = run(checkpoint=tmp_path, steps=5, state=abstract)
    assert losses_of(records) == by_hand[0][3:5]


def test_a_folder_that_cannot_be_written_is_refused_before_any_step(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in ("file", "file/below"):
        with pytest.raises(
            CheckpointWriteError, match=r"cannot write checkpoints to .*: .*exists|Not"
        ):
            run(checkpoint=tmp_path / path)
    run(checkpoint=tmp_path / "run", steps=1)
    with pytest.raises(
        CheckpointExistsError, match=r"is a checkpoint\. Give the folder that holds"
    ):
        run(checkpoint=tmp_path / "run" / "step_00000001")


def test_an_error_in_the_callback_has_the_state(run):
    def on_log(record):
        if record.step == 3:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        run(on_log=on_log)
    assert int(caught.value.state.step) == 4


def test_a_checkpoint_from_just_before_the_loss_was_not_finite_is_doubted(run, tmp_path):
    def batches():
        for number, batch in enumerate(numbers(9)):
            yield {"x": batch["x"] * np.float32("nan" if number == 4 else 1)}

    with pytest.raises(NonFiniteLossError, match=r"step_00000004\. It was saved just before: if"):
        run(batches, checkpoint=tmp_path, save_every=4)


def test_a_finished_run_is_given_back_as_it_is(run, tmp_path, capsys):
    state, _ = run(checkpoint=tmp_path)
    again, records = run(checkpoint=tmp_path, progress=True)
    assert records == []
    assert (
        np.asarray(again.params["w"].data_array) == np.asarray(state.params["w"].data_array)
    ).all()
    assert capsys.readouterr().out == f"complete: {tmp_path}/step_00000006, 6 batches used\n"


def test_a_run_may_be_prolonged(run, by_hand, tmp_path):
    state, first = run(checkpoint=tmp_path, steps=5)
    _, more = run(checkpoint=tmp_path, steps=12, state=state)
    assert losses_of(first + more) == by_hand[0]


def test_a_donated_state_still_says_where_to_go_on(setting, run, by_hand, tmp_path):
    state = setting.make_state()
    run(checkpoint=tmp_path, steps=3, state=state)
    with pytest.raises(Exception, match="donated"):
        state.model
    _, later = run(checkpoint=tmp_path, steps=6, state=state)
    assert losses_of(later) == by_hand[0][3:6]


def test_the_newest_checkpoints_are_kept_each_with_its_place_in_the_batches(run, tmp_path):
    run(checkpoint=tmp_path / "two", save_every=2, steps=7)
    names = sorted(os.listdir(tmp_path / "two"))
    assert names == [
        "step_00000006",
        "step_00000006.batches-0-of-1.json",
        "step_00000007",
        "step_00000007.batches-0-of-1.json",
    ]
    run(checkpoint=tmp_path / "all", save_every=2, steps=7, keep=None)
    assert sorted(os.listdir(tmp_path / "all"))[::2] == [f"step_0000000{i}" for i in (2, 4, 6, 7)]


def test_regular_and_best_checkpoints_are_kept_too(setting, run, tmp_path):
    options = {"save_every": 1, "keep": 1, "keep_every": 3, "best": ("loss", "max")}
    _, records = run(checkpoint=tmp_path / "loss", steps=7, **options)
    losses = losses_of(records)
    manager = CheckpointManager(tmp_path / "loss", best=("loss", "max"))
    assert losses.index(max(losses)) == 3
    assert manager.steps() == [3, 4, 6, 7]
    assert manager.best == 4
    for step in manager.steps():
        assert manager.metrics(step) == {"loss": losses[step - 1]}
    assert len(os.listdir(tmp_path / "loss")) == 8

    values = iter([2.0, 1.0, 3.0])
    stop = threading.Event()
    run(
        checkpoint=tmp_path / "evaluation",
        steps=9,
        **options | {"save_every": 2, "keep_every": None, "best": ("evaluation/error", "min")},
        evaluate_every=2,
        eval_step=lambda state, x: {"error": next(values)},
        eval_batches=list(numbers(1)),
        on_log=lambda record: record.step == 6 and stop.set(),
        stop_event=stop,
    )
    manager = CheckpointManager(tmp_path / "evaluation", best=("evaluation/error", "min"))
    assert manager.best == 4
    # Stopped at the sixth step, which was not the last, or after one more without an evaluation.
    assert manager.steps() in ([4, 6], [4, 7])
    assert manager.metrics(4)["evaluation/error"] == 1.0


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_state(
    run, tmp_path, monkeypatch
):
    disk = Disk(monkeypatch)

    for step in (4, 6):
        disk.fails_once(f"step_0000000{step}")
        message = f"cannot save to .*/step_0000000{step}: the disk is full"
        with pytest.raises(CheckpointWriteError, match=message) as caught:
            run(checkpoint=tmp_path, save_every=2)
        assert int(caught.value.state.step) == 6
    # An error of the run itself is not replaced.
    disk.fails_once("step_00000002")
    batches = [*numbers(2), *({"x": batch["x"] * np.float32("nan")} for batch in numbers(1))]
    with pytest.raises(NonFiniteLossError) as caught:
        run(batches, checkpoint=tmp_path / "other", save_every=2, steps=3)
    assert caught.value.__notes__[0].startswith("Besides, cannot save to")
    assert CheckpointManager(tmp_path).steps() == [2, 4]
    _, records = run(checkpoint=tmp_path)
    assert [record.step for record in records] == [5, 6]


def test_steps_go_on_while_a_checkpoint_is_written(run, by_hand, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    disk.may_write.clear()
    offered = []

    def on_log(record):
        if record.step == 5:
            offered.append(CheckpointManager(tmp_path).latest)
            disk.may_write.set()

    run(checkpoint=tmp_path, save_every=3, on_log=on_log)
    assert offered == [None]
    assert CheckpointManager(tmp_path).steps() == [3, 6]
    # What was written is the state of the third step, which three more have been given.
    _, records = run(checkpoint=tmp_path / "short", steps=3)
    for name in ("run", "short"):
        path = tmp_path / "step_00000003" if name == "run" else tmp_path / "short/step_00000003"
        shutil.copytree(path, tmp_path / "again" / name / "step_00000003")
        shutil.copy(path.with_name("step_00000003.batches-0-of-1.json"), tmp_path / "again" / name)
        _, records = run(checkpoint=tmp_path / "again" / name)
        assert losses_of(records) == by_hand[0][3:6]


def test_a_checkpoint_of_a_run_is_an_ordinary_one(setting, run, tmp_path):
    state, _ = run(checkpoint=tmp_path)
    restored = restore_train_state(tmp_path / "step_00000006", setting.make_state())
    assert (
        np.asarray(restored.params["w"].data_array) == np.asarray(state.params["w"].data_array)
    ).all()


def test_a_checkpoint_that_was_being_written_or_removed_is_not_taken_for_one(run, tmp_path):
    run(checkpoint=tmp_path, steps=4, save_every=2)
    (tmp_path / "step_00000009").mkdir()
    (tmp_path / "step_00000001.penzai-shard-removing").mkdir()
    (tmp_path / "step_00000001.batches-0-of-1.json").write_text("{}")
    _, records = run(checkpoint=tmp_path, steps=6)
    assert [record.step for record in records] == [5, 6]
    names = sorted(os.listdir(tmp_path))
    assert names[::2] == ["step_00000004", "step_00000006", "step_00000009"]
    assert len(names) == 5


def test_resume_false_refuses_a_folder_with_checkpoints(run, tmp_path):
    run(checkpoint=tmp_path)
    with pytest.raises(CheckpointExistsError, match="has checkpoints of a run, up to step 6"):
        run(checkpoint=tmp_path, resume=False)
    run(checkpoint=tmp_path / "new", resume=False, steps=1)


def test_another_model_or_an_earlier_run_in_the_folder_is_refused(setting, run, tmp_path):
    state, _ = run(checkpoint=tmp_path, steps=3)
    other = TrainState.initial_state({"v": jnp.zeros(4)}, optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(CheckpointMismatchError, match="v"):
        run(checkpoint=tmp_path, state=other)
    later, _ = run(state=state, steps=5)
    with pytest.raises(TrainingStoppedError, match=r"is at step 5, and the newest .* step 3"):
        run(checkpoint=tmp_path, state=later, steps=9)


def test_no_steps_left_is_an_error_that_says_what_to_write(run):
    state, _ = run(steps=2)
    with pytest.raises(TrainingStoppedError, match=r"To train 2 steps more: steps=4\."):
        run(steps=2, state=state)


def test_an_iterator_that_says_where_it_stands_is_put_there(run, by_hand, tmp_path):
    stop = threading.Event()
    on_log, records = stop_at(4, stop)
    first = CountingIterator()
    run(first, checkpoint=tmp_path, on_log=on_log, stop_event=stop, steps=12, prefetch=4)
    # It stands after the last batch that was used, not after those that were placed ahead.
    assert first.number == 5
    second = CountingIterator()
    _, later = run(second, checkpoint=tmp_path, steps=12)
    assert second.states_set == [{"next": 5}]
    assert losses_of(records + later) == by_hand[0]


def test_a_run_saved_with_such_an_iterator_needs_one(run, tmp_path):
    run(CountingIterator(), checkpoint=tmp_path, steps=2)
    with pytest.raises(TrainingStoppedError, match="Give the same dataset as before"):
        run(checkpoint=tmp_path, steps=4)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(setting, run, tmp_path):
    def batches():
        for number, batch in enumerate(numbers(9)):
            factor = np.float32("nan") if number == 4 else 1.0
            yield {"x": batch["x"] * factor}

    with pytest.raises(NonFiniteLossError, match="the loss is nan at step 5: ") as caught:
        run(batches, steps=9, checkpoint=tmp_path, save_every=2)
    assert f"The last checkpoint is {tmp_path}/step_00000004." in str(caught.value)
    assert int(caught.value.state.step) == 6
    assert isinstance(caught.value, FloatingPointError)
    _, records = run(batches, steps=9, allow_nonfinite=True)
    assert np.isfinite(losses_of(records)).tolist() == [True] * 4 + [False] * 5


def test_a_step_that_skips_updates_that_are_not_finite_goes_on_for_a_while(setting, monkeypatch):
    model = {"w": pz.nx.wrap(jnp.zeros(4), "features")}
    optimizer, key = optax.adam(0.1), jax.random.key(0)
    state = TrainState.initial_state(model, optimizer, key, skip_nonfinite=True)
    step = build_train_step_fn(setting.loss_fn, skip_nonfinite=True)
    monkeypatch.setattr(fit_call, "MOST_SKIPPED", 3)

    def train(factors):
        batches = ({"x": b["x"] * np.float32(f)} for b, f in zip(numbers(), factors, strict=False))
        return fit(state, step, batches, steps=None, shard_batch=setting.place, progress=False)

    nan = float("nan")
    done = train([1, nan, nan, nan, 1, nan, 1])
    assert (int(done.step), int(done.guards["skipped_steps"])) == (7, 4)
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan at step 5, 4 times in a row: "):
        train([1, nan, nan, nan, nan, 1])


@pytest.mark.parametrize("steps", [4, None])
def test_batches_that_end(run, steps, tmp_path):
    if steps is None:
        state, records = run(list(numbers(3)), steps=None)
        assert int(state.step) == len(records) == 3
        return
    with pytest.raises(TrainingStoppedError) as caught:
        run(list(numbers(3)), steps=4, checkpoint=tmp_path)
    assert str(caught.value) == (
        "batches ended after 3 batches, at step 3 of 4. The last checkpoint is "
        f"{tmp_path}/step_00000003. Repeat them, for instance with dataset.repeat() or "
        "itertools.cycle(batches); or train as long as there are batches, steps=None."
    )
    assert int(caught.value.state.step) == 3


def test_evaluation_is_averaged_and_does_not_change_the_run(setting, run, by_hand):
    calls = []

    def eval_step(state, x):
        calls.append(int(state.step))
        return {"error": jnp.float32(len(calls)), "w": state.params["w"].data_array[:2]}

    _, records = run(
        steps=5,
        log_every=3,
        evaluate_every=2,
        eval_step=eval_step,
        eval_batches=lambda: numbers(3),
    )
    assert [record.step for record in records] == [2, 3, 4, 5]
    assert calls == [2, 2, 2, 4, 4, 4, 5, 5, 5]
    assert records[0].evaluation["error"] == 2.0
    assert records[0].evaluation["w"].shape == (2,)
    assert records[1].evaluation is None
    assert records[3].evaluation["error"] == 8.0
    assert losses_of(records) == by_hand[0][1:5]
    assert "evaluation error 2.0000" in str(records[0])


def test_an_evaluation_step_gives_its_loss_and_its_outputs(setting, run):
    _, (record,) = run(
        steps=1,
        evaluate_every=1,
        eval_step=build_eval_step_fn(setting.loss_fn),
        eval_batches=list(numbers(2)),
    )
    assert set(record.evaluation) == {"loss", "largest"}
    assert record.evaluation["largest"] == pytest.approx(0.125)


def test_an_aux_that_is_the_loss_and_a_loss_by_another_name(setting, run):
    def with_aux(make):
        return lambda state, x: (lambda new, aux: (new, make(aux)))(*setting.step(state, x=x))

    def losses(make, **options):
        records = []
        fit(
            setting.make_state(),
            with_aux(make),
            numbers,
            steps=2,
            log_every=1,
            on_log=records.append,
            progress=False,
            shard_batch=setting.place,
            **options,
        )
        return losses_of(records)

    expected = losses(lambda aux: aux)
    assert losses(lambda aux: aux["loss"]) == expected
    assert losses(lambda aux: {"nats": aux["loss"]}, loss="nats") == expected
    assert losses(lambda aux: [aux], loss=lambda aux: aux[0]["loss"]) == expected
    assert losses(lambda aux: {}, loss=None) == [None, None]
    with pytest.raises(RuleTypeError, match=r"no 'loss'; it has largest\. Return it from the"):
        losses(lambda aux: {"largest": aux["largest"]})
    with pytest.raises(RuleTypeError, match="the loss of a step must be one number"):
        losses(lambda aux: jnp.ones(3))


def test_batches_on_no_device_for_a_state_on_several_warn(setting):
    with pytest.warns(ShardingWarning, match="every device computes the whole batch"):
        fit(setting.make_state(), setting.step, numbers, steps=1, progress=False)


def test_mesh_and_rules_place_batches_by_name(setting, by_hand):
    records = []
    fit(
        setting.make_state(),
        setting.step,
        numbers,
        steps=2,
        mesh=setting.mesh,
        rules=RULES,
        log_every=1,
        on_log=records.append,
        progress=False,
    )
    assert losses_of(records) == by_hand[0][:2]


def test_plain_batches_are_placed_by_what_their_first_dimension_is(setting, by_hand):
    records, placed = [], []

    def step(state, x):
        placed.append(x.sharding.spec)
        return setting.step(state, x=pz.nx.wrap(x, "batch", "seq", "features"))

    plain = [{"x": batch["x"].unwrap("batch", "seq", "features")} for batch in numbers(2)]
    options = {"mesh": setting.mesh, "rules": RULES, "log_every": 1, "progress": False}
    options |= {"steps": 2, "on_log": records.append}
    with pytest.raises(PlanError, match=r'say what the first dimension .*, first_axis="batch"'):
        fit(setting.make_state(), step, plain, **options)
    fit(setting.make_state(), step, plain, first_axis="batch", **options)
    assert placed == [PartitionSpec("data")] * 2
    assert losses_of(records) == by_hand[0][:2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer, not 0"),
        ({"log_every": 2.5}, "log_every must be a positive integer, not 2.5"),
        ({"save_every": 5}, "save_every needs a folder: pass checkpoint='run' too"),
        ({"keep_every": 5}, "keep_every needs a folder: pass checkpoint='run' too"),
        ({"best": ("loss", "min")}, "best needs a folder: pass checkpoint='run' too"),
        ({"best": "loss", "checkpoint": "run"}, r"best='loss' is not a metric, 'min' or 'max'"),
        (
            {"best": ("accuracy", "max"), "checkpoint": "run"},
            r"the metrics of a checkpoint are 'loss', that of its step, and .*'evaluation/loss'",
        ),
        (
            {"best": ("evaluation/loss", "min"), "checkpoint": "run", "save_every": 20},
            r"each step that is saved must be evaluated\. Pass evaluate_every=20, eval_step",
        ),
        ({"prefetch": -1}, "prefetch must be a number of batches, 0 or more, not -1"),
        ({"on_stop": "ignore"}, "on_stop must be 'raise' or 'return', not 'ignore'"),
        ({"rules": RULES, "shard_batch": None}, r"rules need a mesh: pass mesh=make_mesh"),
        ({"first_axis": "b", "shard_batch": None}, r"first_axis needs a mesh: pass mesh=make_mesh"),
        (
            {"first_axis": "b"},
            r"functools\.partial\(layout\.shard_batch, mesh=mesh, first_axis='b'",
        ),
        ({"rules": RULES}, "give either shard_batch, or mesh and rules, but not both"),
        ({"shard_batch": "data"}, "shard_batch must be a function that places a batch"),
        ({"progress": "yes"}, "progress must be True, False or a rich.console.Console"),
        ({"evaluate_every": 3}, "missing: eval_step, eval_batches"),
        (
            {"evaluate_every": 3, "eval_step": print, "eval_batches": iter([])},
            "eval_batches is a list_iterator, which can be read only once",
        ),
        ({"batches": {"x": 1}}, r"is one batch\. .* batches=itertools\.repeat\(batch\)"),
        ({"batches": np.ones(3)}, "is an array"),
        ({"batches": 7}, "not an int"),
        ({"batches": lambda: None}, "is a function, and gave None instead of an iterable"),
    ],
)
def test_what_cannot_be_read_is_refused_before_any_step(run, options, message):
    with pytest.raises(RuleTypeError, match=message):
        run(**options)


def test_a_trainer_or_a_model_in_place_of_a_state_is_refused(setting):
    trainer = StatefulTrainer(setting.make_state(), setting.loss_fn)
    with pytest.raises(RuleTypeError, match=r"trainer\.state = fit\(trainer\.state, trainer\.step"):
        fit(trainer, setting.step, numbers, steps=1)
    with pytest.raises(RuleTypeError, match=r"TrainState\.initial_state\(model"):
        fit({"w": 1}, setting.step, numbers, steps=1)
    with pytest.raises(RuleTypeError, match=r"Make one: build_train_step_fn\(loss_fn\)"):
        fit(setting.make_state(), None, numbers, steps=1)
