"""Programs of several TPU slices: what a slice's program says of the others.

A compiler for TPUs makes one program for each slice, all alike. Its devices are those of a slice,
and so are the groups of its collectives. What goes between slices goes by their hosts: a ``send``
and a ``recv`` with the same rendezvous, which say what kind of collective they are and which
devices of which slices exchange with each other.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from penzai_shard.compiled_programs.device_groups import Groups, checked_groups
from penzai_shard.compiled_programs.instruction_text import ArrayType, arrays_of
from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.errors import ProgramError

_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_TYPE = "_xla_megascale_transfer_type"
_TARGET = "_xla_megascale_target"
_SETTING = re.compile(r'(\w+)=("[^"]*"|\{\{[^{}]*\}(?:,\{[^{}]*\})*\})')
# All devices of some slices, each with those of the same number; or groups, or pairs.
_ACROSS = re.compile(r'"\{(\d+(?:,\d+)*)\}x\{0:(\d+)\}"')
_GROUPS = re.compile(r"\{\{\d+(?:,\d+)*\}(?:,\{\d+(?:,\d+)*\})*\}")
_PAIRS = re.compile(r"\{\{\d+->\d+\}(?:,\{\d+->\d+\})*\}")
# Slices count from 1, their devices from 0: device 3 of the second slice is 200003.
_OF_A_SLICE = 100_000


def settings_of(one: Instruction) -> Mapping[str, str]:
    """What an instruction says in its frontend attributes."""
    return dict(_SETTING.findall(one.attributes.get("frontend_attributes", "")))


def is_between_slices(one: Instruction) -> bool:
    """Whether a ``send`` or ``recv`` goes between slices, and not to the host alone."""
    return _TYPE in settings_of(one)


def kind_of_transfer(one: Instruction) -> str | None:
    """Which kind of collective a ``send`` between slices is a part of; None for anything else."""
    if one.opcode != "send":
        return None
    return _KINDS.get(settings_of(one).get(_TYPE, "").strip('"'))


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices that a program runs on, one copy of it on each.

    Attributes:
        devices: Of each slice its devices, in its program's order, as positions in the mesh.
    """

    devices: Groups

    @classmethod
    def of(cls, module: Module, device_count: int, slice_of: Sequence[int] | None) -> "Slices":
        """The slices of a program.

        Args:
            module: The program.
            device_count: How many devices it runs on.
            slice_of: Which slice each device is of; None if those of one are next to each other.

        Raises:
            ProgramError: The program is not for such slices.
        """
        size = module.partitions
        if size is None and slice_of is not None:
            # Bytes of a module do not say it.
            size = device_count // len(set(slice_of))
        if size in (None, device_count):
            return cls((tuple(range(device_count)),))
        if slice_of is None:
            slice_of = [i // size for i in range(device_count)]
        found: dict[int, list[int]] = {}
        for position, number in enumerate(slice_of):
            found.setdefault(number, []).append(position)
        if any(len(devices) != size for devices in found.values()):
            raise ProgramError(
                f"{module.name}: the program is for slices of {size} devices each, and there are "
                f"{device_count} devices, in slices of "
                + ", ".join(str(len(devices)) for devices in found.values())
                + "."
            )
        return cls(tuple(tuple(devices) for _, devices in sorted(found.items())))

    @property
    def size(self) -> int:
        """How many devices each slice has."""
        return len(self.devices[0])

    def everywhere(self, groups: Groups) -> Groups:
        """Groups of the devices of a slice, as groups of positions in the mesh, of all slices."""
        return groups if len(self.devices) == 1 else _everywhere(self.devices, groups)

    def across(self, one: Instruction) -> Groups:
        """The groups of devices that a transfer between slices goes over, or its pairs.

        Raises:
            ValueError: It says so in a form that is not known.
        """
        target = settings_of(one).get(_TARGET, "")
        form = _PAIRS if kind_of_transfer(one) == "collective-permute" else _GROUPS
        if form.fullmatch(target):
            rows = re.findall(r"\{([\d,>-]+)\}", target)
            return self._checked(tuple(self._positions(row) for row in rows), form is _PAIRS)
        every = _ACROSS.fullmatch(target)
        if every is None or form is _PAIRS or int(every[2]) + 1 != self.size:
            raise ValueError(f"slices and devices in a form that is not known: {target!r}")
        numbers = [int(number) for number in every[1].split(",")]
        if sorted(numbers) != list(range(1, len(self.devices) + 1)):
            raise ValueError(f"slices {every[1]} of {len(self.devices)}")
        return tuple(zip(*self.devices, strict=True))

    def _positions(self, row: str) -> tuple[int, ...]:
        found = []
        for number in re.findall(r"\d+", row):
            which, device = divmod(int(number), _OF_A_SLICE)
            if not (0 < which <= len(self.devices) and device < self.size):
                raise ValueError(f"there is a device {number} of {len(self.devices)} slices")
            found.append(self.devices[which - 1][device])
        return tuple(found)

    def _checked(self, groups: Groups, pairs: bool) -> Groups:
        count = sum(map(len, self.devices))
        for side in zip(*groups, strict=True) if pairs else ():
            checked_groups((side,), count)
        return groups if pairs else checked_groups(groups, count)


@functools.lru_cache(maxsize=256)
def _everywhere(slices: Groups, groups: Groups) -> Groups:
    return tuple(tuple(devices[i] for i in group) for devices in slices for group in groups)


def partner(module: Module, one: Instruction) -> Instruction | None:
    """The ``recv`` of a ``send`` between slices, or the other way around."""
    rendezvous = settings_of(one).get(_RENDEZVOUS)
    if rendezvous is None:
        return None
    other = {"send": "recv", "recv": "send"}[one.opcode]
    for candidate in module.computations[one.computation]:
        if candidate.opcode == other and settings_of(candidate).get(_RENDEZVOUS) == rendezvous:
            return candidate
    return None


def received(module: Module, sent: Instruction) -> tuple[ArrayType, ...]:
    """What comes in from other slices where something is sent to them.

    Raises:
        ValueError: Nothing does.
    """
    recv = partner(module, sent)
    if recv is None or isinstance(recv.read.type, ArrayType):
        raise ValueError("nothing is received where it is sent")
    return arrays_of(recv.read.type[0])
