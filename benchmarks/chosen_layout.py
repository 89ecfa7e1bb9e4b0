"""Is the step in the chosen layout as fast as those in every preset? On eight simulated devices.

For each of three small models ``choose_layout`` chooses for the devices that are there, eight
simulated ones (``hardware="cpu"``), among fewer layouts than by default. The step of its pick and
those of every preset of ``Layout``, on every mesh of eight that the preset has a use for, are then
built and timed in turns in one process. Figures are ratios to the pick, so that below 1 is faster
than it: the median of the rounds, and the quartiles. Time of the processor is that of the process
on all cores, which other load on the machine touches little. The losses of three steps, of the pick
and of every preset, must be those of one device, or the run fails.

Models: ``transformer`` is the four-block one of ``benchmarks.parallel_training``; ``vocabulary``
a Llama with grouped queries and a large vocabulary; ``mlp`` layers without attention.

    python -m benchmarks.chosen_layout [--models transformer,mlp] [--rounds 15]
"""

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import benchmarks.simulated_devices  # noqa: F401 isort: skip
import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.contenders import Contender, chosen, losses, times_in_turns
from benchmarks.parallel_training import with_penzai, work

DEVICES = 8
LOSS_TOLERANCE = 1e-5
"""Relative: sums in another order round otherwise."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and how it is trained.

    Attributes:
        build: Makes the model.
        loss_fn: Its loss.
        batch: Its inputs by name.
        has_blocks: Whether it has layers that presets know.
    """

    build: Callable[[], Any]
    loss_fn: Callable[..., Any]
    batch: dict[str, Any]
    has_blocks: bool = True


def transformer() -> Training:
    """The transformer of the step benchmark."""
    shape = work.Shape()
    tokens = pz.nx.wrap(jnp.asarray(shape.tokens())).tag("batch", "seq")
    return Training(lambda: with_penzai.bare_model(shape), with_penzai.loss_fn, {"tokens": tokens})


