"""Reading what of a traced step has a price, in logical axis names."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from penzai_shard.choosing.by_names.operation_prices import OperationForm
from penzai_shard.choosing.by_names.placements import Dimension, Tensor
from penzai_shard.choosing.by_names.step_arrays import Life, ParameterUse, Table
from penzai_shard.choosing.by_names.step_forms import StepForms, StepOperation, Transfer
from penzai_shard.choosing.by_names.traced_steps import STACKING, TracedStep
from penzai_shard.choosing.dimensions import DimensionClass, ProgramDimensions
from penzai_shard.fused_axes import FusedAxes
from penzai_shard.library_apis.shardy_records import MAKING, PRODUCTS, ShardyRule, itemsize_of
from penzai_shard.path_folding import folding_key
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.sharding_propagation import FLOW, Operation
from penzai_shard.sharding_propagation.factors import rule_of

# What loops do with what they stack, each with the operands that it is about.
_OF_STACKS = {
    FLOW: slice(None),
    "stablehlo.concatenate": slice(None),
    "stablehlo.dynamic_slice": slice(1),
    "stablehlo.reshape": slice(1),
    "stablehlo.slice": slice(1),
    STACKING: slice(1, 2),
}
# One of them makes a stack: in a loop, or where it is unrolled.
_STACKS = frozenset({"stablehlo.concatenate", STACKING})


def read_step(step: TracedStep) -> StepForms:
    """Reads what of a step has a price.

    Args:
        step: The step, traced without any layout.
    """
    return _Reading(step).forms()


class _Reading:
    def __init__(self, step: TracedStep) -> None:
        self._step = step
        self._program = step.program
        self._dimensions = ProgramDimensions.of(step.program)
        self._notes: dict[str, None] = {}
        # Equal ones are the same object, by which prices are remembered.
        self._tensors: dict[Tensor, Tensor] = {}
        self._forms: dict[OperationForm, OperationForm] = {}
        self._names = dict(self._names_of_classes())
        self._operations = [
            each for each in step.program.operations if not step.is_of_optimizer(each)
        ]
        self._makers = {value: each for each in self._operations for value in each.results}
        self._place = {each.number: self._place_of(each) for each in self._operations}
        self._place |= dict(self._places_of_stacks())

    def forms(self) -> StepForms:
        operations = [found for each in self._operations if (found := self._operation(each))]
        for each in self._operations:
            if each.number in self._step.times.unknown and each.kind in MAKING:
                self._notes[
                    f"{each.kind} in {self._step.label(each)}: how often the loop around it runs "
                    "is not known; it counts once"
                ] = None
        return StepForms(
            tuple(operations),
            tuple(self._transfers()),
            tuple(self._uses()),
            tuple(self._lives()),
            self._stages(),
            tuple(self._notes),
        )

    def _stages(self) -> tuple[int, int, int]:
        """Where the stages of memory begin; without blocks all of the step is in the first one."""
        backward: dict[str, list[int]] = {}
        for each in self._operations:
            if self._step.is_backward(each):
                for path in self._step.places.blocks.intersection(self._step.layers(each)):
                    backward.setdefault(path, []).append(each.number)
        end = max((each.number for each in self._operations), default=0) + 1
        if not backward:
            return end, end, end
        ends = sorted((min(numbers), max(numbers)) for numbers in backward.values())
        return ends[0][0], ends[-1][0], ends[-1][1] + 1

    def _names_of_classes(self) -> Iterator[tuple[DimensionClass, LogicalAxis]]:
        """The logical axis of each class of dimensions, as parameters and inputs name it."""
        known: dict[DimensionClass, LogicalAxis] = {}
        for value, names in self._step.arguments.names.items():
            for i, name in enumerate(names[: len(self._step.shape(value))]):
                if name is None or self._step.shape(value)[i] == 1:
                    continue
                parts = self._dimensions.parts(value, i)
                own_names: tuple[LogicalAxis, ...] = (name,)
                if isinstance(name, FusedAxes):
                    own_names = name.names
                    if tuple(name.sizes) != tuple(part.size for part in parts):
                        self._notes[
                            f"the logical axes {name!r} are not told apart by the program; the "
                            "dimension counts as whole in activations"
                        ] = None
                        continue
                for part, own in zip(parts, own_names, strict=False):
                    first = known.setdefault(part, own)
                    if first != own:
                        self._notes[
                            f"logical axes {first!r} and {own!r} are one to the program, as an "
                            f"operation ties them; activations are priced by the rules of {first!r}"
                        ] = None
        yield from known.items()

    @functools.cache  # noqa: B019 - Lives as long as the reading.
    def _tensor(self, value: int) -> Tensor:
        known = self._program.values[value]
        dimensions = []
        for i, size in enumerate(known.shape):
            parts = self._dimensions.parts(value, i) if size > 1 else ()
            name, *others = [self._names.get(part) for part in parts] or [None]
            # Of fused logical axes only the slowest can be split, by its own length.
            slowest = parts[0].size if any(other is not None for other in others) else size
            # A loop that is unrolled has nothing left over, in arrays without elements.
            dimensions.append(Dimension(name, slowest, size // slowest if size else 1))
        tensor = Tensor(tuple(dimensions), itemsize_of(known.dtype))
        return self._tensors.setdefault(tensor, tensor)

    def _place_of(self, operation: Operation) -> Table:
        return self._step.places.table(self._step.layers(operation))

    def _places_of_stacks(self) -> Iterator[tuple[int, Table]]:
        """Where loops stack what a layer keeps for the backward pass, and take it off again.

        These operations are of the loop, which is between layers; what they hand on stays where
        it was made.
        """
        if not any(each.kind in _STACKS and self._is_of_stacks(each) for each in self._operations):
            return
        for each in self._operations:
            if self._is_of_stacks(each):
                maker = self._maker_behind_stacks(each, set())
                if maker is not None:
                    yield each.number, self._place[maker.number]

    def _is_of_stacks(self, operation: Operation) -> bool:
        return operation.kind in _OF_STACKS and self._place[operation.number] == Table.BETWEEN

    def _maker_behind_stacks(self, operation: Operation, seen: set[int]) -> Operation | None:
        """The operation that made what others hand on."""
        if not self._is_of_stacks(operation):
            return operation
        seen.add(operation.number)
        for value in operation.operands[_OF_STACKS[operation.kind]]:
            maker = self._makers.get(value)
            if maker is None or maker.number in seen or value in self._step.free:
                continue
            if (found := self._maker_behind_stacks(maker, seen)) is not None:
                return found
        return None

    def _weight_table(self, operation: Operation) -> Table:
        """How a parameter is laid out where an operation uses it."""
        layers, places = self._step.layers(operation), self._step.places
        if not places.blocks.isdisjoint(layers):
            return Table.IN_BLOCKS
        of_vocabulary = places.lookups | places.heads
        return Table.STORED if of_vocabulary.isdisjoint(layers) else Table.IN_VOCABULARY

    @functools.cached_property
    def _homes(self) -> Mapping[int, Table]:
        """Where each activation is laid out: as the operation that makes it computes.

        What a region gives to what is between layers alone is summed up into that layout at once.
        """
        homes: dict[int, Table] = {}
        wanted: dict[int, set[Table]] = {}
        for each in reversed(self._operations):
            place = self._place[each.number]
            for result in each.results:
                is_given = wanted.get(result) == {Table.BETWEEN}
                homes[result] = Table.BETWEEN if is_given else place
            wants = homes[each.results[0]] if _is_by_element(each) else place
            for value in each.operands:
                wanted.setdefault(value, set()).add(wants)
        return homes

    def _runs_at(self, operation: Operation) -> Table:
        """How what an operation takes is laid out: what works by element follows its result."""
        if _is_by_element(operation):
            return self._homes[operation.results[0]]
        return self._place[operation.number]

    def _table(self, value: int, operation: Operation, *, is_result: bool) -> Table | None:
        """Which rules say where an array of an operation is."""
        step = self._step
        if value in step.gradients:
            return Table.UPDATE
        if value in step.weights:
            return self._weight_table(operation)
        if value in step.free or not step.shape(value):
            return None
        return self._homes.get(value, Table.BETWEEN) if is_result else self._runs_at(operation)

    def _operation(self, each: Operation) -> StepOperation | None:
        step = self._step
        if each.kind == FLOW or all(value in step.free for value in each.results):
            return None
        if all(value in step.weights for value in each.results):
            return None
        tables = (
            *(self._table(value, each, is_result=False) for value in each.operands),
            *(self._table(value, each, is_result=True) for value in each.results),
        )
        present = {table for table in tables if table is not None}
        rule = rule_of(each, self._program.values)
        if rule is None and present:
            return self._of_unknown_rule(each, tables)
        if rule is None or (not rule.reduced and not rule.replicated and len(present) < 2):
            return None
        values = (*each.operands, *each.results)
        tensors = [self._tensor(value) for value in values]
        factors = tuple(
            tuple(factors[0] if factors else None for factors in dimensions)
            for dimensions in (*rule.operands, *rule.results)
        )
        # Without a sum it is a product of elements.
        is_product = each.kind in PRODUCTS and bool(rule.reduced)
        if is_product:
            self._note_unnamed(each, tensors[: len(each.operands)])
        count = len(each.operands)
        form = OperationForm(
            tuple(tensors[:count]),
            tuple(tensors[count:]),
            factors,
            self._sizes(each, rule),
            frozenset(rule.reduced),
            frozenset(rule.replicated | rule.blocked),
            is_product,
            step.gradients.issuperset(each.results),
        )
        form, roots = self._forms.setdefault(form, form), self._roots(values)
        return StepOperation(form, tables, roots, step.label(each), step.times[each.number])

    def _sizes(self, each: Operation, rule: ShardyRule) -> tuple[int, ...]:
        """The length of each factor.

        For Shardy the windows of a convolution have length 1. Where it skips places of the image,
        or puts gaps between them, the shorter side says how many windows there are.
        """
        sizes = list(rule.sizes)
        if each.kind == "stablehlo.convolution":
            found: dict[int, int] = {}
            values = (*each.operands, *each.results)
            for value, dimensions in zip(values, (*rule.operands, *rule.results), strict=True):
                for length, factors in zip(self._step.shape(value), dimensions, strict=True):
                    if len(factors) == 1:
                        found[factors[0]] = min(found.get(factors[0], length), length)
            for factor, length in found.items():
                sizes[factor] = length
        return tuple(sizes)

    def _roots(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The values, or the parameter that one comes of."""
        weights = self._step.weights
        return tuple(min(weights[value]) if value in weights else value for value in values)

    def _of_unknown_rule(
        self, each: Operation, tables: tuple[Table | None, ...]
    ) -> StepOperation | None:
        """An operation of which nothing is known: it needs all of its operands."""
        values = (*each.operands, *each.results)
        tensors = [self._tensor(value) for value in values]
        if max((tensor.nbytes for tensor in tensors), default=0) < 1024:
            return None
        self._notes[
            f"{each.kind} in {self._step.label(each)}: which dimensions belong together is not "
            "known; it is priced as if every device computed all of it"
        ] = None
        count = len(each.operands)
        form = OperationForm(
            tuple(tensors[:count]),
            tuple(tensors[count:]),
            tuple((None,) * len(tensor.dimensions) for tensor in tensors),
            (),
            frozenset(),
            frozenset(),
            False,
        )
        form = self._forms.setdefault(form, form)
        roots, times = self._roots(values), self._step.times[each.number]
        return StepOperation(form, tables, roots, self._step.label(each), times)

    def _note_unnamed(self, each: Operation, operands: list[Tensor]) -> None:
        lengths = dict.fromkeys(
            dimension.size
            for tensor in operands
            for dimension in tensor.dimensions
            if dimension.name is None and dimension.size > 1
        )
        if lengths:
            said = " and ".join(map(str, lengths))
            self._notes[
                f"{each.kind} in {self._step.label(each)}: no parameter and no input names its "
                f"{'dimension' if len(lengths) == 1 else 'dimensions'} of length {said}, which "
                f"{'counts' if len(lengths) == 1 else 'count'} as whole"
            ] = None

    def _transfers(self) -> Iterator[Transfer]:
        brought: set[tuple[int, Table]] = set()
        for each in self._operations:
            place, label = self._runs_at(each), self._step.label(each)
            times = self._step.times[each.number]
            for value in each.operands:
                home = self._homes.get(value)
                if home is None or not self._is_activation(value) or home == place:
                    continue
                if (value, place) not in brought:
                    brought.add((value, place))
                    yield Transfer(self._tensor(value), home, place, label, times)
            if each.kind in MAKING or _is_by_element(each):
                continue  # What it makes is priced with it, or made where it has to be.
            for value in each.results:
                if self._is_activation(value) and self._homes[value] != place:
                    yield Transfer(self._tensor(value), place, self._homes[value], label, times)

    def _is_activation(self, value: int) -> bool:
        step = self._step
        known = value in step.free or value in step.weights or value in step.gradients
        return not known and bool(step.shape(value))

    def _uses(self) -> Iterator[ParameterUse]:
        step = self._step
        found: dict[tuple[int, Table, bool], ParameterUse] = {}
        for each in self._operations:
            if all(value in step.weights for value in each.results):
                continue
            table, backward = self._weight_table(each), step.is_backward(each)
            times = step.times[each.number]
            for value in each.operands:
                if table == Table.STORED or value not in step.weights:
                    continue
                for parameter in sorted(step.weights[value]):
                    tensor = self._used_part(parameter, value)
                    tensor = self._tensors.setdefault(tensor, tensor)
                    path = step.arguments.parameters[parameter].partition("/")[2]
                    where = folding_key(path)
                    use = ParameterUse(
                        parameter, tensor, table, backward, where, each.number, each.number, times
                    )
                    first = found.setdefault((parameter, table, backward), use)
                    found[parameter, table, backward] = first._replace(last=each.number)
        yield from found.values()

    def _used_part(self, parameter: int, value: int) -> Tensor:
        """A parameter as a value made of it alone has it: cast, or one layer of a stack."""
        whole, used = self._tensor(parameter), self._tensor(value)
        if used.nbytes // used.itemsize < whole.nbytes // whole.itemsize:
            return used
        return dataclasses.replace(whole, itemsize=used.itemsize)

    def _lives(self) -> Iterator[Life]:
        """What has to be written down, and for how long.

        What is computed element by element is not, unless a product takes it: compilers compute
        it again where it is used, so that what it comes of lives as long.
        """
        step = self._step
        # Loops stack what they hand on, part by part.
        written = MAKING | {STACKING}
        made = {
            value for each in self._operations if each.kind in written for value in each.results
        }
        taken = {
            value
            for each in self._operations
            if each.kind in MAKING and each.kind != "stablehlo.reduce"
            for value in each.operands
        }
        last: dict[int, int] = {}
        end = max((each.number for each in self._operations), default=0) + 1
        gradients = step.gradients
        for each in reversed(self._program.operations):
            is_optimizer = step.is_of_optimizer(each)
            for value in each.operands:
                until = end if is_optimizer else each.number
                if not is_optimizer and each.kind not in MAKING:
                    for result in each.results:
                        if result not in made and result not in taken:
                            until = max(until, last.get(result, 0))
                last[value] = max(last.get(value, 0), until)
        for each in self._operations:
            for value in each.results:
                if value in step.free or value in step.weights or not step.shape(value):
                    continue
                if value not in made and value not in taken:
                    continue
                table = Table.UPDATE if value in gradients else self._homes[value]
                yield Life(self._tensor(value), table, each.number, last.get(value, each.number))


def _is_by_element(operation: Operation) -> bool:
    """Whether an operation makes each element of some of its operands, or hands them on."""
    return operation.kind not in MAKING and len(operation.results) == 1
