"""Does one step after the other, and what is due between them, until the end or a signal to stop.

A step is given to the devices before the results of the one before are read, so that they never
wait for Python. Not more than one: programs with collectives that are dispatched at once can block
each other on simulated devices.
"""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from penzai_shard import errors
from penzai_shard.arrays.inputs import bound_sharding
from penzai_shard.arrays.kinds import is_key_type
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import Problem, check_arguments
from penzai_shard.fitting.batch_feed import Batch, BatchFeed, Position
from penzai_shard.processes.agreement import gather
from penzai_shard.progress import Bar
from penzai_shard.training.train_state import TrainState

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


# What is reported


@dataclasses.dataclass(frozen=True)
class LogRecord:
    """What ``fit`` gives to ``on_log``.

    Attributes:
        step: The number of steps done, as in the train state after this step.
        loss: The loss of this step; None if ``fit`` was told that there is none.
        metrics: What this step reported, its arrays as those of NumPy. Arrays of which other
            processes hold parts stay as they are.
        seconds_per_step: Mean time of a step since the record before, without saving and
            evaluation. The first step, which compiles, counts only in a record of it alone.
        tokens_per_second: Tokens of all processes over the same time; None if the batches do not
            say how many they have.
        evaluation: The means of an evaluation of the state after this step, or None.
    """

    step: int
    loss: float | None
    metrics: Any
    seconds_per_step: float
    tokens_per_second: float | None = None
    evaluation: Any = None

    def __str__(self) -> str:
        numbers = read_numbers({"loss": self.loss}) | read_numbers({"evaluation": self.evaluation})
        parts = [f"{name} {value:.4f}" for name, value in numbers.items()]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return ", ".join([*parts, f"{self.seconds_per_step * 1e3:,.1f} ms/step"])


