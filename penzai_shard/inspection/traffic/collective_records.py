"""What is known of each collective of a step, and sums over many of them."""

import dataclasses
from collections.abc import Iterable

from penzai_shard.inspection.steps.layer_groups import owners_text
from penzai_shard.inspection.steps.operation_owners import Phase
from penzai_shard.report_trees import count_text


@dataclasses.dataclass(frozen=True)
class CollectivePart:
    """One of the arrays that a collective moves, of those that the compiler merged into it.

    Attributes:
        layers: Whose it is, as of ``Collective``.
        labels: The same as plans name them.
        phase: When it is moved.
        moves: What it is; empty if that is not known.
        payload_bytes: Its part of the payload, in bytes.
    """

    layers: tuple[str, ...]
    labels: tuple[str, ...]
    phase: Phase | None
    moves: str
    payload_bytes: int

    @property
    def owner(self) -> str:
        """Its labels in a short text; ``"unattributed"`` if none is known. See ``owners_text``."""
        return owners_text(self.labels)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One place in a compiled step where devices exchange data.

    Attributes:
        kind: ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"``,
            ``"ragged-all-to-all"``, ``"collective-permute"`` or ``"collective-broadcast"``.
        mesh_axes: The mesh axes that it goes over, in the mesh's order; None if its groups of
            devices are not those of mesh axes.
        axes_text: The same for people; ``"data (4 of 8)"`` where each group is a part of a mesh
            axis.
        group_size: How many devices exchange with each other.
        payload_bytes: The larger of what goes in and what comes out, on one device, in bytes.
        wire_bytes: What one device sends each time, in bytes; see ``ring_bytes``.
        times: How often one step executes it; None if the program does not say.
        at_most: Whether it may be executed less often, since it is in a branch of a condition.
        parts: Its payload divided among its owners: one part for each array that it moves, or a
            single one if the program does not say which array is whose.
        scattered_bytes: Of an all-reduce the part of the payload of which each device keeps its own
            slice alone, in bytes: a reduce-scatter in all but name, as the compiler for CPUs
            writes it.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``; None if that is not known.
        layers: The paths of the layers that own it, several where the compiler merged what they
            asked for; also ``"loss"`` and ``"optimizer"``. Empty if that is not known.
        labels: The same as plans name them, by the names of the parameters in them.
        moves: What it moves: paths of parameters, ``gradient of`` such a path, or a description
            of an activation. Empty if that is not known.
        arrays: What the larger side is on one device, such as ``("f32[8,16]",)``.
        name: Its name in the program.
        op_names: Where the program says that it comes from, with the paths of layers.
    """

    kind: str
    mesh_axes: tuple[str, ...] | None
    axes_text: str
    group_size: int
    payload_bytes: int
    wire_bytes: float
    times: int | None
    phase: Phase | None
    layers: tuple[str, ...]
    labels: tuple[str, ...]
    moves: tuple[str, ...]
    arrays: tuple[str, ...]
    name: str
    parts: tuple[CollectivePart, ...] = dataclasses.field(repr=False)
    op_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    at_most: bool = False
    scattered_bytes: int = 0

    @property
    def wire_bytes_as_meant(self) -> float:
        """What one device would send each time with a reduce-scatter for its scattered part."""
        return self.wire_bytes - ring_bytes("reduce-scatter", self.scattered_bytes, self.group_size)

    @property
    def dtype(self) -> str:
        """The dtype of what it moves, as programs write it; several joined by ``+``."""
        return "+".join(dict.fromkeys(array.partition("[")[0] for array in self.arrays))

    @property
    def owner(self) -> str:
        """Its labels in a short text; ``"unattributed"`` if none is known. See ``owners_text``."""
        return owners_text(self.labels)


@dataclasses.dataclass(frozen=True)
class CollectiveTotal:
    """What some collectives come to in one step, on one device.

    Collectives in a loop of which the program does not say how often it runs are in none of the
    sums but the last two. Those in a branch of a condition count as if it was always taken.

    Attributes:
        places: In how many places of the program they are.
        executed: How often they are executed.
        payload_bytes: The sum of their payloads over all executions, in bytes.
        wire_bytes: What one device sends in all executions, in bytes.
        unknown_places: How many more places there are that are executed an unknown number of times.
        unknown_wire_bytes: What one device would send if each of those was executed once, in bytes.
    """

    places: int = 0
    executed: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    unknown_places: int = 0
    unknown_wire_bytes: float = 0.0

    def executed_text(self, where: str = "") -> str:
        """How often they are executed, for people.

        >>> CollectiveTotal(executed=1, unknown_places=2).executed_text(" in one step")
        '1 collective in one step, and 2 that run an unknown number of times'
        """
        text = count_text(self.executed, "collective") + where
        if self.unknown_places:
            text += f", and {self.unknown_places} that run an unknown number of times"
        return text

    @classmethod
    def of(cls, collectives: Iterable[Collective]) -> "CollectiveTotal":
        """The total of some collectives."""
        return cls.of_parts((one, part) for one in collectives for part in one.parts)

    @classmethod
    def of_parts(cls, parts: Iterable[tuple[Collective, CollectivePart]]) -> "CollectiveTotal":
        """The total of parts of collectives: the bytes of these, and the times of their wholes."""
        payloads: dict[int, tuple[Collective, int]] = {}
        for one, part in parts:
            _, before = payloads.get(id(one), (one, 0))
            payloads[id(one)] = (one, before + part.payload_bytes)
        total = cls()
        for one, payload in payloads.values():
            total += cls._of_one(one, payload)
        return total

    @classmethod
    def _of_one(cls, one: Collective, payload: int) -> "CollectiveTotal":
        sent = one.wire_bytes * payload / one.payload_bytes if one.payload_bytes else 0.0
        if one.times is None:
            return cls(unknown_places=1, unknown_wire_bytes=sent)
        return cls(1, one.times, one.times * payload, one.times * sent)

    def __add__(self, other: "CollectiveTotal") -> "CollectiveTotal":
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return CollectiveTotal(*(a + b for a, b in zip(ours, theirs, strict=True)))


def ring_bytes(kind: str, payload_bytes: float, group_size: int) -> float:
    """What one device sends in one collective by a ring algorithm, in bytes.

    Of n devices, with P the payload on one device: (n - 1) / n P in an all-gather, a reduce-scatter
    and an all-to-all, 2 (n - 1) / n P in an all-reduce, P in a permute or a broadcast. No algorithm
    sends less in the first three and in an all-reduce. What devices of an all-to-all pass on for
    others, where the network makes them, is not counted.

    Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication
    Operations in MPICH"; Chan, Heimlich, Purkayastha and van de Geijn 2007, "Collective
    communication: theory, practice, and experience".

    Args:
        kind: The kind of collective.
        payload_bytes: The larger of operand and result on one device, in bytes.
        group_size: How many devices exchange with each other.

    >>> ring_bytes("all-gather", 1024, 4), ring_bytes("all-reduce", 1024, 4)
    (768.0, 1536.0)
    """
    if group_size == 1:
        return 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload_bytes)
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (group_size - 1) * payload_bytes / group_size
