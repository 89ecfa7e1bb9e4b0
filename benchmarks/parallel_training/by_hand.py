"""The train step as one writes it with nothing but JAX: raw arrays, and constraints by position."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.parallel_training.work import (
    EPSILON,
    MASKED,
    OPTIMIZER,
    WAVELENGTH,
    Contender,
    Layout,
    Shape,
)


def norm(x: Any, scale: Any) -> Any:
    """RMS normalisation along the last dimension."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + EPSILON) * scale


def rotary(x: Any) -> Any:
    """Rotary position embeddings of an array [batch, seq, heads, projection]."""
    half = x.shape[-1] // 2
    timescale = WAVELENGTH ** (jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] / timescale
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of arrays [batch, seq, heads, projection]."""
    scores = jnp.einsum("bqhp,bkhp->bhqk", rotary(query) * query.shape[-1] ** -0.5, rotary(key))
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, MASKED), -1)
    return jnp.einsum("bhqk,bkhp->bqhp", weights, value)


def loss_of(layout: Layout, shape: Shape) -> Any:
    """The loss of weights and tokens."""
    heads = ("batch", "seq", "heads", "projection")
    stream = ("batch", "seq", "embedding")

    def pin(x: Any, *axes: str) -> Any:
        rules = {k: v for k, v in layout.activations.items() if k != "embedding"}
        return jax.lax.with_sharding_constraint(
            x, jax.sharding.NamedSharding(layout.mesh, layout.spec(rules, axes))
        )

    def block(weights: dict[str, Any], x: Any) -> Any:
        normed = norm(x, weights["attention_norm"])
        query, key, value = (
            pin(jnp.einsum("bsd,dhp->bshp", normed, weights[name]), *heads)
            for name in ("query", "key", "value")
        )
        mixed = attention(query, key, value)
        x = pin(x + jnp.einsum("bshp,hpd->bsd", mixed, weights["output"]), *stream)
        normed = norm(x, weights["mlp_norm"])
        hidden = jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])
        hidden = pin(hidden, "batch", "seq", "neurons")
        return pin(x + hidden @ weights["down"], *stream)

    def loss(weights: dict[str, Any], tokens: Any) -> Any:
        x = pin(weights["embedder"][tokens[:, :-1]], *stream)
        for i in range(shape.blocks):
            prefix = f"block_{i}/"
            x = block(
                {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}, x
            )
        logits = norm(x, weights["final_norm"]) @ weights["head"]
        logits = pin(logits, "batch", "seq", "vocabulary")
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def build(shape: Shape, layout: Layout) -> Contender:
    """The step by hand."""
    axes = shape.weight_axes()
    loss = loss_of(layout, shape)
    of_parameters = {name: layout.of_parameter(of) for name, of in axes.items()}

    def start() -> Any:
        weights = {
            name: jax.device_put(array, of_parameters[name])
            for name, array in shape.weights().items()
        }
        return weights, jax.jit(OPTIMIZER.init, out_shardings=of_state)(weights)

    abstract = jax.eval_shape(lambda: {k: jnp.asarray(w) for k, w in shape.weights().items()})
    scalar = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    of_state = optax.tree_map_params(
        OPTIMIZER,
        lambda _, sharding: sharding,
        jax.eval_shape(OPTIMIZER.init, abstract),
        of_parameters,
        transform_non_params=lambda _: scalar,
    )

    def step(state: Any, tokens: Any) -> Any:
        weights, opt_state = state
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), value

    tokens = jax.device_put(shape.tokens(), layout.of_activation(("batch",)))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=((of_parameters, of_state), scalar))
    compiled = jitted.lower(start(), tokens).compile()
    return Contender(compiled, start, lambda state: compiled(state, tokens))
