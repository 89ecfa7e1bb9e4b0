"""Does one step after the other, and everything that is due between them.

A step is given to the devices before the results of the one before are read, so that they never
wait for Python. Not more than one: programs with collectives that are dispatched at once can block
each other on simulated devices.
"""

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
from penzai_shard.errors import Problem
from penzai_shard.fitting import log
from penzai_shard.fitting.batch_feed import Batch, BatchFeed, Position
from penzai_shard.processes.agreement import any_process
from penzai_shard.progress import Bar
from penzai_shard.training.train_state import TrainState

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What a loop does besides its steps.

    Attributes:
        last: The number of the last step; None goes on until the batches end.
        log_every: After how many steps to make a record.
        save_every: After how many steps to save; None saves only at the end.
        evaluate_every: After how many steps to evaluate, and after the last.
        on_log: Takes the records.
        loss: Where the loss is in what a step reports.
        allow_nonfinite: Whether the loss may be infinite or not a number.
        manager: Where to save; None saves nothing.
        best: What the manager takes for the best.
        bar: Shows how far the run is.
        evaluate: Evaluates a state; None where there is nothing to evaluate.
    """

    last: int | None
    log_every: int | None
    save_every: int | None
    evaluate_every: int | None
    on_log: Callable[[log.LogRecord], Any] | None
    loss: log.LossIn
    allow_nonfinite: bool
    manager: Any
    best: Any
    bar: Bar
    evaluate: Callable[[Any], Any] | None

    def is_evaluated(self, step: int) -> bool:
        """Whether the state after a step is evaluated."""
        return self.evaluate is not None and (
            step == self.last or _is_due(self.evaluate_every, step)
        )


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


class TrainingLoop:
    """The steps of a run.

    Attributes:
        state: The train state after the last step that was dispatched.
        done: The number of that step.
        saved: The step of the newest checkpoint.
    """

    def __init__(
        self, step: Any, state: TrainState, at: Position, saved: int | None, options: LoopOptions
    ) -> None:
        self._step, self.state, self.saved = step, state, saved
        self._position, self._options = at, options
        self.done = self._start = self._logged = int(state.step)
        # Number, tokens, report and loss of steps that were dispatched, and what is there once they
        # are done.
        self._unread: list[tuple[int, int | None, Any, Any, Any]] = []
        self._pace, self._waited = log.Pace(), 0.0

    def run(self, feed: BatchFeed, stops: "StopRequests") -> None:
        """Does the steps until the last one, or until it is to stop, and saves.

        Raises:
            TrainingStoppedError: The batches ended early.
            NonFiniteLossError: As its name says.
            Exception: What the iterator of batches raised. In all cases but that of the loss the
                state was saved before.
        """
        self._options.bar.advance(self.done)
        last, is_ended = self._options.last, False

        def is_stopping() -> bool:
            # The other processes may have begun the step that the next batch is for.
            return jax.process_count() == 1 and bool(stops.reason())

        while not is_ended and (last is None or self.done < last):
            start = time.perf_counter()
            try:
                batch = feed.next(is_stopping)
            except Exception as error:
                self._end()
                error.add_note(f"fit was drawing the batch of step {self.done + 1}")
                raise
            self._waited += time.perf_counter() - start
            if batch is not None:
                self._do(batch)
            is_ended = batch is None or any_process(bool(stops.reason()), "whether to stop")
        self._end()
        if is_ended and batch is None and last is not None and not is_stopping():
            what = f"they ended after step {self.done} of {last}"
            fix = "Give more, itertools.cycle(batches), or train until they end, steps=None."
            raise errors.TrainingStoppedError(
                "fit has no batches left:", [Problem("batches", what, fix)]
            )

    def _do(self, batch: Batch) -> None:
        """Gives one step to the devices, and reads what the one before it reported."""
        options = self._options
        if self.done == self._start:
            _warn_if_not_placed(self.state, self._step, batch)
        self.state, report = self._step(self.state, **batch.inputs)
        self.done += 1
        self._position = batch.position
        options.bar.advance()
        loss = log.find_loss(report, options.loss)
        self._unread.append((self.done, batch.tokens, report, loss, self.state.step))
        saves = options.manager is not None and _is_due(options.save_every, self.done)
        self._read(0 if saves or options.is_evaluated(self.done) else 1)
        if saves:
            self._save()

    def _read(self, most_unread: int) -> None:
        """Waits for steps, and says what they reported."""
        options = self._options
        while len(self._unread) > most_unread:
            number, tokens, report, loss, done = self._unread.pop(0)
            jax.block_until_ready(done)
            self._pace.end_step(tokens)
            value = None if loss is None else log.read_number(loss)
            if not (value is None or math.isfinite(value) or options.allow_nonfinite):
                saved = f"; step {self.saved} is saved" if self.saved else ""
                fix = "Write optax.clip_by_global_norm(1.0), or allow_nonfinite=True."
                problem = Problem("loss", f"it is {value} at step {number}{saved}", fix)
                raise errors.NonFiniteLossError("training diverged:", [problem])
            # If all are read, the state is that after this step.
            if not self._unread or _is_due(options.log_every, number):
                self._log(number, value, report)

    def _log(self, number: int, loss: float | None, report: Any) -> None:
        options, evaluation = self._options, None
        if options.evaluate is not None and options.is_evaluated(number):
            evaluation = options.evaluate(self.state)
            self._pace.skip()
        pace = *self._pace.take(), self._waited / (number - self._logged)
        metrics = log.copy_to_host(report)
        self._record = record = log.LogRecord(number, loss, metrics, *pace, evaluation)
        self._logged, self._waited = number, 0.0
        options.bar.show(f"step {number}/{options.last or '?'}: {record}")
        if options.on_log is not None:
            options.on_log(record)

    def _end(self) -> None:
        """Reads and saves what was not yet."""
        self._read(0)
        if self._options.manager is not None and self.done not in (self.saved, self._start):
            self._save()

    def _save(self) -> None:
        """Saves the state and its place in the batches; its step was read and logged."""
        record, options = self._record, self._options
        numbers = record.metrics if isinstance(record.metrics, dict) else {}
        numbers = {**numbers, "loss": record.loss, "evaluation": record.evaluation}
        metrics = log.read_numbers(numbers)
        extra = {"batches": dataclasses.asdict(self._position)}
        options.manager.save(self.done, self.state, metrics, extra=extra)
        self.saved = self.done
        self._pace.skip()
        is_known = not options.best or options.best[0] in metrics
        if not is_known and (record.evaluation is not None or options.evaluate is None):
            what = f"no step has the metric {options.best[0]!r}, but {', '.join(metrics)}"
            raise errors.RuleTypeError(
                "fit:", [Problem("best", what, "Write best=('loss', 'min').")]
            )


def _warn_if_not_placed(state: Any, step: Any, batch: Batch) -> None:
    """Warns of batches that every device would compute whole."""
    count = len(getattr(bound_sharding(state.step), "device_set", ()))
    is_placed = any(map(bound_sharding, jax.tree.leaves(batch.inputs)))
    if count > 1 and not is_placed and not getattr(step, "input_shardings", None):
        fact = f"the batches are on no device, so that each of {count} computes all of them"
        errors.warn_caller([f"{fact}. Write fit(..., mesh=mesh, rules=rules)."])


def evaluate(
    step: Callable[..., Any], make: Callable[[], Iterator[Batch]], ahead: int, state: Any
) -> Any:
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
                returned = {"loss": returned[0], **returned[-1]}
            # Read one late, so that the devices always have one to do.
            total, before, count = _add(total, before), returned, count + 1
    if not count:
        problem = Problem("eval_batches", "there is no batch", "Give a list, or a function.")
        raise errors.TrainingStoppedError("fit cannot evaluate:", [problem])
    return jax.tree.map(lambda own: own / count, _add(total, before))


def _add(total: Any, report: Any) -> Any:
    numbers = jax.tree.map(lambda own: np.asarray(own, np.float64), log.copy_to_host(report))
    return numbers if total is None else jax.tree.map(np.add, total, numbers)


class StopRequests:
    """Notes the wish to stop while it is entered: Ctrl-C, the SIGTERM of clusters, an event.

    A second signal does what it would do without. Signals reach the main thread alone.
    """

    def __init__(self, event: Any) -> None:
        self._event, self._received = event or threading.Event(), ""
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # A signal that is ignored stays so, and so does a handler that is not Python's.
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._handlers.items():
            # Whoever set another one meanwhile keeps it.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._handlers.clear()

    def reason(self) -> str:
        """Why to stop, or nothing."""
        return self._received or ("stop_event" if self._event.is_set() else "")

    def agree(self) -> str:
        """The reason of any process, the same in all."""
        reasons = ("SIGTERM", "Ctrl-C", "stop_event")
        said = [any_process(self.reason() == own, f"whether {own} stops") for own in reasons]
        return reasons[said.index(True)] if any(said) else ""

    def _receive(self, number: int, frame: Any) -> None:
        if self._received:
            self.__exit__()
            signal.raise_signal(number)
        self._received = _SIGNALS[signal.Signals(number)]
