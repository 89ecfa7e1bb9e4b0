"""Where each mesh axis of a value comes from: an argument, a constraint, what is declared."""

import dataclasses
import functools
from collections.abc import Sequence

from jax.sharding import NamedSharding

from penzai_shard.axis_rules import AxisRules
from penzai_shard.inspection.sharding_causes.operation_words import (
    layer_of,
    operation_text,
    source_line,
)
from penzai_shard.inspection.sharding_causes.records import CauseKind, ShardingCause, WayStep
from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.inspection.steps.pinning_layers import PinningLayer
from penzai_shard.inspection.steps.step_arrays import Names, StepArray
from penzai_shard.layers import GatherParameters
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.rule_kinds import IdentityRule, LogicalAxis, NameRule
from penzai_shard.sharding_propagation import FLOW, Cause, Hop, Operation, PropagatedProgram
from penzai_shard.training.gradient_step import GRADIENT_SCOPE

_KINDS: dict[str, CauseKind] = {"parameters": "parameter", "inputs": "input"}
_WORDS = {
    "parameters": "the parameter",
    "inputs": "the input",
    "optimizer state": "the optimizer's state",
    "state variables": "the state",
    "constants": "the model's array",
}
# What hands on one array, at most in another form.
_SAME_ARRAY = frozenset(
    {
        FLOW,
        "stablehlo.convert",
        "stablehlo.dynamic_slice",
        "stablehlo.reshape",
        "stablehlo.slice",
        "stablehlo.transpose",
        "sdy.sharding_constraint",
    }
)


