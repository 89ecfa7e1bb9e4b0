"""What was found for one mesh: each price is worked out once for all layouts that share it."""

from collections.abc import Callable
from typing import TypeAlias

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.by_names.operation_prices import OperationForm, OperationPrice, price
from penzai_shard.choosing.by_names.placements import Moved, Placement, Tensor, dimension_of

MeshItems: TypeAlias = tuple[tuple[str, int], ...]


class MeshPrices:
    """What was found for one mesh, by what it depends on; arrays and operations by identity.

    Whoever asks keeps the arrays and operations.

    Attributes:
        items: Name and size of each mesh axis.
        shape: The size of each mesh axis.
        pads: Whether lengths that do not divide are split too, the last part padded.
        places: Placements by the numbers that stand for them.
    """

    def __init__(self, mesh_items: MeshItems, pads: bool = False) -> None:
        self.items = mesh_items
        self.pads = pads
        self.shape = dict(mesh_items)
        self.places: list[Placement] = []
        self._numbers: dict[Placement, int] = {}
        self._placed: dict[AxisRules, dict[int, int]] = {}
        self._operations: dict[int, dict[tuple[int, ...], OperationPrice]] = {}
        self._moves: dict[tuple[int, int, int], tuple[Moved, ...]] = {}
        self._bytes: dict[tuple[int, int], float] = {}

    def placer(self, rules: AxisRules | None) -> Callable[[Tensor], int]:
        """What says where arrays are by some rules; None where any device makes its part."""
        if rules is None:
            return lambda tensor: self._number(((),) * len(tensor.dimensions))
        known = self._placed.setdefault(rules, {})

        def placed(tensor: Tensor) -> int:
            found = known.get(id(tensor))
            if found is None:
                found = known[id(tensor)] = self._number(
                    tensor.placed(rules, self.items, self.pads)
                )
            return found

        return placed

    def _number(self, placement: Placement) -> int:
        if placement not in self._numbers:
            self._numbers[placement] = len(self.places)
            self.places.append(placement)
        return self._numbers[placement]

    def operation(self, form: OperationForm, placements: tuple[int, ...]) -> OperationPrice:
        """The price of an operation."""
        known = self._operations.get(id(form))
        if known is None:
            known = self._operations[id(form)] = {}
        found = known.get(placements)
        if found is None:
            given = [self.places[number] for number in placements]
            found = known[placements] = price(form, given, self.shape, self.pads)
        return found

    def moves(self, tensor: Tensor, source: int, target: int) -> tuple[Moved, ...]:
        """What is sent to bring an array from one placement to another."""
        key = id(tensor), source, target
        found = self._moves.get(key)
        if found is None:
            before, after = dimension_of(self.places[source]), dimension_of(self.places[target])
            found = tensor.moves(before, after, {}, self.shape)
            self._moves[key] = found
        return found

    def local_bytes(self, tensor: Tensor, placement: int) -> float:
        """The bytes of one device's part."""
        key = id(tensor), placement
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = tensor.local_bytes(self.places[placement], self.shape)
        return found
