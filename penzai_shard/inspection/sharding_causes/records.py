"""What is said of a layout: where each mesh axis of it comes from, and where one was lost."""

import dataclasses
from collections.abc import Iterable
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
        kind: What it comes from.
        path: Which: the path of a parameter, an input or a result, the label of a constraint layer,
            the line of a constraint that a user wrote.
        source: The same in words.
        logical_axis: The logical axis there that is on the mesh axis, if it has a name.
        rule: The rule that put it there, of a constraint layer by name; empty if not known.
        mesh_axis: The mesh axis, or a part of one, as ``data:(1)2``.
        source_mesh_axis: As the source has it, which may have more of it.
        dimension: The dimension of the source that is on it.
        way: The operations that it came through, from the source on.
        also: What has proposed the same at once, in words, and would be the cause without this.
    """

    kind: CauseKind
    path: str
    source: str
    logical_axis: LogicalAxis | None = None
    rule: str = ""
    mesh_axis: str = ""
    source_mesh_axis: str = ""
    dimension: int = 0
    way: tuple[WayStep, ...] = ()
    also: tuple[str, ...] = ()

    def on_its_way(
        self, mesh_axis: str, source_mesh_axis: str, dimension: int, way: tuple[WayStep, ...]
    ) -> "ShardingCause":
        """The cause of a mesh axis that came on some way."""
        return dataclasses.replace(
            self,
            mesh_axis=mesh_axis,
            source_mesh_axis=source_mesh_axis,
            dimension=dimension,
            way=way,
        )

    def with_others(self, also: Iterable[str]) -> "ShardingCause":
        """The cause, and what has proposed the same."""
        return dataclasses.replace(self, also=tuple(also))

    @property
    def reason(self) -> str:
        """The rule, or the dimension of the source, that put the mesh axis there."""
        if self.rule:
            return f"its rule {self.rule}"
        what = f"dimension {self.dimension}"
        if self.logical_axis is not None:
            what = f"logical axis {str(self.logical_axis)!r}"
        return f"its {what} is on mesh axis {self.source_mesh_axis!r}"

    def __str__(self) -> str:
        return f"{self.mesh_axis!r} comes from {self.source}: {self.reason}"


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
        kind: Why, in one word, as ``penzai_shard.sharding_propagation`` has it.
        gathered: The parameter whose parts are only brought together for the operation, since
            something else of it is on the mesh axis, as in fully sharded training; empty for none.
    """

    mesh_axis: str
    logical_axis: LogicalAxis | None
    operation: str
    layer: str
    line: str
    reason: str
    fix: str = ""
    kind: str = ""
    gathered: str = ""

    def __str__(self) -> str:
        what = "" if self.logical_axis is None else f" of {str(self.logical_axis)!r}"
        where = f" in layer {self.layer}" if self.layer else ""
        line = f" ({self.line})" if self.line else ""
        if self.gathered:
            text = f"the parameter {self.gathered} is gathered over {self.mesh_axis!r} at "
            return f"{text}{self.operation}{where}{line}: {self.reason}"
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
        whole_because: Of one that is whole without a loss why it is, in words; empty of others.
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
    whole_because: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return not any(self.spec)

    @property
    def lost(self) -> tuple[ShardingLoss, ...]:
        """The losses without the parameters that are only gathered for use."""
        return tuple(loss for loss in self.losses if not loss.gathered)

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
