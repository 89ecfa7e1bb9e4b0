"""What the first steps after a restore take: buffers that are reused, and compilations.

A step that donates its state writes the next one into the same buffers, unless one of them is not
its own to write: then the memory of both states is held. A buffer is known by its address. The
state is restored onto another mesh than it was saved from.

    python -m benchmarks.first_step [--blocks N]
"""

import os
import tempfile
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, print_figures

RULES = {"embedding": "data", "neurons": "model"}
BATCH = {"batch": "data"}


def make_state(blocks: int, mesh):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=64,
        projection_dim=16,
        mlp_hidden_dim=128,
        num_decoder_blocks=blocks,
        vocab_size=128,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    build, key = llamalike_common.build_llamalike_transformer, jax.random.key(0)
    model = pzs.sharded_init(build, config, key, mesh=mesh, rules=RULES)
    return pzs.TrainState.initial_state(model, optax.adamw(1e-3), key)


def find_buffers(state) -> set[int]:
    """The addresses of what a step donates: all but counters, keys and constants."""
    return {
        shard.data.unsafe_buffer_pointer()
        for array in jax.tree.leaves((state.params, state.opt_state))
        if array.ndim
        for shard in array.addressable_shards
    }


def measure(blocks: int) -> Iterator[Figure]:
    mesh = pzs.make_mesh({"data": 2, "model": 4})
    with tempfile.TemporaryDirectory() as folder:
        saved = make_state(blocks, pzs.make_mesh({"data": 4, "model": 2}))
        path = pzs.save_train_state(f"{folder}/state", saved)
        state = pzs.restore_train_state(path, saved, mesh, RULES)
    traced = []

    def loss_fn(model, rng, state, tokens):
        # Each compilation traces it once.
        traced.append(model)
        logits = model(tokens)
        return (logits**2).untag(*logits.named_shape).mean().unwrap(), state, {}

    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    tokens = pzs.shard_batch(pz.nx.ones({"batch": 8, "seq": 16}, dtype="int32"), mesh, BATCH)
    buffers = [find_buffers(state)]
    for _ in range(3):
        state, _ = step(state, tokens=tokens)
        buffers.append(find_buffers(jax.block_until_ready(state)))
    reused = len(buffers[0] & buffers[1])
    work = f"donated buffers that the first step after a restore reuses, {blocks} blocks of adamw"
    share, detail = 100 * reused / len(buffers[0]), f"{reused} of {len(buffers[0])}"
    yield Figure(work, share, "%", floor=98, at_least=True, digits=1, detail=detail)
    work = "compilations in three steps after a restore"
    yield Figure(work, len(traced), "", floor=1, digits=0)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    options = parser.parse_args()
    print_figures(measure(1 if options.quick else options.blocks), options)


if __name__ == "__main__":
    main()
