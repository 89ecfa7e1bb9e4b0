"""What ``fit`` trains, reports, evaluates and keeps, and how a run goes on."""

import gc
import io
import itertools
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.manager import CheckpointManager
from tests.fitting import runs
from tests.fitting.runs import KEEPING_STEP, draw, initial, losses_by_hand, make_batch, train
from tests.processes.launching import run_program
from tests.refusals import problem_paths, problems_of, refused

EVALUATION = {"evaluate_every": 1, "eval_step": runs.EVALUATE, "eval_batches": list(draw(1))}


def stop(error, *args, match=None, **options):
    """The path of the problem that ends a run, and the step of the state that comes with it."""
    with pytest.raises(error, match=match) as caught:
        train(*args, **options)
    (problem,) = caught.value.problems
    return problem.path, int(caught.value.state.step)


# Steps and records


def test_fit_has_the_losses_of_a_loop_by_hand():
    state, losses = train()
    assert losses == losses_by_hand()
    assert int(state.step) == 9
    assert sum(program._cache_size() for program in runs.STEP.programs.values()) == 1


def test_fit_gives_a_step_to_the_devices_before_it_reads_the_one_before():
    seen = []

    def step(state, **batch):
        seen.append("step")
        return runs.STEP(state, **batch)

    train(step=step, steps=4, on_log=lambda record: seen.append(record.step))
    assert seen == ["step", "step", 1, "step", 2, "step", 3, 4]


def test_fit_records():
    records = []
    train(on_log=records.append, log_every=4)
    assert [record.step for record in records] == [4, 8, 9]
    assert isinstance(records[0].metrics["weights"], np.ndarray)
    assert records[0].tokens_per_second * records[0].seconds_per_step == pytest.approx(24)
    assert " tokens/s, " in str(records[0])
    train(on_log=records.append, log_every=None, tokens_axes=("batch", "rows"))
    assert [(record.step, record.tokens_per_second) for record in records[3:]] == [(9, None)]


@pytest.mark.parametrize(
    ("report", "loss", "expected"),
    [
        (lambda report: report["loss"], "loss", losses_by_hand),
        (lambda report: {"mine": [report["loss"]]}, "mine", losses_by_hand),
        (lambda report: {}, None, lambda: [None] * 9),
    ],
)
def test_fit_finds_the_loss(report, loss, expected):
    def step(state, **batch):
        state, reported = KEEPING_STEP(state, **batch)
        return state, report(reported)

    assert train(step=step, loss=loss)[1] == expected()


def test_fit_refuses_a_loss_that_is_no_number():
    for loss in ("cost", "weights"):
        assert stop(pzs.RuleTypeError, loss=loss) == ("loss", 1)


def test_fit_says_what_a_step_reports_in_place_of_a_loss():
    def step(state, **batch):
        return KEEPING_STEP(state, **batch)[0], {}

    (problem,) = problems_of(pzs.RuleTypeError, train, step=step)
    assert "reports []" in problem.what


def test_fit_places_batches_by_mesh_and_rules():
    assert train(mesh=runs.mesh(), rules=runs.RULES)[1] == losses_by_hand()

    def loss_fn(model, rng, state, x):
        return runs.loss_fn(model, rng, state, pz.nx.wrap(x, "batch", "seq", "features"))

    plain = ({"x": batch["x"].unwrap("batch", "seq", "features")} for batch in draw())
    where = {"mesh": runs.mesh(), "rules": runs.RULES, "first_axis": "batch"}
    losses = train(plain, step=pzs.build_train_step_fn(loss_fn), **where)[1]
    np.testing.assert_allclose(losses, losses_by_hand(), rtol=1e-6)


def test_fit_warns_of_batches_on_no_device():
    with pytest.warns(pzs.ShardingWarning, match="each of 8 computes all"):
        train(shard_batch=None, steps=1)


# Evaluation


