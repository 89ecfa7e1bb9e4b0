"""A train step traced without any layout, and what each of its values is for.

The program has every operation of the forward pass, of the backward pass and of the optimizer.
Its values are of three kinds: what comes of parameters alone, what becomes a gradient, and all
others, which are activations and their gradients.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from penzai import pz

from penzai_shard.choosing.by_names.loop_times import LoopTimes
from penzai_shard.choosing.by_names.places import ModelPlaces
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.compiled_programs.operation_names import OperationName
from penzai_shard.inspection.steps.lowered_steps import LoweredStep, lower_step
from penzai_shard.library_apis.shardy_records import CONSTANTS, MAKING
from penzai_shard.path_folding import folding_key
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.sharding_propagation import Operation, PropagatedProgram
from penzai_shard.surgery import Recipe, axes_in_place, rematerialise_blocks
from penzai_shard.training import TrainState, build_train_step_fn
from penzai_shard.training.gradient_step import OPTIMIZER_SCOPE

STACKING = "stablehlo.dynamic_update_slice"


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """What goes into a step, by the numbers of values.

    Attributes:
        parameters: The paths of the parameters.
        names: The logical axes of every argument that has any.
    """

    parameters: Mapping[int, str]
    names: Mapping[int, tuple[LogicalAxis | None, ...]]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A train step as a program, with what its operations and values are for.

    Attributes:
        program: The program.
        arguments: What goes in.
        lowered: What it was read from.
        places: Where a layout edits the model.
    """

    program: PropagatedProgram
    arguments: StepArguments
    lowered: LoweredStep
    places: ModelPlaces

    @classmethod
    def of(
        cls, problem: TrainingProblem, blocks: Any, vocabulary: LogicalAxis, policy: str | None
    ) -> "TracedStep":
        """Traces a step.

        Args:
            problem: The step.
            blocks: The blocks, as of a layout.
            vocabulary: The logical axis of the vocabulary.
            policy: What blocks keep for the backward pass, as of a layout.
        """
        places = ModelPlaces.of(problem.model, blocks, vocabulary)
        edits = Recipe()
        if policy is not None:
            edits += rematerialise_blocks(places.block_place, policy)
        if pz.select(problem.model).at_instances_of(pz.nn.Layer).count():
            # As in every layout.
            edits += axes_in_place()
        model = edits.apply(problem.model)
        state = TrainState.initial_state(model, problem.optimizer, jax.random.key(0))
        step = build_train_step_fn(problem.loss_fn)
        lowered = lower_step(step, (state,), dict(problem.inputs), platform="cpu")
        program = PropagatedProgram.of(lowered.lowered)
        known = [
            (value, lowered.arguments[name])
            for name, value in program.arguments.items()
            if name in lowered.arguments
        ]
        arguments = StepArguments(
            {v: array.path for v, array in known if array.part == "parameters"},
            {v: array.names for v, array in known if array.names is not None},
        )
        return cls(program, arguments, lowered, places)

    def is_of_optimizer(self, operation: Operation) -> bool:
        """Whether an operation is behind the gradient."""
        return OPTIMIZER_SCOPE in OperationName.of(operation.name).scopes

    def is_backward(self, operation: Operation) -> bool:
        """Whether an operation is of the backward pass, what is computed again included."""
        return OperationName.of(operation.name).is_transposed

    def layers(self, operation: Operation) -> tuple[str, ...]:
        """The paths of the layers that an operation is in, the outermost first."""
        return self.lowered.scopes.paths_in(operation.name)

    def label(self, operation: Operation) -> str:
        """What people call the layer of an operation, without the numbers of blocks."""
        layers = self.layers(operation)
        return folding_key(self.lowered.scopes.label(layers[-1])) if layers else "loss"

    @functools.cached_property
    def free(self) -> frozenset[int]:
        """The values that come of no parameter and no input: any device makes its own part."""
        found: set[int] = set()
        for each in self.program.operations:
            if each.kind in CONSTANTS or (
                each.operands and all(value in found for value in each.operands)
            ):
                found.update(each.results)
        return frozenset(found)

    @functools.cached_property
    def weights(self) -> Mapping[int, frozenset[int]]:
        """The values that come of parameters alone, by element, each with its parameters."""
        found = {value: frozenset({value}) for value in self.arguments.parameters}
        before = 0
        # What loops hand on unchanged is known only when their end was seen.
        while before < len(found):
            before = len(found)
            for each in self.program.operations:
                if each.kind in MAKING or self.is_of_optimizer(each):
                    continue
                # What a loop stacks is what it writes, whatever was there before.
                taken = each.operands[1:2] if each.kind == STACKING else each.operands
                others = (v for v in taken if v not in self.free and v not in each.results)
                sources = [value for value in others if self.shape(value)]
                if sources and all(value in found for value in sources):
                    of = frozenset().union(*(found[value] for value in sources))
                    if self._grows(each, of):
                        continue  # To all positions, say, as the scale of a norm.
                    found.update((result, of) for result in each.results)
        return found

    @functools.cached_property
    def gradients(self) -> frozenset[int]:
        """The values that the optimizer takes, and what they come of element by element."""
        known = self.free | self.weights.keys()
        of_optimizer = {
            value
            for each in self.program.operations
            if self.is_of_optimizer(each)
            for value in each.operands
        }
        made = {
            value
            for each in self.program.operations
            if not self.is_of_optimizer(each)
            for value in each.results
        }
        found = {value for value in of_optimizer & made - known if self.shape(value)}
        for each in reversed(self.program.operations):
            if each.kind in MAKING or found.isdisjoint(each.results):
                continue
            lengths = [self._lengths(each.results[0])]
            if each.kind == STACKING:
                lengths.append(self._lengths(each.operands[1]))
            found.update(
                value
                for value in each.operands
                if value not in known and self._lengths(value) in lengths and self.shape(value)
            )
        return frozenset(found)

    @functools.cached_property
    def times(self) -> LoopTimes:
        """How often each operation is run."""
        return LoopTimes(self.program)

    def _grows(self, operation: Operation, parameters: frozenset[int]) -> bool:
        """Whether an operation gives more elements than some parameters have."""
        largest = max(math.prod(self.shape(value)) for value in parameters)
        return any(math.prod(self.shape(value)) > largest for value in operation.results)

    def _lengths(self, value: int) -> list[int]:
        """The lengths of a value, in whatever order its dimensions are."""
        return sorted(length for length in self.shape(value) if length > 1)

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.program.values[value].shape
