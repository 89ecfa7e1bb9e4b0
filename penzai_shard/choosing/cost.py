"""Says what a train step costs one device: what it computes, sends and holds."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a device sends in a step, of one kind and over the same mesh axes.

    Attributes:
        what: ``"parameter"``, ``"gradient"``, ``"optimizer"`` or ``"activation"``.
        names: The logical axes of what is moved, as far as they are known.
        mesh_axes: The mesh axes that it goes over, in the mesh's order.
        bytes: What one device sends in a whole step.
    """

    what: str
    names: tuple[Any, ...]
    mesh_axes: tuple[str, ...]
    bytes: float


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a train step costs one device.

    Attributes:
        flops: Floating point operations of products and convolutions; a multiplication and an
            addition are two.
        sent: What it sends.
        memory: The bytes that it holds where it holds most, by what they are for:
            ``"parameters"``, ``"optimizer"``, ``"gradients"``, ``"activations"``, ``"inputs"``.
    """

    flops: float
    sent: tuple[Sent, ...]
    memory: Mapping[str, float]

    @property
    def memory_bytes(self) -> int:
        """All that it holds."""
        return round(sum(self.memory.values()))

    @property
    def traffic(self) -> dict[tuple[str, ...], float]:
        """The bytes that are sent over each set of mesh axes."""
        return _sum((line.mesh_axes, line.bytes) for line in self.sent)


def extrapolate(one: StepCost, two: StepCost, blocks: int) -> StepCost:
    """The cost of a model of many equal blocks, line by line.

    Args:
        one: The cost of the model with one of its blocks.
        two: That with two.
        blocks: How many there are.

    >>> one, two = (StepCost(flops, (), {"parameters": 2.0}) for flops in (5.0, 7.0))
    >>> extrapolate(one, two, 11)
    StepCost(flops=25.0, sent=(), memory={'parameters': 2.0})
    """

    def extend(first: Mapping[Any, float], second: Mapping[Any, float]) -> dict[Any, float]:
        lines = {}
        for key in dict.fromkeys((*first, *second)):
            start = first.get(key, 0.0)
            lines[key] = max(start + (blocks - 1) * (second.get(key, 0.0) - start), 0.0)
        return lines

    flops = extend({"": one.flops}, {"": two.flops})[""]
    by_reason = (
        _sum(((line.what, line.names, line.mesh_axes), line.bytes) for line in cost.sent)
        for cost in (one, two)
    )
    sent = (Sent(*reason, bytes=count) for reason, count in extend(*by_reason).items())
    return StepCost(flops, tuple(sent), extend(one.memory, two.memory))


def _sum(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    found: dict[Any, float] = collections.defaultdict(float)
    for key, number in pairs:
        found[key] += number
    return dict(found)
