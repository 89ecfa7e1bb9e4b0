"""A train state as a table."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from penzai_shard.array_kinds import is_traced
from penzai_shard.named_leaves import NamedLeaf, map_arrays
from penzai_shard.planning import axes_text, bytes_text, grouped_rows
from penzai_shard.planning.plan_table import Row
from penzai_shard.text_tables import PreparedTable

# The fields that are shown, and what they are for.
PARTS = {
    "params": "parameter",
    "opt_state": "optimizer",
    "state_vars": "state variable",
    "loss_fn_state": "loss function",
    "unbound_model": "constant",
    "guards": "guard",
}


class StateTable(PreparedTable):
    """What a train state holds and how it is laid out; ``print`` and notebooks show it."""

    headings = ("array", "count", "logical axes/mesh axes", "dtype", "per device", "part")
    right_aligned = frozenset({"count", "per device"})
    unwrapped = frozenset({"dtype"})
    paths = frozenset({"array"})

    @classmethod
    def of(
        cls,
        verdict: str,
        parts: Mapping[str, Any],
        trainable_names: Iterable[str],
    ) -> "StateTable":
        """Makes the table.

        Args:
            verdict: The start of the first line.
            parts: The trees of the state by the names in ``PARTS``.
            trainable_names: The names of the parameters that are trained.
        """
        trained = frozenset(trainable_names)
        rows: list[Row] = []
        for field, part in PARTS.items():
            if field == "params":
                for name, value in parts[field].items():
                    kind = "trained" if name in trained else "frozen"
                    map_arrays(value, functools.partial(_add_row, rows, kind, name))
            else:
                map_arrays(parts[field], functools.partial(_add_row, rows, part, None), field)
        held = bytes_text(sum(row[3] for row in rows))
        return cls(
            grouped_rows(_folded_moments(rows, trained)), f"{verdict}; each device holds {held}"
        )


def _folded_moments(rows: Sequence[Row], trained: frozenset[str]) -> list[Row]:
    """The rows, those of an optimizer's value per trained parameter, laid out alike, as one kind.

    Such as the two moments of Adam, each of which would repeat the table of the parameters.
    """
    axes_of = {row[0]: row[1] for row in rows if row[4] == "trained"}
    moments: dict[str, list[int]] = {}
    for index, (path, axes, _, _, part) in enumerate(rows):
        if part == PARTS["opt_state"]:
            ends = [path[i + 1 :] for i, letter in enumerate(path) if letter == "/"]
            name = next((end for end in ends if axes_of.get(end) == axes), None)
            if name is not None:
                moments.setdefault(path.removesuffix(name), []).append(index)
    folded = list(rows)
    for prefix, indices in moments.items():
        if len(indices) == len(trained) > 1:
            for index in indices:
                *_, dtype, held, part = rows[index]
                folded[index] = (f"{prefix}...", "as the trained parameters", dtype, held, part)
    return folded


def _add_row(rows: list[Row], part: str, name: str | None, leaf: NamedLeaf) -> None:
    if leaf.dtype is None:
        return
    sharding = None if is_traced(leaf.array) else getattr(leaf.array, "sharding", None)
    spec = PartitionSpec()
    stored = shape = tuple(np.shape(leaf.array))
    if isinstance(sharding, NamedSharding):
        shape, spec = sharding.shard_shape(stored), sharding.spec
    axes = axes_text(leaf.names, leaf.shape, spec, stored)
    held = math.prod(shape) * leaf.dtype.itemsize
    rows.append((name or leaf.path, axes, str(leaf.dtype), held, part))
