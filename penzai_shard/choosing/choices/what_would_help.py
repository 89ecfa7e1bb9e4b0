"""What is said where nothing fits: the nearest candidate, and what would help."""

import math
from collections.abc import Sequence

from penzai_shard.choosing.choices.layout_words import candidate_words
from penzai_shard.choosing.choices.priced_candidates import Priced
from penzai_shard.errors import NothingFitsError
from penzai_shard.report_trees import bytes_text, count_text

# What does not grow with the batch.
_HELD_WITHOUT_BATCH = ("parameters", "optimizer", "gradients")


def nothing_fits(
    priced: Sequence[Priced],
    count: int,
    limit: int,
    batch: int | None,
    restricted_by: Sequence[str],
) -> NothingFitsError:
    """The error that no candidate fits.

    Args:
        priced: What was priced most exactly.
        count: How many candidates there are.
        limit: The memory of a device, in bytes.
        batch: How many examples the batch has; None if that is not known.
        restricted_by: The arguments by which there were fewer candidates.
    """
    nearest = min(priced, key=lambda one: (one.memory, one.rank))
    held = ", ".join(
        f"{part} {bytes_text(size)}" for part, size in nearest.cost.memory.items() if size
    )
    return NothingFitsError(
        f"none of {count_text(count, 'layout')} fits into {bytes_text(limit)} of memory on "
        f"each device. The nearest needs {bytes_text(nearest.memory)}, which is "
        f"{bytes_text(nearest.memory - limit)} too much ({held}): "
        f"{candidate_words(nearest.candidate)}. What would help:",
        _advice(nearest, limit, batch, restricted_by),
    )


def _advice(
    nearest: Priced, limit: int, batch: int | None, restricted_by: Sequence[str]
) -> list[str]:
    candidate = nearest.candidate
    devices = math.prod(candidate.mesh_shape.values())
    resident = sum(nearest.cost.memory.get(part, 0.0) for part in _HELD_WITHOUT_BATCH)
    with_batch = nearest.memory - resident
    advice = [f"more devices: {_power_of_two(devices * nearest.memory / limit):,} or more."]
    if resident >= limit:
        advice.append(
            "less in each device: parameters in bfloat16, or an optimizer that keeps less, such as "
            f"optax.adafactor. Without any batch it is {bytes_text(resident)}."
        )
        return [*advice, *_less_restricted(restricted_by)]
    if batch is not None and batch > 1:
        less = max(int(batch * (limit - resident) / with_batch), 1)
        advice.append(f"a smaller batch: about {less:,} in place of {batch:,}.")
    if candidate.layout.rematerialise is None:
        advice.append(
            "rematerialisation: jax.checkpoint around the blocks of a model whose blocks are not "
            "those of Penzai's transformers."
        )
    return [*advice, *_less_restricted(restricted_by)]


def _less_restricted(restricted_by: Sequence[str]) -> list[str]:
    if not restricted_by:
        return []
    return [f"more layouts to choose from: leave out {' and '.join(restricted_by)}."]


def _power_of_two(number: float) -> int:
    return int(2 ** math.ceil(math.log2(max(number, 1.0))))
