"""Finds how a model is best laid out over some devices for training, among all sane layouts.

One way of each table that can be stored is priced by propagation, then the other ways of the
quickest tables. What seems best is compiled, and only of compiled steps it is said that they fit.
Nothing runs, and the same question has the same answer on every machine.
"""

import collections
import contextlib
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from penzai_shard import errors
from penzai_shard.choosing.bound import bound
from penzai_shard.choosing.candidates import (
    Candidate,
    Candidates,
    make_candidates,
    mesh_shapes,
    stored_bytes,
)
from penzai_shard.choosing.choices import Choice, Choices
from penzai_shard.choosing.compiled import compile_candidates
from penzai_shard.choosing.cost import Prices, StepCost
from penzai_shard.choosing.hardware import Devices, Hardware, read_devices
from penzai_shard.choosing.search import CERTAIN, Price, search
from penzai_shard.choosing.workload import Workload, read_options, read_workload
from penzai_shard.progress import progress as show_progress
from penzai_shard.reports.quantities import bytes_text

# Where the quickest way of a table takes so much longer than the best, other ways are not priced.
_SLOWER = 1.25
# At most _TABLES x `compiled` tables are priced, equally many on each mesh: those with the least
# bounds, which store least.
_TABLES = 4
# Up to _MOST x `compiled` layouts are compiled, if that proves the pick within _GAP of the best.
_GAP, _MOST = 0.05, 3
# What all blocks hold follows from one and two of them within this part, which is left free.
_FREE = 0.12