class CauseFinder:
    """What a propagated step says of where layouts come from.

    Args:
        program: The step's program after propagation.
        step: What was lowered.
    """

    def __init__(self, program: PropagatedProgram, step: LoweredStep) -> None:
        self._program = program
        self._step = step
        self._scopes = step.scopes
        self._results = frozenset(program.results)
        self._cause = functools.cache(self._computed_cause)
        self._parameters = {
            array.path.removeprefix("params/"): array
            for array in step.arguments.values()
            if array.part == "parameters"
        }

    def of_value(self, value: int) -> tuple[ShardingCause, ...]:
        """The causes of all mesh axes of a value."""
        return tuple(
            self.cause(value, mesh_axis)
            for dimension in self._program.values[value].spec or ()
            for mesh_axis in dimension
        )

    def cause(self, value: int, mesh_axis: str) -> ShardingCause:
        """Where a mesh axis of a value comes from."""
        return self._cause(value, mesh_axis)

    def _computed_cause(self, value: int, mesh_axis: str) -> ShardingCause:
        first, *others = self._program.causes(value, mesh_axis)
        found = self._read(first, mesh_axis)
        also = dict.fromkeys(self._read(other, mesh_axis).source for other in others)
        return found.with_others(source for source in also if source != found.source)

    def _place_of(self, value: int, mesh_axis: str) -> tuple[int, str] | None:
        """The dimension of a value that is on a mesh axis or a part of it, and what it is on."""
        name = mesh_axis.partition(":")[0]
        for dimension, axes in enumerate(self._program.values[value].spec or ()):
            for axis in axes:
                if axis.partition(":")[0] == name:
                    return dimension, axis
        return None

    def step_of(self, operation: Operation) -> WayStep:
        """An operation in words, with its layer and its line."""
        comes_out = operation.kind == FLOW and self._results.issuperset(operation.results)
        return WayStep(
            "the end of the step" if comes_out else operation_text(operation),
            layer_of(operation, self._scopes),
            source_line(operation.frames),
        )

    def _read(self, cause: Cause, mesh_axis: str) -> ShardingCause:
        found = self._found(cause)
        return found.on_its_way(
            mesh_axis, cause.mesh_axis, cause.dimension, self._told(cause.way, mesh_axis)
        )

    def _told(self, hops: Sequence[Hop], mesh_axis: str) -> tuple[WayStep, ...]:
        steps = []
        for hop in reversed(hops):
            if hop.operation.kind != FLOW:
                step = self.step_of(hop.operation)
                if self._needs_whole(hop, mesh_axis):
                    text = f"{step.operation} (which needs it whole, and splits it again)"
                    step = dataclasses.replace(step, operation=text)
                steps.append(step)
        return tuple(dict.fromkeys(steps))

    def _needs_whole(self, hop: Hop, mesh_axis: str) -> bool:
        """Whether an operation gathers what it takes along the mesh axis, though it hands it on."""
        rule = hop.operation.rule
        if rule is None or hop.source not in hop.operation.operands:
            return False
        place = self._place_of(hop.source, mesh_axis)
        factors = rule.operands[hop.operation.operands.index(hop.source)]
        return place is not None and not rule.replicated.isdisjoint(factors[place[0]])

    def _found(self, cause: Cause) -> ShardingCause:
        """What the cause is, without its way."""
        match cause.kind:
            case "argument":
                return _of_argument(self._step.arguments.get(cause.name), cause.dimension)
            case "output":
                return self._of_result(self._program.results.index(cause.value), cause.dimension)
            case "constraint" if cause.operation is not None:
                return self._of_constraint(cause.operation, cause)
        at = self._place(cause.operation)
        if cause.kind == "manual":
            return ShardingCause("shard_map", at[4:], f"the specs of a jax.shard_map{at}")
        return ShardingCause("unknown", at[4:], f"nothing that Shardy names{at}")

    def cause_of_constraint(self, operation: Operation) -> str:
        """What lays out an array at a constraint, in words."""
        value = operation.results[0]
        return self._of_constraint(
            operation, Cause("constraint", "", value, "", 0, operation, ())
        ).source

    def is_by_name(self, operation: Operation) -> bool:
        """Whether a constraint is that of a layer with rules."""
        pinning = self._pinning(operation)
        return pinning is not None and bool(pinning.rules)

    def gathers(self, operation: Operation) -> bool:
        """Whether a constraint is that of a layer which gathers parameters where they are used."""
        pinning = self._pinning(operation)
        return pinning is not None and pinning.kind == GatherParameters.__name__

    def _pinning(self, operation: Operation) -> PinningLayer | None:
        layers = self._scopes.paths_in(operation.name) if operation.constraint else ()
        return self._scopes.pinning.get(layers[-1]) if layers else None

    def _place(self, operation: Operation | None) -> str:
        """Where an operation is: `` in `` its layer, or `` at `` its line."""
        step = None if operation is None else self.step_of(operation)
        if step is None or not (step.layer or step.line):
            return ""
        return f" in {step.layer}" if step.layer else f" at {step.line}"

    def _of_result(self, number: int, dimension: int) -> ShardingCause:
        """What is declared of a result: by ``out_shardings``, or by a train step."""
        result = self._step.results[number]
        kind: CauseKind = "declared result"
        source = f"the layout that the step declares for its result {result.path}"
        if result.part != "outputs" and self._scopes.of_step:
            kind = _KINDS.get(result.part, kind)
            source = f"the train step, which gives {result.path} back as it got it"
        return ShardingCause(kind, result.path, source, _name(result.names, dimension))

    def _of_constraint(self, operation: Operation, cause: Cause) -> ShardingCause:
        layers = self._scopes.paths_in(operation.name)
        if layers and layers[-1] in self._scopes.pinning:
            return self._of_pinning_layer(layers[-1], operation, cause)
        parameter = self.parameter_pinned_by(operation)
        if parameter is not None:
            name = parameter.path.removeprefix("params/")
            of = "gradient" if f"/{GRADIENT_SCOPE}/" in operation.name else "update"
            kind: CauseKind = "train step"
            source = f"the train step, which lays out the {of} of {name} as the optimizer keeps "
            source += "its moments"
            if _spec_of(parameter) == self._program.values[cause.value].spec:
                kind = "parameter"
                source = f"the parameter {name}, as which the train step lays out its {of}"
            logical_axis = _name(parameter.names, cause.dimension)
            return ShardingCause(kind, parameter.path, source, logical_axis)
        line = source_line(operation.frames, by_user=True)
        source = "jax.lax.with_sharding_constraint" + (f" at {line}" if line else "")
        layer = self._scopes.label(layers[-1]) if layers else ""
        source += f" in layer {layer}" if layers else ""
        return ShardingCause("constraint", line or layer, source)

    def _of_pinning_layer(self, path: str, operation: Operation, cause: Cause) -> ShardingCause:
        layer, label = self._scopes.pinning[path], self._scopes.label_of_one(path)
        shape = self._program.values[cause.value].shape
        outputs = self._scopes.outputs.of(path)
        names = next((array.names for array in outputs if array.shape == shape), None)
        source = f"the constraint layer {label} ({layer.kind})"
        held = self.parameter_behind(operation.operands[0])
        if held is not None:
            names = self._names_of_one(held, shape)
            source += f", which uses {held.path.removeprefix('params/')}"
        logical_axis = _name(names, cause.dimension)
        texts = (_rule_text(rules, logical_axis, cause.mesh_axis) for rules in layer.rules)
        rule = next(filter(None, texts), "")
        return ShardingCause("constraint layer", label, source, logical_axis, rule)

    def parameter_pinned_by(self, operation: Operation) -> StepArray | None:
        """The parameter whose gradient or update a train step brings to its layout there."""
        if self._scopes.paths_in(operation.name):
            return None
        # What splits unevenly is pinned in a function that is compiled on its own.
        parts = [each for each in operation.name.split("/")[:-1] if not each.startswith("jit(")]
        names = ("/".join(parts[i:]) for i in range(len(parts)))
        return next((self._parameters[name] for name in names if name in self._parameters), None)

    def parameter_behind(self, value: int) -> StepArray | None:
        """The parameter that a value is, whole or one layer of a stack of it."""
        seen: set[int] = set()
        while value not in seen:
            seen.add(value)
            name = self._program.argument_names.get(value)
            if name is not None:
                array = self._step.arguments.get(name)
                return array if array is not None and array.part == "parameters" else None
            maker = self._program.makers.get(value)
            if maker is not None and maker.kind in _SAME_ARRAY and maker.operands:
                value = maker.operands[0]
        return None

    def _names_of_one(self, array: StepArray, shape: tuple[int, ...]) -> Names:
        """The names of a parameter's dimensions; of one layer of a stack, without that of it."""
        if array.shape == shape or array.names is None:
            return array.names
        kept = [number for number, name in enumerate(array.names) if name not in self._stacked]
        return tuple(array.names[number] for number in kept) if len(kept) == len(shape) else None

    @property
    def _stacked(self) -> frozenset[LogicalAxis]:
        return frozenset(self._scopes.stack_axes)


