"""The most bytes that a step has in a device's memory at once, beside what it stores."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from penzai_shard.choosing.by_names.placements import Tensor
from penzai_shard.choosing.by_names.step_arrays import Life, ParameterUse, Table

STAGES = 4
"""Forward pass and loss; the backward pass of the last block; that of the first; what is behind.

Between the two, what activations hold gets less by as much with every block, and what gradients
hold more, so that the peak of a deep model is in one of these stages.
"""


@dataclasses.dataclass(frozen=True)
class MemoryAtPeak:
    """How many arrays of each kind are in memory at each operation that makes one.

    Attributes:
        kinds: The kinds of array: those with equal dimensions, laid out by the same rules.
        counts: How many of each kind (columns) are there at each of the operations (rows).
        uses: Parameters as they are used, which are there as copies if they are stored otherwise.
        used: Which of these are there at each operation, for the time of their use.
        between: The same for the time between the forward and the backward use.
        stage: In which stage of the step each operation is.
    """

    kinds: tuple[tuple[Tensor, Table], ...]
    counts: np.ndarray
    uses: tuple[ParameterUse, ...]
    used: np.ndarray
    between: np.ndarray
    stage: np.ndarray

    @classmethod
    def of(
        cls, lives: Sequence[Life], uses: Sequence[ParameterUse], stages: Sequence[int]
    ) -> "MemoryAtPeak":
        """Counts the arrays of a step.

        Args:
            lives: How long each array is in memory.
            uses: Parameters as they are used.
            stages: The numbers of the operations at which each stage but the first begins.
        """
        times = sorted({life.first for life in lives} | {use.first for use in uses})
        kinds: dict[tuple[Tensor, Table], int] = {}
        for life in lives:
            kinds.setdefault((life.tensor, life.table), len(kinds))
        counts = np.zeros((len(times), len(kinds)))
        at = np.asarray(times)
        for life in lives:
            there = (life.first <= at) & (at <= life.last)
            counts[there, kinds[life.tensor, life.table]] += 1
        used = np.zeros((len(times), len(uses)))
        between = np.zeros((len(times), len(uses)))
        ends = {(use.parameter, use.table): use.last for use in uses if not use.is_backward}
        for i, use in enumerate(uses):
            used[(use.first <= at) & (at <= use.last), i] = 1
            end = ends.get((use.parameter, use.table))
            if use.is_backward and end is not None:
                between[(end < at) & (at < use.first), i] = 1
        return cls(
            tuple(kinds), counts, tuple(uses), used, between, np.searchsorted(stages, at, "right")
        )

    def most(
        self,
        bytes_of_kinds: np.ndarray,
        bytes_of_uses: np.ndarray,
        is_dropped: np.ndarray,
    ) -> list[dict[str, float]]:
        """The bytes at the peak of each stage, of activations and of gradients.

        Args:
            bytes_of_kinds: The bytes of one array of each kind on one device.
            bytes_of_uses: Those of the copy of each parameter that is used; 0 without a copy.
            is_dropped: Whether a copy is dropped after the forward pass.
        """
        copies = self.used @ bytes_of_uses + self.between @ (bytes_of_uses * ~is_dropped)
        gradients = self.counts[:, self._of_gradients] @ bytes_of_kinds[self._of_gradients]
        total = self.counts @ bytes_of_kinds + copies
        found = []
        for stage in range(STAGES):
            (rows,) = np.nonzero(self.stage == stage)
            if stage == 1 and not len(rows):
                # Of one block the last one is the first one too.
                (rows,) = np.nonzero(self.stage == 2)
            peak = {"activations": 0.0, "gradients": 0.0}
            if len(rows):
                row = rows[total[rows].argmax()]
                held = float(gradients[row])
                peak = {"activations": float(total[row]) - held, "gradients": held}
            found.append(peak)
        return found

    @functools.cached_property
    def _of_gradients(self) -> np.ndarray:
        return np.array([table == Table.UPDATE for _, table in self.kinds], bool)
