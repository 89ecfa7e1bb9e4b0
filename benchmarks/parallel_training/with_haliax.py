"""The train step with Haliax: parameter and compute mappings."""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax

from benchmarks.parallel_training.work import (
    BLOCK_WEIGHTS,
    EPSILON,
    OPTIMIZER,
    WAVELENGTH,
    Contender,
    Layout,
    Shape,
)


def rotary(x: Any) -> Any:
    """Rotary position embeddings."""
    half = x.resolve_axis("projection").size // 2
    half_axis = hax.Axis("projection", half)
    timescale = hax.named(WAVELENGTH ** (jnp.arange(half) / half), half_axis)
    angle = (
        hax.arange(x.resolve_axis("seq"), dtype=jnp.float32).broadcast_axis(half_axis) / timescale
    )
    sin, cos = hax.sin(angle), hax.cos(angle)
    first = x[{"projection": slice(0, half)}]
    second = x[{"projection": slice(half, None)}]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return hax.concatenate("projection", turned)


class Block(eqx.Module):
    """A transformer block."""

    attention_norm: hnn.RmsNorm
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    mlp_norm: hnn.RmsNorm
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    def __call__(self, x: Any) -> Any:
        """What the block makes of activations."""
        normed = self.attention_norm(x)
        query, key, value = (of(normed) for of in (self.query, self.key, self.value))
        key, value = (array.rename({"seq": "kv_seq"}) for array in (rotary(key), value))
        mask = hnn.attention.causal_mask(x.resolve_axis("seq"), key.resolve_axis("kv_seq"))
        mixed = hnn.attention.dot_product_attention(
            "kv_seq", "projection", rotary(query), key, value, mask=mask
        )
        x = hax.auto_sharded(x + self.output(mixed))
        normed = self.mlp_norm(x)
        hidden = hnn.silu(self.gate(normed)) * self.up(normed)
        return hax.auto_sharded(x + self.down(hax.auto_sharded(hidden)))


class Transformer(eqx.Module):
    """The model."""

    embedder: hnn.Embedding
    blocks: list[Block]
    final_norm: hnn.RmsNorm
    head: hnn.Linear

    def __call__(self, tokens: Any) -> Any:
        """The logits of tokens."""
        x = hax.auto_sharded(self.embedder(tokens))
        for block in self.blocks:
            x = block(x)
        return hax.auto_sharded(self.head(self.final_norm(x)))


def model_with_weights(shape: Shape) -> Transformer:
    """The model with the weights that all start from."""
    axes, weights = shape.weight_axes(), shape.weights()

    def named(name: str) -> Any:
        return hax.named(jnp.asarray(weights[name]), axes[name])

    def norm(name: str) -> hnn.RmsNorm:
        weight = named(name)
        return hnn.RmsNorm(weight.axes, weight, None, EPSILON)

    def linear(name: str) -> hnn.Linear:
        weight = named(name)
        contracted = ("heads", "projection") if name.endswith("output") else axes[name][:1]
        into = tuple(axis for axis in weight.axes if axis.name in contracted)
        out = tuple(axis for axis in weight.axes if axis.name not in contracted)
        return hnn.Linear(weight, None, into, out)

    def block(i: int) -> Block:
        return Block(
            **{
                part: (norm if part.endswith("norm") else linear)(f"block_{i}/{part}")
                for part in BLOCK_WEIGHTS
            }
        )

    table = named("embedder")
    return Transformer(
        hnn.Embedding(table, *table.axes),
        [block(i) for i in range(shape.blocks)],
        norm("final_norm"),
        linear("head"),
    )


def build(shape: Shape, layout: Layout) -> Contender:
    """The step with Haliax."""
    stored, compute = dict(layout.parameters), dict(layout.activations)
    batch = jax.device_put(shape.tokens(), layout.of_activation(("batch",)))
    tokens = hax.named(batch, ("batch", "seq"))
    vocabulary = hax.Axis("vocabulary", shape.vocabulary)

    def start() -> Any:
        model = hax.shard(model_with_weights(shape), stored, mesh=layout.mesh)
        opt_state = hax.shard(OPTIMIZER.init(model), stored, mesh=layout.mesh)
        whole = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
        is_named = lambda leaf: isinstance(leaf, hax.NamedArray)  # noqa: E731
        return model, jax.tree.map(
            lambda leaf: leaf if is_named(leaf) else jax.device_put(leaf, whole),
            opt_state,
            is_leaf=is_named,
        )

    def loss(model: Transformer, tokens: Any) -> Any:
        logits = model(tokens[{"seq": slice(0, -1)}])
        targets = hnn.one_hot(tokens[{"seq": slice(1, None)}], vocabulary, dtype=logits.dtype)
        return hnn.cross_entropy_loss(logits, vocabulary, targets, reduction=hax.mean).array

    def step(state: Any, tokens: Any) -> Any:
        model, opt_state = state
        with hax.axis_mapping(compute):
            value, gradients = eqx.filter_value_and_grad(loss)(model, tokens)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, model)
        return (optax.apply_updates(model, updates), opt_state), value

    with hax.partitioning.set_mesh(layout.mesh):
        state = start()
        of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(of_state, None))
        compiled = jitted.lower(state, tokens).compile()
    return Contender(compiled, start, lambda state: compiled(state, tokens))
