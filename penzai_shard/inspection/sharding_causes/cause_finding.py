"""Where each mesh axis of a value comes from: an argument, a constraint, what is declared."""

import re
from collections.abc import Sequence

from jax.sharding import NamedSharding

from penzai_shard.axis_rules import AxisRules
from penzai_shard.inspection.lowered_steps import LoweredStep
from penzai_shard.inspection.sharding_causes.operation_words import (
    layer_of,
    operation_text,
    source_line,
)
from penzai_shard.inspection.sharding_causes.records import CauseKind, ShardingCause, WayStep
from penzai_shard.inspection.step_arrays import StepArray
from penzai_shard.partition_specs import mesh_axes_by_dimension
from penzai_shard.rule_kinds import IdentityRule, LogicalAxis, NameRule
from penzai_shard.sharding_propagation import FLOW, Hop, Operation, PropagatedProgram
from penzai_shard.training.gradient_step import GRADIENT_SCOPE

Spec = tuple[tuple[str, ...], ...]

_NUMBERED = re.compile(r"(input|output): (\d+)$")
_KINDS: dict[str, CauseKind] = {"parameters": "parameter", "inputs": "input"}
_WORDS = {
    "parameters": "the parameter",
    "inputs": "the input",
    "optimizer state": "the optimizer's state",
    "state variables": "the state",
    "constants": "the model's array",
}


class CauseFinder:
    """What a propagated step says of where layouts come from.

    Args:
        program: The step's program after propagation.
        step: What was lowered.
    """

    def __init__(self, program: PropagatedProgram, step: LoweredStep) -> None:
        self._program = program
        self._step = step
        self._arguments = {
            value: step.arguments[name]
            for name, value in program.arguments.items()
            if name in step.arguments
        }
        self._by_number = tuple(program.arguments.values())
        self._constraints = {op.constraint: op for op in program.operations if op.constraint}
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

    def of_result(self, number: int) -> tuple[ShardingCause, ...]:
        """The causes of all mesh axes of a result, as it comes out."""
        returned = self._program.returned[number]
        value = self._program.results[number]
        own = _axes_in(self._program.values[value].spec or ())
        return tuple(
            self._declared(number, mesh_axis)
            if mesh_axis not in own
            or returned.origins.get(mesh_axis) in ("self", f"output: {number}")
            else self.cause(value, mesh_axis)
            for dimension in returned.spec or ()
            for mesh_axis in dimension
        )

    def cause(self, value: int, mesh_axis: str) -> ShardingCause:
        """Where a mesh axis of a value comes from."""
        hops = self._program.way(value, mesh_axis)
        way = self._told(hops)
        end = hops[-1].source if hops else value
        if end in self._arguments:
            return self._of_argument(end, mesh_axis, way)
        maker = self._program.makers.get(end)
        if maker is not None and maker.constraint:
            return self._of_constraint(maker, mesh_axis, way)
        # A constraint also lays out what it takes, and what is declared of a result what is given.
        origin = self._program.values[end].origins.get(mesh_axis, "")
        if origin in self._constraints:
            return self._of_constraint(self._constraints[origin], mesh_axis, way)
        if numbered := _NUMBERED.match(origin):
            number = int(numbered[2])
            if numbered[1] == "input":
                return self._of_argument(self._by_number[number], mesh_axis, way)
            return self._declared(number, mesh_axis, way)
        for user in self._program.users.get(end, ()):
            if user.constraint:
                return self._of_constraint(user, mesh_axis, way)
        return self._of_region(maker, mesh_axis, way)

    def _told(self, hops: Sequence[Hop]) -> tuple[WayStep, ...]:
        steps = [
            self.step_of(hop.operation) for hop in reversed(hops) if hop.operation.kind != FLOW
        ]
        return tuple(dict.fromkeys(steps))

    def step_of(self, operation: Operation) -> WayStep:
        """An operation in words, with its layer and its line."""
        return WayStep(
            operation_text(operation),
            layer_of(operation, self._step.scopes),
            source_line(operation.frames),
        )

    def _of_argument(self, value: int, mesh_axis: str, way: tuple[WayStep, ...]) -> ShardingCause:
        array = self._arguments.get(value)
        if array is None:
            text = "an argument that the step does not name"
            return ShardingCause(mesh_axis, "other argument", "", None, "", text, way)
        spec = _spec_of(array, self._program.values[value].spec)
        where, logical_axis = _where(spec, array.names, mesh_axis)
        path = array.path.removeprefix("params/").removeprefix("inputs/")
        text = f"{_WORDS.get(array.part, 'the argument')} {path}, whose {where}"
        kind = _KINDS.get(array.part, "other argument")
        return ShardingCause(mesh_axis, kind, array.path, logical_axis, "", text, way)

    def _declared(
        self, number: int, mesh_axis: str, way: tuple[WayStep, ...] = ()
    ) -> ShardingCause:
        """What is declared of a result: by ``out_shardings``, or by a train step."""
        result = self._step.results[number]
        where, logical_axis = _where(
            self._program.returned[number].spec or (), result.names, mesh_axis
        )
        kind: CauseKind = "declared result"
        text = f"the layout that the step declares for its result {result.path}, whose {where}"
        if result.part == "parameters" and self._step.scopes.of_step:
            kind = "parameter"
        if result.part != "outputs" and self._step.scopes.of_step:
            text = f"the train step, which gives {result.path} back as it got it: its {where}"
        return ShardingCause(mesh_axis, kind, result.path, logical_axis, "", text, way)

    def _of_constraint(
        self, operation: Operation, mesh_axis: str, way: tuple[WayStep, ...]
    ) -> ShardingCause:
        layers = self._step.scopes.paths_in(operation.name)
        if layers and layers[-1] in self._step.scopes.pinning:
            return self._of_constraint_layer(layers[-1], operation, mesh_axis, way)
        parameter = self.parameter_pinned_by(operation)
        spec = self._spec(operation)
        if parameter is not None:
            where, logical_axis = _where(spec, parameter.names, mesh_axis)
            name = parameter.path.removeprefix("params/")
            of = "gradient" if f"/{GRADIENT_SCOPE}/" in operation.name else "update"
            kind: CauseKind = "train step"
            text = f"the train step, which lays out the {of} of {name} as the optimizer keeps its "
            text += f"moments: its {where}"
            if _spec_of(parameter, None) == _padded(spec, len(parameter.shape)):
                kind = "parameter"
                text = (
                    f"the parameter {name}, as which the train step lays out its {of}: its {where}"
                )
            return ShardingCause(mesh_axis, kind, parameter.path, logical_axis, "", text, way)
        where, _ = _where(spec, None, mesh_axis)
        layer = layer_of(operation, self._step.scopes)
        line = source_line(operation.frames, by_user=True)
        text = "jax.lax.with_sharding_constraint" + (f" at {line}" if line else "")
        text += f" in layer {layer}" if layers else ""
        return ShardingCause(
            mesh_axis, "constraint", line or layer, None, "", f"{text}, whose {where}", way
        )

    def _of_constraint_layer(
        self, path: str, operation: Operation, mesh_axis: str, way: tuple[WayStep, ...]
    ) -> ShardingCause:
        scopes = self._step.scopes
        layer, label = scopes.pinning[path], scopes.label(path)
        if [scopes.label(other) for other in scopes.pinning].count(label) > 1:
            label = path
        spec = self._spec(operation)
        shape = self._program.values[operation.results[0]].shape
        names = next((a.names for a in scopes.outputs.of(path) if a.shape == shape), None)
        where, logical_axis = _where(spec, names, mesh_axis)
        texts = (_rule_text(rules, logical_axis, mesh_axis) for rules in layer.rules)
        rule = next(filter(None, texts), "")
        text = f"the constraint layer {label} ({layer.kind})"
        text += f", by its rule {rule}" if rule else f", whose {where}"
        return ShardingCause(mesh_axis, "constraint layer", label, logical_axis, rule, text, way)

    def _of_region(
        self, operation: Operation | None, mesh_axis: str, way: tuple[WayStep, ...]
    ) -> ShardingCause:
        """What neither an argument nor a constraint has: the edge of a ``shard_map``, if any."""
        if operation is None or "manual_computation" not in operation.kind:
            text = "nothing that Shardy names"
            return ShardingCause(mesh_axis, "unknown", "", None, "", text, way)
        step = self.step_of(operation)
        at = f" in {step.layer}" if step.layer else f" at {step.line}" if step.line else ""
        text = f"the specs of a jax.shard_map{at}"
        return ShardingCause(mesh_axis, "shard_map", step.layer or step.line, None, "", text, way)

    def parameter_pinned_by(self, operation: Operation) -> StepArray | None:
        """The parameter whose gradient or update a train step brings to its layout there."""
        if self._step.scopes.paths_in(operation.name):
            return None
        parts = operation.name.split("/")[:-1]
        names = ("/".join(parts[i:]) for i in range(1, len(parts)))
        return next((self._parameters[name] for name in names if name in self._parameters), None)

    def _spec(self, operation: Operation) -> Spec:
        return self._program.values[operation.results[0]].spec or ()


