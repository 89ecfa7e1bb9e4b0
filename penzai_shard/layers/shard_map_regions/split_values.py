"""What is known of a value in a region: which of its dimensions each device holds a part of."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from penzai_shard.library_apis.jax_api import Tracer

Shape = tuple[int, ...]


class MixesElementsError(Exception):
    """One operation does not treat the elements of a split dimension independently."""


@dataclasses.dataclass(frozen=True)
class Split:
    """A dimension of which each device holds a contiguous part, by its position.

    Attributes:
        mesh_axes: The mesh axes that it is split over, the major one first.
        parts: How many parts there are.
        name: Its logical axis, for messages alone.
    """

    mesh_axes: tuple[str, ...]
    parts: int
    name: Hashable | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        what = "a split dimension" if self.name is None else f"logical axis {self.name!r}"
        one = len(self.mesh_axes) == 1
        over = f"mesh axis {self.mesh_axes[0]!r}" if one else f"mesh axes {self.mesh_axes}"
        return f"{what}, which is split over {over}"


UNIFORM: Literal["uniform"] = "uniform"
"""A dimension with another length on a device than in the whole, along which nothing changes."""

Dimension = Split | Literal["uniform"] | None
"""None stands for a dimension that every device holds whole."""

Dimensions = tuple[Dimension, ...]


@dataclasses.dataclass(frozen=True)
class Flow:
    """What is known of one value.

    Attributes:
        dims: What each of its dimensions is.
        random: Whether it comes from random numbers that differ between the devices, without a
            split dimension for them to differ along.
        partial: In the analysis of a gradient: the mesh axes over which the devices' values
            still have to be added up.
        zero: Whether it is zero throughout.
        refused: Which refused operations it depends on.
    """

    dims: Dimensions
    random: bool = False
    partial: frozenset[str] = frozenset()
    zero: bool = False
    refused: frozenset[int] = frozenset()

    @property
    def plain(self) -> bool:
        """Whether every device holds the same whole value."""
        return not (self.random or self.partial or any(self.dims))

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes over which it is split."""
        return mesh_axes_of(self.dims)


def mesh_axes_of(dims: Iterable[Dimension]) -> frozenset[str]:
    """The mesh axes over which dimensions are split."""
    return frozenset(name for dim in dims if isinstance(dim, Split) for name in dim.mesh_axes)


def unsplit(rank: int) -> Dimensions:
    """The dimensions of a value that every device holds whole."""
    return (None,) * rank


def refused_by(flows: Iterable[Flow]) -> frozenset[int]:
    """Which refused operations any of some values depends on."""
    return frozenset().union(*(flow.refused for flow in flows))


def join(dims: Sequence[Dimension]) -> Dimension:
    """What a dimension of an elementwise result is, from the same dimension of the operands.

    >>> join([UNIFORM, Split(("data",), 4)]).mesh_axes
    ('data',)
    """
    split = next((dim for dim in dims if isinstance(dim, Split)), None)
    if split is None:
        return UNIFORM if UNIFORM in dims else None
    for dim in dims:
        if isinstance(dim, Split) and dim != split:
            raise MixesElementsError(f"it combines {split} with {dim}")
        if dim is None:
            raise MixesElementsError(f"it combines {split} with values that are not split")
    return split


def join_flows(flows: Sequence[Flow]) -> Flow:
    """What a value is that is one of several, or changes from one into another in a loop."""
    if refused := refused_by(flows):
        return Flow(unsplit(len(flows[0].dims)), refused=refused)
    dims = tuple(join(dims) for dims in zip(*(flow.dims for flow in flows), strict=True))
    partial = {flow.partial for flow in flows if not flow.zero}
    if len(partial) > 1:
        raise MixesElementsError("it combines a sum over a part with one over the whole")
    return Flow(
        dims,
        random=any(flow.random for flow in flows),
        partial=partial.pop() if partial else frozenset(),
        zero=all(flow.zero for flow in flows),
    )


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of the program, with the whole lengths and with those of a part.

    Attributes:
        name: The name of its primitive.
        whole: Its parameters with the whole lengths.
        part: Those with the lengths of a part.
        flows: What is known of its operands.
        inputs: The shapes of its operands, whole and part.
        outputs: The shapes of its results, whole and part.
        splits: The splits of the region's inputs.
        gradient: Whether this is part of a derivative that is summed over the devices.
    """

    name: str
    whole: dict[str, Any]
    part: dict[str, Any]
    flows: tuple[Flow, ...]
    inputs: tuple[tuple[Shape, Shape], ...]
    outputs: tuple[tuple[Shape, Shape], ...]
    splits: frozenset[Split]
    gradient: bool = False

    def dims(self, operand: int = 0) -> Dimensions:
        """What the dimensions of an operand are."""
        return self.flows[operand].dims

    def not_along(self, operand: int, dimensions: Iterable[int], verb: str) -> None:
        """Refuses to do something along dimensions that are not whole on every device."""
        for dimension in dimensions:
            self.not_split(self.dims(operand)[dimension], verb)

    @staticmethod
    def not_split(dim: Dimension, verb: str) -> None:
        """Refuses to do something along a dimension that is not whole on every device."""
        if dim == UNIFORM:
            raise MixesElementsError(f"it {verb} a dimension whose length depends on the device")
        if dim is not None:
            raise MixesElementsError(f"it {verb} {dim}")

    def spans(self, operand: int, dimension: int, whole: int, part: int) -> bool:
        """Whether a length is that of an operand's dimension, in the whole and in a part."""
        of_whole, of_part = self.inputs[operand]
        return of_whole[dimension] == whole and of_part[dimension] == part


def same_value(one: Any, other: Any) -> bool:
    """Whether two parameters or constants of programs are the same.

    >>> same_value((1, np.ones(2)), (1, np.ones(2))), same_value(float("nan"), float("nan"))
    (True, True)
    >>> same_value(1, 1.0)
    False
    """
    if one is other:
        return True
    if isinstance(one, Tracer) or isinstance(other, Tracer) or type(one) is not type(other):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
        return str(one) == str(other) and same_value(
            tuple(getattr(one, "consts", ())), tuple(getattr(other, "consts", ()))
        )
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        with jax.ensure_compile_time_eval():
            if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
                one, other = (jax.random.key_data(value) for value in (one, other))
            return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return bool(one == other) or (one != one and other != other)
