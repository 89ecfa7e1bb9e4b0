"""An array whose dimensions stand in memory in another order than its program says."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class OrderedArray:
    """A value of a program, and the array that holds it.

    Attributes:
        array: The array.
        dims: For each dimension of the array, which dimension of the value it is. A dimension of
            the value that is not there has the same elements at every index.
        shape: The shape of the value.

    >>> value = OrderedArray(jax.numpy.zeros((3, 2)), dims=(1, 0), shape=(2, 3, 4))
    >>> value.in_order((0, 1)).shape, value.whole().shape
    ((2, 3), (2, 3, 4))
    """

    array: Any
    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> "OrderedArray":
        """A value that is held as it is."""
        shape = jax.numpy.shape(array)
        return cls(array, tuple(range(len(shape))), shape)

    def in_order(self, order: Sequence[int]) -> Any:
        """The array with these dimensions of the value, which include all that it has.

        Args:
            order: The dimensions.
        """
        present = [dim for dim in order if dim in self.dims]
        permutation = tuple(self.dims.index(dim) for dim in present)
        array = self.array
        if permutation != tuple(range(len(permutation))):
            array = jax.lax.transpose(array, permutation)
        if len(present) == len(order):
            return array
        shape = tuple(self.shape[dim] for dim in order)
        return jax.lax.broadcast_in_dim(array, shape, tuple(map(order.index, present)))

    def whole(self) -> Any:
        """The value as an array of its own shape, in its own order."""
        return self.in_order(range(len(self.shape)))

    def order_with(self, needed: Iterable[int] = ()) -> tuple[int, ...]:
        """The dimensions that the array has, in its order, and then others that are needed."""
        return self.dims + tuple(dim for dim in needed if dim not in self.dims)

    def renamed(self, new: Sequence[int | None], shape: Sequence[int]) -> "OrderedArray":
        """The value with its dimensions counted anew.

        Args:
            new: For each dimension of the value the new one. None takes it away: it has length
                one, or is not in the array.
            shape: The new shape. A dimension that no other became is the same at every index, and
                so is one whose length was one.
        """
        shape = tuple(shape)
        kept, dropped = [], []
        for place, dim in enumerate(self.dims):
            later = new[dim]
            if later is None or shape[later] != self.shape[dim]:
                dropped.append(place)
            else:
                kept.append(int(later))
        array = jax.lax.squeeze(self.array, dropped) if dropped else self.array
        return OrderedArray(array, tuple(kept), shape)


def common_order(values: Sequence[OrderedArray], needed: Iterable[int] = ()) -> tuple[int, ...]:
    """An order for values of one shape: that of the largest, so that least has to move.

    Args:
        values: The values.
        needed: Dimensions that it shall have in any case.

    Returns:
        All dimensions that any of the arrays has, and those that are needed.

    >>> small = OrderedArray(jax.numpy.zeros(4), dims=(2,), shape=(2, 3, 4))
    >>> large = OrderedArray(jax.numpy.zeros((3, 2)), dims=(1, 0), shape=(2, 3, 4))
    >>> common_order([small, large])
    (1, 0, 2)
    """
    largest = max(values, key=lambda value: math.prod(value.shape[dim] for dim in value.dims))
    others = [dim for value in values for dim in value.dims]
    return largest.order_with(dict.fromkeys([*others, *needed]))
