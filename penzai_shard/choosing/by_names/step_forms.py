"""What of a traced step has a price, in logical axis names: once per step, for all candidates."""

import dataclasses
import functools
from typing import NamedTuple

from penzai_shard.choosing.by_names.memory_at_peak import MemoryAtPeak
from penzai_shard.choosing.by_names.operation_prices import OperationForm
from penzai_shard.choosing.by_names.placements import Tensor
from penzai_shard.choosing.by_names.step_arrays import Life, ParameterUse, Table
from penzai_shard.rule_kinds import LogicalAxis


@dataclasses.dataclass(frozen=True)
class StepOperation:
    """An operation of a step that may cost something.

    Attributes:
        form: What its price depends on.
        tables: Which rules say where each of its arrays is; None where that costs nothing.
        values: The number of each of its arrays, so that what several take is brought once.
        where: The label of its layer.
        times: How often it is run.
    """

    form: OperationForm
    tables: tuple[Table | None, ...]
    values: tuple[int, ...]
    where: str
    times: int

    def what(self, position: int) -> str:
        """What one of its arrays is, as ``Sent`` has it."""
        table = self.tables[position]
        return "activation" if table is None else _WHAT.get(table, "activation")


_WHAT = {
    Table.STORED: "parameter",
    Table.IN_BLOCKS: "parameter",
    Table.IN_VOCABULARY: "parameter",
    Table.UPDATE: "gradient",
}


class Transfer(NamedTuple):
    """An activation that is brought from one layout to another.

    Attributes:
        tensor: The activation.
        source: The rules that it is laid out by where it is made.
        target: The rules that it is laid out by where it is used.
        where: The label of the layer.
        times: How often that is done.
    """

    tensor: Tensor
    source: Table
    target: Table
    where: str
    times: int


@dataclasses.dataclass(frozen=True)
class ArrayIndex:
    """The distinct arrays of a step, and which of them everything that has a price is about.

    Attributes:
        arrays: Each array, with the rules that say where it is; None where that costs nothing.
        operations: Of each operation its arrays, by their numbers.
        transfers: Of each transfer the array before and after.
        uses: Of each use of a parameter the array as it is stored and as it is used.
        kinds: The array of each kind that takes memory.
    """

    arrays: tuple[tuple[Tensor, Table | None], ...]
    operations: tuple[tuple[int, ...], ...]
    transfers: tuple[tuple[int, int], ...]
    uses: tuple[tuple[int, int], ...]
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, forms: "StepForms") -> "ArrayIndex":
        """Numbers the arrays of a step."""
        numbers: dict[tuple[int, Table | None], int] = {}
        arrays: list[tuple[Tensor, Table | None]] = []

        def number(tensor: Tensor, table: Table | None) -> int:
            key = id(tensor), table
            if key not in numbers:
                numbers[key] = len(arrays)
                arrays.append((tensor, table))
            return numbers[key]

        operations = tuple(
            tuple(map(number, each.form.tensors, each.tables)) for each in forms.operations
        )
        transfers = tuple(
            (number(each.tensor, each.source), number(each.tensor, each.target))
            for each in forms.transfers
        )
        uses = tuple(
            (number(each.tensor, Table.STORED), number(each.tensor, each.table))
            for each in forms.uses
        )
        kinds = tuple(number(*kind) for kind in forms.memory.kinds)
        return cls(tuple(arrays), operations, transfers, uses, kinds)


@dataclasses.dataclass(frozen=True)
class StepForms:
    """All of a step that has a price.

    Attributes:
        operations: Its operations, without those that run wherever their arrays are.
        transfers: Activations that layouts move between layers.
        uses: Parameters as they are used.
        lives: What is in memory, beside parameters and the optimizer's state.
        stages: The numbers of the operations at which each stage but the first begins, as of
            ``MemoryAtPeak``.
        notes: What is not known, in sentences.
    """

    operations: tuple[StepOperation, ...]
    transfers: tuple[Transfer, ...]
    uses: tuple[ParameterUse, ...]
    lives: tuple[Life, ...]
    stages: tuple[int, int, int]
    notes: tuple[str, ...]

    @functools.cached_property
    def memory(self) -> MemoryAtPeak:
        """How many arrays are in memory when."""
        return MemoryAtPeak.of(self.lives, self.uses, self.stages)

    @functools.cached_property
    def index(self) -> ArrayIndex:
        """Its arrays by number."""
        return ArrayIndex.of(self)

    def of_microbatch(self, batch: LogicalAxis, count: int) -> "StepForms":
        """The same for one of several equal parts of the batch."""
        tensors: dict[int, Tensor] = {}
        forms: dict[int, OperationForm] = {}

        def smaller(tensor: Tensor) -> Tensor:
            return tensors.setdefault(id(tensor), tensor.of_microbatch(batch, count))

        def smaller_form(form: OperationForm) -> OperationForm:
            return forms.setdefault(id(form), form.of_tensors(*map(smaller, form.tensors)))

        return dataclasses.replace(
            self,
            operations=tuple(
                dataclasses.replace(each, form=smaller_form(each.form)) for each in self.operations
            ),
            transfers=tuple(e._replace(tensor=smaller(e.tensor)) for e in self.transfers),
            lives=tuple(each._replace(tensor=smaller(each.tensor)) for each in self.lives),
        )
