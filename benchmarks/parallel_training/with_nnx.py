"""The train step with Flax NNX, by its functional interface, which is the fast one."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.parallel_training.by_hand import rotary
from benchmarks.parallel_training.work import (
    BLOCK_WEIGHTS,
    EPSILON,
    OPTIMIZER,
    ROOT_WEIGHTS,
    Contender,
    Layout,
    Shape,
)

ZEROS = nnx.initializers.zeros
AXES = {**BLOCK_WEIGHTS, **ROOT_WEIGHTS}


class Block(nnx.Module):
    """A transformer block."""

    def __init__(self, shape: Shape, layout: Layout, rngs: nnx.Rngs) -> None:
        s, self.layout = shape, layout
        heads = (s.heads, s.projection)
        self.attention_norm = norm("attention_norm", s, layout, rngs)
        self.query = linear("query", s.embedding, heads, layout, rngs)
        self.key = linear("key", s.embedding, heads, layout, rngs)
        self.value = linear("value", s.embedding, heads, layout, rngs)
        self.output = linear("output", heads, s.embedding, layout, rngs, (-2, -1))
        self.mlp_norm = norm("mlp_norm", s, layout, rngs)
        self.gate = linear("gate", s.embedding, s.neurons, layout, rngs)
        self.up = linear("up", s.embedding, s.neurons, layout, rngs)
        self.down = linear("down", s.neurons, s.embedding, layout, rngs)

    def __call__(self, x: Any) -> Any:
        """What the block makes of activations."""
        pin = self.layout.constrain
        normed = self.attention_norm(x)
        query, key, value = (
            pin(of(normed), "batch", "seq", "heads", "projection")
            for of in (self.query, self.key, self.value)
        )
        mask = nnx.make_causal_mask(jnp.ones((1, x.shape[1])))
        mixed = nnx.dot_product_attention(rotary(query), rotary(key), value, mask=mask)
        x = pin(x + self.output(mixed), "batch")
        normed = self.mlp_norm(x)
        hidden = nnx.silu(self.gate(normed)) * self.up(normed)
        return pin(x + self.down(pin(hidden, "batch", "seq", "neurons")), "batch")


def initializer(name: str, layout: Layout, values: Any = ZEROS) -> Any:
    """An initialiser that says how the parameter is laid out."""
    return nnx.with_partitioning(values, tuple(map(layout.parameters.get, AXES[name])))


def linear(
    name: str, into: Any, out: Any, layout: Layout, rngs: nnx.Rngs, axis: Any = -1
) -> nnx.LinearGeneral:
    """A linear layer."""
    kernel_init = initializer(name, layout)
    return nnx.LinearGeneral(
        into, out, axis=axis, use_bias=False, kernel_init=kernel_init, rngs=rngs
    )


def norm(name: str, shape: Shape, layout: Layout, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """A norm."""
    scale_init = initializer(name, layout, nnx.initializers.ones)
    return nnx.RMSNorm(shape.embedding, epsilon=EPSILON, scale_init=scale_init, rngs=rngs)


class Transformer(nnx.Module):
    """The model."""

    def __init__(self, shape: Shape, layout: Layout, rngs: nnx.Rngs) -> None:
        s, self.layout = shape, layout
        embedding_init = initializer("embedder", layout)
        self.embedder = nnx.Embed(
            s.vocabulary, s.embedding, embedding_init=embedding_init, rngs=rngs
        )
        self.blocks = nnx.List([Block(s, layout, rngs) for _ in range(s.blocks)])
        self.final_norm = norm("final_norm", s, layout, rngs)
        self.head = linear("head", s.embedding, s.vocabulary, layout, rngs)

    def __call__(self, tokens: Any) -> Any:
        """The logits of tokens."""
        x = self.layout.constrain(self.embedder(tokens), "batch")
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return self.layout.constrain(logits, "batch", "seq", "vocabulary")


def weight_name(path: tuple[Any, ...]) -> str:
    """The name of the weight at a path of the state."""
    *parts, _ = map(str, path)
    return f"block_{parts[1]}/{parts[2]}" if parts[0] == "blocks" else parts[0]


def build(shape: Shape, layout: Layout) -> Contender:
    """The step with NNX."""
    tokens = jax.device_put(shape.tokens(), layout.of_activation(("batch",)))
    with jax.set_mesh(layout.mesh):
        abstract = nnx.eval_shape(lambda: Transformer(shape, layout, nnx.Rngs(0)))
    graph, like = nnx.split(abstract, nnx.Param)
    specs = nnx.get_partition_spec(like)

    def start() -> Any:
        weights = shape.weights()

        def placed(path: Any, parameter: Any) -> Any:
            array = weights[weight_name(path)]
            sharding = jax.sharding.NamedSharding(layout.mesh, of_path[path])
            return parameter.replace(jax.device_put(array, sharding))

        of_path = {path: spec.get_value() for path, spec in nnx.to_flat_state(specs)}
        params = nnx.map_state(placed, like)
        opt_state = jax.jit(OPTIMIZER.init)(params)
        whole = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
        opt_state = optax.tree_map_params(
            OPTIMIZER,
            lambda moment, parameter: jax.device_put(moment, parameter.sharding),
            opt_state,
            params,
            transform_non_params=lambda leaf: jax.device_put(leaf, whole),
        )
        return params, opt_state

    def step(state: Any, tokens: Any) -> Any:
        params, opt_state = state

        def loss(params: Any) -> Any:
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    state = start()
    of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(of_state, None))
    compiled = jitted.lower(state, tokens).compile()
    return Contender(compiled, start, lambda state: compiled(state, tokens))
