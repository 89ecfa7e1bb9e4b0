"""Time of a recipe against Penzai's selectors: a layer after every linear layer of a transformer.

Parameters of the transformer are slots, since edits never look at values. Calls take turns in one
process; medians are printed. ``strip`` is timed on the edited model, and on the bare one, as on
every save of a checkpoint.

    python -m benchmarks.surgery [--rounds N]
"""

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator

os.environ["JAX_PLATFORMS"] = "cpu"

from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, median_ratio, print_figures, take_turns

DEPTHS = (12, 96, 500)
FLOOR = 13
LAYER = pz.nn.Identity()
RECIPE = pzs.Recipe(pzs.insert_after(pz.nn.Linear, LAYER))


def build_model(blocks: int):
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
    return llamalike_common.build_llamalike_transformer(config, init_base_rng=None, name="t")


def seconds(call: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(depths: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    for blocks in depths:
        model = build_model(blocks)
        edited = RECIPE.apply(model)
        assert pzs.strip(edited) == model
        calls = (
            lambda model=model: RECIPE.apply(model),
            lambda model=model: pz.select(model).at_instances_of(pz.nn.Linear).insert_after(LAYER),
            lambda edited=edited: pzs.strip(edited),
            lambda model=model: pzs.strip(model),
        )
        found = take_turns([functools.partial(seconds, call) for call in calls], rounds)
        ours, theirs, off, bare = (statistics.median(column) * 1e3 for column in found)
        ratio = median_ratio(found[1], found[0])
        places = pz.select(model).at_instances_of(pz.nn.Linear).count()
        detail = f"{ours:.1f} ms against {theirs:.1f} ms at {places} places"
        work = f"a layer after every linear layer, {blocks} blocks, times faster than pz.select"
        yield Figure(work, ratio, floor=FLOOR, at_least=True, digits=1, detail=detail)
    detail = f"of a model with nothing to take off: {bare:.1f} ms"
    yield Figure(f"strip of these layers, {depths[-1]} blocks", off, "ms", digits=0, detail=detail)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    depths, rounds = (DEPTHS[:1], 1) if options.quick else (DEPTHS, options.rounds)
    print_figures(measure(depths, rounds), options)


if __name__ == "__main__":
    main()
