"""What is in a step's temporaries at the moment at which most is there: an estimate."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from penzai_shard.compiled_programs.live_values import LiveValue, values_at_peak
from penzai_shard.compiled_programs.modules import Instruction
from penzai_shard.compiled_programs.operation_names import merged_names
from penzai_shard.compiled_programs.value_flow import ValueFlow
from penzai_shard.inspection.steps.layer_groups import folded_owners_text
from penzai_shard.inspection.steps.operation_owners import OperationOwners, Phase
from penzai_shard.inspection.steps.programs import StepProgram
from penzai_shard.path_folding import folded_path, folding_key

# How far an estimate may be from what the compiler says, to be shown.
_PLAUSIBLE = (0.5, 1.5)

TemporaryKind = Literal[
    "kept for the backward pass",
    "gathered",
    "copied parameters",
    "forward",
    "backward",
    "optimizer",
    "other",
]


@dataclasses.dataclass(frozen=True)
class TemporaryGroup:
    """Values that a device holds while a step runs, of one kind and from equal layers.

    Attributes:
        kind: What they are: made in the forward pass and read in the backward pass; gathered from
            other devices; parameters in another dtype or order; or else the phase in which they
            are made.
        layer: The path of the layer that made them, with ``*`` in place of the numbers in which
            equal ones differ; ``"loss"`` or ``"optimizer"``; empty if that is not known.
        label: The same as ``collectives`` writes it: by the names of the layers' parameters,
            where they have some.
        count: How many arrays these are.
        bytes: What they take on one device.
    """

    kind: TemporaryKind
    layer: str
    label: str
    count: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind}, by {self.label}" if self.label else self.kind


def temporaries_by_layer(program: StepProgram) -> tuple[TemporaryGroup, ...]:
    """What is there at the moment at which most is there, each layer's own, the largest first.

    An estimate from the order of the program's instructions, since compilers do not say what they
    put where. Values in the memory of results, before these are written, count too.

    Args:
        program: The program.

    Returns:
        The groups; none where their sum is far from what the compiler says of the temporaries.
    """
    values = values_at_peak(program.module)
    least, most = (share * program.memory.temporaries for share in _PLAUSIBLE)
    if not least <= sum(value.bytes for value in values) <= most + program.memory.outputs:
        return ()
    origins, scopes = _Origins(program), program.step.scopes
    groups: dict[tuple[TemporaryKind, str], list[int]] = {}
    for value in values:
        key = (origins.kind(value), origins.owner(value.instruction))
        groups.setdefault(key, []).append(value.bytes)
    made = [
        TemporaryGroup(kind, layer, layer and scopes.label(layer), len(sizes), sum(sizes))
        for (kind, layer), sizes in groups.items()
    ]
    return tuple(sorted(made, key=lambda group: -group.bytes))


def of_equal_layers(groups: Iterable[TemporaryGroup]) -> tuple[TemporaryGroup, ...]:
    """Groups of single layers as those of equal ones, the largest first."""
    alike: dict[tuple[TemporaryKind, str], list[TemporaryGroup]] = {}
    for group in groups:
        alike.setdefault((group.kind, folding_key(group.layer)), []).append(group)
    made = [_joined(members) for members in alike.values()]
    return tuple(sorted(made, key=lambda group: -group.bytes))


def _joined(members: Sequence[TemporaryGroup]) -> TemporaryGroup:
    return TemporaryGroup(
        kind=members[0].kind,
        layer=folded_path([group.layer for group in members]),
        label=folded_owners_text(g.label for g in members) if members[0].layer else "",
        count=sum(group.count for group in members),
        bytes=sum(group.bytes for group in members),
    )


class _Origins:
    """Where the values of a program come from."""

    def __init__(self, program: StepProgram) -> None:
        self._module = program.module
        self._owners = OperationOwners(program)
        self._flow = ValueFlow(program.module)
        self._parameters = {
            name for name, array in program.step.arguments.items() if array.part == "parameters"
        }

    def kind(self, value: LiveValue) -> TemporaryKind:
        made = self._origin(value.instruction)
        if made.opcode.startswith("all-gather"):
            return "gathered"
        if self._is_copied_parameter(value.instruction):
            return "copied parameters"
        first, last = self._phase(made), self._phase(value.last_use)
        if first == "forward" and last == "backward":
            return "kept for the backward pass"
        return first or "other"

    def _is_copied_parameter(self, one: Instruction) -> bool:
        """Whether parameters are in a value as they are, but for their dtype and order."""
        if not one.user_names:
            return False
        user = self._module.computations[one.computation].instructions[one.user_names[0]]
        arguments = self._flow.arguments_of(user)[user.operand_names.index(one.name)]
        return bool(arguments) and self._parameters.issuperset(arguments)

    def owner(self, one: Instruction) -> str:
        """The layer or the part of the step that made a value; empty if not known."""
        name = self._name(one)
        return (name and self._owners.owner(name)) or ""

    def _phase(self, one: Instruction) -> Phase | None:
        name = self._name(self._origin(one))
        return self._owners.phase(name) if name else None

    def _name(self, one: Instruction) -> str:
        return merged_names(self._origin(one).op_name)[0]

    def _origin(self, one: Instruction) -> Instruction:
        """What computed a value that the compiler only moved, or else what reads it first."""
        return self._named(one, backwards=True) or self._named(one, backwards=False) or one

    def _named(self, one: Instruction, backwards: bool) -> Instruction | None:
        """The nearest instruction that has a name of JAX', up or down from another."""
        instructions = self._module.computations[one.computation].instructions
        near: Instruction | None = one
        while near is not None and "/" not in near.op_name:
            names = near.operand_names if backwards else near.user_names
            near = instructions[names[0]] if names else None
        return near