class Pace:
    """How fast the steps are, from when each was found done."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._steps: list[tuple[float, int | None]] = []
        self._is_first = True

    def end_step(self, tokens: int | None) -> None:
        """Notes that one more step was found done."""
        before, self._since = self._since, time.perf_counter()
        self._steps.append((self._since - before, tokens))

    def skip(self) -> None:
        """Leaves out the time since the last step was found done."""
        self._since = time.perf_counter()

    def take(self) -> tuple[float, float | None]:
        """Seconds per step and tokens per second since the last call."""
        # The first step compiles.
        steps = self._steps[1:] if self._is_first and len(self._steps) > 1 else self._steps
        self._steps, self._is_first = [], False
        seconds = sum(own for own, _ in steps)
        tokens = sum(own or 0 for _, own in steps)
        return seconds / len(steps), tokens / seconds if tokens and seconds else None


def find_loss(reported: Any, loss: str | None) -> Any:
    """The loss in what a step reports, an array that need not be there yet; None if it has none.

    Raises:
        RuleTypeError: It is not there, or is not a single number.
    """
    if loss is None:
        return None
    leaves = jax.tree.leaves(reported.get(loss) if isinstance(reported, dict) else reported)
    if [np.size(leaf) for leaf in leaves] != [1]:
        has = [*reported] if isinstance(reported, dict) else reported
        what = f"the step reports {has}, and no single number {loss!r}"
        fix = "Write build_train_step_fn(..., step_metrics=['loss']), or loss=None for none."
        raise errors.RuleTypeError("fit finds no loss:", [Problem("loss", what, fix)])
    return leaves[0]


def read_numbers(tree: Any) -> dict[str, float]:
    """Every single number of a tree by path.

    >>> read_numbers({"norm": np.ones(1), "evaluation": {"loss": 0.25}, "out": np.ones(8)})
    {'evaluation/loss': 0.25, 'norm': 1.0}
    """
    numbers = [x for x in leaves_of(tree) if np.size(x.value) == 1 and not is_key_type(x.dtype)]
    return {leaf.path: float(np.asarray(leaf.value).item()) for leaf in numbers}


def copy_to_host(tree: Any) -> Any:
    """A tree with the arrays of NumPy, but for those of which other processes hold parts."""

    def read(leaf: Any) -> Any:
        is_read = isinstance(leaf, jax.Array) and not is_key_type(leaf.dtype)
        is_here = is_read and (leaf.is_fully_addressable or leaf.is_fully_replicated)
        return np.asarray(leaf) if is_here else leaf

    return jax.tree.map(read, tree)


# The loop


@dataclasses.dataclass
class TrainingLoop:
    """The steps of a run, and what it does besides.

    Attributes:
        step: The train step.
        state: The train state after the last step that was dispatched, the first one to begin with.
        position: Where the run is in its batches.
        saved: The step of the newest checkpoint.
        bar: Shows how far the run is.
        last: The number of the last step; None goes on until the batches end.
        log_every: After how many steps to make a record.
        save_every: After how many steps to save; None saves only at the end.
        evaluate_every: After how many steps to evaluate, and after the last.
        on_log: Takes the records.
        loss: The key of the loss in what a step reports; None if it has none.
        allow_nonfinite: Whether the loss may be infinite or not a number.
        manager: Where to save; None saves nothing.
        best: What the manager takes for the best.
        evaluate: Evaluates a state; None where there is nothing to evaluate.
        done: The number of the last step that was dispatched.
    """

    step: Any
    state: TrainState
    position: Position
    saved: int | None
    bar: Bar
    last: int | None
    log_every: int | None
    save_every: int | None
    evaluate_every: int | None
    on_log: Callable[[LogRecord], Any] | None
    loss: str | None
    allow_nonfinite: bool
    manager: Any
    best: Any
    evaluate: Any

    def __post_init__(self) -> None:
        self.done = self._start = int(self.state.step)
        # Number, tokens, report and loss of steps that were dispatched, and what is there once they
        # are done.
        self._unread: list[tuple[int, int | None, Any, Any, Any]] = []
        self._pace = Pace()

    def run(self, feed: BatchFeed, find_reason: Callable[[], str]) -> None:
        """Does the steps until the last one, or until it is to stop, and saves.

        Raises:
            TrainingStoppedError: The batches ended early.
            NonFiniteLossError: As its name says.
            Exception: What the iterator of batches raised. In all cases but that of the loss the
                state was saved before.
        """
        last, is_ended = self.last, False
        self.bar.advance(self.done)
        if self.saved is not None:
            self.bar.show(f"resumed from {self.manager.path}, {self.position.used} batches used")

        def is_stopping() -> bool:
            # The other processes may have begun the step that the next batch is for.
            return jax.process_count() == 1 and bool(find_reason())

        while not is_ended and (last is None or self.done < last):
            try:
                batch = feed.next(is_stopping)
            except Exception as error:
                self._end()
                error.add_note(f"fit was drawing the batch of step {self.done + 1}")
                raise
            if batch is not None:
                self._do(batch)
            is_ended = batch is None or bool(agree_to_stop(find_reason))
        self._end()
        if is_ended and batch is None and last is not None and not is_stopping():
            what = f"they ended after step {self.done} of {last}"
            # A run that goes on from a checkpoint calls what makes its batches anew.
            again = "lambda: itertools.cycle(batches)"
            fix = f"Go on by fit(error.state, step, {again}), or write steps=None."
            problem = Problem("batches", what, fix)
            raise errors.TrainingStoppedError("fit has no batches left:", [problem])

    def end_early(self, reason: str, on_stop: str) -> None:
        """Says why the run has stopped, and raises what a signal stands for in Python."""
        text = f"stopped after step {self.done} by {reason}"
        self.bar.show(text)
        # Exactly this type: Python ends a program with the status of Ctrl-C for it.
        raised = {"Ctrl-C": KeyboardInterrupt(text), "SIGTERM": SystemExit(128 + signal.SIGTERM)}
        if reason in raised and on_stop == "raise":
            raise raised[reason]

    def _do(self, batch: Batch) -> None:
        """Gives one step to the devices, and reads what the one before it reported."""
        if self.done == self._start:
            _warn_if_not_placed(self.state, self.step, batch)
        returned = self.step(self.state, **batch.inputs)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        is_right = is_pair and isinstance(returned[0], TrainState)
        fix = "step=build_train_step_fn(loss_fn)"
        check_arguments("fit", {"step(state, **batch)": (returned, is_right, fix)})
        self.state, report = returned
        self.done += 1
        self.position = batch.position
        loss = find_loss(report, self.loss)
        self._unread.append((self.done, batch.tokens, report, loss, self.state.step))
        saves = _is_due(self.save_every, self.done)
        self._read(0 if saves or self._is_evaluated(self.done) else 1)
        if saves:
            self._save()

    def _read(self, most_unread: int) -> None:
        """Waits for steps, and says what they reported."""
        while len(self._unread) > most_unread:
            number, tokens, report, loss, done = self._unread.pop(0)
            jax.block_until_ready(done)
            self.bar.advance()
            self._pace.end_step(tokens)
            value = None if loss is None else float(np.asarray(loss).item())
            if not (value is None or math.isfinite(value) or self.allow_nonfinite):
                saved = f"; step {self.saved} is saved" if self.saved else ""
                fix = "Write optax.clip_by_global_norm(1.0), or allow_nonfinite=True."
                problem = Problem("loss", f"it is {value} at step {number}{saved}", fix)
                raise errors.NonFiniteLossError("training diverged:", [problem])
            # If all are read, the state is that after this step.
            if not self._unread or _is_due(self.log_every, number):
                self._log(number, value, report)

    def _log(self, number: int, loss: float | None, report: Any) -> None:
        evaluation = self.evaluate(self.state) if self._is_evaluated(number) else None
        self._pace.skip()
        metrics, pace = copy_to_host(report), self._pace.take()
        self._record = record = LogRecord(number, loss, metrics, *pace, evaluation)
        self.bar.show(str(record))
        if self.on_log is not None:
            self.on_log(record)

    def _is_evaluated(self, step: int) -> bool:
        is_last = self.evaluate is not None and step == self.last
        return is_last or _is_due(self.evaluate_every, step)

    def _end(self) -> None:
        """Reads and saves what was not yet."""
        self._read(0)
        if self.manager is not None and self.done not in (self.saved, self._start):
            self._save()

    def _save(self) -> None:
        """Saves the state and its place in the batches; its step was read and logged."""
        record = self._record
        numbers = record.metrics if isinstance(record.metrics, dict) else {}
        numbers = {**numbers, "loss": record.loss, "evaluation": record.evaluation}
        metrics = read_numbers(numbers)
        extra = {"batches": self.position._asdict()}
        # What is saved between evaluations may lack the metric of the best. Where it never comes,
        # the state is saved first: a wrong name must not cost a run its last steps.
        best = self.best and self.best[0]
        missing = {best: math.nan} if best and best not in metrics else {}
        self.manager.save(self.done, self.state, metrics | missing, extra=extra)
        self.saved = self.done
        self._pace.skip()
        if missing and (record.evaluation is not None or self.evaluate is None):
            what = f"no step has the metric {best!r}; there are {[*metrics]}"
            problem = Problem("best", what, "Name one of these in best=.")
            raise errors.RuleTypeError("fit:", [problem])


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _warn_if_not_placed(state: Any, step: Any, batch: Batch) -> None:
    """Warns of batches that every device would compute whole."""
    count = len(getattr(bound_sharding(state.step), "device_set", ()))
    is_placed = any(map(bound_sharding, jax.tree.leaves(batch.inputs)))
    if count > 1 and not is_placed and not getattr(step, "input_shardings", None):
        fact = f"the batches are on no device, so that each of {count} computes all of them"
        errors.warn_caller([f"{fact}. Write fit(..., mesh=mesh, rules={{'batch': 'data'}})."])


def evaluate(step: Any, make: Callable[[], Iterator[Batch]], ahead: int, state: Any) -> Any:
    """The mean over batches, each counting the same, of what an evaluation step returns.

    Args:
        step: ``step(state, **inputs)`` gives a tree of numbers, or a loss and a dictionary.
        make: Makes the batches anew.
        ahead: How many of them to place ahead.
        state: The train state.
    """
    total, before, count = None, None, 0
    with BatchFeed(make(), ahead) as feed:
        while (batch := feed.next()) is not None:
            returned = step(state, **batch.inputs)
            if isinstance(returned, tuple) and isinstance(returned[-1], dict):
                fix = "eval_step=build_eval_step_fn(loss_fn)"
                is_right = not isinstance(returned[0], TrainState)
                check_arguments("fit", {"eval_step(state, **batch)": (returned, is_right, fix)})
                returned = {"loss": returned[0], **returned[-1]}
            # Read one late, so that the devices always have one to do.
            total, before, count = _add(total, before), returned, count + 1
    if not count:
        problem = Problem("eval_batches", "there is no batch", "Give a list, or a function.")
        raise errors.TrainingStoppedError("fit cannot evaluate:", [problem])
    return jax.tree.map(lambda own: own / count, _add(total, before))


def _add(total: Any, report: Any) -> Any:
    numbers = jax.tree.map(lambda own: np.asarray(own, np.float64), copy_to_host(report))
    return numbers if total is None else jax.tree.map(np.add, total, numbers)


# Stopping


@contextlib.contextmanager
def stop_requests(event: Any) -> Iterator[Callable[[], str]]:
    """Notes the wish to stop: Ctrl-C, the SIGTERM of clusters, an event.

    A second Ctrl-C does what it would do without this. Signals reach only the main thread.

    Yields:
        A function that gives the reason to stop, or nothing.
    """
    received: list[str] = []
    handlers: dict[int, Any] = {}

    def receive(number: int, frame: Any) -> None:
        # Launchers repeat SIGTERM: timeout sends it to its program, and once more to its group.
        if received and number == signal.SIGINT:
            put_back()
            signal.raise_signal(number)
        received.append(_SIGNALS[signal.Signals(number)])

    def put_back() -> None:
        while handlers:
            signal.signal(*handlers.popitem())

    def find_reason() -> str:
        is_set = event is not None and event.is_set()
        return received[0] if received else "stop_event" if is_set else ""

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            # A signal that is ignored stays so, and so does a handler that is not Python's.
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                handlers[number] = signal.signal(number, receive)
    try:
        yield find_reason
    finally:
        put_back()


def agree_to_stop(find_reason: Callable[[], str]) -> str:
    """The reason of any process, the same in all."""
    return next(filter(None, gather("whether to stop", find_reason())), "")
