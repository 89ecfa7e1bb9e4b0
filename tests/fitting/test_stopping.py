"""Ctrl-C, SIGTERM and an event: the step under way is finished, and nothing is left behind."""

import os
import signal
import threading

import pytest

from penzai_shard.checkpoints.manager import CheckpointManager
from tests.fitting.runs import draw, losses_by_hand, train

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def _handlers_are_as_before():
    # What a shell starts in the background ignores Ctrl-C, and fit leaves that so.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before
    signal.signal(signal.SIGINT, inherited)


def train_and_act(act, at=3, **options):
    """Trains, and acts in the callback of a step."""
    losses = []

    def on_log(record):
        losses.append(record.loss)
        if record.step == at:
            act()

    return train(on_log=on_log, **options)[0], losses


def interrupt():
    signal.raise_signal(signal.SIGINT)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


# What happens in the callback of which step, what fit raises, and the last step, which is saved but
# after a second Ctrl-C. Step 4 is with the devices when the callback of step 3 is called.
@pytest.mark.parametrize(
    ("acts", "at", "error", "message", "step"),
    [
        ([interrupt], 3, KeyboardInterrupt, "stopped after step 4 by Ctrl-C", 4),
        ([interrupt], 9, KeyboardInterrupt, "stopped after step 9 by Ctrl-C", 9),
        ([interrupt, interrupt], 3, KeyboardInterrupt, None, 4),
        ([terminate, terminate], 3, SystemExit, "143", 4),
    ],
)
def test_fit_finishes_the_step_and_saves_on_a_signal(acts, at, error, message, step, tmp_path):
    with pytest.raises(error, match=message) as caught:
        train_and_act(lambda: [act() for act in acts], at=at, checkpoint=tmp_path)
    assert type(caught.value) is error
    assert int(caught.value.state.step) == step
    is_saved = acts != [interrupt, interrupt]
    assert CheckpointManager(tmp_path).steps() == [step] * is_saved
    if is_saved:
        assert train(checkpoint=tmp_path)[1] == losses_by_hand()[step:]


@pytest.mark.parametrize("act", [interrupt, terminate])
def test_fit_returns_the_state_if_told_so(act, capsys):
    state, losses = train_and_act(act, on_stop="return", progress=True)
    assert int(state.step) == len(losses) == 4
    assert "stopped after step 4 by" in capsys.readouterr().err


def test_fit_stops_at_an_event_in_any_thread(tmp_path):
    event, states, handlers = threading.Event(), [], []

    def act():
        handlers.append(signal.getsignal(signal.SIGINT))
        event.set()

    def run():
        states.append(train_and_act(act, stop_event=event, checkpoint=tmp_path)[0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert int(states[0].step) == CheckpointManager(tmp_path).latest == 4
    # Signals reach the main thread alone.
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_fit_does_not_wait_for_a_batch_that_does_not_come():
    is_over = threading.Event()

    class LateEvent:
        """Is set once it was asked more often than two steps do."""

        asked = 0

        def is_set(self):
            self.asked += 1
            return self.asked > 20

    def batches():
        yield from draw(2)
        assert is_over.wait(60)

    state, _ = train_and_act(is_over.set, at=2, batches=batches, stop_event=LateEvent())
    assert int(state.step) == 2


def test_fit_leaves_signals_that_are_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        train_and_act(terminate, steps=4)
    finally:
        signal.signal(signal.SIGTERM, before)
