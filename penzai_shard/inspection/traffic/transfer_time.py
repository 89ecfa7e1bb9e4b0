"""The least time in which a network can carry what a step moves."""

import itertools
from collections.abc import Callable, Iterable, Mapping

from penzai_shard.errors import MeshError, raise_all
from penzai_shard.inspection.devices.quantities import is_positive
from penzai_shard.inspection.traffic.collective_records import Collective
from penzai_shard.meshes import mesh_text


def least_time(
    collectives: Iterable[Collective],
    mesh_shape: Mapping[str, int],
    bandwidth: Mapping[str, float],
) -> float:
    """A lower bound of the time that a step's collectives take, in seconds.

    All of them may run at the same time, and so may the links of different mesh axes; one that goes
    over several mesh axes may use the links of all of them. What goes over any set of mesh axes
    then takes at least its bytes divided by what their links carry together, and the bound is that
    of the worst set, which is also enough (by the theorem on flows and cuts).

    Args:
        collectives: Those of one step. One of unknown times or in a branch of a condition counts as
            not executed, and one whose groups are not those of mesh axes as going over all of them.
        mesh_shape: The sizes of the mesh axes.
        bandwidth: For each mesh axis how many bytes one device can send over its links in a second.

    Raises:
        MeshError: A mesh axis that the collectives go over has no bandwidth, one is not of the
            mesh, or one is not a positive number.
    """
    load: dict[frozenset[str], float] = {}
    for one in collectives:
        axes = frozenset(mesh_shape if one.mesh_axes is None else one.mesh_axes)
        certain = 0 if one.at_most else one.times or 0
        load[axes] = load.get(axes, 0.0) + one.wire_bytes * certain
    used = [axis for axis in mesh_shape if any(axis in axes for axes in load)]
    _refuse_other_bandwidths(bandwidth, mesh_shape, used)
    return time_of_loads(load, lambda chosen: sum(bandwidth[axis] for axis in chosen))


def time_of_loads(
    loads: Mapping[frozenset[str], float], carried: Callable[[frozenset[str]], float]
) -> float:
    """A lower bound of the time for what is sent over sets of mesh axes, in seconds.

    Args:
        loads: The bytes that one device sends over each set of mesh axes.
        carried: How many bytes the links of some mesh axes carry together in a second.

    >>> time_of_loads({frozenset({"data"}): 6.0, frozenset({"data", "model"}): 6.0}, len)
    6.0
    """
    return _time_over(loads, carried, worst_set(loads, carried))


def worst_set(
    loads: Mapping[frozenset[str], float], carried: Callable[[frozenset[str]], float]
) -> frozenset[str]:
    """The mesh axes whose links are busy for as long as ``time_of_loads`` says; the fewest.

    Args:
        loads: As for ``time_of_loads``.
        carried: The same.

    >>> sorted(worst_set({frozenset({"data"}): 6.0, frozenset({"data", "model"}): 7.0}, len))
    ['data', 'model']
    """
    used = sorted({axis for axes, bytes_ in loads.items() if bytes_ for axis in axes})
    sets = (
        frozenset(chosen)
        for size in range(1, len(used) + 1)
        for chosen in itertools.combinations(used, size)
    )
    return max(sets, key=lambda chosen: _time_over(loads, carried, chosen), default=frozenset())


def _time_over(
    loads: Mapping[frozenset[str], float],
    carried: Callable[[frozenset[str]], float],
    chosen: frozenset[str],
) -> float:
    """The time for what stays within some mesh axes."""
    if not chosen:
        return 0.0
    return sum(bytes_ for axes, bytes_ in loads.items() if axes <= chosen) / carried(chosen)


def _refuse_other_bandwidths(
    bandwidth: Mapping[str, float], mesh_shape: Mapping[str, int], used: Iterable[str]
) -> None:
    if not isinstance(bandwidth, Mapping):
        example = ", ".join(f"{axis!r}: 1e11" for axis in mesh_shape or ("data",))
        raise MeshError(
            "the bandwidth is given for each mesh axis, in bytes per second, not as "
            f"{bandwidth!r}. Write time(bandwidth={{{example}}})."
        )
    mesh = mesh_text(mesh_shape)
    problems = [
        f"mesh axis {axis!r}: the step moves data over it, and its bandwidth is not given. "
        f"Add {axis!r}: 1e11 (bytes per second that one device sends over this mesh axis)."
        for axis in used
        if axis not in bandwidth
    ]
    problems += [
        f"mesh axis {axis!r}: the mesh does not have it ({mesh}). Remove it from the bandwidth."
        for axis in bandwidth
        if axis not in mesh_shape
    ]
    problems += [
        f"mesh axis {axis!r}: its bandwidth must be a positive number of bytes per second, "
        f"not {given!r}."
        for axis, given in bandwidth.items()
        if not is_positive(given)
    ]
    raise_all(MeshError, "the least time of the collectives is not known:", problems)
