"""What was found for one mesh: each price is worked out once for all layouts that share it."""

from collections.abc import Callable
from typing import TypeAlias

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.by_names.operation_prices import OperationForm, OperationPrice, price
from penzai_shard.choosing.by_names.placements import Moved, Placement, Tensor, dimension_of, moves

MeshItems: TypeAlias = tuple[tuple[str, int], ...]


class MeshPrices:
    """What was found for one mesh, by what it depends on; arrays and operations by identity.

    Whoever asks keeps the arrays and operations.

    Attributes:
        items: Name and size of each mesh axis.
        shape: The size of each mesh axis.
    """

    def __init__(self, mesh_items: MeshItems) -> None:
        self.items = mesh_items
        self.shape = dict(mesh_items)
        self._placed: dict[AxisRules, dict[int, Placement]] = {}
        self._operations: dict[tuple[int, tuple[Placement, ...]], OperationPrice] = {}
        self._moves: dict[tuple[int, Placement, Placement], tuple[Moved, ...]] = {}
        self._bytes: dict[tuple[int, Placement], float] = {}

    def placer(self, rules: AxisRules) -> Callable[[Tensor], Placement]:
        """What says where arrays are by some rules."""
        known = self._placed.setdefault(rules, {})

        def placed(tensor: Tensor) -> Placement:
            found = known.get(id(tensor))
            if found is None:
                found = known[id(tensor)] = tensor.placed(rules, self.items)
            return found

        return placed

    def operation(self, form: OperationForm, placements: tuple[Placement, ...]) -> OperationPrice:
        """The price of an operation."""
        key = id(form), placements
        found = self._operations.get(key)
        if found is None:
            found = self._operations[key] = price(form, placements, self.shape)
        return found

    def moves(self, tensor: Tensor, source: Placement, target: Placement) -> tuple[Moved, ...]:
        """What is sent to bring an array from one placement to another."""
        key = id(tensor), source, target
        found = self._moves.get(key)
        if found is None:
            places = dimension_of(source), dimension_of(target)
            found = tuple(moves(tensor.nbytes, *places, frozenset(), self.shape))
            self._moves[key] = found
        return found

    def local_bytes(self, tensor: Tensor, placement: Placement) -> float:
        """The bytes of one device's part."""
        key = id(tensor), placement
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = tensor.local_bytes(placement, self.shape)
        return found
