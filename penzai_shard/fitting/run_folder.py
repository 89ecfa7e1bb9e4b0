"""The folder of a run: numbered checkpoints, and beside each how far its batches were used.

``step_00000100`` is a checkpoint as ``save_train_state`` writes it. The file beside it,
``step_00000100.batches-0-of-1.json``, is written before the checkpoint is put in its place, so that
no checkpoint is without it; there is one for each process, which has batches of its own.
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
from typing import Any

import jax

from penzai_shard.checkpointing import restore_train_state, save_train_state
from penzai_shard.checkpointing.locations import (
    SEAL,
    PathLike,
    absolute_path,
    is_remote,
    path_object,
)
from penzai_shard.checkpointing.train_states import refuse_other_state
from penzai_shard.errors import (
    CheckpointExistsError,
    CheckpointWriteError,
    TrainingStoppedError,
)
from penzai_shard.fitting.batch_sources import Position
from penzai_shard.library_apis import orbax_api
from penzai_shard.processes import failing_together, on_first_process, refuse_differences
from penzai_shard.training.train_state import to_flat

_STEP = re.compile(r"step_(\d{8,})")
_BATCHES = re.compile(r"step_(\d{8,})\.batches-(\d+)-of-(\d+)\.json")
_REMOVING = ".penzai-shard-removing"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The checkpoints of one run.

    Attributes:
        where: The folder's absolute path.
        keep: How many of the newest checkpoints to keep; None keeps all.
    """

    where: str
    keep: int | None = 2

    @classmethod
    def at(cls, path: PathLike, keep: int | None) -> "RunFolder":
        """The folder at a path, which need not exist."""
        return cls(absolute_path(path), keep)

    def checkpoint(self, step: int) -> str:
        """The path of the checkpoint of a step.

        >>> RunFolder("/runs/first").checkpoint(100)
        '/runs/first/step_00000100'
        """
        return f"{self.where.rstrip('/')}/step_{step:08d}"

    def shown(self, step: int) -> str:
        """The same for people: from the working directory, if it is in there."""
        path = self.checkpoint(step)
        if is_remote(path):
            return path
        from_here = os.path.relpath(path)
        return path if from_here.startswith(os.pardir) else from_here

    def steps(self) -> list[int]:
        """The steps of which there are whole checkpoints, in order."""
        folder = path_object(self.where)
        if not folder.is_dir():
            return []
        found = [
            int(match[1])
            for entry in folder.iterdir()
            if (match := _STEP.fullmatch(entry.name)) and (entry / SEAL).exists()
        ]
        return sorted(found)

    def newest(self) -> int | None:
        """The newest step; None if there is no checkpoint.

        Raises:
            ShardingError: Processes of a job see different checkpoints.
        """
        steps = self.steps()
        refuse_differences(
            "fit",
            f"the processes of this job see different checkpoints in {self.where}:",
            {"the newest checkpoint": f"step {steps[-1]}" if steps else "none"},
            "Give a folder that all processes share.",
        )
        return steps[-1] if steps else None

    def refuse_other_run(self) -> None:
        """Raises if there are checkpoints already."""
        newest = self.newest()
        if newest is not None:
            raise CheckpointExistsError(
                f"{self.where} has checkpoints of a run, up to step {newest}. Go on with it, "
                "resume=True; or choose another folder for a new run."
            )

    def save(self, state: Any, step: int, position: Position) -> str:
        """Saves a state and its place in the batches, and removes what is not kept any more.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointExistsError: There is a checkpoint of this step.
            CheckpointWriteError: It cannot be written.
        """
        folder = path_object(self.where)
        name = self._position_name(step, jax.process_index(), jax.process_count())
        with failing_together("saving the place in the batches"):
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(folder, name, json.dumps(dataclasses.asdict(position)))
        path = save_train_state(self.checkpoint(step), state)
        if jax.process_index() == 0:
            self._remove_old()
        return path

    def prepare(self) -> None:
        """Makes the folder, and finds out whether checkpoints can be written there.

        Raises:
            CheckpointWriteError: They cannot.
            CheckpointExistsError: It is a checkpoint itself.
            MissingExtraError: Orbax is not installed.
        """
        orbax_api.orbax()
        if is_remote(self.where):
            return

        def try_it() -> None:
            try:
                os.makedirs(self.where, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.where):
                    pass
            except OSError as error:
                raise CheckpointWriteError(
                    f"cannot write checkpoints to {self.where}: {error.strerror}. Give another "
                    "folder."
                ) from error
            if os.path.exists(os.path.join(self.where, SEAL)):
                raise CheckpointExistsError(
                    f"{self.where} is a checkpoint. Give the folder that holds those of a run, for "
                    f"instance {os.path.dirname(self.where)}."
                )

        on_first_process("preparing the folder of the run", try_it)

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
        refuse_other_state(self.checkpoint(step), state)
        if frees:
            # But for the step's number, which errors about a freed state name.
            for leaf in to_flat(state).changing[1:]:
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.delete()
        return restore_train_state(self.checkpoint(step), state), position

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
                f"{self.checkpoint(step)} has no file {name} beside it, which says how many "
                "batches the run had used. Restore it with restore_train_state(path, state), and "
                "give the state to fit with another folder."
            )
        before = _BATCHES.fullmatch(found[0][0])[3]  # type: ignore[index]
        raise TrainingStoppedError(
            f"{self.checkpoint(step)} was saved by {before} processes, each with an iterator of "
            f"its own, and this run has {processes}: where their iterators stood does not fit. "
            "Start as many processes; or restore the state alone with "
            "restore_train_state(path, state), and give it to fit with another folder."
        )

    @staticmethod
    def _position_name(step: int, process: int, processes: int) -> str:
        return f"step_{step:08d}.batches-{process}-of-{processes}.json"

    def _remove_old(self) -> None:
        folder = path_object(self.where)
        steps = self.steps()
        kept = steps if self.keep is None else steps[-self.keep :]
        for step in steps:
            if step not in kept:
                self._remove(self.checkpoint(step))
        for entry in folder.iterdir():
            match = _BATCHES.fullmatch(entry.name)
            if match and int(match[1]) < kept[-1] and int(match[1]) not in kept:
                entry.unlink(missing_ok=True)
            elif entry.name.endswith(_REMOVING):
                shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, checkpoint: str) -> None:
        if is_remote(checkpoint):
            path_object(checkpoint).rmtree()
            return
        # Renamed first, so that no part of a checkpoint is ever taken for a whole one.
        removing = checkpoint + _REMOVING
        os.rename(checkpoint, removing)
        shutil.rmtree(removing, ignore_errors=True)


def _write_whole(folder: Any, name: str, text: str) -> None:
    """Writes a file so that there is all of it under its name, or nothing."""
    if is_remote(str(folder)):
        (folder / name).write_text(text)
        return
    beside = folder / f".{name}.writing"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / name)