def _where(
    spec: Spec, names: Sequence[LogicalAxis | None] | None, mesh_axis: str
) -> tuple[str, LogicalAxis | None]:
    """Which dimension is on a mesh axis, in words, and its logical axis."""
    whole = mesh_axis.partition(":")[0]
    for number, mesh_axes in enumerate(spec):
        if mesh_axis in mesh_axes or whole in {axis.partition(":")[0] for axis in mesh_axes}:
            name = names[number] if names is not None and number < len(names) else None
            what = f"dimension {number}" if name is None else f"logical axis {str(name)!r}"
            return f"{what} is on mesh axis {whole!r}", name
    return f"layout has mesh axis {whole!r}", None


def _rule_text(rules: AxisRules, logical_axis: LogicalAxis | None, mesh_axis: str) -> str:
    whole = mesh_axis.partition(":")[0]
    for rule in rules.rules:
        if isinstance(rule, NameRule):
            if logical_axis in (None, rule.logical_axis) and whole in rule.mesh_axes:
                return str(rule)
        elif isinstance(rule, IdentityRule) or whole in rule.mesh_axes:
            return str(rule)
    return ""


def _spec_of(array: StepArray, otherwise: Spec | None) -> Spec:
    if not isinstance(array.sharding, NamedSharding):
        return otherwise or ()
    return tuple(map(tuple, mesh_axes_by_dimension(array.spec, len(array.shape))))


def _padded(spec: Spec, rank: int) -> Spec:
    return (*spec, *((),) * (rank - len(spec)))


def _axes_in(spec: Spec) -> set[str]:
    return {axis for dimension in spec for axis in dimension}
