"""Train steps of a Llama as one writes them with nothing but JAX: plain arrays, specs by hand.

They share no code with the library. ``LLAMA`` are the sizes, ``compile_step(name)`` compiles.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LLAMA = {"blocks": 1, "embedding": 64, "heads": 4, "projection": 16, "neurons": 256}
BATCH, SEQ, VOCABULARY = 64, 16, 128
_E, _H, _P, _N = (LLAMA[name] for name in ("embedding", "heads", "projection", "neurons"))
_SHAPES = {
    "query": (_E, _H, _P),
    "key": (_E, _H, _P),
    "value": (_E, _H, _P),
    "output": (_H, _P, _E),
    "gate": (_E, _N),
    "up": (_E, _N),
    "down": (_N, _E),
    "embedder": (VOCABULARY, _E),
    "head": (_E, VOCABULARY),
}
_OUTSIDE = ("embedder", "head")
_TWO_DIMENSIONAL = {
    **dict.fromkeys(("query", "key", "value"), P("data", "model")),
    "output": P("model", None, "data"),
    **dict.fromkeys(("gate", "up"), P("data", "model")),
    "down": P("model", "data"),
    "embedder": P("model", "data"),
    "head": P("data", "model"),
}
_FULLY_SHARDED = {
    **dict.fromkeys(("query", "key", "value"), P("data")),
    "output": P(None, None, "data"),
    **dict.fromkeys(("gate", "up"), P(None, "data")),
    "down": P("data"),
    "embedder": P("data"),
    "head": P(None, "data"),
}
# For each layout the mesh, how weights are stored, and how they are used.
LAYOUTS = {
    "data_parallel": ({"data": 8}, {}, {}),
    "fully_sharded": ({"data": 8}, _FULLY_SHARDED, {}),
    "two_dimensional": (
        {"data": 4, "model": 2},
        _TWO_DIMENSIONAL,
        {
            name: P(*("model" if axis == "model" else None for axis in spec))
            for name, spec in _TWO_DIMENSIONAL.items()
        },
    ),
}
OPTIMIZER = optax.adamw(1e-2)


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def _rotate(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 10_000.0 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(query, key, value):
    scores = jnp.einsum("bqhp,bkhp->bhqk", _rotate(query) * _P**-0.5, _rotate(key))
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -2.3819763e38), -1)
    return jnp.einsum("bhqk,bkhp->bqhp", weights, value)


def _initial():
    """The arrays, as shapes are all that counts."""
    weights = {"final_norm": (_E,)}
    for name, shape in _SHAPES.items():
        blocks = [""] if name in _OUTSIDE else [f"{i}/" for i in range(LLAMA["blocks"])]
        weights |= {block + name: shape for block in blocks}
    for i in range(LLAMA["blocks"]):
        weights |= {f"{i}/attention_norm": (_E,), f"{i}/mlp_norm": (_E,)}
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in weights.items()}


def compile_step(layout):
    """The compiled step of a layout."""
    sizes, stored, used = LAYOUTS[layout]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))

    def lie(spec):
        return NamedSharding(mesh, spec)

    def spec_of(path, specs):
        return specs.get(path.rpartition("/")[2], P())

    def pin(x):
        return jax.lax.with_sharding_constraint(x, lie(P("data")))

    def run_block(weights, x):
        normed = pin(_norm(x, weights["attention_norm"]))
        query, key, value = (
            jnp.einsum("bsd,dhp->bshp", normed, weights[name]) for name in ("query", "key", "value")
        )
        mixed = _attend(query, key, value)
        x = x + pin(jnp.einsum("bshp,hpd->bsd", mixed, weights["output"]))
        normed = pin(_norm(x, weights["mlp_norm"]))
        hidden = jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])
        return x + pin(hidden @ weights["down"])

    def find_loss(weights, tokens):
        weights = {
            path: jax.lax.with_sharding_constraint(array, lie(spec_of(path, used)))
            for path, array in weights.items()
        }
        x = pin(weights["embedder"][tokens[:, :-1]])
        for i in range(LLAMA["blocks"]):
            own = {path[2:]: array for path, array in weights.items() if path[:2] == f"{i}/"}
            x = run_block(own, x)
        logits = pin(_norm(x, weights["final_norm"])) @ weights["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(weights, opt_state, tokens):
        loss, gradients = jax.value_and_grad(find_loss)(weights, tokens)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    weights = _initial()
    shardings = {path: lie(spec_of(path, stored)) for path in weights}
    weights = {path: x.update(sharding=shardings[path]) for path, x in weights.items()}
    opt_state = jax.eval_shape(OPTIMIZER.init, weights)
    place = lambda x, sharding: x.update(sharding=sharding)  # noqa: E731
    opt_state = optax.tree.map_params(
        OPTIMIZER,
        place,
        opt_state,
        shardings,
        transform_non_params=lambda x: place(x, lie(P())),
    )
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), "int32", sharding=lie(P("data")))
    results = jax.tree.map(lambda x: x.sharding, (weights, opt_state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*results, None))
    return jitted.lower(weights, opt_state, tokens).compile()
