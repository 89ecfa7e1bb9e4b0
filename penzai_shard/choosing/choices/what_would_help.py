"""What is said where nothing fits: the nearest candidate, and what would help."""

import math
from collections.abc import Iterator, Sequence

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
    could_be_padded: int = 0,
    in_doubt: int = 0,
) -> NothingFitsError:
    """The error that no candidate fits.

    Args:
        priced: What was priced most exactly.
        count: How many candidates there are.
        limit: The memory of a device, in bytes.
        batch: How many examples the batch has; None if that is not known.
        restricted_by: The arguments by which there were fewer candidates.
        could_be_padded: How many tables are left out that ``on_indivisible="pad"`` would try.
        in_doubt: How many candidates may fit that were not compiled, as estimates err.
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
        [
            *_advice(nearest, limit, batch),
            *_more_compiled(priced, count, in_doubt),
            *_more_layouts(restricted_by, could_be_padded),
        ],
    )


def _advice(nearest: Priced, limit: int, batch: int | None) -> list[str]:
    candidate = nearest.candidate
    devices = math.prod(candidate.mesh_shape.values())
    resident = sum(nearest.cost.memory.get(part, 0.0) for part in _HELD_WITHOUT_BATCH)
    with_batch = nearest.memory - resident
    advice = [f"more devices: {_power_of_two(devices * nearest.memory / limit):,} or more."]
    if resident >= limit:
        advice.append(
            "less in each device: an optimizer that keeps less, such as optax.adafactor, or "
            "parameters of fewer bytes, as bfloat16 has. Without any batch it is "
            f"{bytes_text(resident)}."
        )
        return advice
    if batch is not None and batch > 1:
        less = max(int(batch * (limit - resident) / with_batch), 1)
        advice.append(f"a smaller batch: about {less:,} in place of {batch:,}.")
    if candidate.layout.rematerialise is None:
        advice.append(
            "rematerialisation: jax.checkpoint around the blocks in the model's own code. It is "
            "tried without that for Penzai's transformers alone."
        )
    return advice


def _more_compiled(priced: Sequence[Priced], count: int, in_doubt: int) -> Iterator[str]:
    if priced[0].stage == "compiled" and len(priced) < count:
        some = f"{in_doubt:,} of the others may fit" if in_doubt else "none of the others fits"
        yield (
            f"more of them compiled: {len(priced):,} of {count:,} were, and {some}, if estimates "
            "of their memory are no more wrong than those of the compiled ones were. "
            f"compiled={min(2 * len(priced), count)} tries more."
        )


def _more_layouts(restricted_by: Sequence[str], could_be_padded: int) -> Iterator[str]:
    if restricted_by:
        yield f"more layouts to choose from: leave out {' and '.join(restricted_by)}."
    if could_be_padded:
        yield (
            f'storing padded what does not divide: on_indivisible="pad" tries '
            f"{count_text(could_be_padded, 'more table')}."
        )


def _power_of_two(number: float) -> int:
    return int(2 ** math.ceil(math.log2(max(number, 1.0))))
