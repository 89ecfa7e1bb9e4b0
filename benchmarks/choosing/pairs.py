"""Training steps with devices, each with few enough sane layouts to compile every one of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from benchmarks.choosing import models


@dataclasses.dataclass(frozen=True)
class Pair:
    """A training step and devices.

    Attributes:
        make_step: Makes the step.
        devices: What the devices are.
        mesh: The sizes of the mesh axes; None for every mesh of the devices.
        keep: What is decided, as for ``choose_layout``.
        rematerialise: The policies to try.
        microbatches: The numbers of microbatches to try.
    """

    make_step: Callable[[], models.Step]
    devices: str
    mesh: Mapping[str, int] | None = None
    keep: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rematerialise: Sequence[str | None] = (None,)
    microbatches: Sequence[int] = (1,)


# Written without a look at how layouts are priced and searched.
BLIND: dict[str, Pair] = {
    "speech, clipped adamw": Pair(lambda: models.speech(64), "v6e:8", keep={"vocabulary": "model"}),
    "two of 16 experts, lamb": Pair(
        lambda: models.two_of_experts(32, 512),
        "h100:16",
        keep={"vocabulary": "model", "heads": "model"},
    ),
    "convolutions, dense head": Pair(
        lambda: models.convolutions(512), "v5p:8", {"data": 4, "model": 2}, microbatches=(1, 2)
    ),
    "Llama, rolled, grouped": Pair(
        lambda: models.rolled_llama(
            32,
            1024,
            1024,
            2816,
            32_768,
            optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
            num_decoder_blocks=6,
            num_kv_heads=4,
            query_head_multiplier=4,
        ),
        "v5p:16",
        {"data": 4, "model": 4},
        {"vocabulary": "model"},
        rematerialise=(None, "dots"),
    ),
}
