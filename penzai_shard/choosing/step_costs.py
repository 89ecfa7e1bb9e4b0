"""What a training step costs one device, however that was found out."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Self, TypeAlias, TypeVar

from penzai_shard.rule_kinds import LogicalAxis

SentReason: TypeAlias = tuple[str, str, tuple[LogicalAxis | None, ...], tuple[str, ...]]

_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a device sends in a step, for one reason at one place.

    Attributes:
        what: ``"parameter"``, ``"gradient"``, ``"activation"`` or ``"optimizer"``.
        where: The path or label that it belongs to, without the number of a block
            (``"lm/block_*/mlp"``); empty if that is not known.
        names: The logical axes of what is moved, as far as they are known.
        mesh_axes: The mesh axes that it goes over, in the mesh's order.
        bytes: What one device sends, in a whole step.
    """

    what: str
    where: str
    names: tuple[LogicalAxis | None, ...]
    mesh_axes: tuple[str, ...]
    bytes: float

    @property
    def reason(self) -> SentReason:
        """All but the number."""
        return self.what, self.where, self.names, self.mesh_axes


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a training step costs one device.

    Attributes:
        flops: Floating point operations of matrix products and convolutions, a multiplication and
            an addition being two.
        sent: What it sends, and why.
        memory: The most bytes that are in its memory at once, by what they are for:
            ``"parameters"``, ``"optimizer"``, ``"gradients"``, ``"activations"``, ``"inputs"``.
    """

    flops: float
    sent: tuple[Sent, ...]
    memory: Mapping[str, float]

    @property
    def memory_bytes(self) -> int:
        """All of its memory."""
        return round(sum(self.memory.values()))

    @property
    def unfit_figure(self) -> str:
        """Which figure of it is none, in words; empty if all are finite and not negative.

        >>> StepCost(math.nan, (), {}).unfit_figure
        'flops is nan'
        """
        figures = [
            ("flops", self.flops),
            *(("sent", one.bytes) for one in self.sent),
            *(("memory", bytes_) for bytes_ in self.memory.values()),
        ]
        unfit = (each for each in figures if not 0 <= each[1] < math.inf)
        return next((f"{name} is {figure}" for name, figure in unfit), "")

    @property
    def traffic(self) -> dict[tuple[str, ...], float]:
        """The bytes that are sent over each set of mesh axes."""
        found: dict[tuple[str, ...], float] = collections.defaultdict(float)
        for one in self.sent:
            found[one.mesh_axes] += one.bytes
        return dict(found)

    def deeper(self, two: Self, blocks: int) -> "StepCost":
        """The cost for a model of many blocks, from that of one block, which this is, and of two.

        >>> one, two = (StepCost(flops, (), {"parameters": 2.0}) for flops in (5.0, 7.0))
        >>> one.deeper(two, 11)
        StepCost(flops=25.0, sent=(), memory={'parameters': 2.0})
        """
        more = blocks - 1

        def line(first: float, second: float) -> float:
            return max(first + more * (second - first), 0.0)

        def lines(first: Mapping[_Key, float], second: Mapping[_Key, float]) -> dict[_Key, float]:
            keys = dict.fromkeys((*first, *second))
            return {key: line(first.get(key, 0.0), second.get(key, 0.0)) for key in keys}

        sent = lines(_by_reason(self), _by_reason(two))
        return StepCost(
            line(self.flops, two.flops),
            tuple(Sent(*reason, bytes=bytes_) for reason, bytes_ in sent.items()),
            lines(self.memory, two.memory),
        )


def _by_reason(cost: StepCost) -> dict[SentReason, float]:
    found: dict[SentReason, float] = collections.defaultdict(float)
    for one in cost.sent:
        found[one.reason] += one.bytes
    return dict(found)
