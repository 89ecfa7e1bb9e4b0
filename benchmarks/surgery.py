"""Time of a recipe against Penzai's selectors: a layer after every linear layer of a transformer.

Parameters of the transformer are slots, since edits never look at values. Calls take turns in one
process; medians are printed. ``strip`` is timed on the edited model, and on the bare one, as on
every save of a checkpoint.

    python benchmarks/surgery.py [--quick]
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"

from penzai import pz
from penzai.models.transformer.variants import llamalike_common

import penzai_shard as pzs

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    rounds = 3 if parser.parse_args().quick else 15
    print("| blocks | places | pz.select | recipe | ratio | floor | strip | strip of the bare |")
    print("|---" * 8 + "|")
    for blocks in (12, 96, 500):
        model = build_model(blocks)
        edited = RECIPE.apply(model)
        assert pzs.strip(edited) == model
        calls = (
            lambda model=model: pz.select(model).at_instances_of(pz.nn.Linear).insert_after(LAYER),
            lambda model=model: RECIPE.apply(model),
            lambda edited=edited: pzs.strip(edited),
            lambda model=model: pzs.strip(model),
        )
        [call() for call in calls]
        table = [[seconds(call) for call in calls] for _ in range(rounds)]
        penzai, own, off, bare = (
            f"{statistics.median(column) * 1e3:.1f} ms" for column in zip(*table, strict=True)
        )
        ratio = statistics.median(row[0] / row[1] for row in table)
        places = pz.select(model).at_instances_of(pz.nn.Linear).count()
        print(
            f"| {blocks} | {places} | {penzai} | {own} | {ratio:.1f}x | {FLOOR}x "
            f"| {off} | {bare} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
