"""Transformers with experts, as different people send tokens to them; two layers each."""

import jax
import jax.numpy as jnp

from tests.choosing.named_models import (
    BATCH_SEQ,
    EMBEDDING,
    EXPERTS,
    LAYERS,
    TOKENS,
    NamedModel,
    rms_norm,
    structs_of,
)
from tests.choosing.transformer_parts import (
    gated,
    gated_names,
    grouped_attention,
    grouped_names,
    linear,
    linear_names,
)

_STACKED = {
    "w1": ("experts", "embedding", "neurons"),
    "w3": ("experts", "embedding", "neurons"),
    "w2": ("experts", "neurons", "embedding"),
}


def _decoder(moe_names, moe) -> NamedModel:
    """A decoder whose MLPs are experts.

    Args:
        moe_names: The names of their weights, for the path of one.
        moe: Takes the weights, the path and the activations.
    """
    names = {"embed": ("vocabulary", "embedding"), "norm": ("embedding",)}
    for i in range(LAYERS):
        names |= {f"{i}.norm_1": ("embedding",), f"{i}.norm_2": ("embedding",)}
        names |= grouped_names(f"{i}.attention") | moe_names(f"{i}.moe")

    def function(w, tokens):
        x = w["embed"][tokens]
        for i in range(LAYERS):
            x = x + grouped_attention(w, f"{i}.attention", rms_norm(x, w[f"{i}.norm_1"]))
            x = x + moe(w, f"{i}.moe", rms_norm(x, w[f"{i}.norm_2"]))
        return rms_norm(x, w["norm"]) @ w["embed"].T

    return NamedModel(function, structs_of(names, gate_up=2), (TOKENS,), BATCH_SEQ, names)


def _stacked_names(path):
    router = {f"{path}.router": ("embedding", "experts")}
    return router | {f"{path}.{name}": axes for name, axes in _STACKED.items()}


def experts_apart() -> NamedModel:
    """Mixtral as PyTorch stores it: each expert has weights of its own, the router alone knows."""

    def moe_names(path):
        names = linear_names(f"{path}.gate", "experts", "embedding", False)
        for expert in range(EXPERTS):
            names |= gated_names(f"{path}.experts.{expert}")
        return names

    def moe(w, path, x):
        gates, chosen = jax.lax.top_k(jax.nn.softmax(linear(w, f"{path}.gate", x)), 2)
        gates = gates / gates.sum(-1, keepdims=True)
        made = 0.0
        for expert in range(EXPERTS):
            share = jnp.where(chosen == expert, gates, 0).sum(-1, keepdims=True)
            made = made + share * gated(w, f"{path}.experts.{expert}", x)
        return made

    return _decoder(moe_names, moe)


def shared_experts() -> NamedModel:
    """DeepSeek-V3: a bias for the choice alone, and an expert that has all tokens."""

    def moe_names(path):
        names = _stacked_names(path) | gated_names(f"{path}.shared")
        return names | {f"{path}.bias": ("experts",)}

    def moe(w, path, x):
        scores = jax.nn.sigmoid(x @ w[f"{path}.router"])
        _, chosen = jax.lax.top_k(scores + w[f"{path}.bias"], 2)
        gates = jnp.take_along_axis(scores, chosen, -1)
        share = (jax.nn.one_hot(chosen, EXPERTS) * gates[..., None]).sum(-2)
        gate, up = (jnp.einsum("bse,xen->bsxn", x, w[f"{path}.{n}"]) for n in ("w1", "w3"))
        hidden = jax.nn.silu(gate) * up
        routed = jnp.einsum("bsxn,xne,bsx->bse", hidden, w[f"{path}.w2"], share)
        return routed + gated(w, f"{path}.shared", x)

    return _decoder(moe_names, moe)


def scaled_inputs() -> NamedModel:
    """Llama 4: what goes into an expert is scaled, by nothing for those that are not chosen."""

    def moe_names(path):
        return gated_names(f"{path}.shared") | {
            f"{path}.router": ("experts", "embedding"),
            f"{path}.gate_up": ("experts", "embedding", "gate_up*neurons"),
            f"{path}.down": ("experts", "neurons", "embedding"),
        }

    def moe(w, path, x):
        rows = x.reshape(-1, EMBEDDING)
        logits = rows @ w[f"{path}.router"].T
        best, chosen = jax.lax.top_k(logits, 1)
        scores = jnp.full_like(logits, -jnp.inf)
        scores = jax.nn.sigmoid(scores.at[jnp.arange(len(rows))[:, None], chosen].set(best))
        sent = jnp.broadcast_to(rows, (EXPERTS, *rows.shape)) * scores.T[..., None]
        gate, up = jnp.split(sent @ w[f"{path}.gate_up"], 2, -1)
        made = ((up * jax.nn.silu(gate)) @ w[f"{path}.down"]).sum(0)
        return made.reshape(x.shape) + gated(w, f"{path}.shared", x)

    return _decoder(moe_names, moe)


def sorted_tokens() -> NamedModel:
    """Megablox: tokens sorted by expert, multiplied in ragged rows."""

    def moe(w, path, x):
        rows = x.reshape(-1, EMBEDDING)
        gates, chosen = jax.lax.top_k(rows @ w[f"{path}.router"], 2)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        sent = jnp.repeat(rows, 2, 0)[order]
        gate, up = (jax.lax.ragged_dot(sent, w[f"{path}.{n}"], counts) for n in ("w1", "w3"))
        made = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w[f"{path}.w2"], counts)
        made = made[jnp.argsort(order)].reshape(-1, 2, EMBEDDING)
        return (made * jax.nn.softmax(gates, -1)[..., None]).sum(1).reshape(x.shape)

    return _decoder(_stacked_names, moe)
