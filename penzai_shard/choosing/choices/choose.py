"""The layout for a training step, found among all sane ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.asked_devices import AskedDevices
from penzai_shard.choosing.choices.asked_problem import AskedProblem
from penzai_shard.choosing.choices.choices import Choices
from penzai_shard.choosing.choices.priced_candidates import StageName
from penzai_shard.choosing.choices.search import Search, Stage
from penzai_shard.choosing.choices.search_progress import SearchProgress
from penzai_shard.choosing.choices.what_would_help import nothing_fits
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.errors import PlanError

# How many candidates are priced by propagation, and how many compiled.
PROPAGATED = 300
COMPILED = 12


def searched(
    problem: AskedProblem,
    devices: AskedDevices,
    candidates: Sequence[Candidate],
    stages: Sequence[Stage],
    *,
    most: Mapping[StageName, int],
    restricted_by: Sequence[str] = (),
    progress: Any = None,
    notes: Sequence[str] = (),
) -> Choices:
    """The choices among some candidates.

    Args:
        problem: The training step.
        devices: The devices.
        candidates: What to choose from.
        stages: The ways to price them, from the quickest to the most exact one.
        most: How many candidates each stage but the first prices.
        restricted_by: The arguments by which there are fewer candidates.
        progress: As for ``byte_progress``.
        notes: What else there is to know, in sentences.

    Raises:
        NothingFitsError: No candidate fits into the memory.
        PlanError: There is no candidate, or none that can be laid out.
    """
    asked = f"{problem.words} on {devices.words}"
    if not candidates:
        raise PlanError(
            f"there is no layout for {asked} that splits the batch or a parameter. "
            + (f"Leave out {' and '.join(restricted_by)}." if restricted_by else "")
        )

    def time_of(candidate: Candidate, cost: StepCost) -> StepTime:
        return StepTime.of(cost, candidate.mesh_shape, devices.hardware)

    with SearchProgress(progress) as shown:
        search = Search(devices.memory, time_of, dict(most), shown.watch)
        found = search.run(candidates, stages)
    priced = found.all_priced()
    if not priced:
        raise PlanError(
            f"none of the layouts for {asked} can be laid out:",
            [why for _, why in found.refused],
        )
    if not found.ranked(devices.memory):
        raise nothing_fits(priced, devices.memory, problem.sizes.get("batch"), restricted_by)
    return Choices(
        found, devices.hardware, devices.memory, asked, problem.step_options, tuple(notes)
    )


def refuse_batch(sizes: Mapping[Any, int], devices: AskedDevices) -> None:
    """Refuses a batch that cannot be divided among any of the devices.

    Raises:
        PlanError: It cannot; with the nearest that can.
    """
    batch, count = sizes.get("batch"), devices.hardware.device_count
    parts = devices.mesh_shape or {"devices": count}
    if batch is None or count == 1 or any(math.gcd(batch, size) > 1 for size in parts.values()):
        return
    over = (
        f"{count:,} devices" if devices.mesh_shape is None else f"any mesh axis of {devices.words}"
    )
    fitting = -(-batch // count) * count
    raise PlanError(
        f"a batch of {batch:,} does not divide over {over}. Give a multiple of one of their "
        f"factors, such as batch={fitting}."
    )
