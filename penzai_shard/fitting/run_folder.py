"""The folder of a run: numbered checkpoints, and beside each how far its batches were used.

A ``CheckpointManager`` has the checkpoints. The file beside that of step 100,
``step_00000100.batches-0-of-1.json``, is written before the checkpoint is put in its place, so that
no checkpoint is without it; there is one for each process, which has batches of its own.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax

from penzai_shard.checkpointing import CheckpointManager, restore_train_state
from penzai_shard.checkpointing.locations import PathLike, is_remote, path_object, shown_path
from penzai_shard.checkpointing.retention import Best
from penzai_shard.checkpointing.train_states import refuse_other_state
from penzai_shard.errors import CheckpointExistsError, TrainingStoppedError
from penzai_shard.fitting.batch_sources import Position
from penzai_shard.fitting.log_records import EVALUATION
from penzai_shard.processes import failing_together
from penzai_shard.training.train_state import to_flat
from penzai_shard.whole_files import write_whole

_BATCHES = re.compile(r"step_(\d{8,})\.batches-(\d+)-of-(\d+)\.json")


class RunFolder:
    """The checkpoints of one run. A context manager, at whose end all saves are complete.

    Attributes:
        where: The folder's absolute path.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        keep: int | None = 2,
        keep_every: int | None = None,
        best: Any = None,
    ) -> None:
        """Takes a folder, which need not exist, and what to keep as ``CheckpointManager`` does."""
        manager = CheckpointManager(path, keep_last=keep, keep_every=keep_every, best=best)
        self._best = Best.of(best)
        self._manager = manager
        self.where = manager.path
        self.prepare = manager.prepare
        self.newest = manager.agreed_latest
        self.wait = manager.wait

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._manager.__exit__(kind, error, traceback)
        self._remove_old()

    def shown(self, step: int) -> str:
        """The path of the checkpoint of a step: from the working directory, if it is in there."""
        return shown_path(self._manager.checkpoint(step))

    def refuse_other_run(self) -> None:
        """Raises if there are checkpoints already."""
        newest = self.newest()
        if newest is not None:
            raise CheckpointExistsError(
                f"{self.where} has checkpoints of a run, up to step {newest}. Go on with it, "
                "resume=True; or choose another folder for a new run."
            )

    def save(self, state: Any, step: int, position: Position, metrics: Mapping[str, float]) -> None:
        """Saves a state and its place in the batches; the state may be donated then.

        Args:
            state: The state.
            step: Its step.
            position: Its place in the batches.
            metrics: The metrics of this step.

        Raises:
            CheckpointExistsError: There is a checkpoint of this step.
            CheckpointWriteError: It cannot be written, or the one before it could not.
        """
        folder = path_object(self.where)
        name = self._position_name(step, jax.process_index(), jax.process_count())
        with failing_together("saving the place in the batches"):
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(folder, name, json.dumps(dataclasses.asdict(position)))
        is_evaluated = any(name.partition("/")[0] == EVALUATION for name in metrics)
        # Not every step after which a run is stopped was evaluated.
        is_known = self._best is None or self._best.metric in metrics or is_evaluated
        self._manager.save(step, state, metrics if is_known else None)
        self._remove_old()

    def restore(self, state: Any, step: int, *, frees: bool = False) -> tuple[Any, Position]:
        """The state of a step, laid out as a given one is, and its place in the batches.

        Args:
            state: The given one.
            step: The step.
            frees: Whether to free what a step would replace of the given one, once all is known to
                fit, so that no device has to hold both.

        Raises:
            TrainingStoppedError: It was saved by another number of processes, each of which had
                batches of its own.
            CheckpointMismatchError: The checkpoint is of another state.
        """
        position = self._position(step)
        refuse_other_state(self._manager.checkpoint(step), state)
        if frees:
            # But for the step's number, which errors about a freed state name.
            for leaf in to_flat(state).changing[1:]:
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.delete()
        return restore_train_state(self._manager.checkpoint(step), state), position

    def _position(self, step: int) -> Position:
        processes = jax.process_count()
        folder = path_object(self.where)
        name = self._position_name(step, jax.process_index(), processes)
        if (folder / name).exists():
            return Position(**json.loads((folder / name).read_text()))
        others = [
            entry
            for entry in folder.iterdir()
            if (match := _BATCHES.fullmatch(entry.name)) and int(match[1]) == step
        ]
        found = [(entry.name, Position(**json.loads(entry.read_text()))) for entry in others]
        if found and all(position.iterator_state is None for _, position in found):
            return found[0][1]
        if not found:
            raise TrainingStoppedError(
                f"{self._manager.checkpoint(step)} has no file {name} beside it, which says how "
                "many batches the run had used. Restore it with restore_train_state(path, state), "
                "and give the state to fit with another folder."
            )
        before = _BATCHES.fullmatch(found[0][0])[3]  # type: ignore[index]
        raise TrainingStoppedError(
            f"{self._manager.checkpoint(step)} was saved by {before} processes, each with an "
            f"iterator of its own, and this run has {processes}: where their iterators stood does "
            "not fit. "
            "Start as many processes; or restore the state alone with "
            "restore_train_state(path, state), and give it to fit with another folder."
        )

    @staticmethod
    def _position_name(step: int, process: int, processes: int) -> str:
        return f"step_{step:08d}.batches-{process}-of-{processes}.json"

    def _remove_old(self) -> None:
        """Removes what is beside checkpoints that are not there any more."""
        steps = self._manager.steps()
        if jax.process_index() != 0 or not steps:
            return
        for entry in path_object(self.where).iterdir():
            match = _BATCHES.fullmatch(entry.name)
            if match and int(match[1]) < steps[-1] and int(match[1]) not in steps:
                with contextlib.suppress(OSError):
                    entry.unlink()


def _write_whole(folder: Any, name: str, text: str) -> None:
    """Writes a file so that there is all of it under its name, or nothing."""
    if is_remote(str(folder)):
        (folder / name).write_text(text)
    else:
        write_whole(folder / name, text)
