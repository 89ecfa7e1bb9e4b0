"""What a train step costs in any layout, by the names of logical axes alone."""

from typing import Any

from penzai_shard.choosing.by_names.costing import Costing
from penzai_shard.choosing.by_names.layout_tables import LayoutTables
from penzai_shard.choosing.by_names.mesh_prices import MeshItems, MeshPrices
from penzai_shard.choosing.by_names.step_arrays import Table
from penzai_shard.choosing.by_names.step_forms import StepForms
from penzai_shard.choosing.by_names.step_reading import read_step
from penzai_shard.choosing.by_names.stored_arrays import StoredArrays, tensor_of
from penzai_shard.choosing.by_names.traced_steps import TracedStep
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.shallow_models import Shallow, shallow
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.layouts import Layout
from penzai_shard.named_leaves import leaves_of
from penzai_shard.rule_kinds import OnIndivisible


class NamePrices:
    """Prices the layouts of one training step by the names of logical axes, without compiling.

    The step is traced once without any layout, for each rematerialisation policy that a candidate
    asks for; of a deep model the steps of one and of two blocks are. Which dimensions of its values
    are which logical axis follows from the operations that tie them to parameters and inputs. A
    candidate then says by its rules where each value is, and an operation costs what brings its
    operands and its results there.

    What is known of compilers is in it: sums are scattered where the result is split, what a loop
    over microbatches does not change is gathered once, and a gathered parameter is kept for the
    backward pass unless the layout has it gathered again. Nothing is propagated, so that a value is
    where its names say, also where a compiler would choose otherwise.

    Memory is counted over the program in its order: what products and the like make is written
    down, and what is computed element by element is computed again where it is used. Compilers
    hold more at once, by their schedule and what they cannot fuse.

    Attributes:
        notes: What is not known of what was priced, in sentences: operations of which dimensions
            have no name, so that they count as whole, or of which nothing is known, and loops
            without a number of turns.
    """

    def __init__(self, depth: Shallow) -> None:
        """Prices of a step by those of steps with fewer blocks, or by the step itself."""
        self._depth = depth
        self._steps = tuple(map(_StepPrices, depth.problems))
        # A step that cannot be traced is one error, told at once, and not that of every layout.
        self._steps[0].forms_for(None, None, "vocabulary", 1)
        self._tables: dict[tuple[Layout, MeshItems, OnIndivisible], LayoutTables] = {}

    @classmethod
    def of(cls, problem: TrainingProblem) -> "NamePrices":
        """Traces a step.

        Args:
            problem: The step.
        """
        return cls(shallow(problem))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not known, in sentences."""
        return tuple(dict.fromkeys(note for step in self._steps for note in step.notes))

    def cost(self, candidate: Candidate) -> StepCost:
        """What the step costs one device in a layout.

        Args:
            candidate: Mesh, layout and microbatches.

        Raises:
            ShardingError: The layout does not fit the model or the mesh.
        """
        tables = self._tables_of(candidate)
        found = [step.costs(candidate, tables) for step in self._steps]
        stages = found[0] if len(found) == 1 else self._of_all_blocks(*found)
        return max(stages, key=lambda cost: cost.memory_bytes)

    def _tables_of(self, candidate: Candidate) -> LayoutTables:
        layout, items, pads = candidate.layout, candidate.mesh_axes, candidate.on_indivisible
        key = layout, items, pads
        if key not in self._tables:
            # Arrays that are alike once: whole models take long to read.
            stored = self._steps[0].stored
            self._tables[key] = LayoutTables.of(layout, stored, candidate.mesh, pads)
        return self._tables[key]

    def _of_all_blocks(self, one: list[StepCost], two: list[StepCost]) -> list[StepCost]:
        """The costs at each stage of a step with all blocks."""
        first = one[0].deeper(two[0], self._depth.blocks)
        memory = [
            _of_memory(a).deeper(_of_memory(b), self._depth.blocks).memory
            for a, b in zip(one, two, strict=True)
        ]
        return [StepCost(first.flops, first.sent, each) for each in memory]


def _of_memory(cost: StepCost) -> StepCost:
    return StepCost(0.0, (), cost.memory)


class _StepPrices:
    """Prices of one step as it is."""

    def __init__(self, problem: TrainingProblem) -> None:
        self._problem = problem
        self.stored = StoredArrays.of(problem)
        self._inputs = tuple(map(tensor_of, leaves_of(dict(problem.inputs))))
        self._forms: dict[Any, StepForms] = {}
        self._meshes: dict[tuple[MeshItems, bool], MeshPrices] = {}
        self._held: dict[Any, tuple[int, int]] = {}

    @property
    def notes(self) -> list[str]:
        """What is not known."""
        return [note for each in self._forms.values() for note in each.notes]

    def costs(self, candidate: Candidate, tables: LayoutTables) -> list[StepCost]:
        """What the step costs; one for each of its stages, which differ in memory alone."""
        items = candidate.mesh_axes
        pads = tables.on_indivisible == "pad"
        mesh = self._meshes.setdefault((items, pads), MeshPrices(items, pads))
        forms = self.forms_for(
            tables.blocks, tables.policy, tables.vocabulary, candidate.microbatches
        )
        costing = Costing(forms, tables, mesh, candidate.microbatches, self.stored)
        cost = costing.cost()
        parameters, optimizer = self._held_by(tables, candidate)
        placed = mesh.placer(tables.batch)
        always = {
            "parameters": float(parameters),
            "optimizer": float(optimizer),
            "inputs": sum(mesh.local_bytes(tensor, placed(tensor)) for tensor in self._inputs),
        }
        return [StepCost(cost.flops, cost.sent, always | peak) for peak in costing.peaks()]

    def forms_for(self, blocks: Any, policy: Any, vocabulary: Any, microbatches: int) -> StepForms:
        """The step as layouts with such edits have it, traced once."""
        key = repr(blocks), policy, vocabulary
        if (*key, 1) not in self._forms:
            step = TracedStep.of(self._problem, blocks, vocabulary, policy)
            self._forms[*key, 1] = read_step(step)
        if (*key, microbatches) not in self._forms:
            whole = self._forms[*key, 1]
            self._forms[*key, microbatches] = whole.of_microbatch(
                self._problem.batch_axis, microbatches
            )
        return self._forms[*key, microbatches]

    def _held_by(self, tables: LayoutTables, candidate: Candidate) -> tuple[int, int]:
        """The bytes of parameters and of the optimizer's state on one device."""
        rules = tables.rules[Table.STORED], tables.optimizer
        key = candidate.mesh_axes, *rules, tables.on_indivisible
        if key not in self._held:
            self._held[key] = self.stored.bytes_per_device(candidate.mesh, *key[1:])
        return self._held[key]
