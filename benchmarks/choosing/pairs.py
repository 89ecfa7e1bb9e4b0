"""Training steps with devices, each with few enough sane layouts to compile every one of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from benchmarks.choosing import held_out_models, models
from penzai_shard.choosing.candidates import Candidates, candidates, mesh_shapes
from penzai_shard.choosing.candidates.enumerating import OnUnfit
from penzai_shard.choosing.choices.asked_problem import AskedProblem
from penzai_shard.inspection.devices.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Pair:
    """A training step and devices.

    Attributes:
        asked: Makes the step.
        devices: What the devices are.
        mesh: The sizes of the mesh axes; None for every mesh of the devices.
        keep: What is decided, as for ``choose_layout``.
        rematerialise: The policies to try.
        microbatches: The numbers of microbatches to try.
        on_indivisible: Whether layouts are tried that store parameters padded.
    """

    asked: Callable[[], AskedProblem]
    devices: str
    mesh: Mapping[str, int] | None = None
    keep: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rematerialise: Sequence[str | None] = (None,)
    microbatches: Sequence[int] = (1,)
    on_indivisible: OnUnfit = "error"

    @property
    def hardware(self) -> Hardware:
        """The devices."""
        return Hardware.read(self.devices)

    def candidates(self, asked: AskedProblem) -> Candidates:
        """Every sane layout, as ``choose_layout`` lists them."""
        return candidates(
            asked.problem,
            mesh_shapes(self.hardware) if self.mesh is None else [self.mesh],
            dict(self.keep),
            hardware=self.hardware,
            rematerialise=self.rematerialise,
            microbatches=self.microbatches,
            on_indivisible=self.on_indivisible,
        )


_SEEN: dict[str, Pair] = {
    "Llama, grouped queries": Pair(lambda: models.llama(16, 512), "v5e:8", {"data": 4, "model": 2}),
    "Llama, every mesh": Pair(
        lambda: models.llama(16, 1024), "v5p:8", keep={"vocabulary": "model", "neurons": "model"}
    ),
    "Llama, recomputed": Pair(
        lambda: models.llama(16, 2048),
        "v5e:8",
        {"data": 8},
        rematerialise=(None, "dots", "nothing"),
        microbatches=(1, 2),
    ),
    "Llama, long sequences": Pair(
        lambda: models.llama(8, 8192),
        "v5e:16",
        {"data": 4, "model": 4},
        {"vocabulary": "model", "neurons": "model"},
        microbatches=(1, 2),
    ),
    "Llama, odd vocabulary": Pair(lambda: models.llama(16, 512, 512, 2048, 50_257), "v5e:4"),
    "Gemma, tied, GPUs": Pair(
        lambda: models.gemma(16, 512), "h100:8", {"data": 2, "model": 4}, {"heads": "model"}
    ),
    "GPT-2, fused, inferred": Pair(lambda: models.gpt2(16, 512), "v5e:4"),
    "Equinox, inferred": Pair(lambda: models.equinox_transformer(32, 256, 32_768, 512), "h100:4"),
    "encoder-decoder": Pair(lambda: models.encoder_decoder(16, 512), "v5e:4"),
    "experts": Pair(lambda: models.experts(16, 512), "v5p:8"),
    "tables, much memory": Pair(lambda: models.tables(65_536), "h100:4", microbatches=(1, 2)),
    "MLP, much traffic": Pair(lambda: models.mlp(64), "v5e:16", microbatches=(1, 2, 4, 8)),
    "MLP, much computing": Pair(
        lambda: models.mlp(65_536, layers=3),
        "v5e:8",
        {"x": 4, "y": 2},
        microbatches=(1, 2, 4, 8),
    ),
}
# The search was written while looking at those above, and these are what it had not seen.
HELD_OUT: dict[str, Pair] = {
    "vision, momentum": Pair(
        lambda: held_out_models.vision(64),
        "v4:2x2x2",
        {"x": 2, "y": 2, "z": 2},
        {"neurons": "z"},
    ),
    "routed experts, lion": Pair(
        lambda: held_out_models.routed_experts(24, 256),
        "h100:2x6",
        keep={"vocabulary": "model", "neurons": None},
    ),
    "MLP, deep, adafactor": Pair(
        lambda: models.mlp(6144, 768, 1536, 6, optax.adafactor(1e-3)),
        "h100:6",
        microbatches=(1, 2),
    ),
    "Llama, narrow and long": Pair(
        lambda: models.llama(2, 16_384, 256, 1024, 4096, optax.sgd(0.1), num_kv_heads=4),
        "v5e:8",
        keep={"vocabulary": None, "heads": "model", "neurons": "model"},
        rematerialise=(None, "dots", "nothing"),
    ),
    "vocabulary, padded": Pair(
        lambda: held_out_models.large_vocabulary(64, 64), "v5e:8", on_indivisible="pad"
    ),
    "regression, plain sgd": Pair(
        lambda: held_out_models.regression(4096), "v5e:8", microbatches=(1, 4)
    ),
    "Llama, layers stacked": Pair(
        lambda: models.llama(
            16, 512, 512, 1024, 4096, optax.adam(1e-3), num_decoder_blocks=4, use_layer_stack=True
        ),
        "v5p:8",
        {"data": 4, "model": 2},
        {"heads": "model", "neurons": "model"},
    ),
    "retrieval, adagrad": Pair(lambda: held_out_models.retrieval(8192), "v5e:8"),
    "scanned, recomputed": Pair(
        lambda: held_out_models.scanned_gpt(16, 512), "v5e:8", {"data": 4, "model": 2}
    ),
    "NNX vision, adafactor": Pair(
        lambda: held_out_models.nnx_vision(64),
        "h100:8",
        {"data": 4, "model": 2},
        microbatches=(1, 2),
    ),
    "sorted experts": Pair(
        lambda: held_out_models.sorted_experts(16, 512), "h100:2x4", {"data": 2, "model": 4}
    ),
    "Llama, few heads of keys": Pair(
        lambda: models.llama(16, 512, 1024, 4096, 32_768, num_kv_heads=2, query_head_multiplier=8),
        "v5p:16",
        {"data": 4, "model": 4},
        {"vocabulary": "model", "neurons": "model"},
    ),
    "mixer, batch of 12": Pair(
        lambda: held_out_models.equinox_mixer(12), "v5e:8", microbatches=(1, 3)
    ),
}
PAIRS = {**_SEEN, **HELD_OUT}
QUICK = ("MLP, much traffic", "tables, much memory")
