"""What a train step costs in any layout, by the names of logical axes alone."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.by_names.layout_tables import LayoutTables
from penzai_shard.choosing.by_names.operation_prices import OperationForm, OperationPrice, price
from penzai_shard.choosing.by_names.placements import Moved, Placement, Tensor, dimension_of, moves
from penzai_shard.choosing.by_names.step_arrays import ParameterUse, Table
from penzai_shard.choosing.by_names.step_forms import StepForms
from penzai_shard.choosing.by_names.stored_arrays import StoredArrays, tensor_of
from penzai_shard.choosing.by_names.traced_steps import TracedStep
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.step_costs import Sent, SentReason, StepCost
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.layouts import Layout
from penzai_shard.named_leaves import leaves_of

_MeshItems: TypeAlias = tuple[tuple[str, int], ...]
BATCH = "batch"
"""The logical axis that a step splits into microbatches."""


class NamePrices:
    """Prices the layouts of one training step by the names of logical axes, without compiling.

    The step is traced once without any layout, for each rematerialisation policy that a candidate
    asks for. Which dimensions of its values are which logical axis follows from the operations
    that tie them to parameters and inputs. A candidate then says by its rules where each value is,
    and an operation costs what brings its operands and its result there.

    Nothing is propagated, so that a value is where its names say, also where a compiler would
    choose otherwise. See ``notes`` for what has no name.

    Attributes:
        notes: What is not known, in sentences: operations with dimensions without a name, which
            count as whole.
    """

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem
        self._stored = StoredArrays.of(problem)
        self._inputs = tuple(map(tensor_of, leaves_of(dict(problem.inputs))))
        self._forms: dict[Any, StepForms] = {}
        self._pricers: dict[_MeshItems, _MeshPrices] = {}
        self._tables: dict[Any, LayoutTables] = {}
        self._held: dict[Any, tuple[int, int]] = {}

    @classmethod
    def of(cls, problem: TrainingProblem) -> "NamePrices":
        """Traces a step.

        Args:
            problem: The step.
        """
        prices = cls(problem)
        prices._forms_for(None, None, "vocabulary", 1)
        return prices

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not known, in sentences."""
        return tuple(dict.fromkeys(note for each in self._forms.values() for note in each.notes))

    def cost(self, candidate: Candidate) -> StepCost:
        """What the step costs one device in a layout.

        Args:
            candidate: Mesh, layout and microbatches.

        Raises:
            ShardingError: The layout does not fit the model or the mesh.
        """
        mesh_items = candidate.mesh_axes
        tables = self._tables_of(candidate.layout, mesh_items)
        forms = self._forms_for(
            tables.blocks, tables.policy, tables.vocabulary, candidate.microbatches
        )
        mesh = self._pricers.setdefault(mesh_items, _MeshPrices(mesh_items))
        costing = _Costing(forms, tables, mesh, candidate.microbatches, self._stored)
        return costing.cost(self._held_by(tables, mesh_items), self._input_bytes(tables, mesh))

    def _tables_of(self, layout: Layout, mesh_items: _MeshItems) -> LayoutTables:
        key = layout, mesh_items
        if key not in self._tables:
            self._tables[key] = LayoutTables.of(
                layout,
                self.problem.model,
                abstract_mesh(mesh_items),
                self._stored.has_moments,
            )
        return self._tables[key]

    def _forms_for(self, blocks: Any, policy: Any, vocabulary: Any, microbatches: int) -> StepForms:
        key = repr(blocks), policy, vocabulary
        if (*key, 1) not in self._forms:
            step = TracedStep.of(self.problem, blocks, vocabulary, policy)
            self._forms[*key, 1] = StepForms.of(step)
        if (*key, microbatches) not in self._forms:
            whole = self._forms[*key, 1]
            self._forms[*key, microbatches] = whole.of_microbatch(BATCH, microbatches)
        return self._forms[*key, microbatches]

    def _held_by(self, tables: LayoutTables, mesh_items: _MeshItems) -> tuple[int, int]:
        """The bytes of parameters and of the optimizer's state on one device."""
        key = mesh_items, tables.rules[Table.STORED], tables.optimizer
        if key not in self._held:
            mesh = abstract_mesh(mesh_items)
            self._held[key] = self._stored.bytes_per_device(mesh, key[1], key[2])
        return self._held[key]

    def _input_bytes(self, tables: LayoutTables, mesh: "_MeshPrices") -> float:
        placed = mesh.placer(tables.batch)
        return sum(mesh.local_bytes(tensor, placed(tensor)) for tensor in self._inputs)


def abstract_mesh(mesh_items: _MeshItems) -> AbstractMesh:
    """A mesh without devices."""
    names, sizes = zip(*mesh_items, strict=True)
    return AbstractMesh(sizes, names)


class _MeshPrices:
    """What was found for one mesh, by what it depends on; arrays and operations by identity."""

    def __init__(self, mesh_items: _MeshItems) -> None:
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


class _Costing:
    """The cost of one candidate."""

    def __init__(
        self,
        forms: StepForms,
        tables: LayoutTables,
        mesh: _MeshPrices,
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

    def cost(self, held: tuple[int, int], inputs: float) -> StepCost:
        flops = self._operations()
        for tensor, source, target, where in self._forms.transfers:
            places = self._placers[source](tensor), self._placers[target](tensor)
            if places[0] != places[1]:
                moved = self._mesh.moves(tensor, *places)
                self._send("activation", where, tensor, moved, self._microbatches)
        self._parameters()
        sent = tuple(Sent(*reason, bytes=bytes_) for reason, bytes_ in self._sent.items())
        memory = {"parameters": float(held[0]), "optimizer": float(held[1]), **self._peak()}
        memory["inputs"] = inputs
        return StepCost(flops * self._microbatches, sent, memory)

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

    def _peak(self) -> dict[str, float]:
        """Activations and gradients where most memory is used."""
        memory = self._forms.memory
        kinds = np.array(
            [self._mesh.local_bytes(t, self._placers[table](t)) for t, table in memory.kinds]
        )
        stored = self._placers[Table.STORED]
        copies = []
        for use in memory.uses:
            used = self._placers[use.table](use.tensor)
            is_copy = used != stored(use.tensor)
            copies.append(self._mesh.local_bytes(use.tensor, used) if is_copy else 0.0)
        dropped = np.array([self._is_dropped(use) for use in memory.uses], bool)
        found = memory.most(kinds, np.array(copies), dropped)
        if self._microbatches > 1:
            # The sum of the gradients, in float32 at least.
            update = self._placers[Table.UPDATE]
            found["gradients"] += sum(
                count * self._mesh.local_bytes(tensor, update(tensor)) * max(4 / tensor.itemsize, 1)
                for tensor, _, count in self._stored.parameters
            )
        return found


def _nowhere(tensor: Tensor) -> Placement:
    """Where an array is that any device can make."""
    return ((),) * len(tensor.dimensions)
