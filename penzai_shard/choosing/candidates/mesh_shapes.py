"""The mesh shapes that a layout is looked for on."""

from collections.abc import Iterator

from penzai_shard.errors import MeshError
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.inspection.devices.mesh_networks import HostNetwork, TorusNetwork


def mesh_shapes(hardware: Hardware | int) -> tuple[dict[str, int], ...]:
    """Every factorisation of a number of devices into mesh axes that layouts have a use for.

    These are ``data`` and ``model``, and where there are several slices or hosts also ``replica``,
    which lies between them. Mesh axes of size 1 are left out.

    Args:
        hardware: The devices, or how many there are.

    Returns:
        The sizes of the mesh axes by name, those with most for the batch first.

    Raises:
        MeshError: JAX can lay no mesh over the hardware, or a figure of it is not known.

    >>> mesh_shapes(4)
    ({'data': 4}, {'data': 2, 'model': 2}, {'model': 4})
    >>> mesh_shapes(Hardware.read("h100:16"))[:2]
    ({'data': 16}, {'replica': 2, 'data': 8})
    """
    if not isinstance(hardware, Hardware):
        return tuple(_factorisations(hardware, 1))
    found, refusal = [], None
    for shape in _factorisations(hardware.device_count, groups_of_devices(hardware)):
        try:
            hardware.of_mesh(shape)
        except MeshError as error:
            refusal = error
        else:
            found.append(shape)
    if refusal is not None and not found:
        raise refusal
    return tuple(found)


def groups_of_devices(hardware: Hardware) -> int:
    """How many slices or hosts the devices are in.

    >>> groups_of_devices(Hardware.read("v5e:16x16*4"))
    4
    """
    network = hardware.network
    if isinstance(network, HostNetwork):
        return network.hosts
    return network.topology.slices if isinstance(network, TorusNetwork) else 1


def _factorisations(devices: int, groups: int) -> Iterator[dict[str, int]]:
    for model in _divisors(devices):
        rest = devices // model
        for replica in _divisors(groups):
            if rest % replica == 0 and (replica == 1 or rest > replica):
                sizes = {"replica": replica, "data": rest // replica, "model": model}
                yield {name: size for name, size in sizes.items() if size > 1} or {"data": 1}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