def choose_layout(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    devices: Any,
    batch: int | Mapping[str, Any],
    seq: int | None = None,
    memory: float | str | None = None,
    keep: Mapping[Any, Any] | None = None,
    hardware: Any = None,
    names: Mapping[str, Any] | None = None,
    blocks: Any = None,
    rematerialise: Sequence[str | None] = (None, "dots", "nothing"),
    microbatches: Sequence[int] = (1, 2, 4, 8),
    plain_arrays: bool = False,
    compiled: int = 12,
    progress: bool | None = None,
) -> Choices:
    """Finds how a model is best laid out over some devices for training.

    A layout is a short table from logical axes to mesh axes, so that all sane tables can be listed,
    on every shape of the mesh, with every policy and number of microbatches. The price is the
    largest of the times to compute, to send and to update the optimizer at the figures that the
    hardware's vendor publishes. A step that needs more memory than there is is never picked.

    Listing shardings and pricing them is what Alpa does for tensors without names (Zheng et al.
    2022, arXiv:2201.12023); the price is a roofline (Williams et al. 2009).

    Args:
        model: The model, concrete or abstract, with logical axes: Penzai's, Flax's, or what
            ``name_axes`` gives. ``infer_names`` finds them for a model that has none.
        loss_fn: As for ``build_train_step_fn``.
        optimizer: An optimizer of optax.
        devices: The name of hardware (``"v5e:32"``, ``"v5p:4x4x8"``, ``"h100:16"``), a number of
            devices, or ``jax.devices()``, which leave the mesh open; or a mesh, which is kept.
        batch: The number of examples: each input of the loss function without a default is then
            tokens, ``batch`` x ``seq``. Or the inputs by name, arrays or structs; the first
            dimension of a plain one is the batch.
        seq: The number of tokens of an example.
        memory: What a step may need on a device, in bytes or as ``"14GiB"``; by default what
            programs can have. Simulated devices hold bfloat16 in 4 bytes, accelerators in 2.
        keep: What is decided: logical axis to mesh axis, to several, or to None for whole.
        hardware: What a mesh or a number is of: ``"v5e"``. ``"cpu"`` are simulated devices.
        names: As for ``Layout``.
        blocks: As for ``Layout``.
        rematerialise: The policies of ``Layout`` to try.
        microbatches: The numbers of microbatches to try.
        plain_arrays: As for ``TrainState.initial_state``.
        compiled: About how many layouts are compiled: twice as many where something seems quicker,
            four times as many where nothing fits yet, up to three times as many if that compiles
            every layout that may be 5 % quicker. Deep models are compiled with one and with two
            blocks; 12 % of the memory stays free, by which what follows from these may err.
        progress: Whether to show how far it is on standard error; None does if rich is installed.

    Returns:
        The layouts whose compiled steps fit, the best first; after Ctrl-C the best so far.

    Raises:
        NothingFitsError: No layout fits; with the nearest, and what would help.
        PlanError: There is no sane layout.
        RuleTypeError: Arguments cannot be read, or do not go together.
        MeshError: There are no such devices.
        PropagationError: The layouts of the step cannot be propagated.
        CompilationError: The compiler refuses all of them.
        KeyboardInterrupt: Ctrl-C, before anything that fits was found.

    >>> import jax, optax
    >>> import penzai_shard as pzs
    >>> def loss_fn(model, rng, state, x):
    ...     return ((x @ model["w"]) ** 2).mean(), state, {}
    >>> w = jax.ShapeDtypeStruct((512, 2048), "float32")
    >>> choices = choose_layout(
    ...     pzs.name_axes({"w": w}, {"w": ("embedding", "neurons")}),
    ...     loss_fn,
    ...     optax.sgd(0.1),
    ...     devices="v5e:4",
    ...     batch={"x": jax.ShapeDtypeStruct((4096, 512), "float32")},
    ...     plain_arrays=True,
    ...     compiled=1,
    ... )
    >>> choices.best.mesh_sizes
    {'model': 4}
    """
    problems = errors.Problems("choose_layout cannot read what it was given:")
    options = read_options(compiled, microbatches, rematerialise, keep, problems)
    on = read_devices(devices, hardware, memory, problems)
    # The last of them raises what is wrong in all.
    given = model, loss_fn, optimizer, batch, seq, plain_arrays, names, blocks
    workload = read_workload(*given, problems)
    meshes = mesh_shapes(on.hardware) if on.mesh_sizes is None else [on.mesh_sizes]
    candidates = make_candidates(workload, meshes, **options)
    question = f"{workload.words} on {on.hardware.name}"
    pricing = PricedCandidates(workload, on, candidates)
    interrupted = False
    try:
        pricing.search(compiled, progress)
    except KeyboardInterrupt:
        interrupted = True
        if not pricing.rank():
            raise
    left_out = [f"{n:,} left out: {why}" for why, n in sorted(pricing.left_out.items())]
    mistakes = [errors.Problem("", why) for why in left_out]
    if not pricing.tables:
        raise errors.PlanError(f"there is no sane layout for {question}:", mistakes)
    ranked = pricing.rank()
    if not pricing.exact:
        raise errors.CompilationError(f"no layout for {question} can be compiled:", mistakes)
    if not ranked:
        fits = f"none of {len(candidates):,} layouts for {question} fits"
        headline = f"{fits} into {bytes_text(pricing.limit)} on each device:"
        raise errors.NothingFitsError(headline, [pricing.find_nearest()])
    return Choices(
        tuple(ranked),
        tuple(sorted((pricing.estimates | pricing.exact).values(), key=_rank)),
        question,
        on.memory,
        pricing.free,
        sum(len(table.ways) for table in pricing.tables),
        pricing.find_gap(ranked[0]),
        interrupted,
        tuple(left_out),
    )


def _rank(choice: Choice) -> tuple[Any, ...]:
    """By time; of equal times what is simpler comes first, then what holds less."""
    seconds, total, memory = choice.price
    policy = str(choice.layout.rematerialise or "")
    return seconds, total, choice.microbatches, policy, memory, choice.candidate.words


def _way(candidate: Candidate) -> tuple[bool, str, int]:
    """How a table is run: what is computed again, and in how many microbatches."""
    layout, policy = candidate.layout, candidate.layout.rematerialise
    return layout.reshard_after_forward, str(policy or ""), candidate.microbatches


class _Table(NamedTuple):
    """What is known of a table of rules before it is priced.

    Attributes:
        bound: The seconds that no way of it can beat.
        stored: The bytes of parameters and optimizer.
        ways: The numbers of its candidates, the plainest first.
    """

    bound: float
    stored: float
    ways: list[int]


