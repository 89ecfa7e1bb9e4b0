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


SEEN: dict[str, Pair] = {
    "MLP, much traffic": Pair(lambda: models.mlp(64), "v5e:16", microbatches=(1, 2, 4, 8)),
    "tables, much memory": Pair(lambda: models.tables(65_536), "h100:4", microbatches=(1, 2)),
    "retrieval, adagrad": Pair(lambda: models.retrieval(8192), "v5e:8"),
    "experts": Pair(lambda: models.experts(16, 512), "v5p:8"),
    "GPT-2, fused": Pair(lambda: models.gpt2(16, 512), "v5e:4"),
    "vision, momentum": Pair(
        lambda: models.vision(64), "v4:8", {"x": 2, "y": 2, "z": 2}, {"neurons": "z"}
    ),
    "encoder-decoder": Pair(lambda: models.encoder_decoder(16, 512), "v5e:4"),
    "scanned, recomputed": Pair(
        lambda: models.scanned_gpt(16, 512), "v5e:8", {"data": 4, "model": 2}
    ),
    "Equinox": Pair(lambda: models.equinox_transformer(32, 256, 32_768, 512), "h100:4"),
    "mixer, batch of 12": Pair(lambda: models.equinox_mixer(12), "v5e:8", microbatches=(1, 3)),
    "NNX vision, adafactor": Pair(
        lambda: models.nnx_vision(64), "h100:8", {"data": 4, "model": 2}, microbatches=(1, 2)
    ),
    "Llama, grouped queries": Pair(
        lambda: models.llama(16, 512), "v5e:8", {"data": 4, "model": 2}, {"vocabulary": "model"}
    ),
    "Llama, odd vocabulary": Pair(lambda: models.llama(16, 512, 512, 2048, 50_257), "v5e:4"),
    "Gemma, tied": Pair(
        lambda: models.gemma(16, 512),
        "h100:8",
        {"data": 2, "model": 4},
        {"heads": "model", "vocabulary": "model"},
    ),
    "Llama, recomputed": Pair(
        lambda: models.llama(16, 2048),
        "v5e:8",
        {"data": 8},
        rematerialise=(None, "dots", "nothing"),
        microbatches=(1, 2),
    ),
    "Llama, layers stacked": Pair(
        lambda: models.llama(
            16, 512, 512, 1024, 4096, optax.adam(1e-3), num_decoder_blocks=4, use_layer_stack=True
        ),
        "v5p:8",
        {"data": 4, "model": 2},
        {"heads": "model", "neurons": "model"},
    ),
}
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
        {"vocabulary": "model", "neurons": "model"},
        rematerialise=(None, "dots"),
    ),
}
PAIRS = SEEN | BLIND
