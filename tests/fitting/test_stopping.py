"""Ctrl-C, SIGTERM and an event: the step under way is finished, and nothing is left behind."""

import os
import signal
import threading

import pytest

from penzai_shard import fit
from penzai_shard.fitting.stop_requests import StopRequests
from tests.fitting import killed_run
from tests.fitting.conftest import numbers
from tests.processes.jobs import run_script

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers_are_as_before():
    yield
    usual = [signal.default_int_handler, signal.SIG_DFL]
    assert [signal.getsignal(number) for number in SIGNALS] == usual
    assert not [t for t in threading.enumerate() if t.name.startswith("penzai-shard")]


@pytest.fixture
def train(setting):
    def call(act, at=3, steps=9, batches=numbers, **options):
        """Trains, and acts in the callback of a step."""
        losses = []

        def on_log(record):
            losses.append(record.loss)
            if record.step == at:
                act()

        options = {"shard_batch": setting.place, "progress": False, "log_every": 1} | options
        return losses, lambda: fit(
            setting.make_state(), setting.step, batches, steps=steps, on_log=on_log, **options
        )

    return call


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_finishes_the_step_saves_and_raises_with_the_state(train, tmp_path):
    losses, run = train(interrupt, checkpoint=tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    # Step 4 was with the devices when the callback of step 3 was called.
    assert int(caught.value.state.step) == 4
    assert len(losses) == 4
    assert type(caught.value) is KeyboardInterrupt
    assert str(caught.value) == (
        f"stopped after step 4 of 9 (Ctrl-C). Saved to {tmp_path}/step_00000004; the same call "
        "goes on from there."
    )
    _, run = train(lambda: None, checkpoint=tmp_path)
    assert int(run().step) == 9


def test_ctrl_c_without_a_folder_says_where_the_state_is(train):
    _, run = train(interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"The state is error\.state; in a notebook, sys"):
        run()


def test_sigterm_ends_a_script_with_its_status(train, tmp_path):
    _, run = train(lambda: os.kill(os.getpid(), signal.SIGTERM), checkpoint=tmp_path)
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 143
    assert int(caught.value.state.step) == 4
    assert (tmp_path / "step_00000004").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_on_stop_return_gives_the_state(train, number, capsys):
    _, run = train(lambda: signal.raise_signal(number), on_stop="return", progress=True)
    assert int(run().step) == 4
    assert "stopped after step 4 of 9 (" in capsys.readouterr().out


def test_a_second_ctrl_c_stops_at_once(train, tmp_path):
    def twice():
        interrupt()
        interrupt()

    losses, run = train(twice, checkpoint=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(losses) == 3
    assert os.listdir(tmp_path) == []


def test_an_event_ends_the_run_without_an_error(train, tmp_path):
    event = threading.Event()
    _, run = train(event.set, stop_event=event, checkpoint=tmp_path)
    assert int(run().step) == 4
    assert (tmp_path / "step_00000004").exists()


def test_ctrl_c_during_the_last_step_is_not_swallowed(train, tmp_path):
    _, run = train(interrupt, at=9, checkpoint=tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert int(caught.value.state.step) == 9
    assert (tmp_path / "step_00000009").exists()


def test_ctrl_c_does_not_wait_for_a_batch_that_does_not_come(train):
    is_over = threading.Event()

    def batches():
        yield from numbers(2)
        # Asked for once the second batch was taken: step 2 is under way, or waited for already.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert is_over.wait(60)

    class Stuck:
        """Asks for nothing more once the run was told to stop."""

        def __iter__(self):
            return batches()

    before = signal.getsignal(signal.SIGINT)
    seen = []

    def release():
        seen.append(signal.getsignal(signal.SIGINT) is not before)
        is_over.set()

    _, run = train(release, at=2, batches=Stuck(), prefetch=1)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2 of 9"):
        run()
    assert seen == [True]


def test_in_another_thread_there_are_no_handlers_and_the_event_works(train):
    event, states = threading.Event(), []

    def act():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        event.set()

    _, run = train(act, stop_event=event)
    thread = threading.Thread(target=lambda: states.append(run()))
    thread.start()
    thread.join()
    assert int(states[0].step) == 4


def test_a_signal_that_is_ignored_stays_so_and_a_handler_set_meanwhile_stays():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with StopRequests():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, before)

        def own(number, frame):
            pass

        with StopRequests():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_script_that_gets_ctrl_c_saves_and_ends_with_the_usual_status(tmp_path):
    done = run_script(killed_run.__file__, tmp_path, 4, "SIGINT")
    assert done.returncode == -signal.SIGINT, done.stderr
    assert len(done.stdout.splitlines()) == 5
    assert (tmp_path / "step_00000005").exists()