def test_fit_evaluates():
    records = []
    options = {"eval_step": runs.EVALUATE, "eval_batches": lambda: draw(3, 100)}
    state, _ = train(evaluate_every=4, on_log=records.append, log_every=3, **options)
    assert [r.step for r in records if r.evaluation] == [4, 8, 9]
    assert [record.loss for record in records] == [losses_by_hand()[i - 1] for i in (3, 4, 6, 8, 9)]
    losses = [runs.EVALUATE(state, **runs.place(batch))[0] for batch in draw(3, 100)]
    assert records[-1].evaluation["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert records[-1].evaluation["weights"].shape == (4,)
    paths = problem_paths(pzs.TrainingStoppedError, train, **{**EVALUATION, "eval_batches": []})
    assert paths == ["eval_batches"]


# Checkpoints


class CountingIterator:
    """An iterator that says where it stands, as those of grain do."""

    def __init__(self, as_bytes=False):
        self.number, self.drawn, self.as_bytes = 0, 0, as_bytes

    def __iter__(self):
        return self

    def __next__(self):
        self.number, self.drawn = self.number + 1, self.drawn + 1
        return make_batch(self.number - 1)

    def get_state(self):
        return str(self.number).encode() if self.as_bytes else {"next": self.number}

    def set_state(self, state):
        self.number = int(state) if self.as_bytes else state["next"]


@pytest.mark.parametrize(
    ("make", "drawn"),
    [
        (lambda: draw, None),
        (draw, None),
        (lambda: list(draw(9)), None),
        (CountingIterator, 5),
        (lambda: CountingIterator(as_bytes=True), 5),
    ],
)
def test_fit_goes_on_with_the_same_losses(make, drawn, tmp_path):
    folder, batches = tmp_path / "run", make()
    first = train(batches, steps=4, checkpoint=folder, save_every=3, prefetch=3)[1]
    batches = make()
    state, second = train(batches, checkpoint=folder, save_every=3)
    assert first + second == losses_by_hand()
    assert getattr(batches, "drawn", None) == drawn
    assert CheckpointManager(folder).steps() == [6, 9]
    # All is done: the state is that of the checkpoint.
    again, none = train(make(), checkpoint=folder)
    assert none == []
    np.testing.assert_array_equal(again.params["w"].data_array, state.params["w"].data_array)


def test_fit_goes_on_after_kills(tmp_path):
    folder = tmp_path / "run"
    printed, errors = run_program(runs.__file__, folder, 3, 6, 8)
    lines = [line.split() for line in printed.splitlines()]
    assert [line[1] for line in lines if line[0] == "ended"] == ["9"] * 3, errors
    found = [(int(step), float.fromhex(loss)) for step, loss in lines if step != "ended"]
    _, last = train(checkpoint=folder, save_every=2)
    found += list(zip(range(10 - len(last), 10), last, strict=True))
    assert set(found) == set(enumerate(losses_by_hand(), 1))


def test_fit_goes_on_with_a_state_that_is_nowhere(tmp_path):
    where = {"checkpoint": tmp_path / "run", "state": None}
    parts = []
    for steps in (4, 9):
        where["state"] = initial(placed=False)
        parts += train(steps=steps, **where)[1]
    np.testing.assert_allclose(parts, losses_by_hand(), rtol=1e-6)


def test_fit_frees_the_state_that_it_replaces_if_the_step_donates(tmp_path):
    train(steps=4, checkpoint=tmp_path / "run")
    for step, is_freed in ((KEEPING_STEP, False), (runs.STEP, True)):
        state = initial()
        train(state=state, steps=4, step=step, checkpoint=tmp_path / "run")
        assert state.trained_arrays["w"].is_deleted() == is_freed
        # The caller may have other uses of what no step donates.
        assert not state.root_rng.is_deleted()


def test_fit_keeps_the_state_that_it_cannot_replace(tmp_path):
    def state_of(size, axis):
        model = {"w": pz.nx.wrap(jnp.zeros(size), axis)}
        return pzs.TrainState.initial_state(model, optax.adam(0.125), jax.random.key(0))

    with CheckpointManager(tmp_path) as manager:
        extra = {"batches": {"used": 0, "iterator": None}}
        manager.save(0, state_of(4, "features"), extra=extra)
    others = [state_of(5, "features"), state_of(4, "axis")]
    for state in others:
        refused(pzs.CheckpointMismatchError, train, state=state, checkpoint=tmp_path)
    state = state_of(4, "features")
    (tmp_path / "step_00000000" / "state" / "manifest.ocdbt").unlink()
    problems = refused(pzs.CheckpointDamagedError, train, state=state, checkpoint=tmp_path)
    assert "params/w" in problems
    arrays = jax.tree.leaves([*others, state])
    assert not any(array.is_deleted() for array in arrays)


def test_fit_refuses_folders_of_other_runs(tmp_path):
    folder = tmp_path / "run"
    state, _ = train(steps=3, checkpoint=folder)
    for options in ({"resume": False}, {"state": train(steps=4)[0]}):
        problems = refused(pzs.TrainingStoppedError, train, checkpoint=folder, **options)
        assert problems.keys() == {str(folder / "step_00000003")}
    problems = problems_of(pzs.TrainingStoppedError, train, state=state, steps=3)
    assert "steps=6" in problems[0].fix
    # The newest step is behind the last one.
    problems = problems_of(pzs.TrainingStoppedError, train, steps=2, checkpoint=folder)
    assert problems[0].path == str(folder / "step_00000003")
    assert "steps=5" in problems[0].fix
    with CheckpointManager(tmp_path / "other") as manager:
        manager.save(0, initial())
    problems = refused(pzs.TrainingStoppedError, train, checkpoint=tmp_path / "other")
    assert problems.keys() == {str(tmp_path / "other" / "step_00000000")}


def test_fit_refuses_batches_that_cannot_be_found_again(tmp_path):
    # Nobody can tell whether these have given batches before.
    begun, cycle = draw(), itertools.cycle(draw(9))
    next(begun)
    for batches in (begun, cycle, iter(list(draw(9)))):
        assert problem_paths(pzs.RuleTypeError, train, batches, checkpoint=tmp_path) == ["batches"]
    assert not list(tmp_path.iterdir())
    assert train(cycle)[1] == losses_by_hand()
    # As the fix says.
    train(lambda: itertools.cycle(draw(9)), steps=3, checkpoint=tmp_path / "run")
    losses = train(lambda: itertools.cycle(draw(9)), checkpoint=tmp_path / "run")[1]
    assert losses == losses_by_hand()[3:]

    train(CountingIterator(), steps=3, checkpoint=tmp_path / "other")
    assert problem_paths(pzs.TrainingStoppedError, train, checkpoint=tmp_path / "other") == [
        "batches"
    ]


def test_fit_refuses_the_state_of_an_iterator_that_json_does_not_hold(tmp_path):
    odd = CountingIterator()
    odd.get_state = lambda: {"rows": (1, 2)}
    assert problem_paths(pzs.RuleTypeError, train, odd, checkpoint=tmp_path) == ["batches"]
    assert len(train((batch for batch in odd), steps=3, checkpoint=tmp_path)[1]) == 3


def test_fit_keeps_regular_and_best_checkpoints(tmp_path):
    losses = iter([3.0, 1.0, float("nan"), 4.0])
    evaluation = {"eval_step": lambda state, x: next(losses), "eval_batches": list(draw(1))}
    options = {"keep": 1, "keep_every": 6, "best": ("evaluation", "min")}
    # What is saved between evaluations lacks their metric.
    train(checkpoint=tmp_path, save_every=1, evaluate_every=2, steps=8, **options, **evaluation)
    manager = CheckpointManager(tmp_path, best=("evaluation", "min"))
    assert manager.steps() == [4, 6, 8]
    assert manager.best == 4
    assert manager.metrics(8) == {"evaluation": 4.0, "loss": losses_by_hand()[7]}
    assert manager.extra(8) == {"batches": {"used": 8, "iterator": None}}


def test_fit_refuses_a_metric_that_never_comes(tmp_path):
    options = {"checkpoint": tmp_path, "save_every": 2, "best": ("accuracy", "max")}
    assert stop(pzs.RuleTypeError, **options) == ("best", 2)
    # A wrong name costs no steps.
    assert CheckpointManager(tmp_path).latest == 2


# What ends a run


def test_fit_surfaces_a_save_that_fails(tmp_path):
    (tmp_path / "step_00000006").mkdir()
    (tmp_path / "step_00000006" / "mine").touch()
    _, step = stop(pzs.CheckpointWriteError, checkpoint=tmp_path, save_every=3)
    assert step == 6
    assert CheckpointManager(tmp_path).latest == 3
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        train(checkpoint=tmp_path / "file")


def test_fit_ends_at_a_loss_that_is_not_finite(tmp_path):
    def batches():
        yield from draw(4)
        yield {"x": make_batch(0)["x"] * np.inf}
        yield from draw()

    options = {"checkpoint": tmp_path, "save_every": 2, "keep": None}
    path, _ = stop(pzs.NonFiniteLossError, batches, match="step 5; step 4 is saved", **options)
    assert path == "loss"
    assert CheckpointManager(tmp_path).steps() == [2, 4]
    losses = train(batches, allow_nonfinite=True)[1]
    assert (len(losses), np.isfinite(losses).tolist()) == (9, [True] * 4 + [False] * 5)


def test_fit_ends_with_its_batches(tmp_path):
    options = {"checkpoint": tmp_path, "match": "after step 4 of 9.*error.state"}
    assert stop(pzs.TrainingStoppedError, list(draw(4)), **options) == ("batches", 4)
    assert CheckpointManager(tmp_path).latest == 4
    assert train(list(draw(4)), steps=None)[1] == losses_by_hand()[:4]


def test_fit_gives_the_state_with_an_error_of_a_callback():
    def fail(record):
        raise KeyError(record.step)

    with pytest.raises(KeyError) as caught:
        train(on_log=fail)
    assert int(caught.value.state.step) == 2


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("state", {"state": {"w": jnp.ones(2)}}),
        ("state", {"state": jax.eval_shape(lambda: initial(placed=False))}),
        ("step", {"step": None}),
        # What steps return.
        ("step(state, **batch)", {"step": lambda state, x: state}),
        ("step(state, **batch)", {"step": runs.EVALUATE}),
        ("eval_step(state, **batch)", {**EVALUATION, "eval_step": KEEPING_STEP}),
        ("tokens_axes", {"tokens_axes": "batch"}),
        ("steps", {"steps": 0}),
        ("log_every", {"log_every": 0.5}),
        ("prefetch", {"prefetch": 0}),
        ("on_stop", {"on_stop": "save"}),
        ("mesh", {"rules": {}}),
        ("mesh", {"mesh": "mesh", "shard_batch": runs.place}),
        ("checkpoint", {"save_every": 3}),
        ("eval_batches", {"evaluate_every": 3}),
        ("eval_batches", {**EVALUATION, "eval_batches": draw(2)}),
    ],
)
def test_fit_refuses_arguments(path, options):
    assert problem_paths(pzs.RuleTypeError, train, **options) == [path]