def vocabulary() -> Training:
    """Grouped queries, and more parameters in the vocabulary than in all blocks."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=4,
        embedding_dim=128,
        projection_dim=16,
        mlp_hidden_dim=384,
        num_decoder_blocks=2,
        vocab_size=8192,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    tokens = jax.random.randint(jax.random.key(1), (16, 65), 0, config.vocab_size)
    return Training(
        lambda: llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="lm"),
        with_penzai.loss_fn,
        {"tokens": pz.nx.wrap(tokens).tag("batch", "seq")},
    )


def mlp() -> Training:
    """Layers that widen and narrow in turn."""

    def build() -> Any:
        key = jax.random.key(0)
        wide, narrow = {"neurons": 2048}, {"embedding": 512}
        made: list[Any] = []
        for i in range(3):
            made += [
                pz.nn.Linear.from_config(f"layer_{i}/up", key, narrow, wide),
                pz.nn.Elementwise(jnp.tanh),
                pz.nn.Linear.from_config(f"layer_{i}/down", key, wide, narrow),
            ]
        return pz.nn.Sequential(made)

    def loss_fn(model: Any, rng: Any, state: Any, x: Any) -> Any:
        del rng
        loss = ((model(x) - x).untag("batch", "embedding") ** 2).mean().unwrap()
        return loss, state, {"loss": loss}

    x = pz.nx.wrap(jax.random.normal(jax.random.key(1), (512, 512))).tag("batch", "embedding")
    return Training(build, loss_fn, {"x": x}, has_blocks=False)


MODELS = {"transformer": transformer, "vocabulary": vocabulary, "mlp": mlp}


def presets(training: Training) -> Iterator[tuple[str, pzs.Layout, dict[str, int]]]:
    """Every preset with its name, on every mesh of eight devices that it has a use for."""
    options: dict[str, Any] = {} if training.has_blocks else {"blocks": ()}
    of_layout = pzs.Layout
    flat = {"data": DEVICES}
    yield "data_parallel", of_layout.data_parallel(**options), flat
    yield "zero1", of_layout.zero1(**options), flat
    yield "fully_sharded", of_layout.fully_sharded(**options), flat
    for replica in (2, 4):
        mesh = {"replica": replica, "data": DEVICES // replica}
        yield f"hybrid {replica}x{DEVICES // replica}", of_layout.hybrid(**options), mesh
    split = {
        "tensor_parallel": of_layout.tensor_parallel,
        "sequence_parallel": of_layout.sequence_parallel,
        "two_dimensional": of_layout.two_dimensional,
    }
    if not training.has_blocks:
        del split["sequence_parallel"]  # There is no sequence.
    for name, preset in split.items():
        for model in (2, 4, 8):
            data = DEVICES // model
            mesh = {"data": data, "model": model}
            if name == "two_dimensional" and data == 1:
                continue  # That is tensor_parallel.
            yield f"{name} {data}x{model}", preset(**options), mesh
            if training.has_blocks:
                of_logits = preset(vocabulary="model", **options)
                yield f"{name} {data}x{model}, vocabulary", of_logits, mesh


def contender(
    training: Training,
    layout: pzs.Layout,
    mesh_shape: dict[str, int],
    start_from: list[Any] | None = None,
    microbatches: int = 1,
) -> tuple[Contender, list[Any]]:
    """A step in a layout, built as users build it, and the values that it starts from.

    Args:
        training: The model and how it is trained.
        layout: The layout.
        mesh_shape: The sizes of the mesh axes.
        start_from: The values to start from, in the order of the state's arrays, which is the same
            in every layout; None for those that are initialised.
        microbatches: In how many parts the batch is computed.
    """
    mesh = pzs.make_mesh(mesh_shape, jax.devices()[: math.prod(mesh_shape.values())])
    state, step = layout.build(
        training.build,
        mesh=mesh,
        loss_fn=training.loss_fn,
        optimizer=work.optimizer(),
        rng=jax.random.key(0),
        accumulate_steps=microbatches,
    )
    leaves, structure = jax.tree.flatten(state)
    shardings = [leaf.sharding for leaf in leaves]
    values = jax.device_get(leaves) if start_from is None else start_from
    batch = layout.shard_batch(training.batch, mesh)

    def start() -> Any:
        return jax.tree.unflatten(structure, jax.device_put(values, shardings))

    def run(state: Any) -> Any:
        state, aux = step(state, **batch)
        return state, aux["loss"]

    return Contender(0, None, start, run), values


def pick_of(training: Training) -> pzs.Choices:
    """What ``choose_layout`` finds for eight simulated devices."""
    return pzs.choose_layout(
        pzs.abstract_model(training.build),
        training.loss_fn,
        work.optimizer(),
        devices=DEVICES,
        hardware="cpu",
        memory="2GiB",
        batch=training.batch,
        propagated=30,
        compiled=8,
        progress=False,
    )


def measure(name: str, rounds: int) -> None:
    """Prints the figures of one model."""
    training = MODELS[name]()
    best = pick_of(training).best
    print(f"\n{name}: the pick is {best.words()}", flush=True)
    options: dict[str, Any] = {} if training.has_blocks else {"blocks": ()}
    one_device, values = contender(training, pzs.Layout.data_parallel(**options), {"data": 1})
    expected = losses(one_device)
    print(f"losses of one device {expected}")
    contenders = {
        "pick": contender(training, best.layout, best.mesh_shape, values, best.microbatches)[0]
    }
    for preset, layout, mesh_shape in presets(training):
        contenders[preset] = contender(training, layout, mesh_shape, values)[0]
    for which, one in contenders.items():
        found = losses(one)
        if any(abs(a / b - 1) > LOSS_TOLERANCE for a, b in zip(found, expected, strict=True)):
            sys.exit(f"{which} computes something else than one device: losses {found}")
    times = times_in_turns(contenders, rounds)
    print(f"{'':40} {'elapsed':>8} {'':13} {'processor':>9}")
    both = times.elapsed, times.processor
    for which in sorted(contenders, key=lambda one: statistics.median(times.processor[one])):
        cells = "  ".join(_ratio_text(by[which], by["pick"]) for by in both)
        print(f"{which:40} {cells}", flush=True)


def _ratio_text(seconds: list[float], base: list[float]) -> str:
    """The median of the ratios of all rounds, and the quarters below and above."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    below, median, above = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:>8.3f} ({below:.2f}-{above:.2f})"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps each")
    options = parser.parse_args()
    for name in chosen(options.models, MODELS, "model"):
        measure(name, options.rounds)


if __name__ == "__main__":
    main()
