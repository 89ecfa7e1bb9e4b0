"""Time to compile a train step of a stacked transformer, rolled, against Penzai's stack.

Both models are Llama-like transformers of tiny dimensions with the same parameters; only the
stack's class differs. A train step is the loss, its gradients, and an update. Tracing and
compiling are timed together, nothing runs. Lower is better, and what counts is that the figure
does not grow with the number of blocks: "growth" is over the smallest model.

With ``--policies`` a second table: for each policy of what the stack keeps for its backward pass,
the temporaries of the compiled gradient (exact, of the compiler), and the floating-point operations
of its matrix products (exact, of the traced program, each loop counted as often as it runs), over
those of the stack that computes nothing again. A block's input is larger here than its parameters.
What is offloaded stays where it is on a CPU, whose memory is the host's.
"""

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from penzai_shard.layers import LayerStackPolicy, RolledLayerStack
from penzai_shard.traced_programs import inner_programs, opened

POLICIES: dict[str, Any] = {
    "False": False,
    "dots": "dots",
    "dots_without_batch": "dots_without_batch",
    "inputs": "inputs",
    "carries": "carries",
    "offload_carries": "offload_carries",
    "nested": "nested",
    "nested, dots kept": LayerStackPolicy(group_size="sqrt", save_internals="dots"),
}


def build_model(blocks: int) -> Any:
    """A stacked Llama-like transformer of tiny dimensions."""
    return llamalike_common.build_llamalike_transformer(
        llamalike_common.LlamalikeTransformerConfig(
            num_kv_heads=2,
            query_head_multiplier=1,
            embedding_dim=16,
            projection_dim=8,
            mlp_hidden_dim=32,
            num_decoder_blocks=blocks,
            vocab_size=32,
            mlp_variant="swiglu",
            tie_embedder_and_logits=False,
            use_layer_stack=True,
        ),
        init_base_rng=jax.random.key(0),
        name="transformer",
    )


def rolled(model: Any, policy: Any = False) -> Any:
    """The model with its stack as a loop."""
    stacks = pz.select(model).at_instances_of(pz.nn.LayerStack)
    return stacks.apply(lambda stack: RolledLayerStack.from_layer_stack(stack, policy=policy))


def loss_and_arguments(model: Any, batch: int, length: int) -> tuple[Any, tuple[Any, Any]]:
    """The loss as a function of parameters and tokens, and these."""
    slots, parameters = pz.unbind_params(model, freeze=True)
    tokens = pz.nx.wrap(jnp.zeros((batch, length), jnp.int32)).tag("batch", "seq")

    def loss(parameters: Any, tokens: Any) -> Any:
        logits = pz.bind_variables(slots, parameters)(tokens)
        log_probabilities = pz.nx.nmap(jax.nn.log_softmax)(logits.untag("vocabulary"))
        return -log_probabilities.tag("vocabulary").unwrap("batch", "seq", "vocabulary").mean()

    return loss, (parameters, tokens)


def product_flops(program: Any) -> float:
    """The floating-point operations of all matrix products that a traced program runs."""
    total = 0.0
    for equation in opened(program)[0].eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            summed = math.prod(shape[dimension] for dimension in contracted)
            total += 2 * summed * math.prod(equation.outvars[0].aval.shape)
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += turns * sum(map(product_flops, inner_programs(equation)))
    return total


def show_policies(depths: tuple[int, ...]) -> dict[tuple[str, int], tuple[int, float]]:
    """Prints temporaries and operations of each policy, and returns them by policy and depth."""
    found: dict[tuple[str, int], tuple[int, float]] = {}
    headings = [f"{f'{depth} blocks':>12} {'flops':>6}" for depth in depths]
    print(f"\n{'temporaries, MiB':<20} {' '.join(headings)}")
    for name, policy in POLICIES.items():
        line = f"{name:<20}"
        for depth in depths:
            loss, arguments = loss_and_arguments(rolled(build_model(depth), policy), 16, 128)
            traced = jax.jit(jax.grad(loss)).trace(*arguments)
            size = traced.lower().compile().memory_analysis().temp_size_in_bytes
            found[name, depth] = size, product_flops(traced.jaxpr)
            ratio = found[name, depth][1] / found["False", depth][1]
            line += f" {size / 2**20:>12.2f} {ratio:>6.3f}"
        print(line)
    return found


def compile_seconds(model: Any) -> float:
    """Seconds to trace and compile a train step."""
    loss, arguments = loss_and_arguments(model, 2, 8)

    @jax.jit
    def step(parameters: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        return value, jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, parameters, gradients)

    start = time.perf_counter()
    step.lower(*arguments).compile()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Prints the table.

    Args:
        argv: Command line arguments; those of the process by default.

    Returns:
        The figures of each row, times in seconds.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Penzai's stack for 8 blocks only")
    parser.add_argument(
        "--penzai-up-to", type=int, default=32, help="most blocks to compile Penzai's stack for"
    )
    parser.add_argument("--policies", action="store_true", help="show the table of policies too")
    options = parser.parse_args(argv)
    penzai_limit = min(8, options.penzai_up_to) if options.quick else options.penzai_up_to
    compile_seconds(rolled(build_model(2)))
    print(f"{'blocks':>6} {'ours s':>8} {'growth':>7} {'penzai s':>9} {'growth':>7} {'ratio':>7}")
    rows: list[dict[str, float]] = []
    for blocks in (8, 32, 96):
        model = build_model(blocks)
        row = {"blocks": blocks, "ours": min(compile_seconds(rolled(model)) for _ in range(2))}
        if blocks <= penzai_limit:
            row["penzai"] = compile_seconds(model)
        rows.append(row)
        line = f"{blocks:>6} {row['ours']:>8.2f} {row['ours'] / rows[0]['ours']:>7.2f}"
        if "penzai" in row:
            line += f" {row['penzai']:>9.2f} {row['penzai'] / rows[0]['penzai']:>7.2f}"
            line += f" {row['penzai'] / row['ours']:>7.1f}"
        print(line)
    if options.policies:
        show_policies((16,) if options.quick else (16, 64))
    return rows


if __name__ == "__main__":
    main()
