"""How well prices by names and by propagation order layouts, judged by the compiled step.

Candidates of a small Llama on 8 simulated devices are drawn, priced in three ways, and compared:
bytes that a device sends, floating point operations, and what it holds beside its state. Times are
those of one candidate, without the first of its structure, which lowers the step.

Run: python benchmarks/propagated_prices.py [candidates] [seed]
"""

import collections
import os
import random
import statistics
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from penzai.models.transformer.variants import llamalike_common
from scipy.stats import spearmanr

from penzai_shard import abstract_model, cross_entropy, make_mesh
from penzai_shard.choosing.by_names import NamePrices
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.candidates import candidates
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.inspection.memory.memory_report import MemoryReport
from penzai_shard.inspection.steps.programs import compiled_program
from penzai_shard.inspection.traffic.collective_report import CollectiveReport
from penzai_shard.named_arrays import named_array

MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}]


def llama_problem():
    """A step of a Llama of one block, whose layers are too large to be left whole."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=4,
        query_head_multiplier=2,
        embedding_dim=256,
        projection_dim=16,
        mlp_hidden_dim=512,
        num_decoder_blocks=1,
        vocab_size=1024,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )

    def loss_fn(*, model, rng, state, tokens):
        del rng
        return cross_entropy(model(tokens), tokens), state, {}

    model = abstract_model(
        llamalike_common.build_llamalike_transformer, config, init_base_rng=jax.random.key(0)
    )
    tokens = named_array(jax.ShapeDtypeStruct((16, 64), jnp.int32), ("batch", "seq"))
    return TrainingProblem(model, loss_fn, optax.adamw(1e-3), {"tokens": tokens})


def compiled_figures(problem, candidate):
    """What a compiled step sends and holds beside its state; scattered reductions count as such."""
    mesh = make_mesh(dict(candidate.mesh_axes))
    step, state, inputs = problem.built(candidate.layout, mesh, candidate.microbatches)
    program = compiled_program(step, (state,), inputs)
    sent = 0.0
    for one in CollectiveReport.of(program).collectives:
        saved = (one.group_size - 1) / one.group_size * one.scattered_bytes
        sent += (one.wire_bytes - saved) * one.times
    return sent, MemoryReport.of(program).temporaries


def figures(cost):
    """The same of a price."""
    return sum(cost.traffic.values()), cost.memory["activations"] + cost.memory["gradients"]


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    problem = llama_problem()
    drawn = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0).sample(
        list(candidates(problem, MESHES, microbatches=(1, 2))), count
    )
    prices = {"names": NamePrices.of(problem), "propagation": PropagatedPrices.of(problem)}
    truths = [compiled_figures(problem, one) for one in drawn]
    print(f"{count} candidates")
    for stage, pricer in prices.items():
        found, seconds = [], []
        for one in drawn:
            pricer.cost(one)
            start = time.process_time()
            found.append(figures(pricer.cost(one)))
            seconds.append(time.process_time() - start)
        for which, what in enumerate(("sent", "held")):
            ratios = [f[which] / t[which] for f, t in zip(found, truths, strict=True)]
            order = spearmanr([f[which] for f in found], [t[which] for t in truths]).statistic
            near = collections.Counter(abs(ratio - 1) < 0.05 for ratio in ratios)[True]
            print(
                f"by {stage}: {what} / compiled {min(ratios):.2f} to {max(ratios):.2f}, median "
                f"{statistics.median(ratios):.2f}, {near} of {count} within 5 %, "
                f"Spearman {order:.2f}"
            )
        print(f"by {stage}: {statistics.median(seconds) * 1e3:.1f} ms of a processor each")


if __name__ == "__main__":
    main()