# Progress


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self):
        return True


def test_fit_shows_progress(capsys, monkeypatch):
    train(progress=False)
    assert capsys.readouterr() == ("", "")
    evaluation = {"eval_step": lambda state, x: {"error": 2.0}, "eval_batches": list(draw(1))}
    train(progress=True, evaluate_every=9, **evaluation)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": loss ")[0] for line in lines] == ["1/9 steps", "9/9 steps"]
    assert f"{losses_by_hand()[-1]:.4f}, evaluation/error 2.0000, " in lines[1]
    monkeypatch.setattr(sys, "stderr", Terminal())
    train(progress=True)
    text = sys.stderr.getvalue()
    assert "9/9" in text
    assert "9/9 steps: loss " in text.splitlines()[-1]


def test_fit_without_progress_restores_without_a_bar(tmp_path, monkeypatch):
    train(steps=3, checkpoint=tmp_path)
    monkeypatch.setattr(sys, "stderr", Terminal())
    train(steps=5, checkpoint=tmp_path)
    assert sys.stderr.getvalue() == ""
    train(steps=7, checkpoint=tmp_path, progress=True)
    text = sys.stderr.getvalue()
    # That of the restore is gone before there is one of the steps.
    assert 0 <= text.rindex("bytes") < text.index("steps")


def test_fit_lets_go_of_the_state_that_it_was_given():
    given, alive = [], []

    def make_state():
        state = initial()
        given.append(weakref.ref(next(iter(state.trained_arrays.values()))))
        return state

    def look(record):
        gc.collect()
        alive.append(given[0]() is not None)

    # Not **options: such a call holds its arguments itself.
    place = runs.place
    pzs.fit(
        make_state(), KEEPING_STEP, draw(), steps=4, log_every=1, on_log=look, shard_batch=place
    )
    assert not alive[-1]
