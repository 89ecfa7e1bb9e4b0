"""What a step needs of a device's memory, found out before it runs."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penzai_shard.inspection.devices.device_figures import DeviceFigures, device_figures
from penzai_shard.inspection.memory.memory_advice import MemoryAdvice, memory_advice
from penzai_shard.inspection.memory.memory_groups import MemoryGroup, memory_groups
from penzai_shard.inspection.memory.memory_rows import (
    MEMORY,
    TEMPORARIES,
    memory_rows,
    model_order,
)
from penzai_shard.inspection.memory.temporaries import (
    TemporaryGroup,
    of_equal_layers,
    temporaries_by_layer,
)
from penzai_shard.inspection.steps.programs import StepProgram, compiled_program
from penzai_shard.inspection.steps.step_arrays import StepArray, StepPart
from penzai_shard.library_apis.compiler_api import ExecutableMemory
from penzai_shard.meshes import mesh_text
from penzai_shard.report_trees import ReportTree, TreeRow, bytes_text, tree_of
from penzai_shard.text_tables import PreparedTable, Report

# So many groups are shown, and the rest in one row.
_GROUPS_SHOWN = 9
_TEMPORARIES_SHOWN = 3
# What temporaries are is said where they are at least this share of the total.
_SHARE_EXPLAINED = 0.05


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryTable(PreparedTable):
    """What a step needs of a device's memory; ``print`` and notebooks show it.

    Attributes:
        fits: Whether that is there; None if not known.
    """

    headings = ("memory", "arrays", "logical axes/mesh axes", "per device", "optimizer state")
    right_aligned = frozenset({"arrays", "per device", "optimizer state"})
    paths = frozenset({"memory"})

    fits: bool | None = None

    def verdict_style(self) -> str:
        """Green or red, if it is known whether the step fits."""
        return {None: "bold", True: "bold green", False: "bold red"}[self.fits]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MemoryReport(Report):
    """What a step needs of the memory of each device, in bytes, as the compiler planned it.

    What is there between steps is in ``parameters``, ``optimizer_state``, ``state_variables`` and
    ``constants``, together ``resident``: sums of the sizes of what one device holds of each array,
    used by the program or not. The other items are the compiler's own figures.

    Attributes:
        program: What was compiled.
        used: The names of the program's own arguments. JAX leaves out those that change no
            result; they are there all the same.
    """

    program: StepProgram
    used: frozenset[str]

    @classmethod
    def of(cls, program: StepProgram) -> "MemoryReport":
        """What a compiled program needs."""
        module = program.module
        entry = module.computations[module.entry]
        used = frozenset(one.op_name for one in entry if one.opcode == "parameter")
        return cls(program, used)

    @property
    def parameters(self) -> int:
        """The model's parameters."""
        return self._of_part("parameters")

    @property
    def optimizer_state(self) -> int:
        """What the optimizer keeps."""
        return self._of_part("optimizer state")

    @property
    def state_variables(self) -> int:
        """What else a step carries to the next, such as state variables and counts."""
        return self._of_part("state variables")

    @property
    def constants(self) -> int:
        """The model's arrays that are not parameters, such as an epsilon."""
        return self._of_part("constants")

    @property
    def resident(self) -> int:
        """What is there between steps, which is parameters, state and constants.

        The sum of the sizes of their shards on one device.
        """
        return self.parameters + self.optimizer_state + self.state_variables + self.constants

    @property
    def inputs(self) -> int:
        """What comes in beside that, such as the batch."""
        return self._of_part("inputs") + self._of_part("outputs")

    @property
    def unused(self) -> int:
        """The part of ``resident`` and ``inputs`` that the program does not use."""
        return sum(array.bytes_per_device for array in self._on_device(False))

    @property
    def padding(self) -> int:
        """What arguments take beyond the sizes of their shards, as TPUs fill up tiles.

        Less than nothing where the compiler packs elements of half a byte.
        """
        used = sum(array.bytes_per_device for array in self._on_device(True))
        return self._compiled.arguments - used - self._host_counted_as_device

    @property
    def outputs(self) -> int:
        """What comes out, the part included that takes the memory of donated arguments."""
        return self._compiled.outputs

    @property
    def donated(self) -> int:
        """The part of the outputs that takes the memory of donated arguments."""
        return self._compiled.aliased

    @property
    def temporaries(self) -> int:
        """What is there while the step runs, such as activations and gradients."""
        return self._compiled.temporaries

    @property
    def generated_code(self) -> int:
        """The program itself; 0 where the compiler does not say."""
        return self._compiled.generated_code

    @property
    def total(self) -> int:
        """What one device must have while the step runs.

        Everything above, without the donated part, which would count twice.
        """
        return self._compiled.total + self.unused - self._host_counted_as_device

    @property
    def host(self) -> int:
        """What is kept in the host's memory instead, for each device; not in any other item."""
        return max(self._compiled.host, self._on_host(True)) + self._on_host(False)

    def _on_host(self, used: bool) -> int:
        return sum(
            array.bytes_per_device
            for name, array in self._arguments.items()
            if array.is_on_host and (name in self.used) == used
        )

    @property
    def _host_counted_as_device(self) -> int:
        """Arguments in the host's memory that the compiler takes for the device's, on CPUs."""
        used = self._on_host(True)
        return used if self._compiled.host < used else 0

    @property
    def limit(self) -> int | None:
        """What programs can have of the memory of one such device; None if not known."""
        if self.program.memory_limit is not None:
            return self.program.memory_limit
        return None if self._figures is None else self._figures.memory

    @property
    def _figures(self) -> DeviceFigures | None:
        return device_figures(self.program.device_kind)

    @property
    def fits(self) -> bool | None:
        """Whether the total is within the limit; None if that is not known."""
        return None if self.limit is None else self.total <= self.limit

    def groups(self, *, collapse: bool = True) -> tuple[MemoryGroup, ...]:
        """What is resident, the largest first; a parameter with its optimizer's state.

        Args:
            collapse: Put what differs only in the numbers of its paths into one group, as the
                parameters of equal blocks.
        """
        return memory_groups(self._resident_arrays(), collapse)

    @functools.cached_property
    def temporary_groups(self) -> tuple[TemporaryGroup, ...]:
        """What the temporaries are when most of them are there, the largest first (an estimate).

        From the order of the program's instructions, since compilers do not say what they put
        where; empty where that does not explain what the compiler needs.
        """
        return of_equal_layers(self.temporaries_by_layer)

    @functools.cached_property
    def temporaries_by_layer(self) -> tuple[TemporaryGroup, ...]:
        """The same estimate, each layer's own, the largest first."""
        return temporaries_by_layer(self.program)

    @functools.cached_property
    def advice(self) -> tuple[MemoryAdvice, ...]:
        """What would make the step need less, the largest saving first; none where nothing does."""
        return memory_advice(self.program, self.temporary_groups, self.total)

    def table(self, *, collapse: bool = True) -> MemoryTable:
        """The report as a table: plain text for ``print``, coloured by ``rich.print``.

        Args:
            collapse: Show equal blocks as one row with a count, and small groups as one.
        """
        rows = [*self._item_rows(), *_group_rows(self.groups(collapse=collapse), collapse)]
        return MemoryTable(tuple(rows), self._verdict(), tuple(self._remarks()), self.fits)

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The report as a tree: what each layer holds, and what belongs to none.

        A parameter has its optimizer's state with it. The figures named ``"memory"`` add up to the
        total; ``"temporaries (estimated)"`` says which layers have how much of the temporaries.

        Args:
            collapse: Show equal blocks as one, and all scalars of a part.
        """
        return tree_of(
            "MemoryReport",
            self._verdict(),
            self.tree_rows(collapse=collapse),
            ok=self.fits,
            notes=self._remarks(),
            wholes=self.tree_wholes(),
            order=model_order(self.program.step.scopes),
            collapse=collapse,
        )

    def tree_wholes(self) -> dict[str, float]:
        """What the shares in ``tree`` are of."""
        return {MEMORY: self.total, TEMPORARIES: self.temporaries}

    def tree_rows(self, *, collapse: bool = True) -> Iterator[TreeRow]:
        """The rows that ``tree`` nests."""
        arrays = [array for array in self._arguments.values() if not array.is_on_host]
        held = memory_groups(arrays, collapse=False)
        # The order of the arguments, not by size.
        rank = {array.path: number for number, array in enumerate(arrays)}
        return memory_rows(
            self.items(),
            sorted(held, key=lambda group: rank[group.path]),
            self.temporaries_by_layer,
            self.program.step.scopes,
            collapse,
        )

    def to_json(self) -> str:
        """All of it as JSON text, in bytes: every item, and every parameter of its own."""
        mesh = self.program.step.mesh
        return json.dumps(
            {
                "device_kind": self.program.device_kind,
                "mesh": None if mesh is None else dict(mesh.shape),
                **self.items(),
                "host": self.host,
                "limit": self.limit,
                "fits": self.fits,
                "groups": [group.data() for group in self.groups(collapse=False)],
                "temporaries_estimated": [
                    dataclasses.asdict(group) for group in self.temporary_groups
                ],
                "advice": [_advice_data(advice) for advice in self.advice],
            },
            indent=2,
            default=str,
        )

    def items(self) -> dict[str, int]:
        """Every item by its name, in bytes for each device."""
        names = (
            "parameters",
            "optimizer_state",
            "state_variables",
            "constants",
            "inputs",
            "padding",
            "outputs",
            "donated",
            "temporaries",
            "generated_code",
            "total",
            "resident",
            "unused",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def _compiled(self) -> ExecutableMemory:
        return self.program.memory

    @property
    def _arguments(self) -> Mapping[str, StepArray]:
        return self.program.step.arguments

    def _of_part(self, part: StepPart) -> int:
        return sum(
            array.bytes_per_device
            for array in self._arguments.values()
            if array.part == part and not array.is_on_host
        )

    def _on_device(self, used: bool) -> Iterator[StepArray]:
        for name, array in self._arguments.items():
            if not array.is_on_host and (name in self.used) == used:
                yield array

    def _resident_arrays(self) -> list[StepArray]:
        return [
            array
            for array in self._arguments.values()
            if array.part not in ("inputs", "outputs") and not array.is_on_host
        ]

    def _verdict(self) -> str:
        mesh = self.program.step.mesh
        where = "on one device" if mesh is None else f"on each device of mesh ({mesh_text(mesh)})"
        text = f"needs {bytes_text(self.total)}"
        if self.limit is None:
            return f"{text} {where}; how much a device has is not known ({self._kind})"
        answer = "fits" if self.fits else "does not fit"
        return f"{text} of {_limit_text(self.limit)}: {answer}, {where} ({self._kind})"

    @property
    def _kind(self) -> str:
        return self.program.device_kind

    def _item_rows(self) -> Iterator[tuple[str, ...]]:
        counts: dict[str, int] = {}
        for array in self._arguments.values():
            counts[array.part] = counts.get(array.part, 0) + 1
        parts = {"parameters", "optimizer_state", "state_variables", "constants", "inputs"}
        for name, size in self.items().items():
            title = name.replace("_", " ")
            if name in ("resident", "unused") or (not size and name != "total"):
                continue
            count = f"{counts[title]:,}" if name in parts else ""
            sign = "-" if name == "donated" or size < 0 else ""
            yield (title, count, "", f"{sign}{bytes_text(abs(size))}", "")

    def _remarks(self) -> Iterator[str]:
        if self.program.memory_limit is None and self._figures is not None:
            yield f"{_limit_text(self._figures.memory)} is {self._figures.source}"
        if self.resident:
            yield f"of which between steps: {bytes_text(self.resident)}"
        if self.unused:
            yield f"of which the program does not use: {bytes_text(self.unused)}"
        if self.host:
            yield f"in the host's memory, for each device: {bytes_text(self.host)}"
        if self.temporaries >= _SHARE_EXPLAINED * self.total:
            yield from _temporary_remarks(self.temporary_groups)
        for advice in self.advice:
            up_to = "up to " if advice.is_bound else ""
            yield f"to save {up_to}{bytes_text(advice.saves)}: {advice.text}"
        yield from self.program.step.notes


def device_memory(step: Any, /, *args: Any, **kwargs: Any) -> MemoryReport:
    """What a step needs of each device's memory: it is compiled, and not run.

    Nothing is allocated: an array may be a ``jax.ShapeDtypeStruct``, and larger than any device.

    Args:
        step: A train step, a function under ``jax.jit``, or a layer.
        *args: What it is called with, concrete or abstract.
        **kwargs: The same by keyword.

    Returns:
        Parameters, optimizer's state, inputs, outputs, temporaries and their total, in bytes,
        beside the device's limit if that is known, and what is resident parameter by parameter.
        It prints as a table, in which equal blocks are one row, and shows itself as one in a
        notebook.

    Raises:
        MeshError: The arrays are on several meshes.

    >>> import jax, jax.numpy as jnp, optax
    >>> from penzai import pz
    >>> from penzai_shard import TrainState, build_train_step_fn
    >>> def loss_fn(model, rng, state, x):
    ...     return (model(x) ** 2).untag("batch", "out").sum().data_array, state, {}
    >>> model = pz.nn.Linear.from_config("linear", jax.random.key(0), {"in": 256}, {"out": 256})
    >>> state = TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(0))
    >>> step = build_train_step_fn(loss_fn)
    >>> report = device_memory(step, state, x=pz.nx.ones({"batch": 8, "in": 256}))
    >>> report.parameters, report.optimizer_state, report.inputs
    (262144, 524292, 8192)
    """
    return MemoryReport.of(compiled_program(step, args, kwargs))


def _limit_text(limit: int) -> str:
    """A device's memory, as people know it: 15.75 GiB."""
    return f"{limit / 2**30:.4g} GiB" if limit >= 2**30 else bytes_text(limit)


