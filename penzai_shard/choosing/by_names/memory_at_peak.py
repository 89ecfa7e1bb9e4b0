"""The most bytes that a step has in a device's memory at once, beside what it stores."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from penzai_shard.choosing.by_names.placements import Tensor
from penzai_shard.choosing.by_names.step_arrays import Life, ParameterUse, Table


@dataclasses.dataclass(frozen=True)
class MemoryAtPeak:
    """How many arrays of each kind are in memory at each operation that makes one.

    Attributes:
        kinds: The kinds of array: those with equal dimensions, laid out by the same rules.
        counts: How many of each kind (columns) are there at each of the operations (rows).
        uses: Parameters as they are used, which are there as copies if they are stored otherwise.
        used: Which of these are there at each operation, for the time of their use.
        between: The same for the time between the forward and the backward use.
    """

    kinds: tuple[tuple[Tensor, Table], ...]
    counts: np.ndarray
    uses: tuple[ParameterUse, ...]
    used: np.ndarray
    between: np.ndarray

    @classmethod
    def of(cls, lives: Sequence[Life], uses: Sequence[ParameterUse]) -> "MemoryAtPeak":
        """Counts the arrays of a step."""
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
        return cls(tuple(kinds), counts, tuple(uses), used, between)

    def most(
        self,
        bytes_of_kinds: np.ndarray,
        bytes_of_uses: np.ndarray,
        is_dropped: np.ndarray,
    ) -> dict[str, float]:
        """The bytes at the peak, of activations and of gradients.

        Args:
            bytes_of_kinds: The bytes of one array of each kind on one device.
            bytes_of_uses: Those of the copy of each parameter that is used; 0 without a copy.
            is_dropped: Whether a copy is dropped after the forward pass.
        """
        copies = self.used @ bytes_of_uses + self.between @ (bytes_of_uses * ~is_dropped)
        arrays = self.counts * bytes_of_kinds
        total = arrays.sum(axis=1) + copies
        if not len(total):
            return {"activations": 0.0, "gradients": 0.0}
        peak = int(total.argmax())
        is_gradient = np.array([table == Table.UPDATE for _, table in self.kinds], bool)
        gradients = float(arrays[peak] @ is_gradient)
        return {"activations": float(total[peak]) - gradients, "gradients": gradients}
