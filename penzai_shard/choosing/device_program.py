"""A train step as each device runs it, in one layout after the other, from one lowering.

Which operations a step has depends on few things about a layout: the policy, the number of
microbatches, whether parameters are gathered. For each of these *structures* the step is built and
lowered once, in a layout whose rules are marks: each table and each logical axis is a mesh axis of
size 1, which in the program stands wherever that table says something about that axis. For a
candidate its own rules are asked at each mark (lowering takes a second, this a tenth).
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penzai_shard import errors
from penzai_shard.arrays.structure import Leaf, leaves_of
from penzai_shard.choosing.candidates import Candidate, find_roles, make_small
from penzai_shard.choosing.workload import Workload
from penzai_shard.jax_internals.compiler import kept_arguments
from penzai_shard.layouts.axis_roles import FoundRoles, axes_of_role, mesh_axes_of
from penzai_shard.layouts.layout import Layout
from penzai_shard.layouts.presets import TABLES
from penzai_shard.propagation.flat import Operation, Propagated, Spec, Value
from penzai_shard.propagation.partition import Mark, MarkedProgram
from penzai_shard.rules import AxisRules, decide
from penzai_shard.specs import part_count

# A mesh axis beside the marks: JAX leaves constraints out on a mesh of one device.
_REST = "rest"
_PART = re.compile(r"\((\d+)\)(\d+)$")


class _Tables(NamedTuple):
    """A candidate's rules in the model's own names, by table, and what its program is like."""

    rules: Mapping[str, AxisRules]
    split: dict[str, tuple[Any, ...]]
    structure: "_Structure"
    mesh_sizes: tuple[tuple[str, int], ...]

    def find_spec(self, table: str, names: tuple[Any, ...], shape: tuple[int, ...]) -> Spec:
        """The mesh axes of each dimension of an array."""
        decision = decide(self.rules[table].rules, names, shape, self.mesh_sizes)
        if decision.problems:
            raise errors.PlanError("this layout cannot be priced:", decision.problems)
        return decision.mesh_axes


class _Structure(NamedTuple):
    """What decides which operations the program of a layout has.

    Attributes:
        layout: The layout without its rules.
        microbatches: In how many parts the batch is computed.
        pins_regions: Whether what flows into layers and out of them is pinned.
        splits_vocabulary: The same of vocabulary layers. Without a layout between blocks it makes
            no difference.
        gathers: Whether parameters are used otherwise than they are stored.
        is_idle: Whether a mesh axis does not split the batch. Then gradients of what is gathered
            are pinned; of anything else it makes no difference.
    """

    layout: Layout
    microbatches: int
    pins_regions: bool
    splits_vocabulary: bool
    gathers: bool
    is_idle: bool


def _read_tables(model: Any, candidate: Candidate) -> _Tables:
    """Reads a candidate.

    Raises:
        RuleTypeError, MeshError: As ``Layout.for_model``.
    """
    layout, found, sizes = candidate.layout, find_roles(model, candidate), candidate.mesh_sizes
    rules, leaves = found.tables, leaves_of(model)

    def read(table: str) -> list[Spec]:
        own = rules[table].rules
        return [decide(own, x.names, x.shape, sizes, "replicate").mesh_axes for x in leaves]

    gathers = read("parameters") != read("compute")
    in_use = {axis for axis, size in sizes if size > 1}
    is_idle = not in_use or not in_use <= {*mesh_axes_of("batch", [layout.compute])}
    pins_regions, has_between = found.pins_regions, "between_blocks" in rules
    splits_vocabulary = pins_regions and (bool(found.split["vocabulary"]) or not has_between)
    without_rules = dataclasses.replace(
        layout,
        parameters={},
        compute={},
        optimizer=None,
        between_blocks=None,
        reshard_after_forward=gathers and layout.reshard_after_forward,
    )
    structure = _Structure(
        without_rules,
        candidate.microbatches,
        pins_regions,
        splits_vocabulary,
        gathers,
        is_idle or not gathers,
    )
    split = found.split | {"vocabulary": ("vocabulary",) * splits_vocabulary}
    return _Tables(rules, split, structure, sizes)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _MarkedLayout(Layout):
    """A layout whose rules are marks, whatever the model."""

    marks: FoundRoles

    def find_roles(self, tree: Any, mesh: Any) -> FoundRoles:
        """The marks."""
        return self.marks


class MarkedSteps:
    """The steps of a model in any layout; each structure is lowered when it is first asked for.

    Args:
        workload: The step.
        model: The model, which may have fewer blocks than the workload's.
    """

    def __init__(self, workload: Workload, model: Any) -> None:
        self._workload, self._model, self._small = workload, model, make_small(model)
        leaves = [*leaves_of(model), *leaves_of(dict(workload.inputs))]
        roles = [name for role in ("batch", "seq") for name in axes_of_role(role, workload.names)]
        names = (name for leaf in leaves for name in leaf.names or ())
        self._names = [name for name in dict.fromkeys((*roles, *names)) if name is not None]
        self._programs: dict[_Structure, tuple[MarkedProgram, tuple[Leaf, ...], list[int]]] = {}

    def place(self, candidate: Candidate) -> "DeviceProgram":
        """The step as each device runs it in a layout.

        Raises:
            PlanError: A length does not divide.
            RuleTypeError, MeshError: As ``Layout.build``.
            PropagationError: Something runs per device, or Shardy refuses the program.
        """
        tables = _read_tables(self._small, candidate)
        if tables.structure not in self._programs:
            self._programs[tables.structure] = self._lower(tables)
        program, leaves, kept = self._programs[tables.structure]
        # The state comes first, among the arguments and among the results.
        specs = [self._find_spec(tables, mark, leaves) for mark in program.marks]
        placed = program.place(dict(tables.mesh_sizes), specs)
        # Constants that a function holds come first.
        values = placed.arguments[len(placed.arguments) - len(kept) :]
        own = (leaves[number] for number in kept)
        # Those that are trained come first, among the arguments and among the results.
        trained = itertools.takewhile(lambda leaf: leaf.path.startswith("params/"), leaves)
        paths = (leaf.path for leaf in trained)
        updated = dict(zip(paths, placed.results, strict=False))
        return DeviceProgram(placed, dict(zip(values, own, strict=True)), updated)

    def _lower(self, tables: _Tables) -> tuple[MarkedProgram, tuple[Leaf, ...], list[int]]:
        structure = tables.structure
        layout, marks = structure.layout, {}
        for table in TABLES:
            marks[table] = AxisRules({x: f"{table}:{i}" for i, x in enumerate(self._names)})
        # Gradients and updates are computed where an array of the optimizer is split finer.
        finer = [(x.logical_axis, (*x.mesh_axes, _REST)) for x in marks["optimizer"].rules]
        marks["optimizer"] = AxisRules([*finer, *marks["optimizer"].rules])
        if not structure.gathers:
            # Parameters are gathered where these two differ.
            marks["parameters"] = marks["compute"]
        if not structure.pins_regions:
            del marks["between_blocks"]
        axes = {axis: 1 for own in marks.values() for rule in own.rules for axis in rule.mesh_axes}
        # All devices divide a batch that leaves no mesh axis idle, and so does this.
        devices = math.prod(size for _, size in tables.mesh_sizes)
        axes[_REST] = next((n for n in range(2, devices) if devices % n == 0), max(devices, 2))
        # Only what a layout itself says of the batch tells whether a mesh axis is idle.
        known = (x for x in axes_of_role("batch", layout.names) if x in self._names)
        batch = [f"compute:{self._names.index(name)}" for name in known][:1]
        marked = _MarkedLayout(
            **{field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
            | {"compute": {"batch": batch + [_REST] * (not structure.is_idle)}},
            marks=FoundRoles(marks, tables.split, ()),
        )
        candidate = Candidate(tuple(axes.items()), marked, structure.microbatches)
        # Warnings are for a layout that is built.
        with warnings.catch_warnings(action="ignore", category=errors.ShardingWarning):
            step, state, inputs = self._workload.build(candidate, model=self._model)
            lowerable = step.lowerable(state, **inputs)
        with refuse_meshes():
            lowered = lowerable.trace().lower(lowering_platforms=("cpu",))
        return MarkedProgram(lowered), lowerable.leaves, sorted(kept_arguments(lowered))

    def _find_spec(self, tables: _Tables, mark: Mark, leaves: tuple[Leaf, ...]) -> Spec | None:
        """What a candidate says of a mark; None if it has no such table."""
        table = next((axis.partition(":")[0] for axis in mark.axes if ":" in axis), None)
        if table is None:
            return ((),) * len(mark.shape)
        if table not in tables.rules:
            return None
        names = tuple(
            self._names[int(axis.partition(":")[2])] if axis else None for axis in mark.axes
        )
        whole = None if mark.position is None else leaves[mark.position].statistic
        if whole is not None and whole.names is not None and whole.sizes is not None:
            # A statistic of some dimensions of a parameter lies as these do.
            spec = tables.find_spec(table, whole.names, whole.sizes)
            return tuple(() if dim is None else spec[dim] for dim in whole.kept or ())
        if table == "optimizer" and mark.position is None:
            # Gradients lie as the parameter where the optimizer's arrays are not split finer.
            both = (tables.find_spec(x, names, mark.shape) for x in ("parameters", "optimizer"))
            sizes = dict(tables.mesh_sizes)
            return max(both, key=lambda spec: part_count(itertools.chain(*spec), sizes))
        return tables.find_spec(table, names, mark.shape)


@contextlib.contextmanager
def refuse_meshes() -> Iterator[None]:
    """Says what to do if a step cannot be lowered, as its loss function has a mesh of its own."""
    try:
        yield
    except errors.ShardingError:
        raise
    except ValueError as error:
        headline = "the step cannot be lowered for a mesh without devices:"
        fix = "Leave meshes out of the loss function: what it pins, a layout says by names."
        raise errors.PropagationError(
            headline, [errors.Problem("loss_fn", f"{error}", fix)]
        ) from error


class DeviceProgram:
    """A step as each device runs it, with its collectives.

    Attributes:
        operations: What is done, in XLA's order.
        arguments: By the number of a value which array of the step it is.
        results: The values that come out.
        updated: By its path the next value of each parameter that is trained.
        values: All values by number, with what they are on all devices.
        makers: By the number of a value the operation that makes it.
        users: By the number of a value the operations that take it.
        shapes: By the number of a value the shape of the part that a device has.
    """

    def __init__(
        self, program: Propagated, arguments: Mapping[int, Leaf], updated: Mapping[str, int]
    ) -> None:
        self.operations, self.arguments, self.updated = program.operations, arguments, updated
        self.results, self.values = program.results, program.values
        self.mesh_sizes = program.mesh
        self.makers = program.makers
        self.users = collections.defaultdict[int, Sequence[Operation]](list, program.users)
        split = functools.cache(self._split)
        self.shapes = [split(value.shape, spec_of(value)) for value in self.values]

    def _split(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        return tuple(-(-n // self.parts(axes)) for n, axes in zip(shape, spec, strict=True))

    def parts(self, axes: Iterable[str]) -> int:
        """In how many parts mesh axes, or parts of them as ``data:(1)2``, split something."""
        return math.prod(
            int(part[2]) if (part := _PART.search(axis)) else self.mesh_sizes[axis] for axis in axes
        )

    def bytes(self, value: int) -> int:
        """What a device has of a value."""
        return math.prod(self.shapes[value]) * self.itemsize(value)

    def itemsize(self, value: int) -> int:
        """The bytes of an element of a value; 0 of what is no array."""
        dtype = self.values[value].dtype
        bits = re.search(r"\d+", dtype)
        count = 2 if dtype.startswith("complex") else 1
        return count * max(int(bits[0]) // 8, 1) if bits else 0


def spec_of(value: Value) -> Spec:
    """The mesh axes of each dimension of a value, none where there is no layout."""
    return value.spec or ((),) * len(value.shape)
