"""The train step with Flax linen: logical axis rules, and constraints by logical axis."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from flax.training.train_state import TrainState

from benchmarks.parallel_training.by_hand import rotary
from benchmarks.parallel_training.work import EPSILON, OPTIMIZER, Contender, Layout, Shape

# The rules of linen are one table, so a parameter's axes have names of their own.
STREAM = ("batch", "seq", "stream")
HEADS = ("batch", "seq", "heads", "projection")
KERNELS = {
    "query": ("embedding", "heads", "projection"),
    "key": ("embedding", "heads", "projection"),
    "value": ("embedding", "heads", "projection"),
    "output": ("heads", "projection", "embedding"),
    "gate": ("embedding", "neurons"),
    "up": ("embedding", "neurons"),
    "down": ("neurons", "embedding"),
    "head": ("embedding", "vocabulary"),
}
ZEROS = nn.initializers.zeros


def dense(name: str, features: Any, axis: Any = -1) -> nn.DenseGeneral:
    """A linear layer whose kernel has logical axes."""
    kernel_init = nn.with_logical_partitioning(ZEROS, KERNELS[name])
    return nn.DenseGeneral(features, axis, use_bias=False, kernel_init=kernel_init, name=name)


def norm(name: str) -> nn.RMSNorm:
    """A norm whose scale has a logical axis."""
    scale_init = nn.with_logical_partitioning(nn.initializers.ones, ("embedding",))
    return nn.RMSNorm(epsilon=EPSILON, scale_init=scale_init, name=name)


class Block(nn.Module):
    """A transformer block."""

    shape: Shape
    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """What the block makes of activations."""
        s = self.shape
        normed = norm("attention_norm")(x)
        query, key, value = (
            nn.with_logical_constraint(
                dense(name, (s.heads, s.projection))(normed), HEADS, mesh=self.mesh
            )
            for name in ("query", "key", "value")
        )
        mask = nn.make_causal_mask(jnp.ones((1, x.shape[1])))
        mixed = nn.dot_product_attention(rotary(query), rotary(key), value, mask=mask)
        x = nn.with_logical_constraint(
            x + dense("output", s.embedding, (-2, -1))(mixed), STREAM, mesh=self.mesh
        )
        normed = norm("mlp_norm")(x)
        hidden = nn.silu(dense("gate", s.neurons)(normed)) * dense("up", s.neurons)(normed)
        hidden = nn.with_logical_constraint(hidden, ("batch", "seq", "neurons"), mesh=self.mesh)
        return nn.with_logical_constraint(
            x + dense("down", s.embedding)(hidden), STREAM, mesh=self.mesh
        )


class Transformer(nn.Module):
    """The model."""

    shape: Shape
    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """The logits of tokens."""
        s = self.shape
        embedding_init = nn.with_logical_partitioning(ZEROS, ("vocabulary", "embedding"))
        embedder = nn.Embed(
            s.vocabulary, s.embedding, embedding_init=embedding_init, name="embedder"
        )
        x = nn.with_logical_constraint(embedder(tokens), STREAM, mesh=self.mesh)
        for i in range(s.blocks):
            x = Block(s, self.mesh, name=f"block_{i}")(x)
        logits = dense("head", s.vocabulary)(norm("final_norm")(x))
        return nn.with_logical_constraint(logits, ("batch", "seq", "vocabulary"), mesh=self.mesh)


def build(shape: Shape, layout: Layout) -> Contender:
    """The step with linen."""
    mesh, model = layout.mesh, Transformer(shape, layout.mesh)
    rules = list({**layout.activations, **layout.parameters}.items())
    tokens = jax.device_put(shape.tokens(), layout.of_activation(("batch",)))

    def initial() -> TrainState:
        variables = model.init(jax.random.key(0), jnp.zeros((1, shape.seq), jnp.int32))
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=OPTIMIZER)

    boxed = jax.eval_shape(initial)
    shardings = nn.meta.unbox(
        nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    )

    def start() -> TrainState:
        leaves = ("embedding", "scale", "kernel")
        flat = traverse_util.flatten_dict(nn.meta.unbox(boxed.params), sep="/")
        weights = shape.weights()
        params = {path: weights[path.rsplit("/", 1)[0]] for path in flat}
        assert all(path.rsplit("/", 1)[1] in leaves for path in flat)
        params = traverse_util.unflatten_dict(params, sep="/")

        def created() -> TrainState:
            arrays = jax.tree.map(jnp.asarray, params)
            return TrainState.create(apply_fn=model.apply, params=arrays, tx=boxed.tx)

        return jax.jit(
            created, out_shardings=shardings.replace(apply_fn=model.apply, tx=boxed.tx)
        )()

    def step(state: TrainState, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    state = start()
    of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(of_state, None))
    with nn.logical_axis_rules(rules):
        compiled = jitted.lower(state, tokens).compile()
    return Contender(compiled, start, lambda state: compiled(state, tokens))
