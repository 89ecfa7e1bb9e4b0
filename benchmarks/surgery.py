"""Time of editing a model, against Penzai's selectors.

A transformer of 12, 96 and 500 blocks gets a layer after every linear layer, once by a recipe and
once by a chained ``pz.select(...).at_instances_of(...)``; then a recipe of five edits runs against
three of Penzai's single edits. Runs alternate in one process; medians are compared.

    python benchmarks/surgery.py
"""

import argparse
import gc
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from penzai import pz
from penzai.models.transformer import model_parts
from penzai.models.transformer.variants import llamalike_common

from penzai_shard.layers import Checkpointed, Jitted, Scoped
from penzai_shard.surgery import ROOT, Recipe, insert_after, strip, wrap

INSERTED = pz.nn.Identity()


def transformer(blocks):
    """A transformer whose parameters are slots: editing never looks at values."""
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


def penzai_insert(model, kind=pz.nn.Linear):
    return pz.select(model).at_instances_of(kind).insert_after(INSERTED)


def penzai_wrap(model, kind, wrapper):
    return pz.select(model).at_instances_of(kind).apply(wrapper)


def penzai_three_edits(model):
    model = penzai_insert(model)
    model = penzai_wrap(model, pz.nn.Attention, Checkpointed)
    return penzai_wrap(model, model_parts.TransformerBlock, Checkpointed)


INSERT = Recipe(insert_after(pz.nn.Linear, INSERTED))
FIVE_EDITS = Recipe(
    insert_after(pz.nn.Linear, INSERTED),
    wrap(pz.nn.Attention, Checkpointed),
    wrap(model_parts.TransformerBlock, Checkpointed),
    wrap("**/transformer_feed_forward", Scoped),
    wrap(ROOT, Jitted),
)


def seconds(function):
    # Every contender starts without garbage that others left.
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(contenders, repeats):
    """Median seconds of each, run in turn; the first round warms up and does not count."""
    times = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, function in contenders.items():
            taken = seconds(function)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, few repeats")
    options = parser.parse_args(argv)
    repeats = 3 if options.quick else 9
    results = []
    print("blocks   edit                     ours ms   penzai ms   penzai/ours   ours us/block")
    for blocks in (12, 24) if options.quick else (12, 96, 500):
        model = transformer(blocks)
        edited = FIVE_EDITS.apply(model)
        assert strip(edited) == model
        found = measure(
            {
                "one": lambda model=model: INSERT.apply(model),
                "penzai one": lambda model=model: penzai_insert(model),
                "five": lambda model=model: FIVE_EDITS.apply(model),
                "penzai three": lambda model=model: penzai_three_edits(model),
                "strip": lambda edited=edited: strip(edited),
            },
            repeats,
        )
        results.append({"blocks": blocks, **found})
        for label, ours, penzai in (
            ("insert after linear", "one", "penzai one"),
            ("five edits / three", "five", "penzai three"),
        ):
            print(
                f"{blocks:6d}   {label:22s} {found[ours] * 1e3:9.2f} {found[penzai] * 1e3:11.1f} "
                f"{found[penzai] / found[ours]:12.1f}x {found[ours] / blocks * 1e6:15.1f}"
            )
        print(
            f"{blocks:6d}   {'strip all five':22s} {found['strip'] * 1e3:9.2f} "
            f"{'':25s} {found['strip'] / blocks * 1e6:15.1f}"
        )
    return results


if __name__ == "__main__":
    main()
