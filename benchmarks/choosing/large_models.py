"""How long it takes to find a layout for Llama 3 of 8 and of 70 billion parameters, on a CPU.

    python -m benchmarks.choosing.large_models [8b|70b ...]

A process for each: seconds, the most memory of the process, and the layout.
"""

import os
import resource
import subprocess
import sys
import time
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"

# Devices, examples, tokens of an example with the last target, and the sizes of the models.
QUESTIONS = {
    "8b": ("v5p:32", 256, 2049, {"num_decoder_blocks": 32, "embedding_dim": 4096}),
    "70b": ("v5p:256", 256, 4097, {"num_decoder_blocks": 80, "embedding_dim": 8192}),
}
FLOORS = {"8b": (40, 1.0), "70b": (90, 1.0)}


def choose(name: str) -> str:
    """Finds the layout; what it took and what it is, as a row."""
    import jax
    import jax.numpy as jnp
    import optax
    from penzai.models.transformer.variants import llamalike_common

    import penzai_shard as pzs

    devices, batch, seq, sizes = QUESTIONS[name]
    width = sizes["embedding_dim"]
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8,
        query_head_multiplier=width // 128 // 8,
        projection_dim=128,
        mlp_hidden_dim=width * 7 // 2,
        vocab_size=128_256,
        mlp_variant="swiglu",
        rope_wavelength=500_000.0,
        tie_embedder_and_logits=False,
        parameter_dtype=jnp.bfloat16,
        activation_dtype=jnp.bfloat16,
        **sizes,
    )

    def loss_fn(model, rng, state, tokens):
        logits = model(tokens[{"seq": slice(None, -1)}])
        return pzs.cross_entropy(logits, tokens[{"seq": slice(1, None)}]), state, {}

    start = time.perf_counter()
    model = pzs.abstract_model(
        llamalike_common.build_llamalike_transformer, config, init_base_rng=jax.random.key(0)
    )
    options = {"devices": devices, "batch": batch, "seq": seq, "progress": False}
    choices = pzs.choose_layout(model, loss_fn, optax.adamw(1e-3), **options)
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    floor = " s, ".join(map(str, FLOORS[name]))
    figures = f"{seconds:.0f} s | {memory:.2f} GiB | {floor} GiB | {choices.gap:.1%}"
    return f"| {name} on {devices} | {figures} | {choices.best!r} |"


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        warnings.simplefilter("ignore")
        print(choose(sys.argv[2]))
        return
    print("| model | time | memory | floor | gap | pick |\n|---|---|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or QUESTIONS:
        command = [sys.executable, "-m", "benchmarks.choosing.large_models", "--one", name]
        print(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip())


if __name__ == "__main__":
    main()
