"""Time of a call of ``Jitted(model)`` against ``jax.jit`` over a list of the model's arrays.

The model is a small transformer, called as a whole, and held by a layer that takes in all of its
arrays and returns its input: then a call is little else than its overhead. Calls take turns in one
process; medians are printed, and the Python functions that a call of Jitted calls.

    python -m benchmarks.jitted [--rounds N]
"""

import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, median_ratio, print_figures, take_turns

DEPTHS = (2, 12, 48)
FLOOR = 1.26


@pz.pytree_dataclass
class Hold(pz.nn.Layer):
    """Returns its input; the arrays of the layer that it holds count as used."""

    held: pz.nn.Layer

    def __call__(self, x, /, **side_inputs):
        values = jax.tree.leaves(pz.freeze_variables(self.held))
        return jax.lax.optimization_barrier((x, values))[0]


def build_model(blocks: int):
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=1,
        query_head_multiplier=1,
        embedding_dim=4,
        projection_dim=4,
        mlp_hidden_dim=4,
        num_decoder_blocks=blocks,
        vocab_size=8,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    return llamalike_common.build_llamalike_transformer(config, jax.random.key(0))


def flat_call(model, x) -> Callable[[], object]:
    """The same call with Penzai's own means: a list of arrays, and ``jax.jit``."""
    slots, variables = pz.unbind_variables(model, freeze=True)
    arrays, definition = jax.tree.flatten((slots, variables))
    run = jax.jit(lambda arrays, x: pz.bind_variables(*definition.unflatten(arrays))(x))
    return lambda: run(arrays, x)


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    jax.block_until_ready(call())
    started = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / repeats


def count_calls(call: Callable[[], object]) -> int:
    counted = []
    sys.setprofile(lambda frame, event, argument: counted.append(event))
    call()
    sys.setprofile(None)
    return counted.count("call") - 1  # That of the lambda.


def measure(depths: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    x = pz.nx.wrap(jax.numpy.ones((2, 4), int), "batch", "seq")
    counts = {}
    for blocks in depths:
        model = build_model(blocks)
        held = f"{blocks} blocks held by a layer that computes nothing"
        for work, called in {f"{blocks} blocks": model, held: Hold(model)}.items():
            jitted = pzs.Jitted(called)
            calls = flat_call(called, x), lambda jitted=jitted: jitted(x)
            gc.collect()
            gc.disable()
            timers = [functools.partial(seconds, call) for call in calls]
            flat, ours = take_turns(timers, rounds)
            gc.enable()
            medians = [statistics.median(column) * 1e6 for column in (ours, flat)]
            detail = "{:.0f} µs against {:.0f} µs".format(*medians)
            ratio = median_ratio(ours, flat)
            floor = FLOOR if called is model else None
            work = f"call of Jitted against a flat jax.jit, {work}"
            yield Figure(work, ratio, floor=floor, detail=detail)
            counts.setdefault(blocks, count_calls(calls[1]))
    least, most = min(depths), max(depths)
    detail = f"{', '.join(map(str, depths))} blocks: {', '.join(map(str, counts.values()))}"
    work = f"Python calls in a call of Jitted, {most} blocks, floor: those of {least}"
    yield Figure(work, counts[most], "", floor=counts[least], digits=0, detail=detail)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    rounds, depths = (5, DEPTHS[:2]) if options.quick else (options.rounds, DEPTHS)
    print_figures(measure(depths, rounds), options)


if __name__ == "__main__":
    main()
