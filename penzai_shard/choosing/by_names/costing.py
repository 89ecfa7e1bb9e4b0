"""What one candidate costs: its rules put into everything of a step that has a price."""

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np

from penzai_shard.choosing.by_names.layout_tables import LayoutTables
from penzai_shard.choosing.by_names.mesh_prices import MeshPrices
from penzai_shard.choosing.by_names.placements import Moved, Tensor
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
        self._placers = {table: mesh.placer(rules) for table, rules in tables.rules.items()}
        nowhere = mesh.placer(None)
        self._places = [
            (nowhere if table is None else self._placers[table])(tensor)
            for tensor, table in forms.index.arrays
        ]
        self._sent: dict[SentReason, float] = collections.defaultdict(float)

    def cost(self) -> StepCost:
        """What the step computes and sends; what it holds is not in it."""
        flops = self._operations()
        places = self._places
        for each, (before, after) in zip(
            self._forms.transfers, self._forms.index.transfers, strict=True
        ):
            if places[before] != places[after]:
                moved = self._mesh.moves(each.tensor, places[before], places[after])
                times = self._microbatches * each.times
                self._send("activation", each.where, each.tensor, moved, times)
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
        places, operation = self._places, self._mesh.operation
        for each, arrays in zip(self._forms.operations, self._forms.index.operations, strict=True):
            form = each.form
            found = operation(form, tuple([places[number] for number in arrays]))
            flops += found.flops * each.times
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
                self._send(what, each.where, tensor, moved, times * each.times)
        return flops

    def _parameters(self) -> None:
        """What is sent for parameters where they are used, and where they are updated."""
        places = self._places
        used: set[tuple[int, Table]] = set()
        for use, (before, after) in zip(self._forms.uses, self._forms.index.uses, strict=True):
            key = use.parameter, use.table
            if key in used and not self._is_dropped(use):
                continue
            used.add(key)
            if places[before] != places[after]:
                moved = self._mesh.moves(use.tensor, places[before], places[after])
                times = self._microbatches if self._is_dropped(use) else 1
                self._send("parameter", use.where, use.tensor, moved, times * use.times)
        stored, update = self._placers[Table.STORED], self._placers[Table.UPDATE]
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
        memory, index, places = self._forms.memory, self._forms.index, self._places
        local_bytes = self._mesh.local_bytes
        kinds = [
            local_bytes(tensor, places[number])
            for (tensor, _), number in zip(memory.kinds, index.kinds, strict=True)
        ]
        copies = [
            local_bytes(use.tensor, places[after]) if places[before] != places[after] else 0.0
            for use, (before, after) in zip(memory.uses, index.uses, strict=True)
        ]
        dropped = np.array([self._is_dropped(use) for use in memory.uses], bool)
        found = memory.most(np.array(kinds), np.array(copies), dropped)
        if self._microbatches > 1:
            # The sum of the gradients, in float32 at least.
            update = self._placers[Table.UPDATE]
            total = sum(
                number * local_bytes(tensor, update(tensor)) * max(4 / tensor.itemsize, 1)
                for tensor, _, number in self._stored.parameters
            )
            found = [each | {"gradients": each["gradients"] + total} for each in found]
        return found