class PricedCandidates:
    """Candidates, and what is known of their prices; Ctrl-C leaves what there is.

    Args:
        workload: The step.
        devices: The devices.
        candidates: The candidates.
    """

    def __init__(self, workload: Workload, devices: Devices, candidates: Candidates) -> None:
        self.workload, self.devices = workload, devices
        # The plainest come first, in whatever order they are given.
        self.candidates = sorted(candidates, key=lambda each: (_way(each), each.words))
        self.prices = Prices(workload)
        self.free = _FREE if self.prices.blocks > 1 else 0.0
        self.limit = (1 - self.free) * devices.memory
        self.estimates: dict[int, Choice] = {}
        self.exact: dict[int, Choice] = {}
        by_table = collections.defaultdict[Hashable, list[int]](list)
        for number, each in enumerate(self.candidates):
            by_table[each.table].append(number)
        tables = []
        for ways in by_table.values():
            # Of its ways the last has the most microbatches, and so the least bound.
            first, last = (self.candidates[ways[place]] for place in (0, -1))
            least = bound(workload, last, devices.hardware)
            tables.append(_Table(least, stored_bytes(workload, first), ways))
        # If none can be stored, the leanest says by how much.
        limit = max(devices.memory, min((table.stored for table in tables), default=0))
        self.tables = sorted(table for table in tables if table.stored <= limit)
        # Nothing is quicker; what is hardly slower is certain to be as good as any.
        self.least = self.tables[0].bound if self.tables else 0.0
        # How many tables the step cannot be laid out by, or layouts not compiled, by reason.
        self.left_out = collections.Counter(candidates.left_out)
        # The layouts that the compiler refuses.
        self.refused: set[int] = set()
        # What is kept for the backward pass, as a part of what is kept without a policy.
        self.shares: dict[Hashable, float] = {}

    def _kinds(self, number: int) -> list[Hashable]:
        """What others have in common with it, whose estimates err as its own; the closest first."""
        candidate, (*policy, parts) = self.candidates[number], _way(self.candidates[number])
        run = *policy, parts > 1
        table = run, candidate.mesh_sizes, candidate.layout.compute
        return [(*table, candidate.layout.parameters), table, run, ()]

    def _add(self, known: dict[int, Choice], number: int, cost: StepCost, how: str) -> Choice:
        given = cost, self.devices.hardware, how, self.workload.step_options
        known[number] = Choice(self.candidates[number], *given)
        self.bar.advance()
        self.bar.show(f"{len(self.estimates):,} estimated, {len(self.exact):,} compiled")
        return known[number]

    def estimate(self, number: int) -> Choice:
        """The price of a candidate by propagation."""
        if number in self.estimates:
            return self.estimates[number]
        cost = self.prices.price(self.candidates[number])
        return self._add(self.estimates, number, cost, "estimated")

    def _is_possible(self, table: _Table) -> bool:
        """Whether the step can be laid out by a table: what flows in it has other lengths, too."""
        try:
            self.estimate(table.ways[0])
        except errors.PlanError as error:
            self.left_out[error.problems[0].what] += 1
            self.tables.remove(table)
            return False
        return True

    def price_ways(self, most: int, error: float) -> None:
        """Prices a way of each table, then the other ways of the quickest ones.

        Args:
            most: So many are to fit before the rest counts for less.
            error: What compiled steps hold, as a part of their estimates.
        """
        by_mesh = collections.defaultdict[Hashable, list[_Table]](list)
        for table in self.tables:
            by_mesh[self.candidates[table.ways[0]].mesh_sizes].append(table)
        turns = itertools.chain(*itertools.zip_longest(*by_mesh.values()))
        possible = (table.ways for table in turns if table and self._is_possible(table))
        tables = [*itertools.islice(possible, _TABLES * most)]
        limit, fitting = self.limit / error, list[float]()
        missed: list[tuple[float, int]] = []
        for own in sorted(tables, key=lambda own: self.estimate(own[0]).price):
            plain = self.estimate(own[0])
            quickest = min(fitting, default=math.inf)
            is_enough = plain.seconds > _SLOWER * quickest or self.is_certain(quickest)
            if len(fitting) >= (most if is_enough else 2 * most):
                break
            for mode, group in itertools.groupby(own, key=lambda n: _way(self.candidates[n])[:2]):
                ways, batch = [*group], plain.memory["activations"]
                if mode not in self.shares:
                    first = self.estimate(ways[0]).memory["activations"]
                    self.shares[mode] = first / (batch or 1) * self.candidates[ways[0]].microbatches
                for number in ways:
                    kept = batch * self.shares[mode] / self.candidates[number].microbatches
                    held = plain.memory_bytes - batch + kept
                    if held <= limit and self.estimate(number).memory_bytes <= limit:
                        fitting.append(self.estimate(number).seconds)
                        break
                else:
                    missed.append((held, ways[-1]))
        # Where few fit by estimates, others may fit after all.
        for _, number in sorted(missed)[: max(most - len(fitting), 0)]:
            self.estimate(number)

    def is_certain(self, seconds: float) -> bool:
        """Whether nothing can be quicker by more than a hair."""
        return seconds <= self.least * (1 + CERTAIN)

    def search(self, most: int, shown: bool | None) -> None:
        """Prices what may be best, and compiles what seems so."""
        # A candidate that leaves much whole is nothing to warn of: it holds more.
        quiet = warnings.catch_warnings(action="ignore", category=errors.ShardingWarning)
        with show_progress(None, "layouts", shown) as self.bar, quiet:
            error = 1.0
            # Twice, for estimates of memory are mostly wrong by one factor.
            for _ in range(2):
                self.price_ways(most, error)
                prices = {number: each.price for number, each in sorted(self.estimates.items())}
                kinds = {number: self._kinds(number) for number in prices}
                search(prices, kinds, self.compile, self.limit, most, self.least)
                if any(self.is_certain(each.seconds) for each in self.rank()):
                    break
                ratios = [
                    x.price.memory / self.estimates[n].price.memory for n, x in self.exact.items()
                ]
                error = statistics.median(ratios or [1.0])
            self._close_gap(_MOST * most)

    def _close_gap(self, most: int) -> None:
        """Compiles all that may be much quicker than the best, where that is not too many."""
        for best in self.rank()[:1]:
            tables = [table for table in self.tables if table.bound * (1 + _GAP) < best.seconds]
            left = [x for table in tables for x in table.ways if x not in self.exact]
            if len(self.exact) + len(left) <= most and all(map(self._is_possible, tables)):
                self.compile(left)

    def compile(self, numbers: Sequence[int]) -> list[Price]:
        """The prices of the compiled steps of some candidates."""
        new = [x for x in numbers if x not in self.exact and x not in self.refused]
        costs = compile_candidates(self.workload, [self.candidates[number] for number in new])
        blocks = self.prices.blocks
        how = f"compiled (1 and 2 of {blocks} blocks)" if blocks > 1 else "compiled"
        for number, cost in zip(new, costs, strict=True):
            if isinstance(cost, StepCost):
                self._add(self.exact, number, cost, how)
            else:
                self.refused.add(number)
                self.left_out[str(cost).partition("\n")[0]] += 1
        # What the compiler refuses does not fit.
        infinite = Price(math.inf, math.inf, math.inf)
        found = map(self.exact.get, numbers)
        return [infinite if each is None else each.price for each in found]

    def rank(self) -> list[Choice]:
        """The compiled layouts that fit, the best first."""
        fitting = [each for each in self.exact.values() if each.memory_bytes <= self.limit]
        return sorted(fitting, key=_rank)

    def find_gap(self, best: Choice) -> float:
        """By which part it is slower, at most, than what was not compiled."""
        known = self.exact.keys() | self.refused
        left = [table.bound for table in self.tables if not known >= {*table.ways}]
        least = min(left, default=best.seconds)
        return max(best.seconds / least - 1, 0.0) if least else math.inf

    def find_nearest(self) -> errors.Problem:
        """The leanest compiled layout, where nothing fits, and what would help."""
        near = min(self.exact.values(), key=lambda each: (each.memory_bytes, _rank(each)))
        lacks, hardware = near.memory_bytes - self.limit, self.devices.hardware
        what = f"the nearest needs {bytes_text(near.memory_bytes)}, {bytes_text(lacks)} too much"
        what += f": {near!r}; it holds {near.memory_text}"
        if self.free:
            what += f"; {100 * self.free:.0f} % stay free, as not all blocks are compiled"
        kind, count = hardware.name.partition(":")[0], hardware.device_count
        count *= 2 ** math.ceil(math.log2(near.memory_bytes / self.limit))
        devices = "more devices"
        with contextlib.suppress(errors.MeshError):
            devices = f"devices={Hardware.read(f'{kind}:{count}').name!r}"
        fix = f"Write {devices}, a smaller batch, or an optimizer that keeps less."
        return errors.Problem("devices", what, fix)
