"""What is said of a layout: where each mesh axis of it comes from, and where one was lost."""

import dataclasses
from typing import Literal

from jax.sharding import PartitionSpec

from penzai_shard.planning.plan_table import axes_text
from penzai_shard.rule_kinds import LogicalAxis

CauseKind = Literal[
    "parameter",
    "input",
    "other argument",
    "constraint layer",
    "constraint",
    "train step",
    "declared result",
    "shard_map",
    "unknown",
]
RowKind = Literal["output", "gradient", "result"]


@dataclasses.dataclass(frozen=True)
class WayStep:
    """An operation that a mesh axis came through.

    Attributes:
        operation: What it does, in plain words.
        layer: The layer that it is of, as plans call it; or ``"loss"``, ``"optimizer"``; empty if
            that is not known.
        line: Where it was written, ``file.py:12``; empty if that is not known.
    """

    operation: str
    layer: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation} in {self.layer}" if self.layer else self.operation


@dataclasses.dataclass(frozen=True)
class ShardingCause:
    """Where a mesh axis of a layout comes from.

    Attributes:
        mesh_axis: The mesh axis, or a part of one, as ``data:(1)2``.
        kind: What it comes from.
        path: Which: the path of a parameter, an input or a result, the label of a constraint layer,
            the line of a constraint that a user wrote.
        logical_axis: The logical axis there that is on the mesh axis, if it has a name.
        rule: The rule that put it there, of a constraint layer by name; empty if not known.
        text: All of that in words, to be read after "comes from".
        way: The operations that it came through, from where it comes from on.
    """

    mesh_axis: str
    kind: CauseKind
    path: str
    logical_axis: LogicalAxis | None
    rule: str
    text: str
    way: tuple[WayStep, ...] = ()

    def __str__(self) -> str:
        return f"{self.mesh_axis!r} comes from {self.text}"


@dataclasses.dataclass(frozen=True)
class ShardingLoss:
    """Where a mesh axis was lost on the way to a value: the first operation that dropped it.

    Attributes:
        mesh_axis: The mesh axis.
        logical_axis: The logical axis that was on it, if it has a name.
        operation: What the operation does, in plain words.
        layer: The layer that it is of; empty if it is of none.
        line: Where it was written; empty if that is not known.
        reason: Why it was dropped, in words.
        fix: What brings it back, to be pasted; empty if nothing is known to.
    """

    mesh_axis: str
    logical_axis: LogicalAxis | None
    operation: str
    layer: str
    line: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        what = "" if self.logical_axis is None else f" of {str(self.logical_axis)!r}"
        where = f" in layer {self.layer}" if self.layer else ""
        line = f" ({self.line})" if self.line else ""
        text = f"the sharding{what} over {self.mesh_axis!r} was lost at {self.operation}{where}"
        text += f"{line}: {self.reason}"
        return f"{text}. {self.fix}" if self.fix else text


@dataclasses.dataclass(frozen=True)
class WhyRow:
    """The layout of one array, and why it has it.

    Attributes:
        kind: Whether it is what a layer gives, a parameter's gradient, or a result.
        path: Of a layer its path in the model as it was before anything was put in, of a parameter
            or a result its path.
        label: What people call it, as plans print it.
        names: The logical axis of each dimension; None altogether without names.
        shape: Its shape.
        dtype: Its data type, as programs' texts have it.
        spec: The mesh axes of each dimension, major first.
        causes: Where each of them comes from.
        losses: What was lost on the way to it.
    """

    kind: RowKind
    path: str
    label: str
    names: tuple[LogicalAxis | None, ...] | None
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    causes: tuple[ShardingCause, ...]
    losses: tuple[ShardingLoss, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return not any(self.spec)

    @property
    def what(self) -> str:
        """What it is, in words."""
        return {"output": "output of ", "gradient": "gradient of ", "result": ""}[
            self.kind
        ] + self.label

    @property
    def axes(self) -> str:
        """Its dimensions with the mesh axes that they are split over."""
        return axes_text(
            self.names, self.shape, PartitionSpec(*(axes or None for axes in self.spec))
        )
