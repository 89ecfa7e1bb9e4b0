"""Is the layout that is chosen the best there is? Every sane layout of small steps is compiled.

For each pair of a model and a mesh all candidates are priced in every way: by the names of logical
axes, by propagation, and by compiling each of them for as many simulated devices. The last one is
the judge. The table says how well each way ranks the candidates (Spearman's coefficient, 1 for the
same order), how much longer than the best of those that fit the pick of ``choose_layout`` takes by
its compiled step, and whether it needs more memory than there is; half of the candidates do.

Sizes are those of real models, but that there are few blocks: compiling takes as long for small
arrays. Seconds are those of the processor, which other load on the machine touches little.

    python -m benchmarks.choosing [--quick] [--pairs NAME ...]
"""

import argparse
import dataclasses
import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh
from penzai import pz
from penzai.models.transformer.variants import llamalike_common
from scipy import stats

from penzai_shard import abstract_model, cross_entropy
from penzai_shard.choosing.by_compiling import CompiledPrices
from penzai_shard.choosing.by_names import NamePrices
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.candidates import Candidate, candidates, mesh_shapes
from penzai_shard.choosing.choices import choose_layout
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.step_times import StepTime
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import NothingFitsError
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.named_arrays import named_array

# By so much a pick may be slower than the best.
ALLOWED = 0.02
_KEPT_OPEN: Mapping[str, Any] = {"rematerialise": (None,), "microbatches": (1,)}