def _group_rows(groups: Sequence[MemoryGroup], collapse: bool) -> Iterator[tuple[str, ...]]:
    shown = groups[:_GROUPS_SHOWN] if collapse and len(groups) > _GROUPS_SHOWN + 1 else groups
    for group in shown:
        optimizer = bytes_text(group.optimizer_bytes) if group.optimizer_bytes else ""
        held = bytes_text(group.array_bytes)
        yield (group.path, f"{group.count:,}", group.axes_text, held, optimizer)
    if rest := groups[len(shown) :]:
        optimizer = bytes_text(sum(group.optimizer_bytes for group in rest))
        held = bytes_text(sum(group.array_bytes for group in rest))
        count = sum(group.count for group in rest)
        yield (f"and {len(rest)} smaller groups", f"{count:,}", "", held, optimizer)


def _temporary_remarks(groups: Sequence[TemporaryGroup]) -> Iterator[str]:
    """What the temporaries are, the kinds of most bytes and the layers of most bytes first."""
    kinds: dict[str, int] = {}
    for group in groups:
        kinds[group.kind] = kinds.get(group.kind, 0) + group.bytes
    if kinds:
        ordered = sorted(kinds.items(), key=lambda item: -item[1])
        shown = "; ".join(f"{kind} {bytes_text(size)}" for kind, size in ordered if size)
        yield f"temporaries when most are there (estimated): {shown}"
        largest = [group for group in groups if group.layer][:_TEMPORARIES_SHOWN]
        if largest:
            shown = "; ".join(f"{bytes_text(each.bytes)} {each}" for each in largest)
            yield f"the largest: {shown}"


def _advice_data(advice: MemoryAdvice) -> dict[str, Any]:
    rules = {str(axis): mesh_axis for axis, mesh_axis in advice.rules.items()}
    return {**dataclasses.asdict(advice), "rules": rules}
