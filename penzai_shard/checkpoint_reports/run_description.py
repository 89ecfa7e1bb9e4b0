"""The checkpoints in the folder of a run, as a table and as JSON."""

import dataclasses
import datetime
import json
from collections.abc import Mapping

from penzai_shard.checkpoint_reports.stored_arrays import contents_of
from penzai_shard.checkpointing import CheckpointManager
from penzai_shard.checkpointing.locations import (
    PathLike,
    absolute_path,
    no_checkpoint,
    path_object,
    shown_path,
)
from penzai_shard.errors import CheckpointDamagedError, CheckpointNotFoundError, ShardingError
from penzai_shard.planning.plan_table import bytes_text
from penzai_shard.report_trees import count_text
from penzai_shard.text_tables import PreparedTable, Report


@dataclasses.dataclass(frozen=True)
class NumberedCheckpoint:
    """One checkpoint of a run.

    Attributes:
        step: Its step.
        path: Where it is.
        arrays: How many arrays it has.
        bytes: The size of all of them, in bytes.
        saved: When it was saved.
        metrics: The numbers that it was saved with, by name.
        problem: Why nothing can be said of it; empty otherwise.
    """

    step: int
    path: str
    arrays: int = 0
    bytes: int = 0
    saved: datetime.datetime | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problem: str = ""


class NumberedCheckpointsTable(PreparedTable):
    """The checkpoints of a run, the oldest first."""

    headings = ("step", "arrays", "size", "saved (UTC)", "metrics")
    right_aligned = frozenset({"step", "arrays", "size"})
    unwrapped = frozenset({"saved (UTC)"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RunDescription(Report):
    """The checkpoints in the folder of a run, as ``describe_run`` found them.

    Attributes:
        path: The folder.
        checkpoints: The checkpoints, the oldest first.
    """

    path: str
    checkpoints: tuple[NumberedCheckpoint, ...]

    def table(self, *, collapse: bool = True) -> NumberedCheckpointsTable:
        """The checkpoints as a table, one row each.

        Args:
            collapse: Makes no difference here.
        """
        del collapse
        rows = [
            (
                str(each.step),
                "-" if each.problem else f"{each.arrays:,}",
                "-" if each.problem else bytes_text(each.bytes),
                f"{each.saved:%Y-%m-%d %H:%M:%S}" if each.saved else "",
                each.problem or ", ".join(f"{k} {v:.6g}" for k, v in each.metrics.items()),
            )
            for each in self.checkpoints
        ]
        verdict = f"run: {count_text(len(rows), 'checkpoint')}, in {shown_path(self.path)}"
        whole = [each for each in self.checkpoints if not each.problem]
        newest = (f"the newest: {shown_path(whole[-1].path)}",) if whole else ()
        return NumberedCheckpointsTable(tuple(rows), verdict, newest)

    def to_json(self) -> str:
        """All of it as JSON text: one object per checkpoint."""
        checkpoints = [
            {**dataclasses.asdict(each), "saved": each.saved and each.saved.isoformat()}
            for each in self.checkpoints
        ]
        return json.dumps({"path": self.path, "checkpoints": checkpoints}, indent=2)


def describe_run(path: PathLike) -> RunDescription:
    """The checkpoints in the folder of a run; no array of them is read.

    Args:
        path: The folder that ``fit`` or a ``CheckpointManager`` saves to.

    Returns:
        Their steps, sizes, times and metrics. It prints as a table, and shows itself as one in a
        notebook.

    Raises:
        CheckpointNotFoundError: There are no numbered checkpoints.
        MissingExtraError: Orbax is not installed.

    >>> import tempfile, jax
    >>> state = {"w": jax.numpy.ones(2), "root_rng": jax.random.key(0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with CheckpointManager(folder) as manager:
    ...         path = manager.save(100, state, {"loss": 0.5})
    ...     [found] = describe_run(folder).checkpoints
    >>> found.step, found.bytes, found.metrics
    (100, 16, {'loss': 0.5})
    """
    where = absolute_path(path)
    manager = CheckpointManager(where)
    steps = manager.steps()
    if not steps:
        raise no_checkpoint(where, path_object(where))
    return RunDescription(where, tuple(_described(manager, step) for step in steps))


def is_run(path: PathLike) -> bool:
    """Whether there are numbered checkpoints in a folder.

    >>> is_run("no/such/folder")
    False
    """
    return bool(CheckpointManager(path).steps())


def _described(manager: CheckpointManager, step: int) -> NumberedCheckpoint:
    path = manager.checkpoint(step)
    try:
        contents = contents_of(path)
        metrics = manager.metrics(step)
    except CheckpointNotFoundError:
        # Removed in this moment, by the run itself.
        return NumberedCheckpoint(step, path, problem="is not there any more")
    except CheckpointDamagedError:
        return NumberedCheckpoint(step, path, problem="DAMAGED: is not as it was saved")
    except ShardingError as error:
        # The others are worth knowing all the same.
        return NumberedCheckpoint(step, path, problem=str(error).partition("\n")[0])
    size = sum(array.record.nbytes for array in contents.arrays)
    return NumberedCheckpoint(step, path, len(contents.arrays), size, contents.saved, metrics)
