"""Every sane table from logical axes to mesh axes."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from penzai_shard.axis_rules import AxisRules
from penzai_shard.choosing.candidates.candidate import Candidate
from penzai_shard.choosing.candidates.kept_axes import Keep, KeptAxes
from penzai_shard.choosing.candidates.mesh_uses import MeshUse, mesh_uses
from penzai_shard.choosing.candidates.problem_axes import LaidOut, ProblemAxes
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import PlanError, RuleTypeError
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.layouts import Layout
from penzai_shard.layouts.model_roles import Names
from penzai_shard.layouts.presets import MIN_SIZE
from penzai_shard.report_trees import count_text
from penzai_shard.rule_kinds import LogicalAxis
from penzai_shard.rule_presets import data_parallel, fully_sharded
from penzai_shard.rule_presets import tensor_parallel as split_names
from penzai_shard.surgery import rematerialise_blocks

OnUnfit: TypeAlias = Literal["error", "pad"]
MICROBATCHES = (1, 2, 4, 8)
POLICIES = (None, "dots", "nothing")
_FIRST = ("experts", "vocabulary")
_PADDED_LENGTH = re.compile(r"Pad it to (\d+)")
_TWICE = re.compile(
    r"(mesh axis '.*?') \(\d+\) is asked for twice: by (logical axis '.*?') .*?"
    r", and by (logical axis '.*?') "
)


class Candidates(tuple[Candidate, ...]):
    """Candidates, and why others are not among them.

    Attributes:
        left_out: One line for each reason, with the number of tables that it concerns.
        could_be_padded: How many of these tables ``on_indivisible="pad"`` would try.
    """

    left_out: tuple[str, ...]
    could_be_padded: int

    def __new__(
        cls, found: Iterable[Candidate], left_out: Iterable[str] = (), could_be_padded: int = 0
    ) -> "Candidates":
        """Makes them of candidates and reasons."""
        made = super().__new__(cls, found)
        made.left_out = tuple(left_out)
        made.could_be_padded = could_be_padded
        return made


@dataclasses.dataclass(frozen=True)
class _Storage:
    """The tables of one way to store parameters and to split layers."""

    parameters: AxisRules
    compute: AxisRules
    optimizer: AxisRules | None
    splits: bool
    gathers: bool


def candidates(
    problem: TrainingProblem,
    mesh_shapes: Iterable[Mapping[str, int]],
    keep: Keep | None = None,
    *,
    hardware: Hardware | None = None,
    names: Names | None = None,
    blocks: Any = None,
    rematerialise: Sequence[str | None] = POLICIES,
    microbatches: Sequence[int] = MICROBATCHES,
    on_indivisible: OnUnfit = "error",
) -> Candidates:
    """Every sane way to lay out a training step on some meshes.

    The batch is split over one or more mesh axes. Experts, vocabulary, neurons and heads are split
    over those of the model or stay whole, in parameters and in what is computed alike. Parameters
    are stored as they are used; or split over the mesh axes of the batch too, by the embedding or
    as ``fully_sharded`` does, over all of these or over the nearest alone. The optimizer's state
    lies as they do, or is split further. Activations between blocks are split along the sequence or
    not; blocks keep what a policy says, or gather parameters again. The presets of ``Layout`` are
    among them, but for ``manual``.

    Args:
        problem: The step.
        mesh_shapes: The sizes of the mesh axes by name; ``mesh_shapes(hardware)`` gives them.
        keep: What is decided already: logical axis or role to mesh axis, mesh axes, or None for
            "whole". Of the batch, it is what activations and inputs are split over; of ``"seq"``,
            activations between blocks; of what layers are split along, parameters and what is
            computed; of any other axis, such as the embedding, how parameters are stored. What
            is not named is free.
        hardware: The devices, by which mesh axes of one size may differ.
        names: As for ``Layout``: what the model calls its axes. Names that other libraries
            commonly use are known.
        blocks: As for ``Layout``. A model without blocks that are known gets ``()``.
        rematerialise: The policies to try.
        microbatches: The numbers of microbatches to try.
        on_indivisible: ``"pad"`` for tables too by which parameters are stored padded, as their
            lengths do not divide; but for those that would make a length twice as long or more.

    Returns:
        The candidates, each once, always in the same order, and why others are left out.

    Raises:
        RuleTypeError: ``keep`` or ``names`` cannot be read, or no input has a batch.

    >>> import jax, optax, penzai_shard
    >>> from penzai import pz
    >>> def build():
    ...     axes = {"embedding": 8}, {"neurons": 32}
    ...     return pz.nn.Linear.from_config("up", jax.random.key(0), *axes)
    >>> x = pz.nx.zeros({"batch": 8, "embedding": 8})
    >>> problem = TrainingProblem(
    ...     penzai_shard.abstract_model(build), lambda **inputs: None, optax.sgd(0.1), {"x": x}
    ... )
    >>> found = candidates(problem, [{"data": 4, "model": 2}], keep={"neurons": "model"})
    >>> found[0].layout.compute
    AxisRules({'batch': 'data'}) | tensor_parallel('model', axes=('neurons',))
    """
    axes = ProblemAxes.of(problem, dict(names or {}), blocks)
    shapes = [dict(shape) for shape in mesh_shapes]
    kept = KeptAxes.read(dict(keep or {}), axes, shapes)
    _check_blocks(problem.model, blocks, axes.has_blocks, rematerialise)
    pads = on_indivisible == "pad"
    search = _Search(axes, kept, blocks, tuple(rematerialise), tuple(microbatches), pads)
    batch = kept.roles.get("batch")
    uses = (mesh_uses(shape, hardware, batch) for shape in shapes)
    for use in itertools.chain.from_iterable(uses):
        if kept.allows(use):
            search.add(use, is_merged=_merged(use) in shapes)
    lines = [
        f"{reason} ({count:,} {'table' if count == 1 else 'tables'})"
        for reason, count in search.left_out.items()
    ]
    return Candidates(search.found.values(), lines, search.could_be_padded)


def _check_blocks(model: Any, blocks: Any, has_blocks: bool, policies: Sequence[Any]) -> None:
    """Refuses blocks that there are not, and policies alone where there are none."""
    named = f"the {type(model).__name__}"
    if blocks is not None and blocks != ():
        for row in rematerialise_blocks(blocks).report(model).rows:
            if not row.count:
                raise RuleTypeError(
                    f"blocks={blocks!r}: {named} has no such layers: "
                    f"{row.problem.partition(' Give expect=0')[0]} Give their type, as in "
                    "blocks=MyBlock, or its name in a pattern, blocks='**/my_block'; or leave it "
                    "out."
                )
    if not has_blocks and None not in policies:
        raise RuleTypeError(
            f"rematerialise={list(policies)}: it is done to blocks, and {named} has none that are "
            "known. Leave it out; jax.checkpoint in the model itself is priced as it is."
        )


@dataclasses.dataclass
class _Search:
    """The candidates that were found so far."""

    axes: ProblemAxes
    kept: KeptAxes
    blocks: Any
    policies: tuple[str | None, ...]
    microbatches: tuple[int, ...]
    pads: bool
    found: dict[Any, Candidate] = dataclasses.field(default_factory=dict)
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    could_be_padded: int = 0

    def add(self, use: MeshUse, is_merged: bool) -> None:
        """Adds the candidates of one way to use a mesh."""
        devices = math.prod(use.mesh_shape[axis] for axis in use.batch)
        counts = [n for n in self.microbatches if self.axes.batch % (devices * n) == 0]
        if not counts:
            fewest = min(self.microbatches)
            in_parts = f" in {fewest} microbatches" if fewest > 1 else ""
            unit = devices * fewest
            least = self.axes.batch // unit * unit
            divides = f"{least:,} or {least + unit:,}" if least else f"{unit:,}"
            self.left_out[
                f"the batch ({self.axes.batch}) does not divide over "
                f"{count_text(devices, 'device')}{in_parts}; one of {divides} does"
            ] += 1
            return
        for storage in _storages(use, self.axes, self.kept, is_merged):
            for specs, padded, _ in self._laid_out(storage, use.mesh_shape):
                if specs.get("optimizer") == specs["parameters"]:
                    continue  # It is there without a table of the optimizer's own.
                ways = _ways(use, self.axes, self.kept, storage, self.policies)
                for (between, policy, again), parts in itertools.product(ways, counts):
                    key = (use.mesh_axes, use.batch, *specs.items(), between, policy, again, parts)
                    if key not in self.found:
                        layout = self._layout(storage, between, policy, again)
                        self.found[key] = Candidate(use.mesh_axes, layout, parts, padded)

    def _laid_out(self, storage: _Storage, mesh_shape: Mapping[str, int]) -> Iterator[LaidOut]:
        """How parameters lie by some tables: as they are, and padded where that is other."""
        tables = {"parameters": storage.parameters, "compute": storage.compute}
        if storage.optimizer is not None:
            tables["optimizer"] = storage.optimizer
        refusal = None
        try:
            yield self.axes.laid_out(tables, mesh_shape)
        except PlanError as error:
            refusal = error
        if refusal is None and not self.pads:
            return
        try:
            padded = self.axes.laid_out(tables, mesh_shape, "pad")
        except PlanError as error:
            self.left_out[_reason(error)] += 1
            return
        if self.pads and padded.padded and padded.is_sane:
            yield padded
        elif refusal is not None:
            self.left_out[_reason(refusal, would_pad=padded.is_sane)] += 1
            self.could_be_padded += padded.is_sane

    def _layout(
        self, storage: _Storage, between: AxisRules | None, policy: str | None, again: bool
    ) -> Layout:
        return Layout(
            parameters=storage.parameters,
            compute=storage.compute,
            optimizer=storage.optimizer,
            between_blocks=between,
            rematerialise=policy,
            reshard_after_forward=again,
            names=self.axes.names,
            blocks=self.blocks if self.axes.has_blocks else (),
        )


def _merged(use: MeshUse) -> dict[str, int] | None:
    """The mesh with ``replica`` and ``data`` as one mesh axis, if it has both."""
    shape = use.mesh_shape
    if "replica" not in use.batch or "data" not in use.batch:
        return None
    both = shape["replica"] * shape["data"]
    return {
        name: both if name == "data" else size for name, size in shape.items() if name != "replica"
    }


def _storages(
    use: MeshUse, axes: ProblemAxes, kept: KeptAxes, is_merged: bool
) -> Iterator[_Storage]:
    """The ways to split layers, to store parameters, and to keep the optimizer's state.

    What uses all mesh axes of the batch alike is left to the mesh that has them as one.
    """
    for split in _splits(use, axes, kept):
        # As presets have them: of one array experts and vocabulary come before the axes of layers.
        first = _split_rules(split, [role for role in split if role in _FIRST])
        of_layers = _split_rules(split, [role for role in split if role not in _FIRST])
        computed, used = first | _of_batch(use) | of_layers, first | of_layers
        for stored, gathers in _stored(use, axes, kept, is_merged):
            parameters = used | stored
            optimizers: list[AxisRules | None] = [None]
            split_further = kept.whole | fully_sharded(use.batch, MIN_SIZE) if use.batch else stored
            if stored != split_further:
                optimizers.append(used | split_further)
            for optimizer in optimizers:
                yield _Storage(parameters, computed, optimizer, bool(split), gathers)


def _splits(
    use: MeshUse, axes: ProblemAxes, kept: KeptAxes
) -> Iterator[dict[LogicalAxis, tuple[str, ...]]]:
    """Which roles are split over which mesh axes; every mesh axis of the model has a use."""
    choices = [kept.choices_of(role, ((), *use.split_over())) for role in axes.split]
    for picked in itertools.product(*choices):
        split = {role: over for role, over in zip(axes.split, picked, strict=True) if over}
        if set(itertools.chain.from_iterable(split.values())) >= set(use.model):
            yield split


def _split_rules(
    split: Mapping[LogicalAxis, tuple[str, ...]], roles: Iterable[LogicalAxis]
) -> AxisRules:
    rules = AxisRules({})
    for role in roles:
        rules = rules | split_names(split[role], (role,))
    return rules


def _of_batch(use: MeshUse) -> AxisRules:
    return data_parallel(use.batch) if use.batch else AxisRules({})


def _stored(
    use: MeshUse, axes: ProblemAxes, kept: KeptAxes, is_merged: bool
) -> Iterator[tuple[AxisRules, bool]]:
    """By which rules parameters are stored beside those of layers, and whether this splits them."""
    if (fixed := kept.stored) is not None:
        yield fixed, True
        return
    if not is_merged:
        yield kept.whole, False
    for over in use.stored_over():
        if is_merged and over == use.batch:
            continue
        if axes.stored is not None and axes.stored not in kept.storing:
            yield AxisRules({axes.stored: over}) | kept.whole, True
        yield kept.whole | fully_sharded(over, MIN_SIZE), True


def _ways(
    use: MeshUse,
    axes: ProblemAxes,
    kept: KeptAxes,
    storage: _Storage,
    policies: Sequence[str | None],
) -> list[tuple[AxisRules | None, str | None, bool]]:
    """How activations lie between blocks, what these keep, and whether they gather again."""
    if not axes.has_blocks:
        return [(None, None, False)]
    betweens: list[AxisRules | None] = []
    for over in kept.choices_of("seq", ((), *((use.model,) if storage.splits else ()))):
        parts = math.prod(use.mesh_shape[axis] for axis in over)
        if not over:
            betweens.append(None)
        elif any(length % parts == 0 for length in axes.sequence):
            vocabulary = [
                rule for rule in storage.compute.name_rules if rule.logical_axis == "vocabulary"
            ]
            between = (
                AxisRules.from_rules(vocabulary) | _of_batch(use) | split_names(over, ("seq",))
            )
            betweens.append(between)
    again = [(None, True)] if storage.gathers and None in policies else []
    keeping = [*((policy, False) for policy in policies), *again]
    return [(between, *each) for between, each in itertools.product(betweens, keeping)]


def _reason(error: PlanError, would_pad: bool = False) -> str:
    """What does not divide or meets on one mesh axis, without the array; would padding help?"""
    problem = error.problems[0] if error.problems else str(error)
    if twice := _TWICE.search(problem):
        return f"{twice[1]} is asked for twice, by {twice[2]} and by {twice[3]}"
    said = problem[max(problem.find("logical axis"), 0) :]
    reason = said.partition(". ")[0].partition(", asked by")[0]
    length = _PADDED_LENGTH.search(problem)
    if would_pad and length is not None:
        return f'{reason}; on_indivisible="pad" would store it as {length[1]}'
    return reason
