"""The devices that ``choose_layout`` is asked about, read from its arguments."""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from jax import Device
from jax.sharding import AbstractMesh, Mesh

from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.inspection.devices.mesh_networks import TorusNetwork
from penzai_shard.inspection.devices.published_figures import PUBLISHED
from penzai_shard.inspection.devices.quantities import is_positive, read_bytes
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.meshes import mesh_text

_EXAMPLES = 'a name such as "v5e:32", a mesh, or a number with hardware="v5e"'
_FEW_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class AskedDevices:
    """The devices that a layout is looked for.

    Attributes:
        hardware: What they are.
        mesh_shape: The size of each mesh axis, if a mesh was given; None leaves it open.
        memory: What a step may need of the memory of one, in bytes.
    """

    hardware: Hardware
    mesh_shape: Mapping[str, int] | None
    memory: int

    @property
    def words(self) -> str:
        """What they are, for people."""
        count = self.hardware.device_count
        mesh = f", mesh ({mesh_text(self.mesh_shape)})" if self.mesh_shape is not None else ""
        return f"{count:,} devices ({self.hardware.name}{mesh})"

    def compiled_for(self, compile_for: Any) -> Topology | None:
        """The devices that steps are compiled for; None for simulated ones.

        Args:
            compile_for: ``"simulated"`` or ``"hardware"``.

        Raises:
            RuleTypeError: It is neither; or the hardware is not of TPUs.
        """
        if compile_for not in ("simulated", "hardware"):
            raise RuleTypeError(
                f"compile_for is 'simulated' or 'hardware', not {compile_for!r}. Leave it out for "
                "simulated devices."
            )
        if compile_for == "simulated":
            return None
        if not isinstance(self.hardware.network, TorusNetwork):
            raise RuleTypeError(
                "compile_for='hardware' compiles for TPUs, and these are "
                f"{self.hardware.name}. Leave it out, which compiles for simulated devices; "
                "compile_ahead compiles one step for GPUs, with their target configuration."
            )
        return self.hardware.network.topology


def read_devices(devices: Any, hardware: Any, memory: Any) -> AskedDevices:
    """Reads the arguments of ``choose_layout`` that say what is computed on.

    Args:
        devices: The name of hardware, a mesh, JAX's devices, or a number.
        hardware: What a mesh is of, or a number: ``"v5e"``, ``"v5e:4x8"`` or ``Hardware``.
        memory: The memory of a device as a number of bytes or a text such as ``"16GiB"``; None
            for what programs can have of it.

    Raises:
        ShardingError: They cannot be read, or do not go together.
    """
    mesh_shape = None
    if isinstance(devices, str):
        if hardware is not None:
            raise RuleTypeError(
                f"devices={devices!r} says what they are already. Leave out hardware=."
            )
        found = Hardware.read(devices)
    elif isinstance(devices, Mesh | AbstractMesh):
        mesh_shape = {str(name): size for name, size in devices.shape.items()}
        if not mesh_shape:
            raise MeshError(
                "devices: the mesh has no mesh axes. Write "
                'devices=penzai_shard.make_mesh({"data": 8}, abstract=True).'
            )
        members = devices.devices.flat if isinstance(devices, Mesh) else ()
        found = _of_count(devices.size, hardware, f"the mesh ({mesh_text(devices)}) has ", members)
    elif _are_devices(devices):
        found = _of_count(len(devices), hardware, "", devices)
    elif _is_number(devices) and devices > 0 and float(devices).is_integer():
        found = _of_count(int(devices), hardware)
    else:
        meant = _meant(devices, hardware)
        raise RuleTypeError(f"devices must be {_EXAMPLES}, not {devices!r:.80}.{meant}")
    return AskedDevices(found, mesh_shape, _memory(memory, found))


def _are_devices(given: Any) -> bool:
    return (
        isinstance(given, list | tuple)
        and bool(given)
        and all(isinstance(each, Device) for each in given)
    )


def _is_number(given: Any) -> bool:
    return isinstance(given, numbers.Real) and not isinstance(given, bool)


def _meant(devices: Any, hardware: Any) -> str:
    """What to write in the place of what stands for devices elsewhere."""
    shape = None
    if isinstance(devices, Mapping) and devices:
        shape = dict(devices)
    elif isinstance(devices, list | tuple) and devices and all(map(_is_number, devices)):
        shape = dict(zip(("data", "model", "expert", "replica"), devices, strict=False))
    if shape is None:
        return ""
    speed = ', hardware="v5e"' if hardware is None else ""
    return f" Write devices=penzai_shard.make_mesh({shape}, abstract=True){speed}."


def _of_count(count: int, hardware: Any, of: str = "", members: Iterable[Device] = ()) -> Hardware:
    """The hardware of so many devices, of which some are known; ``of`` says whose they are."""
    kinds = {device.device_kind for device in members}
    if hardware is None and kinds:
        known = {figures.device_kind: name for name, figures in PUBLISHED.items()}
        names = {known[kind] for kind in kinds if kind in known}
        if len(names) == 1 and kinds <= known.keys():
            hardware = names.pop()
    if isinstance(hardware, str):
        hardware = Hardware.read(hardware if ":" in hardware else f"{hardware}:{count}")
    if hardware is None:
        kind = f" of kind {' and '.join(map(repr, sorted(kinds)))}" if kinds else ""
        raise MeshError(
            f"devices: {of or 'there are '}{count:,} devices{kind}, and how fast they are is not "
            'known. Say what they are, hardware="v5e", or describe others: '
            'hardware=Hardware(...). Simulated devices as they are: hardware="cpu", memory="2GiB".'
        )
    if not isinstance(hardware, Hardware):
        raise RuleTypeError(
            f'hardware must be a name such as "v5e", or Hardware(...), not {hardware!r:.80}.'
        )
    if hardware.device_count != count:
        raise MeshError(
            f"hardware {hardware.name!r} has {hardware.device_count:,} devices, and there are "
            f"{count:,}. Give as many, or its kind alone: hardware={hardware.name.split(':')[0]!r}."
        )
    return hardware


def _memory(memory: Any, hardware: Hardware) -> int:
    if isinstance(memory, str):
        memory = read_bytes(memory, "memory")
    if memory is None:
        if hardware.memory is None:
            raise MeshError(
                f"how much memory a device of {hardware.name!r} has is not known. Say it: "
                'memory="16GiB".'
            )
        return hardware.memory
    if not is_positive(memory):
        raise RuleTypeError(
            f'memory must be a number of bytes, or a text such as "16GiB", not {memory!r}.'
        )
    if memory < _FEW_BYTES:
        raise RuleTypeError(
            f"memory: {memory} is a number of bytes, and too few for any step. Write '{memory}GiB'."
        )
    return int(memory)
