"""Lists every sane way to lay out a train step: meshes, tables of rules, policies, microbatches.

A table is sane if each mesh axis has a use. Whether it divides is asked of the different shapes of
parameters, of which even a deep model has few, so that thousands of candidates take seconds.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from penzai_shard.arrays.kinds import device_dtype, itemsize
from penzai_shard.arrays.statistics import name_statistics
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.choosing.hardware import Hardware
from penzai_shard.choosing.workload import Workload
from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.layouts.axis_roles import FoundRoles, axes_of_role
from penzai_shard.layouts.layout import Layout
from penzai_shard.layouts.presets import TABLES, add_unknown, split_largest
from penzai_shard.meshes import AnyMesh, make_mesh, mesh_text
from penzai_shard.readers.penzai import make_named
from penzai_shard.rules import AxisRules, Rule, data_parallel, decide
from penzai_shard.specs import part_count
from penzai_shard.training.train_state import TrainState

# What mesh axes of the model split, in the order in which one array's are chosen.
_FIRST = ("experts", "vocabulary")
_SPLIT_ROLES = (*_FIRST, "neurons", "heads")
# What others call these axes: MaxText, the examples of Flax, t5x, Hugging Face.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "embedding": ("embed", "emb", "hidden", "features"),
    "neurons": ("mlp", "ff", "intermediate"),
    "heads": ("head", "q_heads", "num_heads"),
    "vocabulary": ("vocab",),
    "experts": ("expert", "exp"),
}
# The parts of a train state that stay from step to step, by the first piece of a path.
PARTS = {"params": "parameters", "opt_state": "optimizer"}
# What tables of rules are called in words.
_LABELS = "stored by", "computed by", "optimizer by", "between blocks by"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to lay out a train step.

    Attributes:
        mesh_sizes: Name and size of each mesh axis, in the mesh's order.
        layout: The layout, which knows the model's own names.
        microbatches: In how many parts, one after the other, the batch is computed.
    """

    mesh_sizes: tuple[tuple[str, int], ...]
    layout: Layout
    microbatches: int = 1

    @property
    def mesh(self) -> AnyMesh:
        """The mesh, without devices."""
        return make_mesh(dict(self.mesh_sizes), abstract=True)

    @property
    def table(self) -> Hashable:
        """What is equal for candidates that differ in policy and microbatches only."""
        return self.mesh_sizes, tuple(getattr(self.layout, name) for name in TABLES)

    @property
    def words(self) -> str:
        """The layout for people; those of unequal candidates are unequal."""
        layout, parts = self.layout, list[Any]()
        for label, name in zip(_LABELS, TABLES, strict=True):
            if (table := getattr(layout, name)) is not None:
                parts.append(f"{label} {_rules_text(table)}")
        parts += [layout.rematerialise and f"keeps {layout.rematerialise}"]
        parts += [layout.reshard_after_forward and "gathers again"]
        parts += [self.microbatches > 1 and f"{self.microbatches} microbatches"]
        return f"{mesh_text(dict(self.mesh_sizes))}: {'; '.join(filter(None, parts))}"


def _rules_text(rules: AxisRules) -> str:
    pairs = ((x.logical_axis or "largest", "*".join(x.mesh_axes) or "whole") for x in rules.rules)
    return ", ".join(f"{name}/{axes}" for name, axes in pairs) or "nothing"


# Meshes


