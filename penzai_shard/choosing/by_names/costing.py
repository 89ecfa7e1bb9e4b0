"""What one candidate costs: its rules put into everything of a step that has a price."""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from penzai_shard.choosing.by_names.layout_tables import LayoutTables
from penzai_shard.choosing.by_names.mesh_prices import MeshPrices
from penzai_shard.choosing.by_names.placements import Moved, Placement, Tensor
from penzai_shard.choosing.by_names.step_arrays import ParameterUse, Table
from penzai_shard.choosing.by_names.step_forms import StepForms
from penzai_shard.choosing.by_names.stored_arrays import StoredArrays
from penzai_shard.choosing.step_costs import Sent, SentReason, StepCost


class Costing:
    """The cost of one candidate."""

    def __init__(
        self,
        forms: StepForms,
        tables: LayoutTables,
        mesh: MeshPrices,
        microbatches: int,
        stored: StoredArrays,
    ) -> None:
        self._forms = forms
        self._tables = tables
        self._mesh = mesh
        self._microbatches = microbatches
        self._stored = stored
        self._placers: dict[Table | None, Callable[[Tensor], Placement]] = {
            table: mesh.placer(rules) for table, rules in tables.rules.items()
        }
        self._placers[None] = _nowhere
        self._sent: dict[SentReason, float] = collections.defaultdict(float)

    def cost(self) -> StepCost:
        """What the step computes and sends; what it holds is not in it."""
        flops = self._operations()
        for tensor, source, target, where in self._forms.transfers:
            places = self._placers[source](tensor), self._placers[target](tensor)
            if places[0] != places[1]:
                moved = self._mesh.moves(tensor, *places)
                self._send("activation", where, tensor, moved, self._microbatches)
        self._parameters()
        sent = tuple(Sent(*reason, bytes=bytes_) for reason, bytes_ in self._sent.items())
        return StepCost(flops * self._microbatches, sent, {})

    def _send(
        self, what: str, where: str, tensor: Tensor, moved: Iterable[Moved], times: int
    ) -> None:
        for mesh_axes, bytes_ in moved:
            self._sent[what, where, tensor.names, mesh_axes] += bytes_ * times

    def _operations(self) -> float:
        """Prices the operations; returns their floating point operations."""
        flops = 0.0
        brought: set[Any] = set()
        for each in self._forms.operations:
            form = each.form
            placements = tuple(
                self._placers[table](tensor)
                for table, tensor in zip(each.tables, form.tensors, strict=True)
            )
            found = self._mesh.operation(form, placements)
            flops += found.flops
            for position, needed, moved in found.sent:
                if position < len(form.operands):
                    key = each.values[position], needed
                    if key in brought:
                        continue
                    brought.add(key)
                tensor = form.tensors[position]
                # Compilers gather what the loop over microbatches does not change in front of it.
                what = each.what(position)
                times = 1 if what == "parameter" else self._microbatches
                self._send(what, each.where, tensor, moved, times)
        return flops

    def _parameters(self) -> None:
        """What is sent for parameters where they are used, and where they are updated."""
        stored, update = self._placers[Table.STORED], self._placers[Table.UPDATE]
        used: set[tuple[int, Table]] = set()
        for use in self._forms.uses:
            key = use.parameter, use.table
            if key in used and not self._is_dropped(use):
                continue
            used.add(key)
            source, target = stored(use.tensor), self._placers[use.table](use.tensor)
            if source != target:
                moved = self._mesh.moves(use.tensor, source, target)
                times = self._microbatches if self._is_dropped(use) else 1
                self._send("parameter", use.where, use.tensor, moved, times)
        for tensor, where, count in self._stored.parameters:
            source, target = update(tensor), stored(tensor)
            if source != target:
                moved = self._mesh.moves(tensor, source, target)
                self._send("optimizer", where, tensor, moved, count)

    def _is_dropped(self, use: ParameterUse) -> bool:
        """Whether what was gathered for the forward pass is not there any more."""
        is_remade = self._tables.policy is not None and use.table == Table.IN_BLOCKS
        return use.is_backward and (is_remade or self._tables.gathers_again)

    def peaks(self) -> list[dict[str, float]]:
        """Activations and gradients in each stage of the step where most memory is used."""
        memory = self._forms.memory
        kinds = [self._mesh.local_bytes(t, self._placers[table](t)) for t, table in memory.kinds]
        stored = self._placers[Table.STORED]
        copies = []
        for use in memory.uses:
            used = self._placers[use.table](use.tensor)
            is_copy = used != stored(use.tensor)
            copies.append(self._mesh.local_bytes(use.tensor, used) if is_copy else 0.0)
        dropped = np.array([self._is_dropped(use) for use in memory.uses], bool)
        found = memory.most(np.array(kinds), np.array(copies), dropped)
        if self._microbatches > 1:
            # The sum of the gradients, in float32 at least.
            update = self._placers[Table.UPDATE]
            total = sum(
                number
                * self._mesh.local_bytes(tensor, update(tensor))
                * max(4 / tensor.itemsize, 1)
                for tensor, _, number in self._stored.parameters
            )
            found = [each | {"gradients": each["gradients"] + total} for each in found]
        return found


def _nowhere(tensor: Tensor) -> Placement:
    """Where an array is that any device can make."""
    return ((),) * len(tensor.dimensions)
