"""What people see of a run: lines in a file, a bar in a terminal, one output in a notebook."""

import io
import re

import pytest
from rich.console import Console

from penzai_shard import LogRecord, fit
from penzai_shard.fitting import progress_display as displays
from penzai_shard.fitting.log_records import MemoryUse, Pace
from tests.fitting.conftest import numbers


def record(step, **fields):
    values = dict.fromkeys(("aux", "tokens_per_second", "memory", "learning_rate", "evaluation"))
    return LogRecord(
        step=step,
        **values | {"loss": 0.5, "seconds_per_step": 0.25, "seconds_waiting": 0.0} | fields,
    )


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_lines_come_at_intervals_and_of_the_last_record():
    clock, lines = Clock(), []
    display = displays.PlainLines(lines.append, clock)
    with display:
        display.begin(0, 9)
        for step in range(1, 9):
            display.show(record(step))
            clock.now += displays.SECONDS_BETWEEN_LINES / 4
        display.show(record(9, evaluation={"error": 2.0}))
        display.show(record(10))
    assert [line.partition(":")[0] for line in lines] == [f"step {i}/9" for i in (1, 5, 9, 10)]
    assert lines[2] == "step 9/9: loss 0.5000, evaluation error 2.0000, 250.0 ms/step"


def test_figures_are_for_people():
    shown = record(
        1,
        tokens_per_second=12345.6,
        memory=MemoryUse(3 * 2**30, "device", 2**34),
        learning_rate=1e-3,
    )
    assert str(shown) == (
        "loss 0.5000, 12,346 tokens/s, 250.0 ms/step, 3.0 GiB of 16.0 GiB per device, lr 0.001"
    )
    assert str(MemoryUse(2**20, "process")) == "1.0 MiB process"
    assert str(record(1, loss=None, seconds_per_step=12.34)) == "12.3 s/step"


def test_memory_is_that_of_the_fullest_device_where_devices_say_it(monkeypatch):
    class Device:
        def __init__(self, used):
            self.used = used

        def memory_stats(self):
            return {"bytes_in_use": self.used, "bytes_limit": 9}

    monkeypatch.setattr("jax.local_devices", lambda: [Device(3), Device(5), Device(4)])
    assert MemoryUse.now() == MemoryUse(5, "device", 9)


def test_the_first_step_which_compiles_is_not_part_of_the_pace_of_others():
    clock = Clock()
    pace = Pace(clock)
    clock.now += 30.0
    pace.step_done(64)
    assert pace.taken() == (30.0, 64 / 30.0)
    for _ in range(2):
        clock.now += 2.0
        pace.step_done(64)
        clock.now += 100.0  # Saving, say.
        pace.go_on()
    assert pace.taken() == (2.0, 32.0)
    for _ in range(9):
        clock.now += 1.0
        pace.step_done(128)
    # Of the last ten steps: one of the two before, and these nine.
    assert pace.taken() == (1.1, (64 + 9 * 128) / 11.0)
    for _ in range(20):
        clock.now += 3.0
        pace.step_done(None)
    assert pace.taken() == (3.0, None)


@pytest.fixture
def train(setting):
    def call(**options):
        options = {"steps": 4, "log_every": 2, "shard_batch": setting.place} | options
        return fit(setting.make_state(), setting.step, numbers, **options)

    return call


def test_where_there_is_no_terminal_lines_go_to_the_output(train, capsys, monkeypatch):
    monkeypatch.setattr(displays, "SECONDS_BETWEEN_LINES", 0.0)
    train()
    out, err = capsys.readouterr()
    assert err == ""
    first, last = out.splitlines()
    figures = r"loss \d\.\d{4}, [\d,]+ tokens/s, [\d.]+ ms/step, [\d.]+ [MG]iB process, lr 0.125"
    assert re.fullmatch(rf"step 2/4: {figures}", first)
    assert re.fullmatch(rf"step 4/4: {figures}", last)


def test_progress_false_is_silent(train, capsys):
    train(progress=False)
    assert capsys.readouterr() == ("", "")


def test_only_the_first_process_shows_anything(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert type(displays.progress_display(True)) is displays.ProgressDisplay


def test_a_terminal_has_a_bar_that_ends_full(train, tmp_path):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    train(
        progress=console,
        checkpoint=tmp_path,
        evaluate_every=2,
        eval_step=lambda s, x: 1.0,
        eval_batches=lambda: numbers(1),
    )
    train(progress=console, checkpoint=tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())
    bars = [line for line in re.split(r"[\r\n]+", plain) if line.startswith("step ")]
    assert "compiling" in bars[0]
    assert "4/4" in bars[-1]
    assert re.search(r"loss \d\.\d{4}", bars[-1])
    assert "evaluation 1.0000" in bars[-1]
    assert "complete:" in plain
    # The cursor is shown again.
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")


def test_a_narrow_terminal_gets_the_figures_that_it_has_room_for(train):
    written = io.StringIO()
    train(progress=Console(file=written, force_terminal=True, width=64))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())
    bars = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.startswith("step ")]
    assert max(map(len, bars)) <= 64
    assert re.search(r"loss \d\.\d{4}(, [\d,]+ tokens/s)?$", bars[-1])


def test_a_console_that_is_no_terminal_gets_lines(train):
    written = io.StringIO()
    train(progress=Console(file=written, width=40))
    assert "\x1b" not in written.getvalue()
    assert "step 2/4: loss" in written.getvalue()


def test_a_notebook_has_one_output_that_is_replaced(train, monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown[-1] = data

    def display(data, raw, display_id):
        assert raw
        assert display_id
        shown.append(data)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(displays, "is_in_notebook", lambda: True)
    train()
    (data,) = shown
    assert data["text/plain"].startswith("step 4/4: loss ")
    assert '<progress value="4" max="4"></progress> step 4/4: loss ' in data["text/html"]
    bar = displays.NotebookBar()
    bar.say("<saved>")
    assert "&lt;saved&gt;" in shown[-1]["text/html"]