def mesh_shapes(hardware: Hardware) -> list[dict[str, int]]:
    """Every mesh of devices that JAX can lay, those with most for the batch first.

    Its axes are ``data`` and ``model``, and between several hosts of GPUs also ``replica``.

    >>> mesh_shapes(Hardware.read("h100:16"))[:3]
    [{'data': 16}, {'replica': 2, 'data': 8}, {'data': 8, 'model': 2}]
    """
    devices, found = hardware.device_count, []
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for model, replica in itertools.product(divisors, divisors):
        rest = devices // model
        is_whole = hardware.hosts % replica == 0 and rest % replica == 0
        if is_whole and (replica == 1 or rest > replica):
            sizes = {"replica": replica, "data": rest // replica, "model": model}
            shape = {name: size for name, size in sizes.items() if size > 1} or {"data": 1}
            if hardware.has_mesh(shape):
                found.append(shape)
    return found


# What is stored


class StateArray(NamedTuple):
    """What a train state stores, and how it is laid out.

    Attributes:
        part: ``"parameters"``, or ``"optimizer"`` for what the optimizer keeps.
        names: The logical axes by which it is laid out: of a statistic those of its parameter.
        sizes: Their lengths.
        kept: Which of these dimensions it has.
        bytes: What it has in all.
    """

    part: str
    names: tuple[Any, ...]
    sizes: tuple[int, ...]
    kept: tuple[int, ...]
    bytes: int

    def find_axes(self, rules: AxisRules, mesh_sizes: tuple[tuple[str, int], ...]) -> set[str]:
        """The mesh axes over which it is split."""
        axes = decide(rules.rules, self.names, self.sizes, mesh_sizes).mesh_axes
        return {axis for dim in self.kept for axis in axes[dim]}


@functools.lru_cache(maxsize=4)
def stored_arrays(workload: Workload) -> dict[StateArray, int]:
    """The different arrays of parameters and optimizer, and how many there are of each."""
    given = workload.model, workload.optimizer, jax.random.key(0)
    state = TrainState.initial_state(*given, plain_arrays=workload.step_options["plain_arrays"])
    found: collections.Counter[StateArray] = collections.Counter()
    for leaf in name_statistics(leaves_of(state)):
        part, dtype = PARTS.get(leaf.path.partition("/")[0]), device_dtype(leaf.dtype)
        if part is None or dtype is None:
            continue
        named: Any = leaf.names or (), leaf.shape, range(len(leaf.names or ()))
        if (statistic := leaf.statistic) is not None and leaf.names is not None:
            named = statistic.names, statistic.sizes, statistic.kept
        names, sizes, kept = named
        own = tuple(dim for dim in kept if dim is not None)
        size = math.prod(leaf.shape) * itemsize(dtype)
        found[StateArray(part, names, sizes, own, size)] += 1
    return dict(found)


def stored_bytes(
    workload: Workload, candidate: Candidate, parts: Sequence[str] = ("parameters", "optimizer")
) -> float:
    """The bytes of parameters and optimizer that one device stores, by arithmetic.

    Args:
        workload: The step.
        candidate: The layout.
        parts: Which of both.
    """
    tables, mesh_sizes, total = read_tables(workload, candidate), candidate.mesh_sizes, 0.0
    for array, count in stored_arrays(workload).items():
        if array.part in parts:
            axes = array.find_axes(tables[array.part], mesh_sizes)
            total += count * array.bytes / part_count(axes, dict(mesh_sizes))
    return total


def read_tables(workload: Workload, candidate: Candidate) -> dict[str, AxisRules]:
    """The tables of a layout in the model's own names; of the optimizer in any case."""
    return find_roles(_small_model(workload), candidate).tables


def find_roles(model: Any, candidate: Candidate) -> FoundRoles:
    """The roles of a layout in a model, with a table for the optimizer in any case."""
    found = candidate.layout.find_roles(model, candidate.mesh)
    tables = {"optimizer": found.tables["parameters"], **found.tables}
    return dataclasses.replace(found, tables=tables)


def make_small(model: Any) -> list[Any]:
    """One array for each of the different shapes of a model's named arrays."""
    shapes = sorted({(x.names, x.shape) for x in leaves_of(model) if x.names}, key=str)
    return [make_named(jax.ShapeDtypeStruct(shape, "float32"), names) for names, shape in shapes]


@functools.lru_cache(maxsize=4)
def _small_model(workload: Workload) -> list[Any]:
    return make_small(workload.model)


# Candidates


class Candidates(list[Candidate]):
    """Candidates, each once, in an order that is the same everywhere.

    Attributes:
        left_out: How many tables are not among them, by reason.
    """

    def __init__(self, found: Iterable[Candidate], left_out: Mapping[str, int]) -> None:
        super().__init__(found)
        self.left_out = collections.Counter(left_out)


def make_candidates(
    workload: Workload,
    meshes: Iterable[Mapping[str, int]],
    *,
    keep: Mapping[Any, Any] | None = None,
    rematerialise: Sequence[str | None] = (None, "dots", "nothing"),
    microbatches: Sequence[int] = (1, 2, 4, 8),
) -> Candidates:
    """Every sane way to lay out a train step on some meshes.

    Experts, vocabulary, neurons and heads are split over a mesh axis of the model or stay whole.
    Parameters are stored as they are used; or split over the mesh axes of the batch, too, by the
    embedding or by the largest dimension, over all of these or over the nearest. The optimizer's
    state lies as they do, or is split by its largest dimension. Between blocks, activations are
    split along the sequence or not; blocks keep what a policy says, or gather parameters again.

    Args:
        workload: The step.
        meshes: The sizes of the mesh axes by name; ``mesh_shapes(hardware)`` gives them. The mesh
            axes ``replica`` and ``data`` are for the batch, ``model`` is for the model, and any
            other is tried for both.
        keep: What is decided: logical axis or role to mesh axis, mesh axes, or None for "whole".
            Batch, sequence and what layers are split along are looked up in what is computed, any
            other axis in how parameters are stored.
        rematerialise: The policies to try.
        microbatches: The numbers of microbatches to try.

    Raises:
        RuleTypeError: ``keep`` names what is not there, or each policy needs blocks that the model
            does not have.
    """
    maker = _Maker(workload, keep or {}, [dict(sizes) for sizes in meshes], rematerialise)
    for use in maker.mesh_uses():
        maker.add(use, microbatches)
    return Candidates(maker.found.values(), maker.left_out)


class _Use(NamedTuple):
    """What the axes of a mesh are for: the batch, or the model."""

    sizes: dict[str, int]
    batch: tuple[str, ...]
    model: tuple[str, ...]

    @property
    def of_batch(self) -> AxisRules:
        return data_parallel(self.batch) if self.batch else AxisRules({})


class _Maker:
    """The candidates of a workload that were found so far."""

    def __init__(self, workload: Workload, keep: Any, meshes: list[Any], policies: Any) -> None:
        self.workload = workload
        self.found: dict[Any, Candidate] = {}
        self.left_out: collections.Counter[str] = collections.Counter()
        self.shapes = [(leaf.names or (), leaf.shape) for leaf in leaves_of(_small_model(workload))]
        pairs = sorted({(n, str(x), x) for own in self.shapes for x, n in zip(*own, strict=True)})
        # The longest first.
        self.axes = [*dict.fromkeys(name for _, _, name in reversed(pairs) if name is not None)]
        self.names = dict(workload.names)
        for role, others in _OTHER_NAMES.items():
            present = [name for name in others if name in self.axes]
            if present and role not in self.names and not self._has(role):
                self.names[role] = present[0]
        roles: list[Any] = [role for role in _SPLIT_ROLES if self._has(role)]
        # Where no role is known the longest axes are tried.
        self.split = roles or self.axes[:4]

        problems = Problems("no candidates:")
        self.has_blocks = workload.blocks != ()
        self.policies = [x for x in policies if self.has_blocks or x is None]
        if not self.policies:
            what = f"{[*policies]} need blocks, and no layout knows those of the model"
            problems.add("rematerialise", what, "Leave it out, or name layers with blocks=.")
        self.kept = self._read_keep(keep, meshes, problems)
        problems.raise_if_any(RuleTypeError)
        # The mesh axes that are kept for the model.
        self.taken = {x for role in ("seq", *self.split) for x in self.kept.get(role, ())}
        wanted = {*itertools.chain(*self.kept.values())}
        self.meshes = [sizes for sizes in meshes if wanted <= sizes.keys()]
        if count := len(meshes) - len(self.meshes):
            axes = " or ".join(map(repr, sorted(wanted)))
            self.left_out[f"a mesh lacks mesh axis {axes}, which is kept"] = count

    def _has(self, role: str) -> bool:
        # What infer_names calls "heads*projection" is split along its first factor.
        firsts = {str(name).partition("*")[0] for name in self.axes}
        return not {*axes_of_role(role, self.names)}.isdisjoint({*self.axes, *firsts})

    def _read_keep(self, keep: Any, meshes: list[Any], problems: Problems) -> dict[Any, Any]:
        """The mesh axes of each role, or other axis, that is decided."""
        by_name = {name: name for name in self.axes}
        for role in ("batch", "seq", *self.split, "embedding"):
            by_name |= dict.fromkeys((*axes_of_role(role, self.names), role), role)
        # Where they are several they are in the order of the mesh.
        mesh_axes = [*dict.fromkeys(itertools.chain(*sorted(meshes, key=len, reverse=True)))]
        kept: dict[Any, tuple[str, ...]] = {}
        for name, given in keep.items():
            over, path = [given] if isinstance(given, str) else given or (), f"keep[{name!r}]"
            add_unknown(problems, path, {name} - by_name.keys(), [*map(str, by_name)])
            add_unknown(problems, path, over, mesh_axes)
            if (role := by_name.get(name, name)) in kept:
                problems.add(path, f"another name of {role!r} is kept, too", "Leave one out.")
            kept[role] = tuple(axis for axis in mesh_axes if axis in over)
        return kept

    def mesh_uses(self) -> Iterator[_Use]:
        """The ways to use the meshes."""
        for sizes in self.meshes:
            used = [axis for axis, size in sizes.items() if size > 1]
            own = [axis for axis in used if axis in {"replica", "data"} - self.taken]
            free = [axis for axis in used if axis not in {"replica", "data", "model", *self.taken}]
            if "batch" in self.kept:
                own, free = [axis for axis in used if axis in self.kept["batch"]], []
            for count in range(len(free), -1, -1):
                for chosen in itertools.combinations(free, count):
                    batch = (*own, *chosen)
                    yield _Use(sizes, batch, tuple(axis for axis in used if axis not in batch))

    def add(self, use: _Use, microbatches: Sequence[int]) -> None:
        """Adds the candidates of one way to use a mesh."""
        parts = part_count(use.batch, use.sizes)
        examples = self.workload.sizes[self.workload.batch_axis]
        counts = [n for n in microbatches if examples % (parts * n) == 0]
        if not counts:
            what = f"the batch ({examples:,}) does not divide over {parts:,} devices"
            self.left_out[f"{what} in {min(microbatches)} microbatches"] += 1
            return
        betweens = [*self._make_betweens(use)]
        if not betweens:
            self.left_out[f"the sequence is not split over {self.kept['seq']}, as is kept"] += 1
        mesh_sizes = tuple(use.sizes.items())
        for plain in self._make_tables(use):
            specs = self._find_specs(Candidate(mesh_sizes, plain))
            if specs is None or (plain.optimizer and specs["parameters"] == specs["optimizer"]):
                continue
            ways: list[dict[str, Any]] = [{"rematerialise": policy} for policy in self.policies]
            gathers = specs["parameters"] != specs["compute"]
            if gathers and self.has_blocks and None in self.policies:
                ways.append({"reshard_after_forward": True})
            for between, way, n in itertools.product(betweens, ways, counts):
                layout = dataclasses.replace(plain, between_blocks=between, **way)
                key = mesh_sizes, use.batch, *specs.values(), between, *way.items(), n
                self.found.setdefault(key, Candidate(mesh_sizes, layout, n))

    def _make_tables(self, use: _Use) -> Iterator[Layout]:
        """The tables of parameters, computation and optimizer."""
        # What uses all mesh axes of the batch alike is left to the mesh that has them as one.
        merged = {axis: size for axis, size in use.sizes.items() if axis != "replica"}
        merged["data"] = use.sizes.get("replica", 0) * use.sizes.get("data", 1)
        is_merged = {"replica", "data"} <= {*use.batch} and merged in self.meshes
        free = [(), *((axis,) for axis in use.model)]
        choices = [[self.kept[role]] if role in self.kept else free for role in self.split]
        sane = [x for x in itertools.product(*choices) if {*use.model} <= {*itertools.chain(*x)}]
        if not sane:
            self.left_out[f"mesh axis {' or '.join(map(repr, use.model))} has no use"] += 1
        options: dict[str, Any] = {"names": self.names, "blocks": self.workload.blocks}
        known = {"batch", "seq", *self.split}
        of_all = split_largest(use.batch) if use.batch else None
        rest = [(name, over) for name, over in self.kept.items() if name not in known]
        kept = AxisRules([(x, over) for name, over in rest for x in axes_of_role(name, self.names)])
        for picked in sane:
            picks = zip(self.split, picked, strict=True)
            # As presets have it, layers give way to experts and vocabulary.
            used = AxisRules([Rule(role, over, role not in _FIRST) for role, over in picks if over])
            stored = [] if is_merged else [AxisRules({})]
            for over in (use.batch[start:] for start in range(is_merged, len(use.batch))):
                stored += [AxisRules({"embedding": over})] if self._has("embedding") else []
                stored += [split_largest(over)]
            for own in stored:
                options |= {"parameters": used | kept | own, "compute": use.of_batch | used}
                yield Layout(**options)
                if of_all is not None and own != of_all:
                    yield Layout(**options, optimizer=used | of_all)

    def _find_specs(self, candidate: Candidate) -> dict[str, Any] | None:
        """How tables lay out the different parameters; None if they do not."""
        specs, problems = {}, []
        for table, rules in read_tables(self.workload, candidate).items():
            own = [decide(rules.rules, *x, candidate.mesh_sizes) for x in self.shapes]
            problems += [problem.what for each in own for problem in each.problems]
            specs[table] = tuple(each.mesh_axes for each in own)
        self.left_out.update(problems[:1])
        return None if problems else specs

    def _make_betweens(self, use: _Use) -> Iterator[AxisRules | None]:
        """How activations lie between blocks."""
        sizes = self.workload.sizes
        lengths = [sizes[name] for name in axes_of_role("seq", self.names) if name in sizes]
        # Where the last token is a target only, the model sees one less.
        lengths += [length - 1 for length in lengths]
        free = dict.fromkeys([(), use.model])
        for over in [self.kept["seq"]] if "seq" in self.kept else free:
            parts = part_count(over, use.sizes)
            if not over:
                yield None
            elif self.has_blocks and any(length % parts == 0 for length in lengths):
                yield use.of_batch | data_parallel(over, "seq")
