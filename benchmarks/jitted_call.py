"""Time of a ``Jitted(model)(x)`` call beyond its computation, against the floor and Penzai.

The floor is a function under ``jax.jit`` that takes the flat list of the model's arrays. All
three run the same computation: the models are Llama-like transformers with all their blocks and
parameters, held by a layer that takes in all of their arrays and returns its input,
so that a call's time is almost only the time to get the arrays into the compiled function. All
measurements are interleaved in one process, and medians are printed. Lower is better.

"ours/floor" is the whole call over the whole call of the floor. "calls" are the Python and C
functions that one forward call runs through; "new bytes" the buffers that it makes.
"""

import argparse
import gc
import operator
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common
from penzai.toolshed import jit_wrapper

from penzai_shard.layers import Jitted


@pz.pytree_dataclass
class HeldStill(pz.nn.Layer):
    """Holds a layer, takes in all its parameters, and returns its input.

    Attributes:
        held: The layer.
    """

    held: Any

    def __call__(self, argument: Any, /, **side_inputs: Any) -> Any:
        """Returns the input; the parameters count as used, so none is left out of the call."""
        leaves = jax.tree_util.tree_leaves(self.held)
        values = [leaf.value if isinstance(leaf, pz.Parameter) else leaf for leaf in leaves]
        return jax.lax.optimization_barrier((argument, values))[0]


def build_model(blocks: int) -> Any:
    """A Llama-like transformer of tiny dimensions, without the computation of its blocks."""
    model = llamalike_common.build_llamalike_transformer(
        llamalike_common.LlamalikeTransformerConfig(
            num_kv_heads=1,
            query_head_multiplier=1,
            embedding_dim=4,
            projection_dim=4,
            mlp_hidden_dim=4,
            num_decoder_blocks=blocks,
            vocab_size=8,
            mlp_variant="swiglu",
            tie_embedder_and_logits=False,
        ),
        init_base_rng=jax.random.key(0),
        name="transformer",
    )
    return HeldStill(model)


def flat_call(model: Any) -> tuple[Callable[..., Any], list[Any], int]:
    """The floor: a jitted function over the model's flat arrays, and those arrays."""
    slots, variables = pz.unbind_variables(model, freeze=True)
    arrays, structure = jax.tree_util.tree_flatten((slots, variables))

    def run(arrays: list[Any], argument: Any) -> Any:
        slots, variables = jax.tree_util.tree_unflatten(structure, arrays)
        return pz.bind_variables(slots, variables)(argument)

    return jax.jit(run), arrays, len(variables)


def measure_times(
    calls: dict[str, Callable[[], Any]], slow: Callable[[], Any], rounds: int, inner: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds of each call, measured in turns, and the median seconds of the slow one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    slow_times = []

    def seconds_of(call: Callable[[], Any], repeats: int) -> float:
        jax.block_until_ready(call())
        start = time.perf_counter()
        for _ in range(repeats):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / repeats

    for call in (*calls.values(), slow):
        jax.block_until_ready(call())
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for name, call in calls.items():
                times[name].append(seconds_of(call, inner))
            if number % 8 == 0:
                slow_times.append(seconds_of(slow, 1))
    finally:
        gc.enable()
    return times, statistics.median(slow_times)


def count_calls(call: Callable[[], Any]) -> int:
    """How many Python and C functions one call of ``call`` calls."""
    call()
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    # The call of ``call`` itself, and the one that ends the profiling.
    return count - 2


def new_bytes(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of the buffers that a call makes and keeps, and bytes of its output."""
    call()
    gc.collect()
    before = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}
    output = call()
    gc.collect()
    after = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}
    made = sum(size for pointer, size in after.items() if pointer not in before)
    return made, sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(output))


def measure(blocks: int, rounds: int, inner: int) -> dict[str, float]:
    """All figures for one number of blocks."""
    model = build_model(blocks)
    argument = pz.nx.ones({"batch": 2, "seq": 4})
    flat, arrays, parameters = flat_call(model)
    ours, penzai = Jitted(model), jit_wrapper.Jitted(model)
    times, penzai_seconds = measure_times(
        {"floor": lambda: flat(arrays, argument), "ours": lambda: ours(argument)},
        lambda: penzai(argument),
        rounds,
        inner,
    )
    made, output = new_bytes(lambda: ours(argument))
    return {
        "blocks": blocks,
        "parameters": parameters,
        "floor": statistics.median(times["floor"]),
        "ours": statistics.median(times["ours"]),
        "penzai": penzai_seconds,
        # The median of the quotients of neighbouring measurements, as machines are not steady.
        "ratio": statistics.median(map(operator.truediv, times["ours"], times["floor"])),
        "calls": count_calls(lambda: ours(argument)),
        "penzai_calls": count_calls(lambda: penzai(argument)),
        "made": made,
        "output": output,
    }


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Prints the table.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        The figures of each row, times in seconds.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, two sizes only")
    options = parser.parse_args(argv)
    sizes = (2, 12) if options.quick else (2, 12, 48)
    rounds, inner = (25, 10) if options.quick else (121, 10)
    print(
        f"{'blocks':>6} {'params':>6} {'floor us':>9} {'ours us':>9} {'penzai us':>10} "
        f"{'ours/floor':>10} {'penzai/floor':>12} {'penzai/ours':>11} {'calls':>6} "
        f"{'penzai calls':>12} {'new bytes':>9} {'output bytes':>12}"
    )
    rows = []
    for blocks in sizes:
        row = measure(blocks, rounds, inner)
        rows.append(row)
        print(
            f"{row['blocks']:>6} {row['parameters']:>6} {row['floor'] * 1e6:>9.1f} "
            f"{row['ours'] * 1e6:>9.1f} {row['penzai'] * 1e6:>10.1f} "
            f"{row['ratio']:>10.2f} {row['penzai'] / row['floor']:>12.1f} "
            f"{row['penzai'] / row['ours']:>11.1f} {row['calls']:>6} {row['penzai_calls']:>12} "
            f"{row['made']:>9} {row['output']:>12}"
        )
    return rows


if __name__ == "__main__":
    main()
