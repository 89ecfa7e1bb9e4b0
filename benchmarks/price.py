"""Time of a train step's price: its collectives, its memory and its lock, against compiling it.

The model has the sizes of Llama 3 8B, its blocks written out, on a mesh of 64 devices that are not
there. ``compile_step`` compiles for as many simulated ones in a process of its own.

    python -m benchmarks.price [--blocks 32]
"""

import itertools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.transformer import model_parts
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, print_figures

MESH = {"data": 16, "model": 4}
RULES = {"embedding": "data", "vocabulary": "model", "neurons": "model", "kv_heads": "model"}
BATCH, LENGTH = 64, 2048


def make_step(blocks: int):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8,
        query_head_multiplier=4,
        embedding_dim=4096,
        projection_dim=128,
        mlp_hidden_dim=14336,
        num_decoder_blocks=blocks,
        vocab_size=128256,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        parameter_dtype=jnp.bfloat16,
        activation_dtype=jnp.bfloat16,
    )
    mesh = pzs.make_mesh(MESH, abstract=True)
    build = llamalike_common.build_llamalike_transformer
    model = pzs.abstract_model(build, config, jax.random.key(0))
    split_batch = pzs.ConstrainShardingByName(mesh, {"batch": "data"})
    blocks = pz.select(model).at_instances_of(model_parts.TransformerBlock)
    model = blocks.insert_after(split_batch)
    plan = pzs.make_plan(model, mesh, RULES)
    state = pzs.TrainState.initial_state(
        plan.restore_structs(), optax.adamw(1e-3), jax.random.key(0)
    )
    tokens = jax.eval_shape(lambda: pz.nx.zeros({"batch": BATCH, "seq": LENGTH}, jnp.int32))
    tokens = pzs.shard_batch(tokens, mesh, {"batch": "data"})
    return pzs.build_train_step_fn(loss_fn, donate_params_and_state=True), state, tokens


def loss_fn(model, rng, state, tokens):
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    log_probs = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary")).tag("vocabulary")
    right = log_probs[{"vocabulary": tokens[{"seq": pz.slice[1:]}]}]
    return -right.untag("batch", "seq").unwrap().mean(), state, {}


def measure(blocks: int) -> Iterator[Figure]:
    step, state, tokens = make_step(blocks)
    times = [time.perf_counter()]
    program = pzs.compile_step(step, state, tokens=tokens)
    times.append(time.perf_counter())
    str(program.collectives.table())
    times.append(time.perf_counter())
    str(program.memory.table())
    times.append(time.perf_counter())
    pzs.ShardingLock.of(program).to_json()
    times.append(time.perf_counter())
    parts = [after - before for before, after in itertools.pairwise(times)]
    detail = "compiled {:.1f} s, collectives {:.1f} s, memory {:.1f} s, lock {:.1f} s"
    work = f"price of a train step of Llama 3 8B's sizes, {blocks} blocks, 64 devices"
    yield Figure(work, sum(parts), "s", floor=60, digits=0, detail=detail.format(*parts))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=32)
    options = parser.parse_args()
    print_figures(measure(2 if options.quick else options.blocks), options)


if __name__ == "__main__":
    main()
