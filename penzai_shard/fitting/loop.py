"""The training loop.

It gives the devices a step before it reads what the step before returned, so that they never wait
for Python; batches come from a thread that places them meanwhile.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from penzai_shard.errors import (
    NonFiniteLossError,
    TrainingStoppedError,
    warn_caller,
)
from penzai_shard.fitting.background_feed import BackgroundFeed
from penzai_shard.fitting.batch_sources import (
    BatchSource,
    Place,
    PlacedBatch,
    Position,
    is_placed_nowhere,
    placed_batches,
)
from penzai_shard.fitting.evaluation import Evaluation
from penzai_shard.fitting.iterator_states import state_of_text
from penzai_shard.fitting.log_records import (
    LogRecord,
    LossOf,
    MemoryUse,
    Pace,
    learning_rate_of,
    loss_in,
    metrics_of_step,
    on_host,
)
from penzai_shard.fitting.progress_display import ProgressDisplay
from penzai_shard.fitting.run_folder import RunFolder
from penzai_shard.fitting.stop_requests import (
    StopAgreement,
    StopEvent,
    StopReason,
    StopRequests,
)

# How many steps may be with the devices, their results not read, while the next one is prepared.
STEPS_UNREAD = 1


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What a loop does besides its steps.

    Attributes:
        last: The number of the last step; None goes on until the batches end.
        place: Places a batch.
        ahead: How many batches to place ahead.
        log_every: After how many steps to make a record.
        on_log: Takes the records.
        loss: Where the loss is in what a step returns.
        most_nonfinite: How many losses in a row may be infinite or not a number; None for any.
        count_tokens: How many tokens a batch has.
        save_every: After how many steps to save; None saves only at the end.
        evaluation: What to evaluate, and when.
        stop_event: Ends the loop when it is set.
    """

    last: int | None
    place: Place
    ahead: int
    log_every: int
    on_log: Callable[[LogRecord], Any] | None
    loss: LossOf
    most_nonfinite: int | None
    count_tokens: Callable[[Any], int | None]
    save_every: int | None
    evaluation: Evaluation | None
    stop_event: StopEvent | None


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A step that was given to the devices and whose results were not read yet."""

    number: int
    tokens: int | None
    aux: Any
    loss: Any
    done: Any
    learning_rate: Any
    stop_reason: jax.Array | None


class TrainingLoop:
    """One run of a loop: its state from step to step.

    Args:
        state: The train state to start from.
        step: The train step.
        source: The batches.
        position: How many of the batches were used by the steps before.
        options: All else.
        folder: Where to save; None saves nothing.
        display: Shows the progress.
        saved_at: The step of the checkpoint that the state comes from, if it does.
    """

    def __init__(
        self,
        state: Any,
        step: Callable[..., tuple[Any, Any]],
        source: BatchSource,
        position: Position,
        options: LoopOptions,
        folder: RunFolder | None,
        display: ProgressDisplay,
        saved_at: int | None,
    ) -> None:
        self.state = state
        self.done = int(state.step)
        self.position = position
        self._step = step
        self._source = source
        self._options = options
        self._folder = folder
        self._display = display
        self._started_at = self._logged_at = self.done
        self._saved_at = saved_at
        self._unread: list[_Dispatched] = []
        self._nonfinite = 0
        self._last_read: _Dispatched | None = None
        self._evaluation: Any = None
        self._pace = Pace()
        self._waited_before = 0.0
        self._has_rate = learning_rate_of(state) is not None
        self._stops = StopRequests(options.stop_event)
        self._agreement = StopAgreement() if jax.process_count() > 1 else None
        self._agreed = StopReason.NONE

    def run(self) -> StopReason:
        """Does the steps, and saves what they gave.

        Returns:
            Why it ended before the last step, if it did.
        """
        iterator = self._source.iterator(self.position)
        self._display.begin(self.done, self._options.last)
        try:
            with self._stops, self._folder or contextlib.nullcontext():
                with BackgroundFeed(
                    self._batches(iterator),
                    self._options.ahead,
                    in_step=self._agreement is not None,
                ) as self._feed:
                    self._go()
                    self._end()
                self._put_back(iterator)
        except BaseException as error:
            if getattr(error, "state", None) is None:
                # Not every class of exceptions takes further attributes.
                with contextlib.suppress(AttributeError, TypeError):
                    error.state = self.state  # type: ignore[attr-defined]
            raise
        received = self._stops.reason()
        if received is StopReason.EVENT and self.done == self._options.last:
            received = StopReason.NONE
        return max(received, self._agreed)

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the last state."""
        return self._folder is not None and self._saved_at == self.done

    def _go(self) -> None:
        last = self._options.last
        while last is None or self.done < last:
            try:
                batch = self._feed.next(self._may_stop_waiting)
            except Exception as error:
                self._end()
                error.add_note(
                    f"fit was asking for the batch of step {self.done + 1}.{self._saved()}"
                )
                raise
            if batch is None:
                if self._may_stop_waiting() or last is None:
                    return
                raise self._ended_early(last)
            if self.done == self._started_at:
                self._warn_if_not_placed(batch)
            self._do(batch)
            if self._should_stop():
                return

    def _do(self, batch: PlacedBatch) -> None:
        """Gives one step to the devices, and reads what one before it returned."""
        self.state, aux = self._step(self.state, **batch.inputs)
        self.done += 1
        self.position = batch.position
        stop = None if self._agreement is None else self._agreement.shared(self._stops.reason())
        rate = None
        if self._has_rate and self._is_logged(self.done):
            # A copy: the state may be donated to the next step before this is read.
            rate = jax.numpy.copy(learning_rate_of(self.state))
        loss = loss_in(aux, self._options.loss)
        self._unread.append(
            _Dispatched(self.done, batch.tokens, aux, loss, self.state.step, rate, stop)
        )
        self._display.advance(self.done)
        saves = self._folder is not None and _is_due(self._options.save_every, self.done)
        if saves or self._evaluates(self.done):
            self._read_all()
        while len(self._unread) > STEPS_UNREAD:
            self._read(self._unread.pop(0))
        if saves:
            self._save()

    def _read_all(self) -> None:
        while self._unread:
            self._read(self._unread.pop(0))

    def _read(self, dispatched: _Dispatched) -> None:
        """Waits for a step, and says what it returned."""
        loss = None
        if dispatched.loss is None:
            jax.block_until_ready(dispatched.done)
        else:
            loss = float(np.asarray(dispatched.loss).reshape(()))
        self._pace.step_done(dispatched.tokens)
        self._last_read = dispatched
        if dispatched.stop_reason is not None:
            agreed = StopReason(int(np.asarray(dispatched.stop_reason)))
            self._agreed = max(self._agreed, agreed)
        is_finite = loss is None or math.isfinite(loss)
        self._nonfinite = 0 if is_finite else self._nonfinite + 1
        most = self._options.most_nonfinite
        if loss is not None and most is not None and self._nonfinite > most:
            raise self._not_finite(loss, dispatched.number)
        evaluation = None
        if self._evaluates(dispatched.number) and self._options.evaluation is not None:
            # All that was given to the devices has been read, so this is the state of that step.
            evaluation = self._evaluation = self._options.evaluation.run(self.state)
            self._pace.go_on()
        if evaluation is not None or self._is_logged(dispatched.number):
            self._log(dispatched, evaluation)

    def _log(self, dispatched: _Dispatched, evaluation: Any = None) -> None:
        self._logged_at, before = dispatched.number, self._logged_at
        seconds, tokens_per_second = self._pace.taken()
        waited = self._feed.seconds_waited
        rate = dispatched.learning_rate
        if rate is None and self._has_rate and dispatched.number == self.done:
            rate = learning_rate_of(self.state)
        loss = dispatched.loss
        record = LogRecord(
            step=dispatched.number,
            loss=None if loss is None else float(np.asarray(loss).reshape(())),
            aux=on_host(dispatched.aux),
            seconds_per_step=seconds,
            tokens_per_second=tokens_per_second,
            seconds_waiting=(waited - self._waited_before) / (dispatched.number - before),
            memory=MemoryUse.now(),
            learning_rate=None if rate is None else float(np.asarray(rate).reshape(())),
            evaluation=evaluation,
        )
        self._waited_before = waited
        self._display.show(record)
        if self._options.on_log is not None:
            self._options.on_log(record)

    def _end(self) -> None:
        """Reads all that was not read, and saves."""
        self._read_all()
        if self._last_read is not None and self._logged_at != self.done:
            self._log(self._last_read)
        self._save()

    def _save(self) -> None:
        if self._folder is not None and self.done not in (self._saved_at, self._started_at):
            loss = None if self._last_read is None else self._last_read.loss
            evaluation = self._evaluation if self._evaluates(self.done) else None
            metrics = metrics_of_step(loss, evaluation)
            self._folder.save(self.state, self.done, self.position, metrics)
            self._saved_at = self.done
            self._pace.go_on()

    def _batches(self, iterator: Any) -> Iterator[PlacedBatch]:
        last = self._options.last
        is_wanted = self._folder is not None or iterator is self._source.batches
        return placed_batches(
            iterator,
            self._options.place,
            self.position,
            None if last is None else last - self.done,
            self._options.count_tokens,
            argument=self._source.argument,
            keep_position=is_wanted,
        )

    def _put_back(self, iterator: Any) -> None:
        """Lets the caller's own iterator stand after the last batch that was used."""
        state = self.position.iterator_state
        if (
            iterator is self._source.batches
            and state is not None
            and self.done != self._options.last
        ):
            iterator.set_state(state_of_text(state))

    def _should_stop(self) -> bool:
        if self._agreement is not None:
            return self._agreed is not StopReason.NONE
        return self._stops.reason() is not StopReason.NONE

    def _may_stop_waiting(self) -> bool:
        # The other processes may have begun the step that this batch is for.
        return self._agreement is None and self._should_stop()

    def _is_logged(self, number: int) -> bool:
        return _is_due(self._options.log_every, number)

    def _evaluates(self, number: int) -> bool:
        evaluation = self._options.evaluation
        return evaluation is not None and (
            _is_due(evaluation.every, number) or number == self._options.last
        )

    def _warn_if_not_placed(self, batch: PlacedBatch) -> None:
        """Warns of batches that every device would compute whole."""
        sharding = getattr(self.state.step, "sharding", None)
        devices = 1 if sharding is None else len(sharding.device_set)
        declared = getattr(self._step, "declared_inputs", None)
        if devices > 1 and is_placed_nowhere(batch.inputs) and not (declared and declared.names):
            warn_caller(
                [
                    f"the train state is on {devices} devices, and the batches are on none, so "
                    "that every device computes the whole batch. Place them: "
                    "shard_batch=functools.partial(layout.shard_batch, mesh=mesh), or mesh=mesh, "
                    'rules=rules; with first_axis="batch" for plain arrays.'
                ]
            )

    def _not_finite(self, loss: float, number: int) -> NonFiniteLossError:
        if self._saved_at is not None and self._saved_at == number - self._nonfinite:
            doubt = " It was saved just before: if it cannot be gone on from, remove it."
        else:
            doubt = ""
        times = f", {self._nonfinite} times in a row" if self._nonfinite > 1 else ""
        return NonFiniteLossError(
            f"the loss is {loss} at step {number}{times}: training diverged, or a batch holds "
            f"numbers that are not finite.{self._saved()}{doubt} Lower the learning rate; or "
            "clip the gradient, build_train_step_fn(..., clip_global_norm=1.0); or skip such "
            "updates, skip_nonfinite=True there and in TrainState.initial_state. "
            "allow_nonfinite=True goes on all the same.",
            state=self.state,
        )

    def _ended_early(self, last: int) -> TrainingStoppedError:
        self._end()
        done = self.done - self._started_at
        return TrainingStoppedError(
            f"{self._source.argument} ended after {done} batches, at step {self.done} of {last}."
            f"{self._saved()} Repeat them, for instance with dataset.repeat() or "
            "itertools.cycle(batches); or train as long as there are batches, steps=None.",
            state=self.state,
        )

    def _saved(self) -> str:
        if self._folder is None or self._saved_at is None:
            return ""
        return f" The last checkpoint is {self._folder.shown(self._saved_at)}."


def _is_due(every: int | None, number: int) -> bool:
    return every is not None and number % every == 0
