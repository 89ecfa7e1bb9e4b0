"""The checkpoints of a run in one folder: numbered, some of them kept, written in the background.

``step_00000100`` is a checkpoint as ``save_train_state`` writes it, with its metrics in the
metadata, so that both are put in place in one step. A directory of this name is whole, for it gets
it once all is written, and loses it before anything of it is removed.
"""

import functools
import json
import logging
import operator
import os
import shutil
import tempfile
import time
from types import TracebackType
from typing import Any

import jax

from penzai_shard.checkpointing.background_saves import BackgroundSave
from penzai_shard.checkpointing.locations import (
    SEAL,
    STEP,
    PathLike,
    absolute_path,
    content_of,
    is_remote,
    path_object,
)
from penzai_shard.checkpointing.replacement import SUFFIX, final_of
from penzai_shard.checkpointing.retention import Metrics, Retention, metrics_of, metrics_to_json
from penzai_shard.checkpointing.taking_part import all_restore, all_save
from penzai_shard.checkpointing.train_states import (
    prepare_train_state,
    refuse_other_kinds,
    restore_train_state,
)
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    RuleTypeError,
    ShardingError,
)
from penzai_shard.library_apis import orbax_api
from penzai_shard.processes import on_first_process, refuse_differences

_REMOVING = ".penzai-shard-removing"
_METRICS = "penzai_shard_metrics"
# A save that waits longer than this for the one before is reported.
_SECONDS_WORTH_SAYING = 1.0

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves train states of a run by their steps, keeps some of them, and restores the newest.

    ``save`` returns as soon as what this process holds of the state is copied to the host's memory:
    the next step may donate the state, while a thread writes the copy. Every state that ``save``
    was given is saved, or an error says why not: at the next ``save``, ``restore``, ``wait`` or
    ``close``, at the end of the ``with`` statement, or on standard error at the end of the program.
    A ``save`` waits for the one before, so that there is one copy at a time.

    Whatever ends the program at whatever moment, ``latest`` is a whole checkpoint. In a job of
    several processes all must make the same calls in the same order, on a folder that they share.

    Attributes:
        path: The absolute path of the folder.

    >>> import tempfile
    >>> state = {"step": jax.numpy.int32(3), "root_rng": jax.random.key(0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with CheckpointManager(folder, keep_last=1, best=("loss", "min")) as manager:
    ...         for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
    ...             path = manager.save(step, state, {"loss": loss})
    ...         manager.wait()
    ...         steps, best, newest = manager.steps(), manager.best, manager.latest
    ...         restored = manager.restore(state)
    >>> steps, best, newest
    ([1, 3], 1, 3)
    """

    def __init__(
        self,
        path: PathLike,
        *,
        keep_last: int | None = 2,
        keep_every: int | None = None,
        best: Any = None,
        asynchronous: bool = True,
    ) -> None:
        """Takes a folder, which need not exist; nothing is written.

        Args:
            path: The folder.
            keep_last: How many of the newest checkpoints to keep; None keeps all.
            keep_every: Checkpoints whose step is a multiple of this are kept for ever.
            best: The name of a metric, ``"min"`` or ``"max"``, and how many of the best checkpoints
                to keep, one by default: ``("loss", "min", 3)``. Those without this metric, or of
                which it is infinite or not a number, are never the best.
            asynchronous: Whether to write in the background. If not, ``save`` returns once the
                checkpoint is in its place.

        Raises:
            RuleTypeError: An argument cannot be read.
        """
        self.path = absolute_path(path)
        self._retention = Retention.of(keep_last, keep_every, best)
        self._asynchronous = asynchronous
        self._pending: BackgroundSave | None = None
        self._is_closed = self._is_prepared = False

    def __repr__(self) -> str:
        return f"CheckpointManager({self.path!r})"

    def checkpoint(self, step: int) -> str:
        """The path of the checkpoint of a step.

        >>> CheckpointManager("/runs/first").checkpoint(100)
        '/runs/first/step_00000100'
        """
        return f"{self.path.rstrip('/')}/step_{_number(step):08d}"

    def steps(self) -> list[int]:
        """The steps of which there are whole checkpoints now, in order."""
        folder = path_object(self.path)
        if not folder.is_dir():
            return []
        found = set()
        for entry in folder.iterdir():
            # A save that was killed may have left what it was to replace beside its path.
            name = final_of(entry).name if entry.name.endswith(SUFFIX) else entry.name
            match = STEP.fullmatch(name)
            if match and (content_of(self.checkpoint(int(match[1]))) / SEAL).exists():
                found.add(int(match[1]))
        return sorted(found)

    @property
    def latest(self) -> int | None:
        """The newest step of which there is a whole checkpoint now; None if there is none."""
        return max(self.steps(), default=None)

    @property
    def best(self) -> int | None:
        """The step with the best metric of those that there are; None if there is none."""
        best = self._retention.best
        if best is None:
            raise RuleTypeError(
                "nothing says what is best: CheckpointManager(path, best=('loss', 'min'))."
            )
        return next(iter(best.in_order(self._metrics_by_step(self.steps()))), None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that the checkpoint of a step was saved with.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of this step.
            CheckpointDamagedError: Its metadata cannot be read.
        """
        self._refuse_missing(step)
        found = self._read_metrics(step)
        if found is None:
            raise CheckpointDamagedError(
                f"the metrics in {self.checkpoint(step)} cannot be read: "
                f"{orbax_api.METADATA_FILE} is not as it was written."
            )
        return dict(found)

    def save(
        self,
        step: int,
        train_state: Any,
        metrics: Metrics | None = None,
        *,
        overwrite: bool = False,
    ) -> str:
        """Saves a state, and then removes the checkpoints that are not kept any more.

        Args:
            step: Its step, greater than that of all checkpoints that there are.
            train_state: A ``TrainState``, or any pytree that ``save_train_state`` takes. It may be
                donated, and arrays of NumPy in it be written to, once this returns.
            metrics: Numbers by name, such as the loss of an evaluation.
            overwrite: Whether to replace a checkpoint of this step.

        Returns:
            The path at which the checkpoint is, or will be.

        Raises:
            CheckpointExistsError: There is a checkpoint of this step, or of a later one.
            CheckpointMismatchError: Some arrays cannot be saved.
            CheckpointWriteError: It cannot be written; or the one before it could not, and then
                this one was not begun.
            RuleTypeError: An argument cannot be read, or the manager is closed.
            MissingExtraError: Orbax is not installed.
        """
        number, found = _number(step), metrics_of(metrics)
        if self._retention.best is not None and metrics is not None:
            self._retention.best.refuse_other_names(found)
        if self._is_closed:
            raise RuleTypeError(f"the CheckpointManager of {self.path} is closed. Make another.")
        path = self.checkpoint(number)
        refuse_other_kinds("CheckpointManager.save", train_state)
        # First, as one process may have more to wait for than others.
        all_save(path)
        self._wait_for_the_one_before(number)
        self.prepare()
        on_first_process("saving a checkpoint", lambda: self._refuse_later(number))
        metadata = {_METRICS: metrics_to_json(found)}
        begun = prepare_train_state(path, train_state, overwrite, metadata).begin()
        then = functools.partial(self._remove_old, number)
        if self._asynchronous:
            self._pending = BackgroundSave(begun, then, self.path)
        else:
            begun.finish()
            then()
        return path

    def restore(
        self,
        train_state: Any,
        step: int | None = None,
        *,
        mesh: Any = None,
        rules: Any = None,
        **options: Any,
    ) -> Any:
        """Restores the state of a step, the newest by default, once all saves are complete.

        Args:
            train_state: A state of the same model and optimizer, concrete or abstract.
            step: The step; None for the newest.
            mesh: As for ``restore_train_state``; without it, each array gets the sharding of the
                one in ``train_state``.
            rules: As for ``restore_train_state``.
            **options: All other options of ``restore_train_state``.

        Returns:
            The state.

        Raises:
            CheckpointNotFoundError: There is no checkpoint, or none of this step.
            CheckpointDamagedError: It is not as it was saved. A note says which others there are.
            ShardingError: As ``restore_train_state`` does, and what ``wait`` raises.
        """
        all_restore(self.path)
        self.wait()
        if step is None:
            step = self.agreed_latest()
            if step is None:
                raise CheckpointNotFoundError(
                    f"there is no checkpoint in {self.path}. Begin a run: save(step, state)."
                )
        else:
            self._refuse_missing(step)
        try:
            return restore_train_state(self.checkpoint(step), train_state, mesh, rules, **options)
        except CheckpointDamagedError as error:
            others = [other for other in self.steps() if other != step]
            if others:
                error.add_note(
                    f"{self.path} also has step {', '.join(map(str, others))}: "
                    f"restore(state, step={others[-1]})."
                )
            raise

    def wait(self) -> None:
        """Waits until all that ``save`` was given is on the disk.

        Raises:
            CheckpointWriteError: It could not be written, or an old one not be removed.
        """
        if self._pending is not None:
            # It stays pending if Ctrl-C interrupts this.
            self._pending.join()
            pending, self._pending = self._pending, None
            pending.raise_failure()

    def close(self) -> None:
        """Waits, and takes no further saves; raises what ``wait`` raises."""
        self._is_closed = True
        self.wait()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ShardingError as failure:
            if error is None:
                raise
            error.add_note(f"Besides, {failure}")

    def agreed_latest(self) -> int | None:
        """``latest``, the same in all processes of the job, which must all call this.

        Raises:
            ShardingError: They see different checkpoints.
        """
        latest = self.latest
        refuse_differences(
            "looking for the newest checkpoint",
            f"the processes of this job see different checkpoints in {self.path}:",
            {"the newest checkpoint": "none" if latest is None else f"step {latest}"},
            "Give a folder that all processes share.",
        )
        return latest

    def prepare(self) -> None:
        """Makes the folder, and finds out whether checkpoints can be written there.

        ``save`` does so too; a long run may want to know before its first step.

        Raises:
            CheckpointWriteError: They cannot.
            CheckpointExistsError: It is a checkpoint itself.
            MissingExtraError: Orbax is not installed.
        """
        orbax_api.orbax()
        if not (self._is_prepared or is_remote(self.path)):
            on_first_process("preparing the folder of the run", self._try_folder)
        self._is_prepared = True

    def _try_folder(self) -> None:
        try:
            os.makedirs(self.path, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise CheckpointWriteError(
                f"cannot write checkpoints to {self.path}: {error.strerror}. Give another folder."
            ) from error
        if os.path.exists(os.path.join(self.path, SEAL)):
            raise CheckpointExistsError(
                f"{self.path} is a checkpoint. Give the folder that holds those of a run, for "
                f"instance {os.path.dirname(self.path)}."
            )

    def _wait_for_the_one_before(self, number: int) -> None:
        """Waits for a save that is being written, and says so if it takes long."""
        pending = self._pending
        start = time.monotonic()
        try:
            self.wait()
        except ShardingError as error:
            error.add_note(f"So step {number} was not saved.")
            raise
        seconds = time.monotonic() - start
        if pending is not None and seconds > _SECONDS_WORTH_SAYING and jax.process_index() == 0:
            _log.warning(
                "saving step %d has waited %.1f s until %s was written. Save less often, or to a "
                "faster disk.",
                number,
                seconds,
                pending.where,
            )

    def _refuse_later(self, number: int) -> None:
        """Refuses a step before the newest, from which nobody would go on."""
        steps = self.steps()
        if steps and number < steps[-1] and number not in steps:
            raise CheckpointExistsError(
                f"cannot save step {number}: {self.path} has step {steps[-1]}, which is newer. "
                f"To go on from a step before that, save to another folder, or remove the "
                "checkpoints after it."
            )

    def _refuse_missing(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            has = f"It has step {', '.join(map(str, steps))}." if steps else "It has none."
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {_number(step)} in {self.path}. {has}"
            )

    def _metrics_by_step(self, steps: list[int]) -> dict[int, Metrics]:
        """Of a checkpoint whose metrics cannot be read nobody can say that it is the best."""
        return {step: self._read_metrics(step) or {} for step in steps}

    def _read_metrics(self, step: int) -> Metrics | None:
        """The metrics of a checkpoint; None if they cannot be read."""
        file = content_of(self.checkpoint(step)) / orbax_api.METADATA_FILE
        try:
            found = json.loads(file.read_bytes())["custom_metadata"].get(_METRICS, {})
            return {name: float(value) for name, value in found.items()}
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None

    def _remove_old(self, saved: int) -> None:
        on_first_process("removing old checkpoints", lambda: self._remove_all_but_kept(saved))

    def _remove_all_but_kept(self, saved: int) -> None:
        steps = self.steps()
        metrics = self._metrics_by_step(steps) if self._retention.best is not None else {}
        kept = self._retention.kept(steps, metrics) | {saved}
        for step in steps:
            if step not in kept:
                self._remove(self.checkpoint(step))
        if not is_remote(self.path):
            for entry in os.scandir(self.path):
                if entry.name.endswith(_REMOVING):
                    shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, checkpoint: str) -> None:
        try:
            if is_remote(checkpoint):
                # Without its seal it is not a checkpoint any more.
                (path_object(checkpoint) / SEAL).unlink()
                path_object(checkpoint).rmtree()
                return
            # Renamed first, so that no part of a checkpoint is ever taken for a whole one.
            removing = checkpoint + _REMOVING
            shutil.rmtree(removing, ignore_errors=True)
            os.rename(checkpoint, removing)
            shutil.rmtree(removing)
        except OSError as error:
            raise CheckpointWriteError(
                f"cannot remove {checkpoint}, which is not kept any more: {error.strerror}. "
                "What was saved after it is whole."
            ) from error


def _number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise RuleTypeError(
            f"step must be a number of 0 or more, not {step!r:.80}. Write for instance "
            "save(step, state); restore(state, step=100), or step=manager.best; restore(state, "
            "mesh=mesh)."
        )
    return number