def _token_loss(*, model: Any, rng: Any, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
    del rng
    return cross_entropy(model(tokens), tokens), state, {}


def _square_loss(*, model: Any, rng: Any, state: Any, x: Any) -> tuple[Any, Any, Any]:
    del rng
    return (model(x).untag("batch", "embedding") ** 2).mean().unwrap(), state, {}


def transformer(
    batch: int, seq: int, embedding: int = 1024, neurons: int = 4096, vocabulary: int = 8192
) -> TrainingProblem:
    """A training step of a Llama of one block."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=8,
        query_head_multiplier=2,
        embedding_dim=embedding,
        projection_dim=embedding // 16,
        mlp_hidden_dim=neurons,
        num_decoder_blocks=1,
        vocab_size=vocabulary,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        rope_wavelength=10_000,
        rms_norm_eps=1e-5,
    )
    model = abstract_model(
        llamalike_common.build_llamalike_transformer, config, init_base_rng=jax.random.key(0)
    )
    tokens = named_array(jax.ShapeDtypeStruct((batch, seq), jnp.int32), ("batch", "seq"))
    return TrainingProblem(model, _token_loss, optax.adamw(1e-3), {"tokens": tokens})


def mlp(batch: int, embedding: int = 2048, neurons: int = 8192, layers: int = 2) -> TrainingProblem:
    """A training step of layers that widen and narrow in turn."""

    def build() -> Any:
        key = jax.random.key(0)
        wide, narrow = {"neurons": neurons}, {"embedding": embedding}
        made: list[Any] = []
        for i in range(layers):
            made += [
                pz.nn.Linear.from_config(f"layer_{i}/up", key, narrow, wide),
                pz.nn.Elementwise(jnp.tanh),
                pz.nn.Linear.from_config(f"layer_{i}/down", key, wide, narrow),
            ]
        return pz.nn.Sequential(made)

    x = named_array(jax.ShapeDtypeStruct((batch, embedding), jnp.float32), ("batch", "embedding"))
    return TrainingProblem(abstract_model(build), _square_loss, optax.adamw(1e-3), {"x": x})


@dataclasses.dataclass(frozen=True)
class Pair:
    """A training step and a mesh.

    Attributes:
        problem: Makes the step.
        hardware: What the devices are.
        mesh: The sizes of the mesh axes; None for every mesh of the devices.
        keep: What is decided, where there are too many layouts to compile all of them.
    """

    problem: Callable[[], TrainingProblem]
    hardware: str
    mesh: Mapping[str, int] | None = None
    keep: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_IN_LAYERS = {"batch": "data", "vocabulary": "model", "neurons": "model"}
_SPLIT = {"data": 4, "model": 2}
PAIRS: dict[str, Pair] = {
    "MLP, few examples": Pair(lambda: mlp(64), "v5e:8"),
    "MLP, many examples": Pair(lambda: mlp(65_536), "v5e:8"),
    "MLP, wide": Pair(lambda: mlp(4096, 1024, 32_768), "v5p:8"),
    "MLP, deep": Pair(lambda: mlp(4096, layers=5), "v5e:4"),
    "MLP, GPUs": Pair(lambda: mlp(8192), "h100:8"),
    "transformer, short": Pair(lambda: transformer(8, 128), "v5e:4", {"data": 4}),
    "transformer, long": Pair(lambda: transformer(8, 4096), "v5e:8", {"data": 8}),
    "transformer, split, short": Pair(lambda: transformer(8, 128), "v5e:8", _SPLIT, _IN_LAYERS),
    "transformer, split, long": Pair(lambda: transformer(16, 2048), "v5e:8", _SPLIT, _IN_LAYERS),
    "transformer, vocabulary": Pair(
        lambda: transformer(16, 512, 512, 1024, 131_072), "v5p:8", _SPLIT, _IN_LAYERS
    ),
}
QUICK = ("MLP, deep",)


@dataclasses.dataclass(frozen=True)
class Judged:
    """What became of a pair.

    Attributes:
        count: How many layouts were compiled.
        spearman: Of each quicker way to price, the coefficient with the compiled price.
        slower: By which part the pick takes longer than the best that fits; NaN without a pick.
        is_best: Whether it takes as long as the best.
        is_over: Whether it needs more memory than there is.
    """

    count: int
    spearman: Mapping[str, float]
    slower: float
    is_best: bool
    is_over: bool


def judged(pair: Pair) -> Judged:
    """Compiles every candidate of a pair, and judges the quicker prices and the pick by that."""
    problem, hardware = pair.problem(), Hardware.read(pair.hardware)
    shapes = mesh_shapes(hardware) if pair.mesh is None else [pair.mesh]
    found = candidates(problem, shapes, dict(pair.keep), hardware=hardware, **_KEPT_OPEN)
    with CompiledPrices(problem) as compiled:
        answers = list(compiled.costs(found))
    costs = {
        one: cost for one, cost in zip(found, answers, strict=True) if isinstance(cost, StepCost)
    }

    def price(one: Candidate, cost: StepCost) -> tuple[float, float]:
        time = StepTime.of(cost, one.mesh_shape, hardware)
        return time.bound, time.without_overlap

    limit = sorted(cost.memory_bytes for cost in costs.values())[len(costs) // 2]
    prices = {one: price(one, cost) for one, cost in costs.items()}
    best = min(prices[one] for one, cost in costs.items() if cost.memory_bytes <= limit)
    quicker = {"names": NamePrices.of(problem), "propagation": PropagatedPrices.of(problem)}
    spearman = {
        name: _spearman([price(one, stage.cost(one)) for one in costs], list(prices.values()))
        for name, stage in quicker.items()
    }
    pick = _pick(pair, problem, hardware, limit)
    if pick is None:
        return Judged(len(costs), spearman, math.nan, False, False)
    slower = prices[pick][0] / best[0] - 1
    return Judged(len(costs), spearman, slower, slower < 1e-9, costs[pick].memory_bytes > limit)


def _pick(pair: Pair, problem: TrainingProblem, hardware: Hardware, limit: int) -> Candidate | None:
    devices: Any = pair.hardware
    if pair.mesh is not None:
        devices = AbstractMesh(tuple(pair.mesh.values()), tuple(pair.mesh))
    try:
        choices = choose_layout(
            problem.model,
            problem.loss_fn,
            problem.optimizer,
            devices=devices,
            hardware=None if pair.mesh is None else hardware,
            batch=dict(problem.inputs),
            memory=limit,
            keep=dict(pair.keep),
            progress=False,
            **_KEPT_OPEN,
        )
    except NothingFitsError:
        return None
    return choices.best.priced.candidate


def _spearman(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """The coefficient of two rankings; of equal bounds the sum of what overlaps decides."""
    ranks = [np.unique(np.round(side, 12), axis=0, return_inverse=True)[1] for side in (one, other)]
    if any(len(set(rank.tolist())) == 1 for rank in ranks):
        return 1.0 if (ranks[0] == ranks[1]).all() else 0.0
    return float(stats.spearmanr(ranks[0].ravel(), ranks[1].ravel()).statistic)


def _seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges the pairs, prints a table, and says whether the picks are as good as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one pair alone")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, help="these pairs alone")
    options = parser.parse_args(arguments)
    names = options.pairs or (QUICK if options.quick else tuple(PAIRS))
    heads = ("layouts", "names", "propagation", "slower", "best", "over", "seconds")
    print(f"{'pair':26}" + "".join(f"{head:>13}" for head in heads))
    answers = []
    for name in names:
        start = _seconds()
        one = judged(PAIRS[name])
        answers.append(one)
        cells = (
            f"{one.count}",
            f"{one.spearman['names']:.2f}",
            f"{one.spearman['propagation']:.2f}",
            f"{one.slower:.1%}",
            "yes" if one.is_best else "no",
            "yes" if one.is_over else "no",
            f"{_seconds() - start:.0f}",
        )
        print(f"{name:26}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
    good = sum(one.slower <= ALLOWED for one in answers)
    best, over = sum(one.is_best for one in answers), sum(one.is_over for one in answers)
    print(
        f"{good} of {len(answers)} picks within {ALLOWED:.0%} of the best, {best} the best, "
        f"{over} over the memory limit"
    )
    return 0 if good == len(answers) and not over else 1


if __name__ == "__main__":
    sys.exit(main())
