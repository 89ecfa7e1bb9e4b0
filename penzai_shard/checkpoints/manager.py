"""Keeps the checkpoints of a run in one folder: numbered, written in the background, some removed.

``step_00000100`` is a checkpoint as ``save_train_state`` writes it, and its metrics are in its own
metadata, so that none of them is ever there without the other. A directory has this name only while
it is whole: it gets it once all is written, and loses it before anything of it is removed.
"""

# Imported here so that its own callback at the end of the program comes after that of this module.
import concurrent.futures.thread
import json
import math
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from penzai_shard import errors
from penzai_shard.checkpoints import train_states
from penzai_shard.checkpoints.records import MARKER, absolute_path, is_checkpoint, read_manifest
from penzai_shard.errors import Problem, Problems
from penzai_shard.processes.agreement import gather, on_first, together
from penzai_shard.processes.job import at_end

_STEP = re.compile(r"step_\d{8,}")
_REMOVING = ".penzai-shard-removing"
_SECTION = "penzai_shard_run"
_CALLED = "CheckpointManager"
_Metrics = Mapping[int, Mapping[str, float]]


class CheckpointManager:
    """Saves train states of a run by their steps, keeps some of them, and restores the newest.

    ``save`` returns as soon as what this process holds of the state is copied to the host's memory:
    the next step may donate the state, while a thread writes the copy. There is one copy at a time:
    a ``save`` waits for the one before. What goes wrong in the background is raised by the next
    ``save``, ``restore``, ``wait`` or ``close``, as by the end of the ``with`` statement, or is
    printed at the end of the program. Python 3.12 and 3.13 may not complete a save at their own
    end, which is printed too.

    Whatever ends the program at whatever moment, ``latest`` is a whole checkpoint. Several
    processes make the same calls in the same order, on a folder that they share.

    Args:
        path: The folder, which is made by the first ``save``.
        keep_last: How many of the newest checkpoints to keep; None keeps all.
        keep_every: Checkpoints whose step is a multiple of this are kept for ever.
        best: A metric, ``"min"`` or ``"max"``, and how many of the best checkpoints to keep, one by
            default: ``("loss", "min", 3)``. Every ``save`` needs this metric then. A checkpoint of
            which it is infinite or not a number is never the best.
        asynchronous: Whether to write in the background. If not, ``save`` returns once the
            checkpoint is in its place.

    Attributes:
        path: The absolute path of the folder.

    Raises:
        RuleTypeError: Arguments cannot be read, or the folder is a checkpoint; all are in it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with CheckpointManager(folder, keep_last=1, best=("loss", "min")) as manager:
    ...         for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
    ...             state = {"step": step, "root_rng": jax.random.key(0)}
    ...             path = manager.save(step, state, {"loss": loss})
    ...     restored = manager.restore(state)
    ...     manager.steps(), manager.best, manager.latest
    ([1, 3], 1, 3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_last: int | None = 2,
        keep_every: int | None = None,
        best: Any = None,
        asynchronous: bool = True,
    ) -> None:
        folder = absolute_path(path)
        parts = [*best] if isinstance(best, tuple | list) else []
        parts = [*parts, 1] if len(parts) == 2 else parts
        is_best = len(parts) == 3 and parts[1] in ("min", "max") and _is_count(parts[2])
        checks = {
            "path": (str(folder), not is_checkpoint(folder), "the folder around this checkpoint"),
            "best": (best, best is None or is_best, "best=('loss', 'min')"),
        }
        for name, count in (("keep_last", keep_last), ("keep_every", keep_every)):
            checks[name] = count, count is None or _is_count(count), f"{name}=100, or None"
        errors.check_arguments(_CALLED, checks)
        self.path = str(folder)
        self._keep_last, self._keep_every, self._best = keep_last, keep_every, parts or None
        self._asynchronous = asynchronous
        self._saving: concurrent.futures.Future[None] | None = None

    # What there is

    def path_of(self, step: int | jax.Array) -> str:
        """The path of the checkpoint of a step, whether there is one or not.

        >>> CheckpointManager("/runs/may").path_of(100)
        '/runs/may/step_00000100'
        """
        # That of a state is an array of one integer.
        number: Any = np.asarray(step)
        is_step = not number.shape and np.issubdtype(number.dtype, np.integer) and number >= 0
        fix = "step=int(state.step), or manager.best"
        errors.check_arguments(_CALLED, {"step": (step, is_step, fix)})
        return os.path.join(self.path, f"step_{int(step):08d}")

    def steps(self) -> list[int]:
        """The steps of which there are whole checkpoints now, in order."""
        names = [path.parent.name for path in pathlib.Path(self.path).glob(f"step_*/{MARKER}")]
        return sorted(int(name.removeprefix("step_")) for name in names if _STEP.fullmatch(name))

    @property
    def latest(self) -> int | None:
        """The newest step of which there is a whole checkpoint now; None if there is none."""
        return max(self.steps(), default=None)

    @property
    def best(self) -> int | None:
        """The step with the best metric now; None if no checkpoint has it, or none is asked for."""
        return next(iter(sort_best(self._read_all_metrics(), self._best)), None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics with which the first process saved a step.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of it.
            CheckpointDamagedError: Its metadata is not as it was saved.
        """
        return dict(self._read_entries(step)[0]["metrics"])

    def extra(self, step: int) -> dict[str, Any]:
        """What this process gave as ``extra`` when it saved a step.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError: As for ``metrics``.
            CheckpointMismatchError: Another number of processes saved it, each something else.
        """
        entries = self._read_entries(step)
        is_same = len(entries) == jax.process_count()
        if not is_same and any(entry["extra"] != entries[0]["extra"] for entry in entries):
            what = f"{len(entries)} processes saved it with an extra= each"
            problem = Problem(self.path_of(step), what, f"Start {len(entries)} processes.")
            raise errors.CheckpointMismatchError("no extra= is that of this process:", [problem])
        return dict(entries[jax.process_index() if is_same else 0]["extra"])

    def _read_entries(self, step: int) -> list[dict[str, Any]]:
        """What each process said when a step was saved."""
        texts = read_manifest(self.path_of(step)).metadata.get(_SECTION)
        # Somebody may have saved it without a manager.
        return [json.loads(text) for text in texts or [_write_entry(None, None)]]

    def _read_all_metrics(self) -> dict[int, dict[str, float]]:
        """The metrics by step; none of those checkpoints that are damaged."""
        found: dict[int, dict[str, float]] = {}
        for step in self.steps():
            try:
                found[step] = self.metrics(step)
            except errors.CheckpointDamagedError:
                found[step] = {}
        return found

    # Saving

    def save(
        self,
        step: int | jax.Array,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> str:
        """Saves a state, and then removes the checkpoints that are not kept any more.

        Args:
            step: Its step, ``state.step``, not below that of any checkpoint in the folder.
            state: As for ``save_train_state``. It may be donated, and arrays of NumPy in it be
                written to, once this returns.
            metrics: Numbers by name, such as the loss of an evaluation; ``math.nan`` for that of
                ``best`` where it is not known. Those of the first process are kept.
            extra: What else the checkpoint is to keep by name, such as the place in the data; JSON
                holds it. Each process has its own.
            overwrite: Whether to replace a checkpoint of this step.

        Returns:
            The path at which the checkpoint is, or will be.

        Raises:
            CheckpointWriteError: There is a checkpoint of this step or of a later one; the metric
                of ``best`` is not there; or this one cannot be written; or the one before could
                not, and this one was not begun.
            ShardingError: As for ``save_train_state``.
            RuleTypeError: An argument cannot be read.
        """
        self.wait()
        latest = on_first("looking for later checkpoints", lambda: self.latest)
        with together(_CALLED):
            path, entry = self.path_of(step), _write_entry(metrics, extra)
            self._check_save(step, metrics, latest)
        # Another step in another process is another call.
        metadata = {_SECTION: gather(f"{_CALLED} saves {path}", entry)}
        options = {"overwrite": overwrite, "metadata": metadata, "copy": True}
        finish = train_states.begin_save_train_state(_CALLED, path, state, **options)
        # Processes agree by the name of the thread.
        thread = concurrent.futures.ThreadPoolExecutor(1, f"penzai_shard saving {self.path}")
        self._saving = thread.submit(self._finish, finish)
        thread.shutdown(wait=False)
        _unfinished.add(self)
        if not self._asynchronous:
            self.wait()
        return path

    def _check_save(self, step: Any, metrics: Any, latest: int | None) -> None:
        problems = Problems("cannot save:")
        if latest is not None and step < latest:
            # Nobody would go on from it.
            problems.add(self.path, f"it has step {latest} already", "Save to another.")
        names, best = [*(metrics or {})], (self._best or [None])[0]
        if best is not None and best not in names:
            fix = f"Name one of them in best=, or add {{{best!r}: math.nan}} where it is not known."
            problems.add("metrics", f"best= is {best!r}, and they are {names}", fix)
        problems.raise_if_any(errors.CheckpointWriteError)

    def _finish(self, finish: Callable[[], str]) -> None:
        finish()
        on_first("removing old checkpoints", self._remove_all_but_kept)

    def _remove_all_but_kept(self) -> None:
        found = self._read_all_metrics()
        kept = choose_kept(found, self._keep_last, self._keep_every, self._best)
        for path in [self.path_of(step) for step in {*found} - kept]:
            # Renamed first, so that no part of a checkpoint is taken for a whole one.
            os.rename(path, path + _REMOVING)
        # With those that a killed program has left.
        for removed in pathlib.Path(self.path).glob(f"*{_REMOVING}"):
            shutil.rmtree(removed, ignore_errors=True)

    # Restoring and the end

    def restore(self, state: Any, step: int | None = None, **options: Any) -> Any:
        """Restores the state of a step, the newest by default, once all saves are complete.

        Args:
            state: A state of the same model and optimizer, with arrays or structs.
            step: The step; None for the newest.
            **options: Options of ``restore_train_state``, such as ``mesh`` and ``rules``. Without
                them arrays go where those of the state are.

        Raises:
            CheckpointNotFoundError: There is no checkpoint, or none of this step.
            CheckpointDamagedError: It is not as it was saved.
            ShardingError: As ``restore_train_state`` does, and what ``wait`` raises.
        """
        self.wait()
        if step is None:
            step = on_first("looking for the newest checkpoint", lambda: self.latest)
        if step is None:
            fix = "Write manager.save(step, state) first; manager.latest is None until then."
            problem = Problem(self.path, "no step is saved there", fix)
            raise errors.CheckpointNotFoundError("there is no checkpoint:", [problem])
        return train_states.restore_train_state(self.path_of(step), state, **options)

    def wait(self) -> None:
        """Waits until all that ``save`` was given is on the disk.

        Raises:
            CheckpointWriteError: It could not be written.
            OSError: An old one could not be removed.
        """
        if self._saving is not None:
            # Ctrl-C ends only the waiting; that for a thread would take the thread for ended.
            concurrent.futures.wait([self._saving])
            saving, self._saving = self._saving, None
            _unfinished.discard(self)
            saving.result()

    def close(self) -> None:
        """Waits, as the end of a ``with`` statement does.

        Raises:
            CheckpointWriteError, OSError: As for ``wait``.
        """
        self.wait()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _write_entry(metrics: Any, extra: Any) -> str:
    """What a process says with a checkpoint, as JSON."""
    try:
        numbers = {str(name): float(value) for name, value in dict(metrics or {}).items()}
        return json.dumps({"metrics": numbers, "extra": dict(extra or {})})
    except (TypeError, ValueError) as error:
        fix = "Write for instance metrics={'loss': 0.5}, extra={'batches': 100}."
        problem = Problem("", f"metrics= or extra= is not what JSON holds by name: {error}", fix)
        raise errors.RuleTypeError(f"{_CALLED}:", [problem]) from error


# What is kept


def choose_kept(
    metrics: _Metrics, keep_last: int | None, keep_every: int | None, best: Sequence[Any] | None
) -> set[int]:
    """The steps that are kept, of those whose metrics are given; always the newest.

    Args:
        metrics: The metrics by step.
        keep_last: How many of the newest; None keeps all.
        keep_every: Those whose step is a multiple of this.
        best: A metric, ``"min"`` or ``"max"``, and how many of the best.

    >>> seen = {50: {}, 100: {"loss": 2.0}, 150: {"loss": 1.0}, 200: {}, 250: {}}
    >>> sorted(choose_kept(seen, 1, 100, ("loss", "min", 1)))
    [100, 150, 200, 250]
    """
    newest = sorted(metrics)[-keep_last:] if keep_last else metrics
    regular = [step for step in metrics if keep_every is not None and step % keep_every == 0]
    return {*newest, *regular, *sort_best(metrics, best)[: best[2] if best else 0]}


def sort_best(metrics: _Metrics, best: Sequence[Any] | None) -> list[int]:
    """The steps that have a finite metric, the best first, and of equals the newer one."""
    if best is None:
        return []
    name, direction, _ = best
    sign = 1 if direction == "min" else -1
    values = {step: sign * numbers.get(name, math.nan) for step, numbers in metrics.items()}
    finite = [step for step, value in values.items() if math.isfinite(value)]
    return sorted(finite, key=lambda step: (values[step], -step))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


# At the end of the program

# Managers whose thread nobody has waited for.
_unfinished: set[CheckpointManager] = set()


def _finish_all() -> None:
    """Ends the saves that nobody waited for, and prints which of them failed."""
    for manager in list(_unfinished):
        try:
            manager.wait()
        except Exception as error:
            # Python 3.12 and 3.13 start no threads any more, and Orbax writes in threads.
            print(f"penzai_shard: call close() of a CheckpointManager: {error}", file=sys.stderr)


at_end(_finish_all)