def _of_argument(array: StepArray | None, dimension: int) -> ShardingCause:
    if array is None:
        return ShardingCause("other argument", "", "an argument that the step does not name")
    path = array.path.removeprefix("params/").removeprefix("inputs/")
    source = f"{_WORDS.get(array.part, 'the argument')} {path}"
    kind = _KINDS.get(array.part, "other argument")
    return ShardingCause(kind, array.path, source, _name(array.names, dimension))


def _name(names: Names, dimension: int) -> LogicalAxis | None:
    return names[dimension] if names is not None and dimension < len(names) else None


def _rule_text(rules: AxisRules, logical_axis: LogicalAxis | None, mesh_axis: str) -> str:
    """The rule that puts a logical axis on a mesh axis; empty where several may."""
    name = mesh_axis.partition(":")[0]
    found = []
    for rule in rules.rules:
        is_of_axis = isinstance(rule, IdentityRule) or name in rule.mesh_axes
        is_of_name = not isinstance(rule, NameRule) or logical_axis in (None, rule.logical_axis)
        if is_of_axis and is_of_name:
            found.append(str(rule))
    return found[0] if found and (len(found) == 1 or logical_axis is not None) else ""


def _spec_of(array: StepArray) -> tuple[tuple[str, ...], ...] | None:
    if not isinstance(array.sharding, NamedSharding):
        return None
    return mesh_axes_by_dimension(array.spec, len(array.shape))
